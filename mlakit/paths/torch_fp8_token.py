"""Torch operators: float32 norm, then q as FP8 with a scale a token."""

from functools import partial

from mlakit.paths.quantised import eager, refusal_in
from mlakit.paths.registry import Path

PATH = Path(
    name="torch_fp8_token",
    text="torch operators: float32 norm, then q as FP8 with a scale a token",
    call=partial(eager, "fp8_token"),
    supports=partial(refusal_in, quant="fp8_token"),
    rounding="round_once",
    launches=27,
    output="fp8_token",
)
