"""torch_rms_norm_copied: two ``F.rms_norm`` after ``.contiguous()``, the copies timed."""

from __future__ import annotations

from mlakit.paths import torch_rms_norm
from mlakit.paths.checks import check, unquantised
from mlakit.paths.registry import Path


def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """Copy both parts, then as ``torch_rms_norm``. Any strides.

    Raises:
        MisuseError: arguments that do not fit (``mlakit.paths.checks``).
    """
    # `out` is held against the originals too: the copies would hide an overlap.
    if out is not None:
        check(q, q_weight, q_eps, k, k_weight, k_eps, out)
    return torch_rms_norm.call(
        q.contiguous(), q_weight, q_eps, k.contiguous(), k_weight, k_eps, out=out
    )


PATH = Path(
    name="torch_rms_norm_copied",
    text="two torch.nn.functional.rms_norm on contiguous copies of the views",
    call=call,
    supports=unquantised,
    rounding="round_once",
    launches=4,
    copies=True,
    makes_outputs=True,
)
