"""Vector arithmetic: sources, results and the instructions that touch masks (CDNA3 ISA and RDNA3/4
ISA, "Vector ALU Operations"; "VOPD" for dual issue). What is computed is in ``alu``; packed and
converting instructions are in ``packed``."""

from __future__ import annotations

import re

import numpy as np

from mlakit.codegen.isa import lanes
from mlakit.codegen.isa.alu import COMPARE, OPS, bitop3, div_scale, float_class
from mlakit.codegen.isa.numbers import exponent_bits, fma
from mlakit.codegen.isa.parse import VCC, EmulationError, Instruction, Operand
from mlakit.codegen.isa.state import DTYPES, Waves, width_of

U16, U32, U64, I64, F32, F64 = np.uint16, np.uint32, np.uint64, np.int64, np.float32, np.float64
_VCC = Operand("s", VCC, 2, text="vcc")


def plain_name(name: str) -> str:
    """A name without the parts that only newer generations write; AGPR moves are moves."""
    if name.startswith("v_accvgpr_"):
        return "v_mov_b32"
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
        return bits.view(DTYPES[kind]), None
    if k == 0 and lanes.dpp_pattern(i.mods):
        bits, allowed = lanes.dpp(
            waves, waves.read(op._replace(neg=False, absolute=False), "b32"), i.mods
        )
        if op.absolute or op.neg:
            bits = (bits & U32(0x7FFFFFFF) if op.absolute else bits) ^ U32(op.neg << 31)
        if width_of(kind) == 16:
            bits = bits.astype(U16)
        return bits.view(DTYPES[kind]), allowed
    high = i.bits("op_sel", 0, 4)[k] if width_of(kind) == 16 and "op_sel" in i.mods else 0
    return waves.read(op, kind, high), None


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
        args += [np.zeros((1, 1), DTYPES[kind])] * (3 - len(args))
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
    value = np.asarray(op.compute(*args)).astype(DTYPES[op.result], copy=False)
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
        mask = float_class(value, wanted)
    else:
        (a, allowed), (b, _) = (source(waves, i, k, o, kind) for k, o in enumerate(operands))
        mask = np.broadcast_to(COMPARE[operation](a, b), waves.exec.shape)
        mask = mask if allowed is None else mask & allowed
    if not x or waves.gfx < 1000:
        waves.write_mask(i.operands[0], mask)
    if x:
        waves.set_exec(mask & waves.exec)


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


_SPECIAL = {
    "v_div_scale_f32": scale_for_division,
    "v_div_fmas_f32": fma_for_division,
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
    if m and (m.group(1) in COMPARE or m.group(1) == "class"):
        return compare, _NONE if m.group(1) == "class" else _MODS
    plain = plain_name(name)
    if plain in OPS or plain in ("v_cndmask_b32", "v_cndmask_b16"):
        return arithmetic, _MODS
    known = re.fullmatch(r"v_bitop[23]_b(16|32)", name)
    return (arithmetic, frozenset(["bitop3"])) if known else None
