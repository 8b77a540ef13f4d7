"""Torch operators: float32 norm, then q as FP8 with a scale a 128-group."""

from functools import partial

from mlakit.paths.quantised import eager, refusal_in
from mlakit.paths.registry import Path

PATH = Path(
    name="torch_fp8_group128",
    text="torch operators: float32 norm, then q as FP8 with a scale a 128-group",
    call=partial(eager, "fp8_group128"),
    supports=partial(refusal_in, quant="fp8_group128"),
    rounding="round_once",
    launches=27,
    output="fp8_group128",
)
