"""Scalar instructions: SOP1, SOP2, SOPC, SOPK (CDNA3 ISA, "Scalar ALU Operations"; RDNA4 ISA adds
the scalar float instructions and 64-bit add and multiply). Branches are in ``execute``."""

from __future__ import annotations

import re

import numpy as np

from mlakit.codegen.isa.numbers import fma
from mlakit.codegen.isa.parse import EmulationError, Instruction
from mlakit.codegen.isa.state import DTYPES, Waves

U32, U64, I32, I64, F32 = np.uint32, np.uint64, np.int32, np.int64, np.float32
IGNORED = re.compile(
    r"s_nop|s_waitcnt\w*|s_wait_(?!event)\w+|s_delay_alu|s_clause|s_sendmsg|s_setprio|s_sleep|"
    r"s_inst_prefetch|s_set_inst_prefetch_distance|s_code_end|s_icache_inv|s_ttracedata|"
    r"s_prefetch_inst\w*|v_nop|buffer_gl[01]_inv|buffer_wbl2|buffer_inv|global_(inv|wb|wbinv)"
)
"""Waits, hints and cache upkeep: no value changes here, where every access completes at once."""


def _carry(a, b, c=0):
    wide = a.astype(U64) + b.astype(U64) + U64(1) * np.asarray(c, U64)
    return wide.astype(U32), wide >> U64(32) != 0


def _borrow(a, b, c=0):
    need = b.astype(U64) + np.asarray(c, U64)
    return (a.astype(U64) - need).astype(U32), a.astype(U64) < need


def _signed(f):
    def run(a, b):
        wide = f(a.astype(np.int64), b.astype(np.int64))
        return wide.astype(I32), wide != wide.astype(I32)

    return run


def _bfe(a, b):
    shift, width = b & U32(31), (b >> U32(16)) & U32(127)
    mask = np.where(width >= 32, U32(0xFFFFFFFF), (U32(1) << (width & U32(31))) - U32(1))
    return (a >> shift.astype(a.dtype)) & mask


def _bfe_signed(a, b):
    width = np.minimum((b >> U32(16)) & U32(127), U32(32))
    up = (U32(32) - width).astype(I32)
    field = (_bfe(a.view(U32), b) << up.astype(U32)).view(I32) >> np.minimum(up, 31)
    return np.where(width == 0, I32(0), field).astype(I32)


def _bfe_signed64(a, b):
    width = ((b >> U32(16)) & U32(127)).astype(np.int64)
    up = np.clip(64 - width - (b & U32(63)), 0, 63)
    return np.where(width == 0, 0, (a << up) >> np.minimum(64 - width, 63))


def _lshl_add(n):
    def run(a, b):
        wide = (a.astype(U64) << U64(n)) + b.astype(U64)
        return wide.astype(U32), wide >> U64(32) != 0

    return run


def _reverse(a):
    return np.array([int(f"{x:032b}"[::-1], 2) for x in a.tolist()], U32)


def _high_half(a):
    return (a >> U32(16)).astype(np.uint16).view(np.float16).astype(F32)


_BOTH, _NONZERO = "pair", "nonzero"
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
_U, _I, _F, _U64 = ("u32", "u32"), ("i32", "i32"), ("f32", "f32"), ("u64", "u64")
ALU = {
    "s_add_u32": ("u32", _U, _carry, _BOTH),
    "s_sub_u32": ("u32", _U, _borrow, _BOTH),
    "s_add_i32": ("i32", _I, _signed(np.add), _BOTH),
    "s_sub_i32": ("i32", _I, _signed(np.subtract), _BOTH),
    "s_addk_i32": ("i32", _I, _signed(np.add), _BOTH),
    "s_mul_i32": ("u32", _U, lambda a, b: a * b, None),
    "s_mulk_i32": ("u32", _U, lambda a, b: a * b, None),
    "s_mul_hi_u32": ("u32", _U, lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32), None),
    "s_mul_hi_i32": ("i32", _I, lambda a, b: (a.astype(np.int64) * b >> 32).astype(I32), None),
    "s_mul_u64": ("u64", _U64, lambda a, b: a * b, None),
    "s_add_nc_u64": ("u64", _U64, lambda a, b: a + b, None),
    "s_sub_nc_u64": ("u64", _U64, lambda a, b: a - b, None),
    "s_ashr_i32": ("i32", ("i32", "u32"), lambda a, b: a >> (b & U32(31)).astype(I32), _NONZERO),
    "s_ashr_i64": ("i64", ("i64", "u32"), lambda a, b: a >> (b & U32(63)).astype(I64), _NONZERO),
    "s_bfe_u32": ("u32", _U, _bfe, _NONZERO),
    "s_bfe_i32": ("i32", ("i32", "u32"), _bfe_signed, _NONZERO),
    "s_bfe_i64": ("i64", ("i64", "u32"), _bfe_signed64, _NONZERO),
    "s_min_u32": ("u32", _U, lambda a, b: (np.minimum(a, b), a <= b), _BOTH),
    "s_max_u32": ("u32", _U, lambda a, b: (np.maximum(a, b), a >= b), _BOTH),
    "s_min_i32": ("i32", _I, lambda a, b: (np.minimum(a, b), a <= b), _BOTH),
    "s_max_i32": ("i32", _I, lambda a, b: (np.maximum(a, b), a >= b), _BOTH),
    "s_brev_b32": ("u32", ("u32",), _reverse, None),
    "s_movk_i32": ("i32", ("i32",), lambda a: a, None),
    "s_sext_i32_i16": ("i32", ("u32",), lambda a: a.astype(np.int16).astype(I32), None),
    "s_sext_i32_i8": ("i32", ("u32",), lambda a: a.astype(np.int8).astype(I32), None),
    "s_pack_ll_b32_b16": ("u32", _U, lambda a, b: a & U32(0xFFFF) | b << U32(16), None),
    "s_pack_lh_b32_b16": ("u32", _U, lambda a, b: a & U32(0xFFFF) | b & U32(0xFFFF0000), None),
    "s_mul_f32": ("f32", _F, np.multiply, None),
    "s_add_f32": ("f32", _F, np.add, None),
    "s_sub_f32": ("f32", _F, np.subtract, None),
    "s_maximum_f32": ("f32", _F, np.maximum, None),
    "s_minimum_f32": ("f32", _F, np.minimum, None),
    "s_max_num_f32": ("f32", _F, np.fmax, None),
    "s_min_num_f32": ("f32", _F, np.fmin, None),
    "s_fmac_f32": ("f32", ("f32",) * 3, fma, None),
    "s_fmamk_f32": ("f32", ("f32",) * 3, fma, None),
    "s_fmaak_f32": ("f32", ("f32",) * 3, fma, None),
    "s_cvt_f32_f16": ("f32", ("f16",), lambda a: a.astype(F32), None),
    "s_cvt_hi_f32_f16": ("f32", ("u32",), _high_half, None),
    "v_s_rsq_f32": ("f32", ("f32",), lambda a: 1 / np.sqrt(a.astype(np.float64)), None),
    "v_s_rcp_f32": ("f32", ("f32",), lambda a: 1 / a.astype(np.float64), None),
}
for _size, _type in (("32", U32), ("64", U64)):
    _u, _count = "u" + _size, U32(int(_size) - 1)
    for _name, _f in _LOGIC.items():
        ALU[f"s_{_name}_b{_size}"] = (_u, (_u, _u), _f, _NONZERO)
    ALU |= {
        f"s_lshl_b{_size}": (
            _u, (_u, "u32"), lambda a, b, c=_count, t=_type: a << (b & c).astype(t), _NONZERO,
        ),
        f"s_lshr_b{_size}": (
            _u, (_u, "u32"), lambda a, b, c=_count, t=_type: a >> (b & c).astype(t), _NONZERO,
        ),
        f"s_not_b{_size}": (_u, (_u,), lambda a: ~a, _NONZERO),
    }  # fmt: skip
for _n in (1, 2, 3, 4):
    ALU[f"s_lshl{_n}_add_u32"] = ("u32", _U, _lshl_add(_n), _BOTH)
_RENAMED = {
    "s_add_co_u32": "s_add_u32",
    "s_sub_co_u32": "s_sub_u32",
    "s_add_co_i32": "s_add_i32",
    "s_sub_co_i32": "s_sub_i32",
    "s_addk_co_i32": "s_addk_i32",
    "s_add_co_ci_u32": "s_addc_u32",
    "s_sub_co_ci_u32": "s_subb_u32",
    "s_add_u64": "s_add_nc_u64",
}
_COMPARE = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _sources(waves: Waves, i: Instruction, kinds: tuple[str, ...]) -> list[np.ndarray]:
    operands = i.operands[1:]
    if i.name.startswith(("s_addk", "s_mulk", "s_fmac")):
        operands = [i.operands[0], *operands] if "k_" in i.name else [*operands, i.operands[0]]
    return [waves.read_scalar(o, k) for o, k in zip(operands, kinds, strict=True)]


def _alu(waves: Waves, i: Instruction) -> None:
    kind, sources, f, scc = ALU[_RENAMED.get(i.name, i.name)]
    result = f(*_sources(waves, i, sources))
    if scc is _BOTH:
        result, waves.scc = result
    elif scc:
        waves.scc = result != 0
    waves.write_scalar(i.operands[0], np.ascontiguousarray(result, DTYPES[kind]))


def _with_carry(waves: Waves, i: Instruction) -> None:
    a, b = (waves.read_scalar(o) for o in i.operands[1:])
    f = _carry if "add" in i.name else _borrow
    result, waves.scc = f(a, b, waves.scc)
    waves.write_scalar(i.operands[0], result)


def _copy(waves: Waves, i: Instruction) -> None:
    """s_mov: a register that was never written may be copied, and stays unwritten."""
    dst, src = i.operands
    wide = i.name.endswith("64")
    if src.kind != "s" or dst.kind != "s":
        kind = "u64" if wide else "u32"
        waves.write_scalar(dst, waves.read_scalar(src, kind).copy())
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
    a, b = (waves.read_scalar(o, kind) for o in i.operands)
    waves.scc = _COMPARE[operation](a, b)


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


def handler(name: str):
    """The function that runs a scalar instruction, or None if no such instruction is known."""
    if name in ("s_mov_b32", "s_mov_b64"):
        return _copy
    if _RENAMED.get(name, name) in ALU:
        return _alu
    if _RENAMED.get(name, name) in ("s_addc_u32", "s_subb_u32"):
        return _with_carry
    if re.fullmatch(r"s_cselect_b(32|64)", name):
        return _cselect
    m = re.fullmatch(r"s_(\w+)_saveexec_b(32|64)", name)
    if m and m.group(1) in _LOGIC:
        return _saveexec
    m = re.fullmatch(r"s_cmpk?_(\w+)_([ui]32|[ui]64|f32)", name)
    if m and m.group(1) in _COMPARE:
        return _compare
    if re.fullmatch(r"s_bitcmp[01]_b32", name):
        return _bitcmp
    if name == "s_setreg_imm32_b32":
        return _setreg
    return None
