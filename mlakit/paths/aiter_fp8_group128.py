"""AITER's Triton kernel: both norms, and q as FP8 with a scale a 128-group."""

from functools import partial

from mlakit.paths.aiter_quant import call, supports
from mlakit.paths.registry import Path

PATH = Path(
    name="aiter_fp8_group128",
    text="AITER's Triton kernel: both norms, and q as FP8 with a scale a 128-group",
    call=partial(call, "fp8_group128"),
    supports=partial(supports, quant="fp8_group128"),
    rounding="round_once",
    launches=1,
    output="fp8_group128",
    fused=True,
)
