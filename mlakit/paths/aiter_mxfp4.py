"""AITER's Triton kernel: both norms, and q as MXFP4 under the rule that Quark calls even."""

from mlakit.paths.aiter_quant import call, supports
from mlakit.paths.registry import quantising

PATH = quantising(
    "aiter_mxfp4",
    "AITER's Triton kernel: both norms, and q as MXFP4 under the rule that Quark calls even",
    call, supports, launches=1, fused=True,
)  # fmt: skip
