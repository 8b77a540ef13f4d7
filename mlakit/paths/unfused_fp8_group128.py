"""The best unfused pair: one launch for both norms, one that quantises the rounded q."""

from functools import partial

from mlakit.paths.registry import Path
from mlakit.paths.triton_fused import knobs
from mlakit.paths.triton_quant import refusal_in, unfused

PATH = Path(
    name="unfused_fp8_group128",
    text="two Triton launches: both norms, then q as FP8 with a scale a 128-group",
    call=partial(unfused, "fp8_group128"),
    supports=partial(refusal_in, quant="fp8_group128"),
    rounding="round_once",
    launches=2,
    timed=False,
    output="fp8_group128",
    knobs=knobs,
)
