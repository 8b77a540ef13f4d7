"""AITER's Triton kernel: both norms, and q as FP8 with a scale a 128-group."""

from mlakit.paths.aiter_quant import call, supports
from mlakit.paths.registry import quantising

PATH = quantising(
    "aiter_fp8_group128",
    "AITER's Triton kernel: both norms, and q as FP8 with a scale a 128-group",
    call, supports, launches=1, fused=True,
)  # fmt: skip
