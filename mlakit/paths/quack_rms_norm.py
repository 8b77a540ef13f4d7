"""quack_rms_norm: QuACK's RMSNorm twice (CuTe DSL)."""

from __future__ import annotations

from mlakit import archs
from mlakit.context import Context
from mlakit.paths.checks import kernel_limits
from mlakit.paths.peers import pair_of
from mlakit.paths.registry import Path


def norm(x, weight, eps):
    """``quack.rmsnorm``'s forward alone: float32 throughout, one rounding."""
    from quack.rmsnorm import rmsnorm_fwd

    return rmsnorm_fwd(x, weight, eps=eps)[0]


def supports(context: Context) -> str | None:
    """None if it can run, else why not in a line; a hypothetical context has the package."""
    if "quack" not in context.packages:
        return "quack is not installed: pip install quack-kernels"
    if not archs.from_sm_90(context.arch):
        return f"QuACK is for NVIDIA cards from sm_90 on, not {context.arch}"
    return kernel_limits(context)


PATH = Path(
    name="quack_rms_norm",
    text="two QuACK RMSNorm launches on the split views",
    call=pair_of(norm, "quack", "quack-kernels"),
    supports=supports,
    rounding="round_once",
    launches=2,
    makes_outputs=True,
)
