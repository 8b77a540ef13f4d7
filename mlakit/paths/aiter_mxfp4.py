"""AITER's Triton kernel: both norms, and q as MXFP4 under the rule that Quark calls even."""

from functools import partial

from mlakit.paths.aiter_quant import call, supports
from mlakit.paths.registry import Path

PATH = Path(
    name="aiter_mxfp4",
    text="AITER's Triton kernel: both norms, and q as MXFP4 under the rule that Quark calls even",
    call=partial(call, "mxfp4"),
    supports=partial(supports, quant="mxfp4"),
    rounding="round_once",
    launches=1,
    output="mxfp4",
    fused=True,
)
