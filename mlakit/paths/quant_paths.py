"""The paths that deliver a quantised q: every way of doing it, for every format that it has."""

from functools import partial

from mlakit.paths import aiter_quant, quantised, triton_quant
from mlakit.paths.registry import Path

_FORMATS = {
    "fp8_group128": "q as FP8 with a scale a 128-group",
    "fp8_token": "q as FP8 with a scale a token",
    "mxfp4": "q as MXFP4 with a scale byte a 32-group",
}
_EAGER_LAUNCHES = {"fp8_group128": 27, "fp8_token": 27, "mxfp4": 55}


def _path(how: str, quant: str, text: str, call, supports, launches: int, **more) -> Path:
    return Path(
        name=f"{how}_{quant}",
        text=text,
        call=partial(call, quant),
        supports=partial(supports, quant=quant),
        rounding="round_once",
        launches=launches,
        output=quant,
        **more,
    )


def _paths(quant: str, as_format: str) -> list[Path]:
    eager = f"torch operators: float32 norm, then {as_format}"
    two, one = f"two Triton launches: both norms, then {as_format}", "one Triton launch: both norms"
    runs = triton_quant.refusal_in
    return [
        _path("torch", quant, eager, quantised.eager, quantised.refusal_in, _EAGER_LAUNCHES[quant]),
        _path("unfused", quant, two, triton_quant.unfused, runs, 2, timed=False),
        _path(
            "triton", quant, f"{one}, and {as_format}", triton_quant.fused, runs, 1,
            timed=False, fused=True,
        ),
    ]  # fmt: skip


def _aiter(quant: str, as_format: str) -> Path:
    text = f"AITER's Triton kernel: both norms, and {as_format}"
    return _path("aiter", quant, text, aiter_quant.call, aiter_quant.supports, 1, fused=True)


PATHS: dict[str, Path] = {
    path.name: path
    for path in (
        *(path for quant, text in _FORMATS.items() for path in _paths(quant, text)),
        _aiter("fp8_group128", _FORMATS["fp8_group128"]),
        _aiter("mxfp4", "q as MXFP4 under the rule that Quark calls even"),
    )
}
