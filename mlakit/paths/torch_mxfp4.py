"""Torch operators: float32 norm, then q as MXFP4 with a scale byte a 32-group."""

from mlakit.paths.quantised import eager, refusal_in
from mlakit.paths.registry import quantising

PATH = quantising(
    "torch_mxfp4",
    "torch operators: float32 norm, then q as MXFP4 with a scale byte a 32-group",
    eager, refusal_in, launches=55,
)  # fmt: skip
