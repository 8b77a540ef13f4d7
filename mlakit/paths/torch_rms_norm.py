"""torch_rms_norm: two ``F.rms_norm`` on the views as they are."""

from __future__ import annotations

import torch.nn.functional as F

from mlakit.paths.checks import check, delivered, unquantised
from mlakit.paths.registry import Path


def norm(x, weight, eps):
    """``F.rms_norm`` over the last dimension; float32 weights of a 16-bit ``x`` stay float32."""
    return F.rms_norm(x, x.shape[-1:], weight, eps) if x.shape[-1] else x.new_empty(x.shape)


def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """One ``F.rms_norm`` each; see ``mlakit.paths.registry.Path`` for the arguments. Any strides.

    ``F.rms_norm`` takes no output: with ``out`` its results are copied there.

    Raises:
        MisuseError: arguments that do not fit (``mlakit.paths.checks``).
    """
    check(q, q_weight, q_eps, k, k_weight, k_eps, out)
    return delivered((norm(q, q_weight, q_eps), norm(k, k_weight, k_eps)), out)


PATH = Path(
    name="torch_rms_norm",
    text="two torch.nn.functional.rms_norm on the split views",
    call=call,
    supports=unquantised,
    rounding="round_once",
    launches=2,
    makes_outputs=True,
)
