"""The best unfused pair: one launch for both norms, one that quantises the rounded q."""

from functools import partial

from mlakit.paths.registry import quantising
from mlakit.paths.triton_quant import refusal_in, unfused, unfused_launched
from mlakit.paths.triton_quant_config import unfused_knobs

PATH = quantising(
    "unfused_fp8_token",
    "two Triton launches: both norms, then q as FP8 with a scale a token",
    unfused, refusal_in, launches=2, timed=False, knobs=partial(unfused_knobs, "fp8_token"),
    launched=partial(unfused_launched, "fp8_token"),
)  # fmt: skip
