"""Torch operators: float32 norm, then q as FP8 with a scale a 128-group."""

from mlakit.paths.quantised import eager, refusal_in
from mlakit.paths.registry import quantising

PATH = quantising(
    "torch_fp8_group128",
    "torch operators: float32 norm, then q as FP8 with a scale a 128-group",
    eager, refusal_in, launches=27,
)  # fmt: skip
