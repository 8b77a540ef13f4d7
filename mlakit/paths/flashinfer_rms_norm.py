"""flashinfer_rms_norm: FlashInfer's RMSNorm twice."""

from __future__ import annotations

from mlakit.context import Context
from mlakit.paths.checks import kernel_limits
from mlakit.paths.peers import pair_of
from mlakit.paths.registry import Path


def norm(x, weight, eps):
    """``flashinfer.norm.rmsnorm``: float32 throughout, one rounding."""
    from flashinfer.norm import rmsnorm

    return rmsnorm(x, weight, eps)


def supports(context: Context) -> str | None:
    """None if it can run, else why not in a line; a hypothetical context has the package."""
    if "flashinfer" not in context.packages:
        return "flashinfer is not installed: pip install flashinfer-python"
    if context.vendor != "nvidia":
        return f"FlashInfer is for NVIDIA cards, not {context.arch}"
    if context.dtype == "fp32" or context.norm_weight_dtype != context.dtype:
        return "FlashInfer's norm takes bf16 or fp16, and weights of the same dtype"
    return kernel_limits(context)


PATH = Path(
    name="flashinfer_rms_norm",
    text="two FlashInfer RMSNorm launches on the split views",
    call=pair_of(norm, "flashinfer", "flashinfer-python"),
    supports=supports,
    rounding="round_once",
    launches=2,
    makes_outputs=True,
)
