"""One Triton launch: q normalised and quantised as MXFP4 with a scale byte a 32-group, kv too."""

from functools import partial

from mlakit.paths.registry import Path
from mlakit.paths.triton_quant import fused, refusal_in
from mlakit.paths.triton_quant_config import knobs

PATH = Path(
    name="triton_mxfp4",
    text="one Triton launch: both norms, and q as MXFP4 with a scale byte a 32-group",
    call=partial(fused, "mxfp4"),
    supports=partial(refusal_in, quant="mxfp4"),
    rounding="round_once",
    launches=1,
    timed=False,
    output="mxfp4",
    fused=True,
    knobs=partial(knobs, "mxfp4"),
)
