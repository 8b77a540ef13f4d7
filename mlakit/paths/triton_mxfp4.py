"""One Triton launch: q normalised and quantised as MXFP4 with a scale byte a 32-group, kv too."""

from functools import partial

from mlakit.paths.registry import quantising
from mlakit.paths.triton_quant import again, fused, fused_launched, refusal_in
from mlakit.paths.triton_quant_config import knobs

PATH = quantising(
    "triton_mxfp4",
    "one Triton launch: both norms, and q as MXFP4 with a scale byte a 32-group",
    fused, refusal_in, launches=1, timed=False, fused=True, again=partial(again, "mxfp4"),
    knobs=partial(knobs, "mxfp4"), launched=partial(fused_launched, "mxfp4"),
)  # fmt: skip
