"""The best unfused pair: one launch for both norms, one that quantises the rounded q."""

from functools import partial

from mlakit.paths.registry import Path
from mlakit.paths.triton_fused import knobs
from mlakit.paths.triton_quant import refusal_in, unfused

PATH = Path(
    name="unfused_mxfp4",
    text="two Triton launches: both norms, then q as MXFP4 with a scale byte a 32-group",
    call=partial(unfused, "mxfp4"),
    supports=partial(refusal_in, quant="mxfp4"),
    rounding="round_once",
    launches=2,
    timed=False,
    output="mxfp4",
    knobs=knobs,
)
