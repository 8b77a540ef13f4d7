"""Number conversions and exact arithmetic that numpy lacks; arrays of any shape.

Formats: OCP "8-bit Floating Point Specification" and "Microscaling Formats (MX) Specification";
the fnuz encodings: CDNA3 ISA, section "FP8 and BF8 data types".
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

F32, F64, U32, U64, I64 = np.float32, np.float64, np.uint32, np.uint64, np.int64


class MiniFloat(NamedTuple):
    """A float of at most 8 bits: mantissa bits, bias, code of the largest value, codes above it."""

    bits: int
    mantissa: int
    bias: int
    top: int
    inf: int | None
    nan: int | None


E4M3 = MiniFloat(8, 3, 7, 0x7E, None, 0x7F)
E5M2 = MiniFloat(8, 2, 15, 0x7B, 0x7C, 0x7F)
E4M3_FNUZ = MiniFloat(8, 3, 8, 0x7F, None, 0x80)
E5M2_FNUZ = MiniFloat(8, 2, 16, 0x7F, None, 0x80)
E2M1 = MiniFloat(4, 1, 1, 7, None, None)


@cache
def _boundaries(to: MiniFloat) -> np.ndarray:
    """(top + 1,) float64: half-way from each code's magnitude to the next; the last overflows."""
    codes = np.arange(to.top + 1)
    exponent, units = codes >> to.mantissa, codes & ((1 << to.mantissa) - 1)
    units = units + np.where(exponent > 0, 1 << to.mantissa, 0)
    values = np.ldexp(units.astype(F64), np.maximum(exponent, 1) - to.bias - to.mantissa)
    return np.append(values[1:] + values[:-1], 3 * values[-1] - values[-2]) / 2


def to_minifloat(x: np.ndarray, to: MiniFloat, saturate: bool = False) -> np.ndarray:
    """Codes (uint32) of x (float32 or float64) rounded to nearest even.

    Overflow gives inf, or NaN where the format has no inf; ``saturate`` (the mode bit FP16_OVFL)
    gives the largest finite value instead, but keeps a true inf. A format without NaN saturates.
    """
    x = np.asarray(x, F64)
    size, between = np.abs(x), _boundaries(to)
    code = np.searchsorted(between, size)
    code += (code % 2 == 1) & (size == between[np.minimum(code, to.top)])
    beyond = to.inf if to.inf is not None else to.nan
    kept = beyond is None or (saturate & np.isfinite(x))
    code = np.where(code > to.top, np.where(kept, to.top, beyond or 0), code)
    sign = np.signbit(x) & ~((to.nan == 0x80) & ((code == 0) | (code == 0x80)))
    code = np.where(sign, code | (1 << (to.bits - 1)), code)
    return np.where(np.isnan(x), to.top if to.nan is None else to.nan, code).astype(U32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits (uint32) of float32, to nearest even; a NaN is made quiet."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 of bf16 bits."""
    return (np.asarray(bits).astype(U32) << U32(16)).view(F32)


def to_f16(x: np.ndarray, saturate: bool = False) -> np.ndarray:
    """float16 of float32, to nearest even; ``saturate``: overflow stops at the largest finite."""
    half = np.asarray(x, F32).astype(np.float16)
    if saturate:
        over = np.isinf(half) & np.isfinite(x)
        half = np.where(over, np.copysign(np.float16(65504), half), half)
    return half


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 a + b and the exact error of that sum (Knuth)."""
    total = np.atleast_1d(a + b)
    back = total - a
    return total, np.nan_to_num((a - (total - back)) + (b - back), nan=0.0, posinf=0, neginf=0)


def _to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """float64 ``total`` moved to the odd neighbour on the side of ``error`` where it is inexact."""
    bits = total.view(I64)
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    if not inexact.any():
        return total
    away = (error > 0) == (total > 0)
    return np.where(inexact, np.where(away, bits + 1, bits - 1), bits).view(F64)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, to: type = F32) -> np.ndarray:
    """a * b + c of float32 or float16, rounded once to ``to``.

    The float64 product is exact; the float64 sum is rounded to odd, so that the second rounding,
    to ``to``, is the only one.
    """
    product = np.asarray(a, F64) * np.asarray(b, F64)
    return _to_odd(*_two_sum(product, np.asarray(c, F64))).astype(to)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float64 a * b + c, rounded once (Boldo and Melquiond's emulation), away from overflow."""
    product = a * b
    (ah, al), (bh, bl) = (_halves(x) for x in (a, b))
    low = np.nan_to_num(((ah * bh - product) + ah * bl + al * bh) + al * bl, nan=0.0)
    th, tl = _two_sum(c, low)
    vh, vl = _two_sum(product, th)
    return vh + _to_odd(*_two_sum(tl, vl))


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Veltkamp's split: x as a sum of two float64 with at most 26 bits each."""
    high = x * 134217729.0
    high = high - (high - x)
    return high, x - high


def exponent_bits(x: np.ndarray) -> np.ndarray:
    """The biased exponent field of float32, int32."""
    return ((np.ascontiguousarray(x, F32).view(U32) >> U32(23)) & U32(0xFF)).astype(np.int32)


def scale_of(x: np.ndarray) -> np.ndarray:
    """float64 power of two that a scaled conversion's float32 scale operand stands for.

    Only the exponent field counts (CDNA4 ISA, "V_CVT_SCALEF32_*").
    """
    return np.ldexp(1.0, exponent_bits(x) - 127)
