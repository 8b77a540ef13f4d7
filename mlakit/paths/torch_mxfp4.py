"""Torch operators: float32 norm, then q as MXFP4 with a scale byte a 32-group."""

from functools import partial

from mlakit.paths.quantised import eager, refusal_in
from mlakit.paths.registry import Path

PATH = Path(
    name="torch_mxfp4",
    text="torch operators: float32 norm, then q as MXFP4 with a scale byte a 32-group",
    call=partial(eager, "mxfp4"),
    supports=partial(refusal_in, quant="mxfp4"),
    rounding="round_once",
    launches=55,
    output="mxfp4",
)
