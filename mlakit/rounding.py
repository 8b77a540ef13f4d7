"""The float64 oracle and the named roundings of RMSNorm: formulas, implemented once.

``y = x * rsqrt(mean(x^2) + eps) * w`` per row. A *rounding* is the order in which an
implementation rounds on the way. The statistics of every formula are taken in float64 and then
rounded to the format the formula names, so that no reduction order is baked in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float64, unrounded. x: (..., N) any float dtype; weight: (N,). Returns float64."""
    x64 = x.double()
    return x64 * _rstd64(x64, eps) * weight.double()


def _rstd64(x64: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps)


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 once, to nearest even, to ``dtype``; NaN and inf are kept.

    torch casts float64 to a 16-bit float through float32, which rounds twice. Here the step to
    float32 rounds to odd, and the second rounding is then the only one.
    """
    if dtype in (torch.float32, torch.float64):
        return values.to(dtype)
    f32 = values.to(torch.float32)
    bits = f32.view(torch.int32)
    bits = torch.where(f32.double().abs() > values.abs(), bits - 1, bits)
    inexact = bits.view(torch.float32).double() != values
    odd = torch.where(inexact & ~values.isnan(), bits | 1, bits)
    return odd.view(torch.float32).to(dtype)


def truncate_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 toward zero to ``dtype`` (bf16 keeps its top 16 bits); NaN and inf are kept."""
    if dtype in (torch.float32, torch.float64):
        return values.to(dtype)
    nearest = values.to(dtype)
    too_far = nearest.float().abs() > values.float().abs()
    bits = nearest.view(torch.int16)
    return torch.where(too_far, bits - 1, bits).view(dtype)


@dataclass(frozen=True)
class Rounding:
    """One named order of roundings: ``formula(x, weight, eps) -> tensor of x's dtype``."""

    name: str
    text: str
    formula: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _normalised32(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * _rstd64(x.double(), eps).float()


def _round_once(x, weight, eps):
    return (_normalised32(x, eps) * weight.float()).to(x.dtype)


def _cast_then_weight(x, weight, eps):
    return (_normalised32(x, eps).to(x.dtype) * weight).to(x.dtype)


def _truncate(x, weight, eps):
    return truncate_to(_normalised32(x, eps) * weight.float(), x.dtype)


ROUNDINGS: dict[str, Rounding] = {
    r.name: r
    for r in (
        Rounding("round_once", "R((x*s)*w): float32 throughout, one rounding", _round_once),
        Rounding("cast_then_weight", "R(R(x*s)*w): Hugging Face, two roundings", _cast_then_weight),
        Rounding("truncate", "T((x*s)*w): float32, then cut toward zero", _truncate),
    )
}
