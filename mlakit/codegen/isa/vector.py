"""Vector arithmetic: sources, results and the instructions that touch masks (CDNA3 ISA and RDNA3/4
ISA, "Vector ALU Operations"; "VOPD" for dual issue). What is computed is in ``alu``; packed and
converting instructions are in ``packed``."""

from __future__ import annotations

import re

import numpy as np

from mlakit.codegen.isa import lanes
from mlakit.codegen.isa.alu import COMPARE, OPS, bitop3, borrow, carry, div_scale, float_class
from mlakit.codegen.isa.numbers import exponent_bits, fma
from mlakit.codegen.isa.parse import EmulationError, Instruction, Operand
from mlakit.codegen.isa.state import DTYPES, VCC_MASK, Waves, family, signed

U16, U32, U64, I64, F32, F64 = np.uint16, np.uint32, np.uint64, np.int64, np.float32, np.float64


def source(waves: Waves, i: Instruction, k: int, op: Operand, kind: str):
    """Source ``k`` as ``kind``, with op_sel, SDWA or DPP; (value, lanes that may be written)."""
    allowed = None
    if kind == "mask":
        return waves.read_mask(op), None
    if i.sdwa:
        raw = waves.read(op.plain, "b32")
        bits = lanes.sdwa_select(raw, i.mods.get(f"src{k}_sel", "DWORD"), op.sext)
    elif k == 0 and lanes.dpp_pattern(i.mods):
        bits, allowed = lanes.dpp(waves, waves.read(op.plain, "b32"), i.mods)
    else:
        high = i.bits("op_sel", 0, 4)[k] if kind.endswith("16") and "op_sel" in i.mods else 0
        return waves.read(op, kind, high), None
    if kind.endswith("16"):
        bits = bits.astype(U16)
    return signed(bits, op).view(DTYPES[kind]), allowed


def _finish(value: np.ndarray, kind: str, i: Instruction) -> np.ndarray:
    """Output modifiers: mul, div and clamp to [0, 1]; only floats are emulated."""
    factor = float(i.mods.get("mul", 1)) / float(i.mods.get("div", 1))
    if factor != 1:
        value = value * value.dtype.type(factor)
    if "clamp" in i.mods:
        if kind not in ("f32", "f16"):
            raise EmulationError(f"clamp on integers is not emulated: {i.text}")
        value = np.where(np.isnan(value), value.dtype.type(0), np.clip(value, 0, 1))
    return value


def _evaluate(waves: Waves, i: Instruction) -> tuple[np.ndarray, str, np.ndarray | None]:
    """(value, its type, lanes that may be written) of a value instruction."""
    if i.plain.startswith("v_bitop"):
        kind = i.plain[-3:]
        args = [waves.read(o, kind) for o in i.operands[1:]]
        args += [np.zeros((1, 1), DTYPES[kind])] * (3 - len(args))
        return bitop3(*args, int(i.mods.get("bitop3", "0"), 0)), kind, None
    op = OPS[i.plain]
    operands = [*i.operands[1:], *i.operands[: op.old]]
    if "mask" in op.sources and len(operands) < 3:
        operands.append(VCC_MASK)
    given = enumerate(zip(operands, op.sources, strict=True))
    read = [source(waves, i, k, o, kind) for k, (o, kind) in given]
    args, allowed = [value for value, _ in read], read[0][1]
    if i.plain == "v_cvt_f16_f32" and waves.fp16_ovfl:
        args.append(True)
    value = np.asarray(op.compute(*args)).astype(DTYPES[op.result], copy=False)
    if i.mods:
        value = _finish(value, op.result, i)
    return value, op.result, allowed


def _commit(waves: Waves, i: Instruction, value: np.ndarray, kind: str, allowed) -> None:
    """Write a value instruction's result to its first operand."""
    dst = i.operands[0]
    if i.sdwa and i.mods.get("dst_sel", "DWORD") != "DWORD":
        bits = value.view(f"u{value.itemsize}").astype(U32)
        bits = np.broadcast_to(bits, waves.exec.shape)
        waves.write(dst, lanes.sdwa_place(waves.v[dst.index], bits, i.mods), allowed)
    elif kind.endswith("16"):
        high = "op_sel" in i.mods and i.bits("op_sel", 0, 4)[len(i.operands) - 1]
        waves.write_half(dst, value.view(U16), high, waves.gfx >= 1000 or high, allowed)
    else:
        waves.write(dst, value, allowed)


def arithmetic(waves: Waves, i: Instruction) -> None:
    """A value instruction, or two that issue together: both read before either writes."""
    if i.dual is None:
        _commit(waves, i, *_evaluate(waves, i))
        return
    first, second = (_evaluate(waves, half) for half in (i, i.dual))
    kept = np.array(second[0])  # it may be a view of what the first half writes
    _commit(waves, i, *first)
    _commit(waves, i.dual, kept, *second[1:])


def _compare(waves: Waves, i: Instruction) -> None:
    """v_cmp_* to a lane mask; v_cmpx_* to exec (and to its destination, before gfx10)."""
    x, operation, kind = re.fullmatch(r"v_cmp(x?)_(\w+?)_([fuib]+\d+)", i.name).groups()
    operands = i.operands if (x and waves.gfx >= 1000) else i.operands[1:]
    if operation == "class":
        value, wanted = waves.read(operands[0], kind), waves.read(operands[1], "u32")
        mask = float_class(value, wanted)
    else:
        (a, allowed), (b, _) = (source(waves, i, k, o, kind) for k, o in enumerate(operands))
        mask = np.broadcast_to(COMPARE[operation](a, b), waves.exec.shape)
        mask = mask if allowed is None else mask & allowed
    if not x or waves.gfx < 1000:
        waves.write_mask(i.operands[0], mask)
    if x:
        waves.set_exec(mask & waves.exec)


def _with_carry(waves: Waves, i: Instruction) -> None:
    """v_add_co_u32, v_sub_co_u32, v_subrev_co_u32 and the forms with a carry in."""
    dst, carry_out, a, b, *carry_in = i.operands
    a, b = (waves.read(o, "u32") for o in (a, b))
    if "subrev" in i.name:
        a, b = b, a
    c = waves.read_mask(carry_in[0]) if carry_in else 0
    value, flag = (carry if "add" in i.name else borrow)(a, b, c)
    waves.write(dst, np.broadcast_to(value, waves.exec.shape))
    waves.write_mask(carry_out, flag)


def _multiply_add_wide(waves: Waves, i: Instruction) -> None:
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


def _scale_for_division(waves: Waves, i: Instruction) -> None:
    """v_div_scale_f32: value and the mask that v_div_fmas_f32 reads."""
    dst, mask, *sources = i.operands
    value, flag = div_scale(*(waves.read(o, "f32") for o in sources))
    waves.write(dst, np.broadcast_to(value, waves.exec.shape))
    if mask.kind != "null":
        waves.write_mask(mask, flag)


def _fma_for_division(waves: Waves, i: Instruction) -> None:
    """v_div_fmas_f32: fma, scaled back by 2^64 or 2^-64 where vcc asks (RDNA3 ISA)."""
    a, b, c = (waves.read(o, "f32") for o in i.operands[1:])
    scaled = waves.read_mask(VCC_MASK)
    total = fma(a, b, c)
    back = np.where(exponent_bits(c) > 127, F64(2.0**64), F64(2.0**-64))
    exact = (fma(a, b, c, F64) * back).astype(F32)
    waves.write(i.operands[0], np.where(scaled, exact, np.broadcast_to(total, scaled.shape)))


_MODS = lanes.DPP_MODS + " op_sel clamp mul div dst_sel dst_unused src0_sel src1_sel"
_VALUES = "|".join(OPS)
_COMPARED = "|".join(COMPARE)
FAMILIES = (
    family("v_div_scale_f32", _scale_for_division),
    family("v_div_fmas_f32", _fma_for_division),
    family(r"v_mad_(co_)?(u64_u32|i64_i32)", _multiply_add_wide),
    family(r"v_(add|sub|subrev|addc|subb|subbrev)_co(_ci)?_u32", _with_carry),
    family(r"v_cmpx?_class_[fui](16|32|64)", _compare),
    family(rf"v_cmpx?_({_COMPARED})_[fui](16|32|64)", _compare, _MODS),
    family(_VALUES, arithmetic, _MODS),
    family(r"v_bitop[23]_b(16|32)", arithmetic, "bitop3"),
)
