"""Torch operators: float32 norm, then q as FP8 with a scale a token."""

from mlakit.paths.quantised import eager, refusal_in
from mlakit.paths.registry import quantising

PATH = quantising(
    "torch_fp8_token",
    "torch operators: float32 norm, then q as FP8 with a scale a token",
    eager, refusal_in, launches=27,
)  # fmt: skip
