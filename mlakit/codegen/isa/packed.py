"""Packed and mixed-precision arithmetic, and conversions between number formats.

Sections: CDNA3 ISA "Packed Math" and "FP8 conversions"; CDNA4 ISA "V_CVT_SCALEF32_*",
"V_CVT_PK_BF16_F32"; RDNA4 ISA "V_CVT_PK_FP8_F32"; LLVM for gfx1250's eight-wide conversions.
"""

from __future__ import annotations

import re

import numpy as np

from mlakit.codegen.isa import numbers
from mlakit.codegen.isa.alu import maximum, minimum
from mlakit.codegen.isa.parse import EmulationError, Instruction, Operand, const_bits
from mlakit.codegen.isa.state import Waves
from mlakit.codegen.isa.vector import source

U16, U32, F16, F32 = np.uint16, np.uint32, np.float16, np.float32
_NAN_WINS = {"maximum": maximum, "minimum": minimum}
_SHIFTS = {"lshlrev": np.left_shift, "lshrrev": np.right_shift, "ashrrev": np.right_shift}
_INTEGERS = {"add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}
_FLOATS = {"add": np.add, "mul": np.multiply, "max": maximum, "min": minimum}


def _part(waves: Waves, o: Operand, wide: bool, high: int) -> np.ndarray:
    """One half of a packed source as uint32: a register of a pair, or 16 bits of a register."""
    if wide:
        if o.kind == "const":
            if high:
                raise EmulationError(f"the high half of a packed constant: {o.text}")
            return np.full((1, 1), const_bits(o.text, "f32"), U32)
        return waves.read(o._replace(index=o.index + high, neg=False), "b32")
    bits = waves.read(o._replace(neg=False), "b32")
    if o.kind == "const" and "." in o.text:
        bits = np.full((1, 1), const_bits(o.text, "f16"), U32)
    return (bits >> U32(16 if high else 0)) & U32(0xFFFF)


def packed(waves: Waves, i: Instruction) -> None:
    """v_pk_*: the same operation on two halves; op_sel and op_sel_hi choose each half's source."""
    operation, kind = re.fullmatch(r"v_pk_(\w+?)_(?:num_)?([fuib]+\d+)", i.name).groups()
    wide, n = kind.endswith("32"), len(i.operands) - 1
    halves = []
    for half, key, negate, default in ((0, "op_sel", "neg_lo", 0), (1, "op_sel_hi", "neg_hi", 1)):
        select, flip = i.bits(key, default, n), i.bits(negate, 0, n)
        if operation == "mov":
            halves.append(_part(waves, i.operands[1 + half], True, i.bits("op_sel", 0, 2)[half]))
            continue
        args = []
        for k, o in enumerate(i.operands[1:]):
            bits = _part(waves, o, wide, select[k])
            bits = bits ^ U32(flip[k] << (31 if wide else 15))
            args.append(bits.view(F32) if wide else _narrow(bits, kind))
        halves.append(_packed_result(operation, kind, args, i))
    if wide:
        low, high = (np.broadcast_to(h, waves.exec.shape).copy() for h in halves)
        waves.write_vgpr(i.operands[0].index, low.view(U32))
        waves.write_vgpr(i.operands[0].index + 1, high.view(U32))
    else:
        low, high = (np.asarray(h).view(U16).astype(U32) for h in halves)
        waves.write(i.operands[0], low | high << U32(16))


def _narrow(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return numbers.from_bf16(bits)
    return bits.astype(U16).view({"f16": F16, "i16": np.int16}.get(kind, U16))


def _packed_result(operation: str, kind: str, args: list[np.ndarray], i: Instruction):
    if operation == "fma":
        result = numbers.fma(*args, F16 if kind == "f16" else F32)
    elif operation in ("mad", "mul_lo"):
        result = args[0] * args[1] + (args[2] if operation == "mad" else args[0].dtype.type(0))
    elif operation in _SHIFTS:
        count, value = args
        result = _SHIFTS[operation](value, count & count.dtype.type(15))
    elif operation in _NAN_WINS:
        a, b = args
        result = np.where(np.isnan(a) | np.isnan(b), a + b, _NAN_WINS[operation](a, b))
    else:
        result = (_INTEGERS if kind[0] in "ui" else _FLOATS)[operation](*args)
    if "clamp" in i.mods:
        raise EmulationError(f"clamp on packed operations is not emulated: {i.text}")
    return numbers.to_bf16(result).astype(U16) if kind == "bf16" else result


def fma_mix(waves: Waves, i: Instruction) -> None:
    """v_fma_mix_f32, v_fma_mixlo_f16, v_fma_mixhi_f16: op_sel_hi says which sources are 16-bit."""
    narrow, high = i.bits("op_sel_hi", 0, 3), i.bits("op_sel", 0, 3)
    args = []
    for k, o in enumerate(i.operands[1:]):
        if not narrow[k]:
            args.append(waves.read(o, "f32"))
        elif i.name.endswith("bf16"):
            value = numbers.from_bf16(
                waves.read(o._replace(neg=False, absolute=False), "b16", high[k])
            )
            value = np.abs(value) if o.absolute else value
            args.append(-value if o.neg else value)
        else:
            args.append(waves.read(o, "f16", high[k]).astype(F32))
    total = numbers.fma(*args)
    if "clamp" in i.mods:
        total = np.clip(np.nan_to_num(total, nan=0.0), 0, 1)
    if "_mix_" in i.name:
        waves.write(i.operands[0], np.broadcast_to(total, waves.exec.shape))
        return
    bits = numbers.to_bf16(total) if "bf16" in i.name else numbers.to_f16(total, waves.fp16_ovfl)
    bits = bits.astype(U16) if bits.dtype == U32 else bits
    waves.write_half(i.operands[0], bits, "mixhi" in i.name, keep=True)


def _fp8(waves: Waves, name: str) -> numbers.MiniFloat:
    fnuz = 940 <= waves.gfx < 950
    if "bf8" in name:
        return numbers.E5M2_FNUZ if fnuz else numbers.E5M2
    return numbers.E4M3_FNUZ if fnuz else numbers.E4M3


def _insert(waves: Waves, dst: Operand, bits: np.ndarray, shift: int, size: int) -> None:
    """Write ``size`` bits at ``shift`` of a register and keep the rest of it."""
    keep = U32(~(((1 << size) - 1) << shift) & 0xFFFFFFFF)
    waves.write(dst, (waves.v[dst.index] & keep) | (bits << U32(shift)).astype(U32))


def convert_pair(waves: Waves, i: Instruction) -> None:
    """v_cvt_pk_{bf16,f16}_f32, v_pack_b32_f16: two values to one register."""
    if i.name == "v_pack_b32_f16":
        a, b = (source(waves, i, k, i.operands[1 + k], "b16")[0] for k in (0, 1))
    else:
        a, b = (waves.read(o, "f32") for o in i.operands[1:])
        if "bf16" in i.name:
            a, b = numbers.to_bf16(a), numbers.to_bf16(b)
        else:
            a, b = (numbers.to_f16(x).view(U16) for x in (a, b))
    waves.write(i.operands[0], a.astype(U32) | b.astype(U32) << U32(16))


def convert_fp8_pair(waves: Waves, i: Instruction) -> None:
    """v_cvt_pk_fp8_f32, v_cvt_pk_bf8_f32 (saturating where MODE.FP16_OVFL is set).

    With ``scalef32``: v_cvt_scalef32_pk_{fp8,bf8,fp4}_{f32,f16,bf16}, which divide by the scale's
    power of two first and clamp to the largest value that the format has.
    """
    scaled = "scalef32" in i.name
    operands = i.operands[1:-1] if scaled else i.operands[1:]
    scale = numbers.scale_of(waves.read(i.operands[-1], "f32")) if scaled else 1.0
    if i.name.endswith("_f32"):
        pair = [waves.read(o, "f32") for o in operands]
    else:
        bits = waves.read(operands[0], "b32")
        halves = [(bits >> U32(s)) & U32(0xFFFF) for s in (0, 16)]
        kind = "bf16" if i.name.endswith("_bf16") else "f16"
        pair = [_narrow(h, kind).astype(F32) for h in halves]
    fp4 = "_fp4_" in i.name
    to = numbers.E2M1 if fp4 else _fp8(waves, i.name)
    codes = [numbers.to_minifloat(x / scale, to, saturate=scaled or waves.fp16_ovfl) for x in pair]
    select = i.bits("op_sel", 0, 4)
    if fp4:
        byte = select[2] + 2 * select[3]
        _insert(waves, i.operands[0], codes[0] | codes[1] << U32(4), 8 * byte, 8)
    else:
        high = select[len(i.operands) - 1]
        _insert(waves, i.operands[0], codes[0] | codes[1] << U32(8), 16 * high, 16)


def convert_eight(waves: Waves, i: Instruction) -> None:
    """v_cvt_scalef32_pk8_{fp8,bf8,fp4}_{f32,f16,bf16} of gfx1250: eight values at once."""
    dst, src, scale_op = i.operands
    what, kind = re.fullmatch(r"v_cvt_scalef32_pk8_(fp8|bf8|fp4)_(\w+)", i.name).groups()
    scale = numbers.scale_of(waves.read(scale_op, "f32"))
    words = [waves.read(src._replace(index=src.index + k), "b32") for k in range(src.count)]
    if kind == "f32":
        values = [w.view(F32) for w in words]
    else:
        halves = [(w >> U32(s)) & U32(0xFFFF) for w in words for s in (0, 16)]
        values = [_narrow(h, kind).astype(F32) for h in halves]
    fp4 = what == "fp4"
    to = numbers.E2M1 if fp4 else _fp8(waves, i.name)
    codes = [numbers.to_minifloat(v / scale, to, saturate=True) for v in values]
    per_word, size = (8, 4) if fp4 else (4, 8)
    for k in range(dst.count):
        word = np.zeros(waves.exec.shape, U32)
        for n in range(per_word):
            word |= codes[k * per_word + n] << U32(size * n)
        waves.write_vgpr(dst.index + k, word)


_PACKED = re.compile(
    r"v_pk_(?:(?:add|mul|fma|max|min|maximum|minimum)_(?:num_)?(?:f16|bf16|f32)"
    r"|(?:add|sub|max|min|mad|mul_lo|lshlrev|lshrrev|ashrrev)_[ui]16|(?:lshl|lshr)rev_b16|mov_b32)"
)
_PICK = frozenset(["op_sel"])
_FAMILIES = (
    (_PACKED, packed, _PICK | {"op_sel_hi", "neg_lo", "neg_hi", "clamp"}),
    (
        re.compile(r"v_fma_mix(lo|hi)?_(f32|f16|bf16|f32_f16|f32_bf16)"),
        fma_mix,
        _PICK | {"op_sel_hi", "clamp"},
    ),
    (re.compile(r"v_cvt_pk_(bf16|f16)_f32"), convert_pair, frozenset()),
    (re.compile(r"v_pack_b32_f16"), convert_pair, _PICK),
    (re.compile(r"v_cvt_pk_(fp8|bf8)_f32"), convert_fp8_pair, _PICK),
    (re.compile(r"v_cvt_scalef32_pk_(fp8|bf8|fp4)_(f32|f16|bf16)"), convert_fp8_pair, _PICK),
    (re.compile(r"v_cvt_scalef32_pk8_(fp8|bf8|fp4)_(f32|f16|bf16)"), convert_eight, frozenset()),
)


def handler(name: str):
    """(function, modifiers it knows) of a packed or converting instruction, or None."""
    return next(((run, mods) for p, run, mods in _FAMILIES if p.fullmatch(name)), None)
