"""One Triton launch: q normalised and quantised as FP8 with a scale a token, kv normalised."""

from functools import partial

from mlakit.paths.registry import Path
from mlakit.paths.triton_quant import fused, refusal_in
from mlakit.paths.triton_quant_config import knobs

PATH = Path(
    name="triton_fp8_token",
    text="one Triton launch: both norms, and q as FP8 with a scale a token",
    call=partial(fused, "fp8_token"),
    supports=partial(refusal_in, quant="fp8_token"),
    rounding="round_once",
    launches=1,
    timed=False,
    output="fp8_token",
    fused=True,
    knobs=partial(knobs, "fp8_token"),
)
