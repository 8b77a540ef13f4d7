"""What each value instruction computes: tables of functions on numpy arrays.

Sections: CDNA3 ISA and RDNA3/4 ISA, instruction lists VOP1, VOP2, VOP3 and VOPC; CDNA4 ISA for
V_BITOP3_B32 and V_MAXIMUM3_F32. Reciprocals and roots are rounded correctly (idealised).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np

from mlakit.codegen.isa.numbers import exponent_bits, fma, fma64, from_bf16, to_f16

U16, U32, U64, I32 = np.uint16, np.uint32, np.uint64, np.int32
F16, F32, F64 = np.float16, np.float32, np.float64


class Op(NamedTuple):
    """A value instruction: the type of its result, the types of its sources, what it computes."""

    result: str
    sources: tuple[str, ...]
    compute: Callable
    old: bool = False
    """the destination is a last source too (multiply-accumulate)"""
    scc: str = ""
    """of a scalar one: SCC is ``nonzero`` (of the result), or ``computed`` beside it"""


def op(types: str, compute: Callable, *, old: bool = False, scc: str = "") -> Op:
    """``types``: the result's, then the sources'."""
    result, *sources = types.split()
    return Op(result, tuple(sources), compute, old, scc)


def maximum(a, b):
    """IEEE maxNum with +0 above -0; a NaN loses."""
    return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))


def minimum(a, b):
    """IEEE minNum with -0 below +0; a NaN loses."""
    return -maximum(-a, -b)


def _median(a, b, c):
    """The middle of three; with a NaN among them, the least."""
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, minimum(minimum(a, b), c), middle)


def nan_wins(f: Callable) -> Callable:
    """``f``, but NaN where any operand is."""
    return lambda *xs: np.where(reduce(np.logical_or, map(np.isnan, xs)), sum(xs), f(*xs))


def _fold(f):
    return lambda a, b, c: f(f(a, b), c)


def _not(f):
    return lambda a, b: ~f(a, b)


def _ordered(a, b):
    return (a == a) & (b == b)


def _ideal(f):
    """A float32 or float16 function rounded correctly from float64."""
    return lambda x: f(x.astype(F64)).astype(x.dtype)


def bitop3(a, b, c, table: int):
    """Any function of three bits: bit ``a * 4 + b * 2 + c`` of ``table``."""
    a, b, c = np.broadcast_arrays(a, b, c)
    out = np.zeros_like(a)
    for k in range(8):
        if table >> k & 1:
            out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return out


def _byte_permute(a, b, select):
    """v_perm_b32: each byte of ``select`` picks from the eight bytes of a (high) and b (low).

    8 to 11 give the sign of every other byte, 12 gives 0, more gives 0xff.
    """
    shifts, full = U32([0, 8, 16, 24]), U32(0xFF)
    eight = [(x >> s) & full for x in (b, a) for s in shifts]
    signs = [(x >> U32(7)) * full for x in eight[1::2]]
    choices = [*eight, *signs, U32(0), full]
    picks = [np.minimum((select >> s) & full, U32(13)) for s in shifts]
    return sum(np.choose(pick, choices) << s for pick, s in zip(picks, shifts, strict=True))


def _bfe(a, shift, width):
    mask = (U32(1) << (width & U32(31))) - U32(1)
    return (a >> (shift & U32(31)).astype(a.dtype)) & mask.astype(a.dtype)


def _bfe_signed(a, shift, width):
    width = width & U32(31)
    up = (U32(32) - width) & U32(31)
    field = (_bfe(a.view(U32), shift, width) << up).view(I32) >> up.astype(I32)
    return np.where(width == 0, I32(0), field)


def shift(f: Callable) -> Callable:
    """x shifted by n as the hardware does it: by n modulo the width."""
    return lambda n, x: f(x, (n & n.dtype.type(8 * x.itemsize - 1)).astype(x.dtype))


def carry(a, b, c=0):
    """(a + b + c, whether it left 32 bits) of uint32."""
    wide = a.astype(U64) + b + np.asarray(c, U64)
    return wide.astype(U32), wide >> U64(32) != 0


def borrow(a, b, c=0):
    """(a - b - c, whether it went below 0) of uint32."""
    wide = a.astype(U64) - b - np.asarray(c, U64)
    return wide.astype(U32), wide >> U64(32) != 0


def _div_fixup(q, d, n):
    """v_div_fixup_f32: the special cases of n / d, else |q| with the sign of n / d.

    A NaN quotient of finite numbers comes of an overflow on the way, and is one.
    """
    sign = np.signbit(d) ^ np.signbit(n)
    out = np.where(np.isnan(q), F32(np.inf), np.abs(q))
    out = np.where(exponent_bits(n) - exponent_bits(d) < -150, F32(0), out)
    out = np.where((exponent_bits(d) == 255) | (n == 0), F32(0), out)
    out = np.where((d == 0) | np.isinf(n), F32(np.inf), out)
    bad = ((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n)) | np.isnan(d) | np.isnan(n)
    return np.where(bad, F32(np.nan), np.where(sign, -out, out)).astype(F32)


def div_scale(x, d, n):
    """v_div_scale_f32: (x scaled by a power of two, whether div_fmas must undo it)."""
    x, d, n = np.broadcast_arrays(x, d, n)
    is_d = x.view(U32) == d.view(U32)
    up = x * F32(2.0**64)
    tiny = F64(2.0**-126)
    quotient = np.abs(n.astype(F64) / d.astype(F64))
    cases = [
        ((n == 0) | (d == 0), F32(np.nan), False),
        (exponent_bits(n) - exponent_bits(d) >= 96, np.where(is_d, up, x), True),
        (np.abs(d) < tiny, up, False),
        (quotient < tiny, np.where(is_d, x, up), True),
        (exponent_bits(n) <= 23, up, False),
    ]
    conditions = [c for c, _, _ in cases]
    value = np.select(conditions, [np.broadcast_to(v, x.shape) for _, v, _ in cases], x)
    return value.astype(F32), np.select(conditions, [f for _, _, f in cases], False)


def _choose(a, b, mask):
    return np.where(mask, b, a)


def _reverse_bits(a):
    as_bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8), bitorder="little")
    reversed_bits = np.packbits(as_bits.reshape(-1, 32)[:, ::-1], bitorder="little")
    return reversed_bits.view(U32).reshape(a.shape)


def _align(a, b, c):
    return ((a.astype(U64) << U64(32) | b) >> (c & U32(31)).astype(U64)).astype(U32)


_LOW24 = U32(0xFFFFFF)
_U2, _U3, _F2, _F3 = "b32 u32 u32", "b32 u32 u32 u32", "f32 f32 f32", "f32 f32 f32 f32"
OPS: dict[str, Op] = {
    "v_mov_b32": op("b32 b32", lambda a: a),
    "v_mov_b64": op("b64 b64", lambda a: a),
    "v_and_b32": op(_U2, np.bitwise_and),
    "v_or_b32": op(_U2, np.bitwise_or),
    "v_xor_b32": op(_U2, np.bitwise_xor),
    "v_bfrev_b32": op("b32 b32", _reverse_bits),
    "v_bfi_b32": op(_U3, lambda a, b, c: (a & b) | (~a & c)),
    "v_cndmask_b32": op("b32 b32 b32 mask", _choose),
    "v_cndmask_b16": op("b16 b16 b16 mask", _choose),
    "v_perm_b32": op(_U3, _byte_permute),
    "v_alignbit_b32": op(_U3, _align),
    "v_bfe_u32": op(_U3, _bfe),
    "v_bfe_i32": op("i32 i32 u32 u32", _bfe_signed),
    "v_add_u32": op(_U2, np.add),
    "v_sub_u32": op(_U2, np.subtract),
    "v_subrev_u32": op(_U2, lambda a, b: b - a),
    "v_add3_u32": op(_U3, lambda a, b, c: a + b + c),
    "v_lshl_add_u32": op(_U3, lambda a, b, c: (a << (b & U32(31))) + c),
    "v_add_lshl_u32": op(_U3, lambda a, b, c: (a + b) << (c & U32(31))),
    "v_lshl_or_b32": op(_U3, lambda a, b, c: (a << (b & U32(31))) | c),
    "v_and_or_b32": op(_U3, lambda a, b, c: (a & b) | c),
    "v_or3_b32": op(_U3, lambda a, b, c: a | b | c),
    "v_xad_u32": op(_U3, lambda a, b, c: (a ^ b) + c),
    "v_mul_lo_u32": op(_U2, np.multiply),
    "v_mad_u32": op(_U3, lambda a, b, c: a * b + c),
    "v_mul_u32_u24": op(_U2, lambda a, b: (a & _LOW24) * (b & _LOW24)),
    "v_mad_u32_u24": op(_U3, lambda a, b, c: (a & _LOW24) * (b & _LOW24) + c),
    "v_lshl_add_u64": op("b64 u64 u32 u64", lambda a, b, c: (a << (b & 7).astype(U64)) + c),
    "v_add_u64": op("b64 u64 u64", np.add),
    "v_mul_u64": op("b64 u64 u64", np.multiply),
    "v_add_u16": op("u16 u16 u16", np.add),
    "v_cvt_f32_f16": op("f32 f16", lambda a: a.astype(F32)),
    "v_cvt_f16_f32": op("f16 f32", to_f16),
    "v_cvt_f32_bf16": op("f32 bf16", from_bf16),
    "v_cvt_f64_f32": op("f64 f32", lambda a: a.astype(F64)),
    "v_cvt_f32_f64": op("f32 f64", lambda a: a.astype(F32)),
    "v_rsq_f32": op("f32 f32", _ideal(lambda x: 1 / np.sqrt(x))),
    "v_rcp_f32": op("f32 f32", _ideal(lambda x: 1 / x)),
    "v_sqrt_f32": op("f32 f32", _ideal(np.sqrt)),
    "v_rsq_f64": op("f64 f64", lambda x: 1 / np.sqrt(x)),
    "v_div_fixup_f32": op(_F3, _div_fixup),
    "v_med3_f32": op(_F3, _median),
    "v_maximum_f32": op(_F2, nan_wins(maximum)),
    "v_minimum_f32": op(_F2, nan_wins(minimum)),
    "v_maximum3_f32": op(_F3, nan_wins(_fold(maximum))),
    "v_minimum3_f32": op(_F3, nan_wins(_fold(minimum))),
    "v_max3_f32": op(_F3, _fold(maximum)),
    "v_min3_f32": op(_F3, _fold(minimum)),
    "v_minmax_f32": op(_F3, lambda a, b, c: maximum(minimum(a, b), c)),
    "v_maxmin_f32": op(_F3, lambda a, b, c: minimum(maximum(a, b), c)),
    "v_max_f32": op(_F2, maximum),
    "v_min_f32": op(_F2, minimum),
}
"""By plain name."""
for _k, _fma in (("f16", lambda a, b, c: fma(a, b, c, F16)), ("f32", fma), ("f64", fma64)):
    _two, _three = f"{_k} {_k} {_k}", f"{_k} {_k} {_k} {_k}"
    OPS |= {
        f"v_add_{_k}": op(_two, np.add),
        f"v_sub_{_k}": op(_two, np.subtract),
        f"v_subrev_{_k}": op(_two, lambda a, b: b - a),
        f"v_mul_{_k}": op(_two, np.multiply),
        f"v_fma_{_k}": op(_three, _fma),
        f"v_fmac_{_k}": op(_three, _fma, old=True),
        # The middle operand is the literal, and in the text's order it is a factor.
        f"v_fmamk_{_k}": op(_three, _fma),
        f"v_fmaak_{_k}": op(_three, _fma),
    }
for _k in ("u32", "i32", "u16"):
    OPS[f"v_max_{_k}"] = op(f"{_k} {_k} {_k}", np.maximum)
    OPS[f"v_min_{_k}"] = op(f"{_k} {_k} {_k}", np.minimum)
    OPS[f"v_max3_{_k}"] = op(f"{_k} {_k} {_k} {_k}", _fold(np.maximum))
    OPS[f"v_min3_{_k}"] = op(f"{_k} {_k} {_k} {_k}", _fold(np.minimum))
for _n, _count in (("16", "u16"), ("32", "u32"), ("64", "u32")):
    OPS[f"v_lshlrev_b{_n}"] = op(f"u{_n} {_count} u{_n}", shift(np.left_shift))
    OPS[f"v_lshrrev_b{_n}"] = op(f"u{_n} {_count} u{_n}", shift(np.right_shift))
    OPS[f"v_ashrrev_i{_n}"] = op(f"i{_n} {_count} i{_n}", shift(np.right_shift))
COMPARE = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
}
COMPARE |= {f"n{name}": _not(f) for name, f in COMPARE.items()}
COMPARE |= {"ne": np.not_equal, "o": _ordered, "u": _not(_ordered)}


def float_class(x: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """v_cmp_class: bits from signaling NaN (0), quiet NaN, -inf, -normal ... to +inf (9)."""
    mantissa, size = {2: (10, U16), 4: (23, U32), 8: (52, U64)}[x.itemsize]
    bits = np.ascontiguousarray(x).view(size)
    quiet = (bits >> size(mantissa - 1)) & size(1)
    minus, tiny = np.signbit(x), np.abs(x) < np.finfo(x.dtype).tiny
    size_class = np.select([np.isinf(x), x == 0, tiny], [3, 0, 1], 2)
    which = np.where(minus, 5 - size_class, 6 + size_class)
    which = np.where(np.isnan(x), np.where(quiet == 1, 1, 0), which)
    return (wanted >> which.astype(U32)) & U32(1) == 1
