"""Scalar instructions: SOP1, SOP2, SOPC, SOPK (CDNA3 ISA, "Scalar ALU Operations"; RDNA4 ISA adds
the scalar float instructions and 64-bit add and multiply). Branches are in ``execute``."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from mlakit.codegen.isa.alu import COMPARE, OPS, Op, borrow, carry, op, shift
from mlakit.codegen.isa.parse import EmulationError, Instruction
from mlakit.codegen.isa.state import DTYPES, Waves, family

U32, U64, I32, I64, F32 = np.uint32, np.uint64, np.int32, np.int64, np.float32
_IGNORED = (
    r"s_nop|s_waitcnt\w*|s_wait_(?!event)\w+|s_delay_alu|s_clause|s_sendmsg|s_setprio|s_sleep|"
    r"s_inst_prefetch|s_set_inst_prefetch_distance|s_code_end|s_icache_inv|s_ttracedata|"
    r"s_prefetch_inst\w*|v_nop|buffer_gl[01]_inv|buffer_wbl2|buffer_inv|global_(inv|wb|wbinv)"
)
"""Waits, hints and cache upkeep: no value changes here, where every access completes at once."""


def _flagged(f):
    """Of int32: the result, and whether it overflowed."""

    def run(a, b):
        wide = f(a.astype(I64), b.astype(I64))
        return wide.astype(I32), wide != wide.astype(I32)

    return run


def _chosen(f, first):
    """Minimum or maximum, and whether it is the first operand."""
    return lambda a, b: (f(a, b), first(a, b))


def _bfe(a, b):
    """A field of ``b >> 16`` bits at bit ``b & 31`` (or 63) of a, with the sign that a has."""
    size = 8 * a.itemsize
    at = (b & U32(size - 1)).astype(I64)
    width = ((b >> U32(16)) & U32(127)).astype(I64)
    up = np.clip(size - width - at, 0, size - 1).astype(a.dtype)
    down = np.minimum(size - np.minimum(width, size - at), size - 1).astype(a.dtype)
    return np.where(width == 0, a.dtype.type(0), (a << up) >> down)


def _lshl_add(n):
    def run(a, b):
        wide = (a.astype(U64) << U64(n)) + b
        return wide.astype(U32), wide >> U64(32) != 0

    return run


def _high_half(a):
    return (a >> U32(16)).astype(np.uint16).view(np.float16).astype(F32)


_LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "and_not1": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "or_not1": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
_U, _I = "u32 u32 u32", "i32 i32 i32"
ALU: dict[str, Op] = {
    "s_add_u32": op(_U, carry, scc="computed"),
    "s_sub_u32": op(_U, borrow, scc="computed"),
    "s_add_i32": op(_I, _flagged(np.add), scc="computed"),
    "s_sub_i32": op(_I, _flagged(np.subtract), scc="computed"),
    "s_addk_i32": op(_I, _flagged(np.add), old=True, scc="computed"),
    "s_mulk_i32": op(_U, np.multiply, old=True),
    "s_mul_hi_u32": op(_U, lambda a, b: a.astype(U64) * b >> U64(32)),
    "s_mul_hi_i32": op(_I, lambda a, b: a.astype(I64) * b >> 32),
    "s_sub_u64": op("u64 u64 u64", np.subtract),
    "s_bfe_u32": op(_U, _bfe, scc="nonzero"),
    "s_bfe_i32": op("i32 i32 u32", _bfe, scc="nonzero"),
    "s_bfe_i64": op("i64 i64 u32", _bfe, scc="nonzero"),
    "s_min_u32": op(_U, _chosen(np.minimum, np.less_equal), scc="computed"),
    "s_max_u32": op(_U, _chosen(np.maximum, np.greater_equal), scc="computed"),
    "s_min_i32": op(_I, _chosen(np.minimum, np.less_equal), scc="computed"),
    "s_max_i32": op(_I, _chosen(np.maximum, np.greater_equal), scc="computed"),
    "s_movk_i32": op("i32 i32", lambda a: a),
    "s_sext_i32_i16": op("i32 u32", lambda a: a.astype(np.int16)),
    "s_sext_i32_i8": op("i32 u32", lambda a: a.astype(np.int8)),
    "s_pack_ll_b32_b16": op(_U, lambda a, b: a & U32(0xFFFF) | b << U32(16)),
    "s_pack_lh_b32_b16": op(_U, lambda a, b: a & U32(0xFFFF) | b & U32(0xFFFF0000)),
    "s_cvt_hi_f32_f16": op("f32 u32", _high_half),
}
for _mine, _vector in (
    ("mul_i32", "mul_lo_u32"), ("mul_u64", "mul_u64"), ("add_u64", "add_u64"),
    ("brev_b32", "bfrev_b32"), ("cvt_f32_f16", "cvt_f32_f16"),
):  # fmt: skip
    ALU[f"s_{_mine}"] = OPS[f"v_{_vector}"]
for _name in "mul add sub maximum minimum max min fmac fmamk fmaak".split():
    ALU[f"s_{_name}_f32"] = OPS[f"v_{_name}_f32"]
for _name in ("v_s_rsq_f32", "v_s_rcp_f32"):
    ALU[_name] = OPS[_name.replace("v_s_", "v_")]
for _size in ("32", "64"):
    _u, _i = "u" + _size, "i" + _size
    for _name, _f in _LOGIC.items():
        ALU[f"s_{_name}_b{_size}"] = op(f"{_u} {_u} {_u}", _f, scc="nonzero")
    for _name, _kind in ((f"lshl_b{_size}", _u), (f"lshr_b{_size}", _u), (f"ashr_i{_size}", _i)):
        _run = shift(np.left_shift if "lshl" in _name else np.right_shift)
        _swapped = partial(lambda f, a, n: f(n, a), _run)
        ALU[f"s_{_name}"] = op(f"{_kind} {_kind} u32", _swapped, scc="nonzero")
    ALU[f"s_not_b{_size}"] = op(f"{_u} {_u}", np.invert, scc="nonzero")
for _n in (1, 2, 3, 4):
    ALU[f"s_lshl{_n}_add_u32"] = op(_U, _lshl_add(_n), scc="computed")


def _alu(waves: Waves, i: Instruction) -> None:
    known = ALU[i.plain]
    operands = [*i.operands[1:], *i.operands[: known.old]]
    result = known.compute(
        *(waves.read_scalar(o, k) for o, k in zip(operands, known.sources, strict=True))
    )
    if known.scc == "computed":
        result, waves.scc = result
    elif known.scc:
        waves.scc = result != 0
    waves.write_scalar(i.operands[0], np.ascontiguousarray(result, DTYPES[known.result]))


def _with_carry(waves: Waves, i: Instruction) -> None:
    a, b = (waves.read_scalar(o) for o in i.operands[1:])
    result, waves.scc = (carry if "add" in i.name else borrow)(a, b, waves.scc)
    waves.write_scalar(i.operands[0], result)


def _copy(waves: Waves, i: Instruction) -> None:
    """s_mov: a register that was never written may be copied, and stays unwritten."""
    dst, src = i.operands
    wide = i.name.endswith("64")
    if src.kind != "s" or dst.kind != "s":
        waves.write_scalar(dst, waves.read_scalar(src, "u64" if wide else "u32").copy())
        return
    for k in range(1 + wide):
        waves.s[dst.index + k] = waves.s[src.index + k]
        waves.s_set[dst.index + k] = waves.s_set[src.index + k]


def _cselect(waves: Waves, i: Instruction) -> None:
    a, b = (waves.read_scalar(o, "u" + i.name[-2:]) for o in i.operands[1:])
    waves.write_scalar(i.operands[0], np.where(waves.scc, a, b))


def _saveexec(waves: Waves, i: Instruction) -> None:
    operation, size = re.fullmatch(r"s_(\w+)_saveexec_b(\d+)", i.name).groups()
    kind = "u" + size
    old = waves.pack(waves.exec).astype(U64 if size == "64" else U32)
    new = _LOGIC[operation](waves.read_scalar(i.operands[1], kind), old)
    waves.write_scalar(i.operands[0], old)
    waves.set_exec(waves.unpack(new.astype(U64)))
    waves.scc = new != 0


def _compare(waves: Waves, i: Instruction) -> None:
    operation, kind = re.fullmatch(r"s_cmpk?_(\w+)_([ui]\d+|f32)", i.name).groups()
    waves.scc = COMPARE[operation](*(waves.read_scalar(o, kind) for o in i.operands))


def _bitcmp(waves: Waves, i: Instruction) -> None:
    a, b = (waves.read_scalar(o) for o in i.operands)
    waves.scc = ((a >> (b & U32(31))) & U32(1)) == U32(i.name.startswith("s_bitcmp1"))


def _setreg(waves: Waves, i: Instruction) -> None:
    """Writes to MODE: only what keeps round-to-nearest and denormals, and FP16_OVFL (bit 23)."""
    register = ",".join(o.text for o in i.operands[:1])
    m = re.fullmatch(r"hwreg\(HW_REG_(?:WAVE_)?MODE, ?(\d+), ?(\d+)\)", register)
    value = int(i.operands[-1].text, 0)
    if m and int(m.group(1)) == 23 and m.group(2) == "1":
        waves.fp16_ovfl = bool(value)
    elif m and int(m.group(1)) + int(m.group(2)) <= 4 and value == 0:
        return
    elif not (m and int(m.group(1)) >= 24):
        raise EmulationError(f"a mode this emulator does not know: {i.text}")


_LOGICAL, _COMPARED = "|".join(_LOGIC), "|".join(COMPARE)
FAMILIES = (
    family(_IGNORED, lambda waves, i: None, "*"),
    family(r"s_mov_b(32|64)", _copy),
    family("|".join(ALU), _alu),
    family(r"s_(addc|subb)_u32", _with_carry),
    family(r"s_cselect_b(32|64)", _cselect),
    family(rf"s_({_LOGICAL})_saveexec_b(32|64)", _saveexec),
    family(rf"s_cmpk?_({_COMPARED})_([ui](32|64)|f32)", _compare),
    family(r"s_bitcmp[01]_b32", _bitcmp),
    family("s_setreg_imm32_b32", _setreg),
)
