"""flashinfer_rms_norm: FlashInfer's RMSNorm twice."""

from __future__ import annotations

from mlakit.context import Context
from mlakit.paths.peers import peer


def norm(x, weight, eps):
    """``flashinfer.norm.rmsnorm``: float32 throughout, one rounding."""
    from flashinfer.norm import rmsnorm

    return rmsnorm(x, weight, eps)


def _limits(context: Context) -> str | None:
    if context.vendor != "nvidia":
        return f"FlashInfer is for NVIDIA cards, not {context.arch}"
    if context.dtype == "fp32" or context.norm_weight_dtype != context.dtype:
        return "FlashInfer's norm takes bf16 or fp16, and weights of the same dtype"
    return None


PATH = peer(
    "flashinfer_rms_norm",
    "two FlashInfer RMSNorm launches on the split views",
    norm, "flashinfer", "flashinfer-python", _limits,
)  # fmt: skip
