"""One Triton launch: q normalised and quantised as FP8 with a scale a 128-group, kv normalised."""

from functools import partial

from mlakit.paths.registry import quantising
from mlakit.paths.triton_quant import again, fused, fused_launched, refusal_in
from mlakit.paths.triton_quant_config import knobs

PATH = quantising(
    "triton_fp8_group128",
    "one Triton launch: both norms, and q as FP8 with a scale a 128-group",
    fused, refusal_in, launches=1, timed=False, fused=True, again=partial(again, "fp8_group128"),
    knobs=partial(knobs, "fp8_group128"), launched=partial(fused_launched, "fp8_group128"),
)  # fmt: skip
