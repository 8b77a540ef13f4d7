"""quack_rms_norm: QuACK's RMSNorm twice (CuTe DSL)."""

from __future__ import annotations

from mlakit import archs
from mlakit.context import Context
from mlakit.paths.peers import peer


def norm(x, weight, eps):
    """``quack.rmsnorm``'s forward alone: float32 throughout, one rounding."""
    from quack.rmsnorm import rmsnorm_fwd

    return rmsnorm_fwd(x, weight, eps=eps)[0]


def _limits(context: Context) -> str | None:
    if archs.from_sm_90(context.arch):
        return None
    return f"QuACK is for NVIDIA cards from sm_90 on, not {context.arch}"


PATH = peer(
    "quack_rms_norm",
    "two QuACK RMSNorm launches on the split views",
    norm, "quack", "quack-kernels", _limits,
)  # fmt: skip
