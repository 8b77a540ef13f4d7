"""Packed and mixed-precision arithmetic, and conversions between number formats.

Sections: CDNA3 ISA "Packed Math" and "FP8 conversions"; CDNA4 ISA "V_CVT_SCALEF32_*",
"V_CVT_PK_BF16_F32"; RDNA4 ISA "V_CVT_PK_FP8_F32"; LLVM for gfx1250's eight-wide conversions.
"""

from __future__ import annotations

import re
from functools import reduce

import numpy as np

from mlakit.codegen.isa import numbers
from mlakit.codegen.isa.alu import maximum, minimum, nan_wins, shift
from mlakit.codegen.isa.parse import EmulationError, Instruction, Operand, const_bits
from mlakit.codegen.isa.state import DTYPES, Waves, family
from mlakit.codegen.isa.vector import source

U16, U32, F32 = np.uint16, np.uint32, np.float32


_FLOATS = {
    "add": np.add,
    "mul": np.multiply,
    "max": maximum,
    "min": minimum,
    "maximum": nan_wins(maximum),
    "minimum": nan_wins(minimum),
    "fma": lambda a, b, c: numbers.fma(a, b, c, a.dtype.type),
}
_INTEGERS = {
    "add": np.add,
    "sub": np.subtract,
    "max": np.maximum,
    "min": np.minimum,
    "mul_lo": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "lshlrev": shift(np.left_shift),
    "lshrrev": shift(np.right_shift),
    "ashrrev": shift(np.right_shift),
}


def _part(waves: Waves, o: Operand, wide: bool, high: int) -> np.ndarray:
    """One half of a packed source as uint32: a register of a pair, or 16 bits of a register."""
    kind = "f32" if wide else "f16"
    if o.kind == "const" and (wide or "." in o.text):
        if high and wide:
            raise EmulationError(f"the high half of a packed constant: {o.text}")
        bits = np.full((1, 1), const_bits(o.text, kind), U32)
    else:
        bits = waves.read(o.plain._replace(index=o.index + (wide and high)), "b32")
    return bits if wide else _halves(bits)[high]


def _halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return bits & U32(0xFFFF), bits >> U32(16)


def _packed(waves: Waves, i: Instruction) -> None:
    """v_pk_*: the same operation on two halves; op_sel and op_sel_hi choose each half's source."""
    operation, kind = re.fullmatch(r"v_pk_(\w+?)_([fuib]+\d+)", i.plain).groups()
    if "clamp" in i.mods:
        raise EmulationError(f"clamp on packed operations is not emulated: {i.text}")
    wide, n, result = kind.endswith("32"), len(i.operands) - 1, []
    for key, negate, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        select, flip = i.bits(key, default, n), i.bits(negate, 0, n)
        args = []
        for o, high, minus in zip(i.operands[1:], select, flip, strict=True):
            bits = _part(waves, o, wide, high) ^ U32(minus << (31 if wide else 15))
            args.append(bits.view(F32) if wide else _narrow(bits, kind))
        table = _FLOATS if "f" in kind else _INTEGERS
        value = table[operation](*args)
        result.append(numbers.to_bf16(value) if kind == "bf16" else value)
    _write_pair(waves, i.operands[0], *result)


def _write_pair(waves: Waves, dst: Operand, low: np.ndarray, high: np.ndarray) -> None:
    """Two results: of 32 bits to two registers, of 16 (or bf16 bits in uint32) to one."""
    if low.dtype == F32:
        # Both before either is written: a half that is moved may be a register of the result.
        halves = [np.broadcast_to(value, waves.exec.shape).copy() for value in (low, high)]
        for k, bits in enumerate(halves):
            waves.write_vgpr(dst.index + k, bits.view(U32))
    else:
        low, high = (v.view(f"u{v.itemsize}").astype(U32) for v in (low, high))
        waves.write(dst, low | high << U32(16))


def _packed_move(waves: Waves, i: Instruction) -> None:
    """v_pk_mov_b32: op_sel chooses a register of each source's pair."""
    dst, *sources = i.operands
    chosen = zip(sources, i.bits("op_sel", 0, 2), strict=True)
    _write_pair(waves, dst, *(_part(waves, o, True, high).view(F32) for o, high in chosen))


def _narrow(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return numbers.from_bf16(bits)
    return bits.astype(U16).view(DTYPES.get(kind, U16))


def _fma_mix(waves: Waves, i: Instruction) -> None:
    """v_fma_mix_f32, v_fma_mixlo_f16, v_fma_mixhi_f16: op_sel_hi says which sources are 16-bit."""
    narrow, high = i.bits("op_sel_hi", 0, 3), i.bits("op_sel", 0, 3)
    args = []
    for k, o in enumerate(i.operands[1:]):
        if not narrow[k]:
            args.append(waves.read(o, "f32"))
        elif i.name.endswith("bf16"):
            args.append(numbers.from_bf16(waves.read(o, "bf16", high[k])))
        else:
            args.append(waves.read(o, "f16", high[k]).astype(F32))
    total = numbers.fma(*args)
    if "clamp" in i.mods:
        total = np.clip(np.nan_to_num(total, nan=0.0), 0, 1)
    if "_mix_" in i.name:
        waves.write(i.operands[0], np.broadcast_to(total, waves.exec.shape))
        return
    if "bf16" in i.name:
        bits = numbers.to_bf16(total).astype(U16)
    else:
        bits = numbers.to_f16(total, waves.fp16_ovfl)
    waves.write_half(i.operands[0], bits, "mixhi" in i.name, keep=True)


def _fp8(waves: Waves, name: str) -> numbers.MiniFloat:
    fnuz = 940 <= waves.gfx < 950
    if "bf8" in name:
        return numbers.E5M2_FNUZ if fnuz else numbers.E5M2
    return numbers.E4M3_FNUZ if fnuz else numbers.E4M3


def _convert_pair(waves: Waves, i: Instruction) -> None:
    """v_cvt_pk_{bf16,f16}_f32, v_pack_b32_f16: two values to one register."""
    if i.name == "v_pack_b32_f16":
        pair = [source(waves, i, k, i.operands[1 + k], "b16")[0] for k in (0, 1)]
    else:
        to = numbers.to_bf16 if "bf16" in i.name else numbers.to_f16
        pair = [to(waves.read(o, "f32")) for o in i.operands[1:]]
    _write_pair(waves, i.operands[0], *pair)


def _values(waves: Waves, operands: list[Operand], kind: str) -> list[np.ndarray]:
    """float32 of registers that hold one value each, or two in 16 bits."""
    words = [
        waves.read(o._replace(index=o.index + k), "b32" if o.kind == "v" else kind)
        for o in operands
        for k in range(o.count)
    ]
    if kind == "f32":
        return [word.view(F32) for word in words]
    return [_narrow(half, kind).astype(F32) for word in words for half in _halves(word)]


def _convert_scaled(waves: Waves, i: Instruction) -> None:
    """v_cvt_pk_fp8_f32, v_cvt_pk_bf8_f32 (saturating where MODE.FP16_OVFL is set).

    With ``scalef32``: v_cvt_scalef32_{pk,pk8}_{fp8,bf8,fp4}_{f32,f16,bf16}, which divide by the
    scale's power of two first and clamp to the largest value that the format has. ``pk8`` (gfx1250)
    converts eight values, the others two, to the part of the register that op_sel names.
    """
    scaled, eight, what, kind = _CONVERSION.fullmatch(i.name).groups()
    dst, *operands = i.operands
    scale = numbers.scale_of(waves.read(operands.pop(), "f32")) if scaled else 1.0
    to = numbers.E2M1 if what == "fp4" else _fp8(waves, what)
    saturate = bool(scaled) or waves.fp16_ovfl
    values = _values(waves, operands, kind)
    codes = [numbers.to_minifloat(v / scale, to, saturate) for v in values]
    per_word = 32 // to.bits
    words = [codes[k : k + per_word] for k in range(0, len(codes), per_word)]
    merged = [
        reduce(np.bitwise_or, [c << U32(to.bits * n) for n, c in enumerate(word)]) for word in words
    ]
    if eight:
        for k, word in enumerate(merged):
            waves.write_vgpr(dst.index + k, np.broadcast_to(word, waves.exec.shape))
        return
    select, size = i.bits("op_sel", 0, 4), 2 * to.bits
    part = select[2] + 2 * select[3] if what == "fp4" else select[len(i.operands) - 1]
    keep = U32(~(((1 << size) - 1) << size * part) & 0xFFFFFFFF)
    waves.write(dst, (waves.v[dst.index] & keep) | merged[0] << U32(size * part))


_CONVERSION = re.compile(r"v_cvt_(scalef32_)?pk(8?)_(fp8|bf8|fp4)_(f32|f16|bf16)")
_PACKED = (
    r"v_pk_(?:(?:add|mul|fma|max|min|maximum|minimum)_(?:f16|bf16|f32)"
    r"|(?:add|sub|max|min|mad|mul_lo|lshlrev|lshrrev|ashrrev)_[ui]16|(?:lshl|lshr)rev_b16)"
)
_HALVES = "op_sel op_sel_hi"
FAMILIES = (
    family(_PACKED, _packed, _HALVES + " neg_lo neg_hi clamp"),
    family("v_pk_mov_b32", _packed_move, _HALVES),
    family(r"v_fma_mix(lo|hi)?_(f32|f16|bf16|f32_f16|f32_bf16)", _fma_mix, _HALVES + " clamp"),
    family(r"v_cvt_pk_(bf16|f16)_f32", _convert_pair),
    family(r"v_pack_b32_f16", _convert_pair, "op_sel"),
    family(_CONVERSION.pattern, _convert_scaled, "op_sel"),
)
