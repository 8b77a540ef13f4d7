"""dual_stream: q on the current stream and k on a second one, as CUDA serving engines do."""

from __future__ import annotations

from functools import cache

import torch

from mlakit.context import Context
from mlakit.errors import MisuseError
from mlakit.paths.checks import check, unquantised
from mlakit.paths.registry import Path
from mlakit.paths.torch_rms_norm import norm


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One second stream a device (CUDA or HIP), made once: never inside a capture's replay."""
    return torch.cuda.Stream(device)


def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """Fork, normalise both at once, join; legal inside a graph capture.

    Raises:
        MisuseError: arguments that do not fit (``mlakit.paths.checks``), or not on a GPU.
    """
    check(q, q_weight, q_eps, k, k_weight, k_eps, out)
    if q.device.type != "cuda":
        raise MisuseError(
            f"dual_stream needs a GPU's second stream and q is on {q.device}: use torch_rms_norm"
        )
    current, side = torch.cuda.current_stream(q.device), _side_stream(q.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        k_out = norm(k, k_weight, k_eps)
        if out is not None:
            k_out = out[1].copy_(k_out)
    q_out = norm(q, q_weight, q_eps)
    if out is not None:
        q_out = out[0].copy_(q_out)
    current.wait_stream(side)
    if out is not None:
        return out
    # Made in the side stream's memory pool, read in the current one.
    k_out.record_stream(current)
    return q_out, k_out


def supports(context: Context) -> str | None:
    """None on a GPU."""
    if context.vendor == "cpu":
        return "a CPU has no second stream: needs an AMD or NVIDIA GPU"
    return unquantised(context)


PATH = Path(
    name="dual_stream",
    text="one F.rms_norm on each of two GPU streams",
    call=call,
    supports=supports,
    rounding="round_once",
    launches=2,
    makes_outputs=True,
)
