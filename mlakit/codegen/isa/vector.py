"""Vector arithmetic: VOP1, VOP2, VOP3, VOPC and dual issue (CDNA3 ISA and RDNA3/4 ISA, "Vector ALU
Operations" and the instruction lists VOP1, VOP2, VOP3; "VOPD" for dual issue; CDNA4 ISA for
V_BITOP3_B32). Packed and converting instructions are in ``packed``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlakit.codegen.isa import lanes
from mlakit.codegen.isa.numbers import exponent_bits, fma, fma64, from_bf16, to_f16
from mlakit.codegen.isa.parse import VCC, EmulationError, Instruction, Operand
from mlakit.codegen.isa.state import Waves, width_of

U16, U32, U64, I32, I64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
_VCC = Operand("s", VCC, 2, text="vcc")


class Op(NamedTuple):
    """A value instruction: the type of its result, the types of its sources, what it computes."""

    result: str
    sources: tuple[str, ...]
    compute: Callable
    old: bool = False
    """the destination is a last source too (multiply-accumulate)"""


def _op(result: str, sources: str, compute: Callable, old: bool = False) -> Op:
    return Op(result, tuple(sources.split()), compute, old)


def maximum(a, b):
    """IEEE maxNum with +0 above -0; a NaN loses."""
    u = np.uint32 if a.dtype == F32 else np.uint16
    both = np.broadcast_arrays(a, b)
    same = (np.ascontiguousarray(both[0]).view(u) & np.ascontiguousarray(both[1]).view(u)).view(
        a.dtype
    )
    return np.where(a == b, same, np.fmax(a, b))


def minimum(a, b):
    """IEEE minNum with -0 below +0; a NaN loses."""
    return -maximum(-a, -b)


def median(a, b, c):
    """The middle of three; with a NaN among them, the least."""
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, minimum(minimum(a, b), c), middle)


def _nan_wins(f):
    return lambda *xs: np.where(
        np.logical_or.reduce([np.isnan(x) for x in np.broadcast_arrays(*xs)]), F32(np.nan), f(*xs)
    )


def _fold(f):
    return lambda a, b, c: f(f(a, b), c)


def _to_int(low, high, dtype):
    def convert(x):
        clipped = np.clip(np.nan_to_num(np.trunc(x.astype(F64)), nan=0.0), low, high)
        return clipped.astype(I64).astype(dtype)

    return convert


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


def byte_permute(a, b, select):
    """v_perm_b32: each byte of ``select`` picks from the eight bytes of a (high) and b (low)."""
    both = a.astype(U64) << U64(32) | b.astype(U64)
    out = np.zeros(np.broadcast_shapes(both.shape, select.shape), U32)
    for k in range(4):
        pick = (select >> U32(8 * k)) & U32(0xFF)
        byte = (both >> ((pick & U32(7)) * U32(8)).astype(U64)).astype(U32) & U32(0xFF)
        sign_at = ((pick & U32(3)) * U32(16) + U32(15)).astype(U64)
        sign = np.where((both >> sign_at) & U64(1), U32(0xFF), U32(0))
        byte = np.where(pick >= 8, np.where(pick < 12, sign, U32(0xFF)), byte)
        out |= np.where(pick == 12, U32(0), byte) << U32(8 * k)
    return out


def _bfe(a, shift, width):
    mask = (U32(1) << (width & U32(31))) - U32(1)
    return (a >> (shift & U32(31)).astype(a.dtype)) & mask.astype(a.dtype)


def _bfe_signed(a, shift, width):
    width = width & U32(31)
    up = (U32(32) - width) & U32(31)
    field = (_bfe(a.view(U32), shift, width) << up).view(I32) >> up.astype(I32)
    return np.where(width == 0, I32(0), field)


def _shift(f, kind):
    count = width_of(kind) - 1
    return lambda n, x: f(x, (n & n.dtype.type(count)).astype(x.dtype))


def div_fixup(q, d, n):
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


def _mul_wide(dtype, shift):
    wide = I64 if dtype is I32 else U64
    return lambda a, b: (a.astype(wide) * b.astype(wide) >> wide(shift)).astype(dtype)


_LOW24 = U32(0xFFFFFF)
_B, _F = "b32", "f32"
OPS: dict[str, Op] = {
    "v_mov_b32": _op(_B, _B, lambda a: a),
    "v_mov_b16": _op("b16", "b16", lambda a: a),
    "v_mov_b64": _op("b64", "b64", lambda a: a),
    "v_not_b32": _op(_B, _B, lambda a: ~a),
    "v_and_b32": _op(_B, "b32 b32", lambda a, b: a & b),
    "v_or_b32": _op(_B, "b32 b32", lambda a, b: a | b),
    "v_xor_b32": _op(_B, "b32 b32", lambda a, b: a ^ b),
    "v_xnor_b32": _op(_B, "b32 b32", lambda a, b: ~(a ^ b)),
    "v_and_b16": _op("b16", "b16 b16", lambda a, b: a & b),
    "v_or_b16": _op("b16", "b16 b16", lambda a, b: a | b),
    "v_bfrev_b32": _op(
        _B,
        _B,
        lambda a: (
            np.packbits(
                np.unpackbits(np.ascontiguousarray(a).view(np.uint8), bitorder="little").reshape(
                    -1, 32
                )[:, ::-1],
                bitorder="little",
            )
            .view(U32)
            .reshape(a.shape)
        ),
    ),
    "v_bcnt_u32_b32": _op(_B, "b32 b32", lambda a, b: np.bitwise_count(a).astype(U32) + b),
    "v_ffbh_u32": _op(
        "i32", _B, lambda a: np.where(a == 0, -1, 32 - np.frexp(a.astype(F64))[1]).astype(I32)
    ),
    "v_bfi_b32": _op(_B, "b32 b32 b32", lambda a, b, c: (a & b) | (~a & c)),
    "v_perm_b32": _op(_B, "b32 b32 b32", byte_permute),
    "v_alignbit_b32": _op(
        _B,
        "b32 b32 b32",
        lambda a, b, c: ((a.astype(U64) << U64(32) | b) >> (c & U32(31)).astype(U64)).astype(U32),
    ),
    "v_bfe_u32": _op(_B, "u32 u32 u32", _bfe),
    "v_bfe_i32": _op("i32", "i32 u32 u32", _bfe_signed),
    "v_add_u32": _op(_B, "u32 u32", lambda a, b: a + b),
    "v_sub_u32": _op(_B, "u32 u32", lambda a, b: a - b),
    "v_subrev_u32": _op(_B, "u32 u32", lambda a, b: b - a),
    "v_add3_u32": _op(_B, "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": _op(_B, "u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) + c),
    "v_lshl_add_u64": _op(
        "b64", "u64 u32 u64", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c
    ),
    "v_mul_u64": _op("b64", "u64 u64", lambda a, b: a * b),
    "v_sub_u64": _op("b64", "u64 u64", lambda a, b: a - b),
    "v_mad_u32": _op(_B, "u32 u32 u32", lambda a, b, c: a * b + c),
    "v_add_u64": _op("b64", "u64 u64", lambda a, b: a + b),
    "v_add_lshl_u32": _op(_B, "u32 u32 u32", lambda a, b, c: (a + b) << (c & U32(31))),
    "v_lshl_or_b32": _op(_B, "u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) | c),
    "v_and_or_b32": _op(_B, "u32 u32 u32", lambda a, b, c: (a & b) | c),
    "v_or3_b32": _op(_B, "u32 u32 u32", lambda a, b, c: a | b | c),
    "v_xor3_b32": _op(_B, "u32 u32 u32", lambda a, b, c: a ^ b ^ c),
    "v_xad_u32": _op(_B, "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_mul_lo_u32": _op(_B, "u32 u32", lambda a, b: a * b),
    "v_mul_hi_u32": _op(_B, "u32 u32", _mul_wide(U32, 32)),
    "v_mul_hi_i32": _op("i32", "i32 i32", _mul_wide(I32, 32)),
    "v_mul_u32_u24": _op(_B, "u32 u32", lambda a, b: (a & _LOW24) * (b & _LOW24)),
    "v_mad_u32_u24": _op(_B, "u32 u32 u32", lambda a, b, c: (a & _LOW24) * (b & _LOW24) + c),
    "v_mad_u16": _op("u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    "v_mul_lo_u16": _op("u16", "u16 u16", lambda a, b: a * b),
    "v_add_u16": _op("u16", "u16 u16", lambda a, b: a + b),
    "v_sub_u16": _op("u16", "u16 u16", lambda a, b: a - b),
    "v_cvt_f32_u32": _op(_F, "u32", lambda a: a.astype(F32)),
    "v_cvt_f32_i32": _op(_F, "i32", lambda a: a.astype(F32)),
    "v_cvt_u32_f32": _op(_B, _F, _to_int(0, 2**32 - 1, U32)),
    "v_cvt_i32_f32": _op("i32", _F, _to_int(-(2**31), 2**31 - 1, I32)),
    "v_cvt_f32_f16": _op(_F, "f16", lambda a: a.astype(F32)),
    "v_cvt_f16_f32": _op("f16", _F, to_f16),
    "v_cvt_f32_bf16": _op(_F, "bf16", from_bf16),
    "v_cvt_f64_f32": _op("f64", _F, lambda a: a.astype(F64)),
    "v_cvt_f32_f64": _op(_F, "f64", lambda a: a.astype(F32)),
    "v_rsq_f32": _op(_F, _F, _ideal(lambda x: 1 / np.sqrt(x))),
    "v_rcp_f32": _op(_F, _F, _ideal(lambda x: 1 / x)),
    "v_rcp_iflag_f32": _op(_F, _F, _ideal(lambda x: 1 / x)),
    "v_sqrt_f32": _op(_F, _F, _ideal(np.sqrt)),
    "v_exp_f32": _op(_F, _F, _ideal(np.exp2)),
    "v_log_f32": _op(_F, _F, _ideal(np.log2)),
    "v_floor_f32": _op(_F, _F, np.floor),
    "v_ceil_f32": _op(_F, _F, np.ceil),
    "v_trunc_f32": _op(_F, _F, np.trunc),
    "v_rndne_f32": _op(_F, _F, np.rint),
    "v_frexp_mant_f32": _op(_F, _F, lambda x: np.frexp(x)[0]),
    "v_frexp_exp_i32_f32": _op(
        "i32", _F, lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)
    ),
    "v_ldexp_f32": _op(
        _F, "f32 i32", lambda x, n: np.ldexp(x.astype(F64), np.clip(n, -400, 400)).astype(F32)
    ),
    "v_div_fixup_f32": _op(_F, "f32 f32 f32", div_fixup),
    "v_med3_f32": _op(_F, "f32 f32 f32", median),
    "v_maximum_f32": _op(_F, "f32 f32", _nan_wins(maximum)),
    "v_minimum_f32": _op(_F, "f32 f32", _nan_wins(minimum)),
    "v_maximum3_f32": _op(_F, "f32 f32 f32", _nan_wins(_fold(maximum))),
    "v_minimum3_f32": _op(_F, "f32 f32 f32", _nan_wins(_fold(minimum))),
    "v_maxmin_f32": _op(_F, "f32 f32 f32", lambda a, b, c: minimum(maximum(a, b), c)),
    "v_minmax_f32": _op(_F, "f32 f32 f32", lambda a, b, c: maximum(minimum(a, b), c)),
    "v_maximumminimum_f32": _op(
        _F, "f32 f32 f32", _nan_wins(lambda a, b, c: minimum(maximum(a, b), c))
    ),
    "v_minimummaximum_f32": _op(
        _F, "f32 f32 f32", _nan_wins(lambda a, b, c: maximum(minimum(a, b), c))
    ),
}
for _k, _np in (("f32", F32), ("f16", F16)):
    OPS |= {
        f"v_add_{_k}": _op(_k, f"{_k} {_k}", np.add),
        f"v_sub_{_k}": _op(_k, f"{_k} {_k}", np.subtract),
        f"v_subrev_{_k}": _op(_k, f"{_k} {_k}", lambda a, b: b - a),
        f"v_mul_{_k}": _op(_k, f"{_k} {_k}", np.multiply),
        f"v_max_{_k}": _op(_k, f"{_k} {_k}", maximum),
        f"v_min_{_k}": _op(_k, f"{_k} {_k}", minimum),
        f"v_max3_{_k}": _op(_k, f"{_k} {_k} {_k}", _fold(maximum)),
        f"v_min3_{_k}": _op(_k, f"{_k} {_k} {_k}", _fold(minimum)),
        f"v_fma_{_k}": _op(_k, f"{_k} {_k} {_k}", lambda a, b, c, t=_np: fma(a, b, c, t)),
        f"v_fmac_{_k}": _op(_k, f"{_k} {_k} {_k}", lambda a, b, d, t=_np: fma(a, b, d, t), True),
        f"v_fmamk_{_k}": _op(_k, f"{_k} {_k} {_k}", lambda a, k, b, t=_np: fma(a, k, b, t)),
        f"v_fmaak_{_k}": _op(_k, f"{_k} {_k} {_k}", lambda a, b, k, t=_np: fma(a, b, k, t)),
    }
_D = "f64"
OPS |= {
    "v_add_f64": _op(_D, "f64 f64", np.add),
    "v_mul_f64": _op(_D, "f64 f64", np.multiply),
    "v_fma_f64": _op(_D, "f64 f64 f64", fma64),
    "v_fmac_f64": _op(_D, "f64 f64 f64", fma64, True),
    "v_fmamk_f64": _op(_D, "f64 f64 f64", lambda a, k, b: fma64(a, k, b)),
    "v_fmaak_f64": _op(_D, "f64 f64 f64", fma64),
    "v_max_f64": _op(_D, "f64 f64", np.fmax),
    "v_rsq_f64": _op(_D, _D, lambda x: 1 / np.sqrt(x)),
    "v_rcp_f64": _op(_D, _D, lambda x: 1 / x),
    "v_ldexp_f64": _op(_D, "f64 i32", lambda x, n: np.ldexp(x, n)),
}
for _k in ("u32", "i32", "u16", "i16"):
    OPS |= {
        f"v_max_{_k}": _op(_k, f"{_k} {_k}", np.maximum),
        f"v_min_{_k}": _op(_k, f"{_k} {_k}", np.minimum),
        f"v_max3_{_k}": _op(_k, f"{_k} {_k} {_k}", _fold(np.maximum)),
        f"v_min3_{_k}": _op(_k, f"{_k} {_k} {_k}", _fold(np.minimum)),
        f"v_med3_{_k}": _op(
            _k,
            f"{_k} {_k} {_k}",
            lambda a, b, c: np.sort(np.stack(np.broadcast_arrays(a, b, c)), 0)[1],
        ),
    }
for _n in ("16", "32", "64"):
    _count = "u16" if _n == "16" else "u32"
    OPS |= {
        f"v_lshlrev_b{_n}": _op("u" + _n, f"{_count} u{_n}", _shift(np.left_shift, "u" + _n)),
        f"v_lshrrev_b{_n}": _op("u" + _n, f"{_count} u{_n}", _shift(np.right_shift, "u" + _n)),
        f"v_ashrrev_i{_n}": _op("i" + _n, f"{_count} i{_n}", _shift(np.right_shift, "i" + _n)),
    }
_FLOAT_COMPARE = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "ne": np.not_equal,
}


def plain_name(name: str) -> str:
    """A name without the parts that only newer generations write."""
    return name.replace("_nc_", "_").replace("_num_", "_").replace("_co_u32_", "_co_u32")


def source(waves: Waves, i: Instruction, k: int, op: Operand, kind: str):
    """Source ``k`` as ``kind``, with op_sel or SDWA; returns (value, lanes that may be written)."""
    allowed = None
    if i.sdwa:
        raw = waves.read(op._replace(neg=False, absolute=False), "b32")
        bits = lanes.sdwa_select(raw, i.mods.get(f"src{k}_sel", "DWORD"), op.sext)
        if width_of(kind) == 16:
            bits = bits.astype(U16)
        if op.absolute or op.neg:
            sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
            bits = (bits & ~sign if op.absolute else bits) ^ (
                sign if op.neg else bits.dtype.type(0)
            )
        return bits.view(_dtype(kind)), None
    if k == 0 and lanes.dpp_pattern(i.mods):
        bits, allowed = lanes.dpp(
            waves, waves.read(op._replace(neg=False, absolute=False), "b32"), i.mods
        )
        if op.absolute or op.neg:
            bits = (bits & U32(0x7FFFFFFF) if op.absolute else bits) ^ U32(op.neg << 31)
        if width_of(kind) == 16:
            bits = bits.astype(U16)
        return bits.view(_dtype(kind)), allowed
    high = i.bits("op_sel", 0, 4)[k] if width_of(kind) == 16 and "op_sel" in i.mods else 0
    return waves.read(op, kind, high), None


def _dtype(kind: str):
    from mlakit.codegen.isa.state import DTYPES

    return DTYPES[kind]


def _finish(value: np.ndarray, kind: str, i: Instruction) -> np.ndarray:
    """Output modifiers: mul, div and clamp to [0, 1]; only floats are emulated."""
    if "mul" in i.mods or "div" in i.mods:
        value = value * value.dtype.type(
            float(i.mods["mul"]) if "mul" in i.mods else 1 / float(i.mods["div"])
        )
    if "clamp" in i.mods:
        if kind not in ("f32", "f16"):
            raise EmulationError(f"clamp on integers is not emulated: {i.text}")
        value = np.where(np.isnan(value), value.dtype.type(0), np.clip(value, 0, 1))
    return value


def evaluate(waves: Waves, i: Instruction) -> tuple[np.ndarray, str, np.ndarray | None]:
    """(value, its type, lanes that may be written) of a value instruction."""
    name = plain_name(i.name)
    if name in ("v_cndmask_b32", "v_cndmask_b16"):
        return _select(waves, i, "b" + name[-2:])
    if name.startswith("v_bitop"):
        kind = "b" + name[-2:]
        args = [waves.read(o, kind) for o in i.operands[1:]]
        args += [np.zeros((1, 1), _dtype(kind))] * (3 - len(args))
        return bitop3(*args, int(i.mods.get("bitop3", "0"), 0)), kind, None
    op = OPS[name]
    operands = i.operands[1:]
    if op.old:
        operands = [*operands, i.operands[0]]
    allowed, args = None, []
    for k, (o, kind) in enumerate(zip(operands, op.sources, strict=True)):
        value, write = source(waves, i, k, o, kind)
        allowed = write if write is not None else allowed
        args.append(value)
    if name == "v_cvt_f16_f32" and waves.fp16_ovfl:
        args.append(True)
    value = np.asarray(op.compute(*args)).astype(_dtype(op.result), copy=False)
    if i.mods:
        value = _finish(value, op.result, i)
    return value, op.result, allowed


def _select(waves: Waves, i: Instruction, kind: str):
    mask = i.operands[3] if len(i.operands) > 3 else _VCC
    chosen = waves.read_mask(mask)
    (a, allowed), (b, _) = (source(waves, i, k, i.operands[k + 1], kind) for k in (0, 1))
    return np.where(chosen, b, a), kind, allowed


def commit(waves: Waves, i: Instruction, value: np.ndarray, kind: str, allowed) -> None:
    """Write a value instruction's result to its first operand."""
    dst = i.operands[0]
    if i.sdwa and i.mods.get("dst_sel", "DWORD") != "DWORD":
        bits = np.broadcast_to(
            value.astype(U32) if value.itemsize == 2 else value.view(U32), waves.exec.shape
        )
        waves.write(dst, lanes.sdwa_place(waves.v[dst.index], bits, i.mods), allowed)
    elif width_of(kind) == 16:
        high = "op_sel" in i.mods and i.bits("op_sel", 0, 4)[len(i.operands) - 1]
        waves.write_half(dst, value.view(U16), high, waves.gfx >= 1000 or high, allowed)
    else:
        waves.write(dst, value, allowed)


def arithmetic(waves: Waves, i: Instruction) -> None:
    """A value instruction, or two that issue together: both read before either writes."""
    if i.dual is None:
        commit(waves, i, *evaluate(waves, i))
        return
    parts = [(half, *evaluate(waves, half)) for half in (i, i.dual)]
    for half, value, kind, allowed in [(h, np.array(v), k, a) for h, v, k, a in parts]:
        commit(waves, half, value, kind, allowed)


def compare(waves: Waves, i: Instruction) -> None:
    """v_cmp_* to a lane mask; v_cmpx_* to exec (and to its destination, before gfx10)."""
    x, operation, kind = re.fullmatch(r"v_cmp(x?)_(\w+?)_([fuib]+\d+)", i.name).groups()
    operands = i.operands if (x and waves.gfx >= 1000) else i.operands[1:]
    if operation == "class":
        value, wanted = waves.read(operands[0], kind), waves.read(operands[1], "u32")
        mask = _class(value, wanted)
    else:
        (a, allowed), (b, _) = (source(waves, i, k, o, kind) for k, o in enumerate(operands))
        mask = np.broadcast_to(_FLOAT_COMPARE[operation](a, b), waves.exec.shape)
        mask = mask if allowed is None else mask & allowed
    if not x or waves.gfx < 1000:
        waves.write_mask(i.operands[0], mask)
    if x:
        waves.set_exec(mask & waves.exec)


def _class(x: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """v_cmp_class: bits from signaling NaN (0), quiet NaN, -inf, -normal ... to +inf (9)."""
    mantissa, size = {2: (10, U16), 4: (23, U32), 8: (52, U64)}[x.itemsize]
    bits = np.ascontiguousarray(x).view(size)
    quiet = (bits >> size(mantissa - 1)) & size(1)
    minus, tiny = np.signbit(x), np.abs(x) < np.finfo(x.dtype).tiny
    size_class = np.select([np.isinf(x), x == 0, tiny], [3, 0, 1], 2)
    which = np.where(minus, 5 - size_class, 6 + size_class)
    which = np.where(np.isnan(x), np.where(quiet == 1, 1, 0), which)
    return (wanted >> which.astype(U32)) & U32(1) == 1


def with_carry(waves: Waves, i: Instruction) -> None:
    """v_add_co_u32, v_sub_co_u32, v_subrev_co_u32 and the forms with a carry in."""
    dst, carry_out, a, b, *carry_in = i.operands
    a, b = (waves.read(o, "u32").astype(U64) for o in (a, b))
    if "subrev" in i.name:
        a, b = b, a
    c = waves.read_mask(carry_in[0]).astype(U64) if carry_in else U64(0)
    wide = a + b + c if "add" in i.name else a - b - c
    waves.write(dst, np.broadcast_to(wide, waves.exec.shape).astype(U32))
    waves.write_mask(carry_out, wide >> U64(32) != 0)


def multiply_add_wide(waves: Waves, i: Instruction) -> None:
    """v_mad_u64_u32 and v_mad_i64_i32 (v_mad_nc_* on gfx1250): 32 x 32 + 64 bits."""
    dst, *rest = i.operands
    carry, (a, b, c) = (rest[0], rest[1:]) if len(rest) == 4 else (None, rest)
    wide = I64 if "i64" in i.name else U64
    a, b = (waves.read(o, "i32" if wide is I64 else "u32").astype(wide) for o in (a, b))
    product, c = (a * b).view(U64), waves.read(c, "u64")
    total = np.broadcast_to(product + c, waves.exec.shape)
    waves.write(dst, total.astype(U64))
    if carry is not None:
        waves.write_mask(carry, total < c)


def scale_for_division(waves: Waves, i: Instruction) -> None:
    """v_div_scale_f32: value and the mask that v_div_fmas_f32 reads."""
    dst, mask, *sources = i.operands
    value, flag = div_scale(*(waves.read(o, "f32") for o in sources))
    waves.write(dst, np.broadcast_to(value, waves.exec.shape))
    if mask.kind != "null":
        waves.write_mask(mask, flag)


def fma_for_division(waves: Waves, i: Instruction) -> None:
    """v_div_fmas_f32: fma, scaled back by 2^64 or 2^-64 where vcc asks (RDNA3 ISA)."""
    a, b, c = (waves.read(o, "f32") for o in i.operands[1:])
    scaled = waves.read_mask(_VCC)
    total = fma(a, b, c)
    back = np.where(exponent_bits(c) > 127, F64(2.0**64), F64(2.0**-64))
    exact = (fma(a, b, c, F64) * back).astype(F32)
    waves.write(i.operands[0], np.where(scaled, exact, np.broadcast_to(total, scaled.shape)))


def count_lanes_below(waves: Waves, i: Instruction) -> None:
    """v_mbcnt_lo/hi_u32_b32: set mask bits among the lanes below one's own, plus an addend."""
    mask, addend = (waves.read(o, "u32") for o in i.operands[1:])
    lane = np.arange(waves.lanes) - (32 if "_hi_" in i.name else 0)
    below = ((U64(1) << np.clip(lane, 0, 32).astype(U64)) - U64(1)).astype(U32)
    waves.write(i.operands[0], np.bitwise_count(mask & below).astype(U32) + addend)


def swap(waves: Waves, i: Instruction) -> None:
    """v_swap_b32."""
    a, b = (waves.vgpr(o.index).copy() for o in i.operands)
    waves.write(i.operands[0], b)
    waves.write(i.operands[1], a)


_SPECIAL = {
    "v_div_scale_f32": scale_for_division,
    "v_div_fmas_f32": fma_for_division,
    "v_mbcnt_lo_u32_b32": count_lanes_below,
    "v_mbcnt_hi_u32_b32": count_lanes_below,
    "v_swap_b32": swap,
}
_NONE: frozenset[str] = frozenset()
_MODS = lanes.DPP_MODS | frozenset(
    "op_sel clamp mul div dst_sel dst_unused src0_sel src1_sel".split()
)


def handler(name: str):
    """(function, modifiers it knows) of a vector arithmetic instruction, or None."""
    if name in _SPECIAL:
        return _SPECIAL[name], _NONE
    if re.fullmatch(r"v_mad_(nc_|co_)?(u64_u32|i64_i32)", name):
        return multiply_add_wide, _NONE
    if re.fullmatch(r"v_(add|sub|subrev|addc|subb|subbrev)_co(_ci)?_u32", name):
        return with_carry, _NONE
    m = re.fullmatch(r"v_cmpx?_(\w+?)_([fui](16|32|64))", name)
    if m and (m.group(1) in _FLOAT_COMPARE or m.group(1) == "class"):
        return compare, _NONE if m.group(1) == "class" else _MODS
    plain = plain_name(name)
    if plain in OPS or plain in ("v_cndmask_b32", "v_cndmask_b16"):
        return arithmetic, _MODS
    known = re.fullmatch(r"v_bitop[23]_b(16|32)", name)
    return (arithmetic, frozenset(["bitop3"])) if known else None
