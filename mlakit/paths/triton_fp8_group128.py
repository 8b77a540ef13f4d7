"""One Triton launch: q normalised and quantised as FP8 with a scale a 128-group, kv normalised."""

from functools import partial

from mlakit.paths.registry import Path
from mlakit.paths.triton_quant import fused, refusal_in
from mlakit.paths.triton_quant_config import knobs

PATH = Path(
    name="triton_fp8_group128",
    text="one Triton launch: both norms, and q as FP8 with a scale a 128-group",
    call=partial(fused, "fp8_group128"),
    supports=partial(refusal_in, quant="fp8_group128"),
    rounding="round_once",
    launches=1,
    timed=False,
    output="fp8_group128",
    fused=True,
    knobs=partial(knobs, "fp8_group128"),
)
