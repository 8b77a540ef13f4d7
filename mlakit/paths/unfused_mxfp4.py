"""The best unfused pair: one launch for both norms, one that quantises the rounded q."""

from functools import partial

from mlakit.paths.registry import quantising
from mlakit.paths.triton_quant import refusal_in, unfused, unfused_launched
from mlakit.paths.triton_quant_config import unfused_knobs

PATH = quantising(
    "unfused_mxfp4",
    "two Triton launches: both norms, then q as MXFP4 with a scale byte a 32-group",
    unfused, refusal_in, launches=2, timed=False, knobs=partial(unfused_knobs, "mxfp4"),
    launched=partial(unfused_launched, "mxfp4"),
)  # fmt: skip
