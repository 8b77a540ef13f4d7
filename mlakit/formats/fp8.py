"""FP8 E4M3 in its two encodings: cast, scales, quantise, dequantise, and the scales' layouts.

OCP (gfx950, NVIDIA; maximum 448) has bias 7, a negative zero and NaN at 0x7f and 0xff. FNUZ
(gfx942; maximum 240) has bias 8, no negative zero, and NaN at 0x80 alone. The same byte is twice as
large in OCP as in FNUZ, so bytes of one read as the other are silently half or double.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlakit.errors import MisuseError, unknown

GROUP = 128
"""elements that share one scale in ``fp8_group128``"""
MIN_AMAX = 1e-10
"""floor of a group's largest magnitude, so that an all-zero group has a finite scale (AITER's)"""
SCALE_LAYOUTS = ("row_major", "transposed", "strided")


@dataclass(frozen=True)
class Encoding:
    """One encoding of E4M3: torch's dtype, the largest value (also the scales' divisor), bias."""

    name: str
    dtype: torch.dtype
    maximum: float
    bias: int


ENCODINGS = {
    e.name: e
    for e in (
        Encoding("fp8_ocp", torch.float8_e4m3fn, 448.0, 7),
        Encoding("fp8_fnuz", torch.float8_e4m3fnuz, 240.0, 8),
    )
}
BY_DTYPE = {e.dtype: e for e in ENCODINGS.values()}


def encoding(name: str) -> Encoding:
    """The encoding called ``name``: ``fp8_ocp`` or ``fp8_fnuz``.

    Raises:
        MisuseError: neither.
    """
    if name not in ENCODINGS:
        raise unknown("FP8 encoding", name, ENCODINGS)
    return ENCODINGS[name]


def encode(values: torch.Tensor, to: Encoding) -> torch.Tensor:
    """Float32 ``values`` clamped to the finite range, then rounded to nearest even; NaN is kept.

    Without the clamp a value above the maximum would become NaN.
    """
    return values.clamp(-to.maximum, to.maximum).to(to.dtype)


def refusal(width: int, group: int = GROUP) -> str | None:
    """Why rows of ``width`` elements cannot be quantised in groups, or None."""
    if width and width % group == 0:
        return None
    return f"q is {width} wide: groups of {group} need a width of {group}, {2 * group}, ..."


def scale_of(amax: torch.Tensor, to: Encoding) -> torch.Tensor:
    """Float32 scale of a group whose largest magnitude is ``amax``: max(amax, 1e-10) / maximum."""
    return amax.float().clamp_min(MIN_AMAX) / to.maximum


def quantise(
    values: torch.Tensor, to: Encoding, group: int | None = GROUP
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows; ``group=None`` gives one scale a row (per token).

    ``y -> encode(y * (1 / scale))`` in float32: one reciprocal a group and a product an element, as
    AITER's Triton kernel does it. Dividing instead can differ by one step where y/scale is a tie.

    Args:
        values: (M, N) float32.
        to: the encoding.
        group: elements that share a scale.

    Returns:
        values (M, N) in FP8 and scale (M, N/group) float32, row-major.

    Raises:
        MisuseError: N is no multiple of ``group``.
    """
    m, n = values.shape
    reason = refusal(n, group or n or 1)
    if reason:
        raise MisuseError(reason)
    grouped = values.float().view(m, n // (group or n), group or n)
    scale = scale_of(grouped.abs().amax(-1), to)
    coded = encode(grouped * scale.reciprocal().unsqueeze(-1), to)
    return coded.view(m, n), scale


def dequantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 of FP8 ``values`` (M, N) times ``scale`` (M, groups), which divide N evenly."""
    m, n = values.shape
    groups = scale.shape[1]
    return (values.float().view(m, groups, n // groups) * scale.unsqueeze(-1)).view(m, n)


def empty_scale(
    m: int, groups: int, layout: str = "row_major", device: torch.device | str = "cpu"
) -> torch.Tensor:
    """An unwritten (m, groups) float32 scale tensor in a layout of ``SCALE_LAYOUTS``.

    ``row_major``: strides (groups, 1). ``strided``: the transposed memory, honestly described by
    strides (1, m). ``transposed``: the same column-major bytes behind a view whose strides say
    (groups, 1), as AITER's ``transpose_scale`` returns them; indexing that view reads the wrong
    scale unless m or groups is 1.

    Raises:
        MisuseError: unknown layout.
    """
    if layout not in SCALE_LAYOUTS:
        raise unknown("scale layout", layout, SCALE_LAYOUTS)
    if layout == "strided":
        return torch.empty(groups, m, dtype=torch.float32, device=device).t()
    return torch.empty(m, groups, dtype=torch.float32, device=device)


def by_row(scale: torch.Tensor, layout: str) -> torch.Tensor:
    """``scale`` of ``layout`` as a view whose ``[row, group]`` is that group's scale.

    Raises:
        MisuseError: unknown layout.
    """
    if layout not in SCALE_LAYOUTS:
        raise unknown("scale layout", layout, SCALE_LAYOUTS)
    m, groups = scale.shape
    return scale.view(groups, m).t() if layout == "transposed" else scale
