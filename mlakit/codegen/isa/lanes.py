"""Moving data between lanes: DPP, SDWA selection, permutes, swizzles, read and write lane.

Sections: CDNA3 ISA "Data Parallel Processing (DPP)" and "Sub-Dword Addressing (SDWA)"; RDNA3 ISA
"DPP" (row_share, row_xmask, DPP8, fetch inactive); CDNA4 ISA "V_PERMLANE16/32_SWAP_B32".
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from mlakit.codegen.isa.parse import EmulationError, Instruction
from mlakit.codegen.isa.state import Waves, family

U32 = np.uint32


def _in_row(lane: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Lane ``at`` of each lane's row of 16, -1 where that is outside it."""
    return np.where((at >= 0) & (at < 16), (lane & ~15) + at, -1)


def _select(lane: np.ndarray, choice: list[int]) -> np.ndarray:
    return lane - lane % len(choice) + np.array(choice)[lane % len(choice)]


_SOURCES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "row_mirror": lambda lane, n: lane ^ 15,
    "row_half_mirror": lambda lane, n: lane ^ 7,
    "row_shl": lambda lane, n: _in_row(lane, (lane & 15) + n),
    "row_shr": lambda lane, n: _in_row(lane, (lane & 15) - n),
    "row_ror": lambda lane, n: _in_row(lane, (lane - n) & 15),
    "row_newbcast": lambda lane, n: (lane & ~15) + n,
    "row_share": lambda lane, n: (lane & ~15) + n,
    "row_xmask": lambda lane, n: lane ^ n,
    "row_bcast": lambda lane, n: np.where(lane > n, (lane & ~n) - 1, -1),
    "wave_shl": lambda lane, n: np.append(lane[1:], -1),
    "wave_shr": lambda lane, n: lane - 1,
    "wave_rol": lambda lane, n: np.roll(lane, -1),
    "wave_ror": lambda lane, n: np.roll(lane, 1),
}
"""By DPP pattern: (lanes,) source lane of each lane, -1 where it has none, from its number."""
_PATTERNS = ("quad_perm", "dpp8", *_SOURCES)
DPP_MODS = " ".join([*_PATTERNS, "row_mask bank_mask bound_ctrl fi"])


def dpp_pattern(mods: dict[str, str]) -> str | None:
    """The name of the DPP pattern among an instruction's modifiers, if it has one."""
    return next((p for p in _PATTERNS if p in mods), None)


def dpp_sources(pattern: str, value: str, lanes: int) -> np.ndarray:
    """(lanes,) source lane of each lane; -1 where the pattern has none."""
    lane = np.arange(lanes)
    if pattern in ("quad_perm", "dpp8"):
        return _select(lane, [int(x) for x in value.strip("[]").split(",")])
    return _SOURCES[pattern](lane, int(value, 0))


def dpp(waves: Waves, bits: np.ndarray, mods: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Source 0 after DPP, and the lanes that may be written.

    A source lane that is out of range or inactive reads 0 with ``bound_ctrl``, and blocks the write
    without; ``fi`` lets inactive lanes be read (gfx10 and later). ``row_mask`` and ``bank_mask``
    block lanes of their own.
    """
    pattern = dpp_pattern(mods)
    source = dpp_sources(pattern, mods[pattern], waves.lanes)
    bits = np.broadcast_to(bits, waves.exec.shape)
    valid = np.broadcast_to(source >= 0, waves.exec.shape)
    if not waves.exec_full and mods.get("fi", "0") == "0":
        valid = valid & waves.exec[:, source]
    moved = bits[:, source]
    lane = np.arange(waves.lanes)
    rows = (int(mods.get("row_mask", "0xf"), 0) >> (lane >> 4 & 3)) & 1
    banks = (int(mods.get("bank_mask", "0xf"), 0) >> (lane >> 2 & 3)) & 1
    write = np.broadcast_to((rows & banks).astype(bool), valid.shape)
    if mods.get("bound_ctrl", "0") != "0" or pattern == "dpp8":
        return np.where(valid, moved, U32(0)), write
    return moved, write & valid


def _sdwa_field(select: str) -> tuple[int, int]:
    """(size, shift) in bits of ``BYTE_n`` or ``WORD_n``."""
    part, number = select.split("_")
    size = 8 if part == "BYTE" else 16
    return size, size * int(number)


def sdwa_select(bits: np.ndarray, select: str, signed: bool = False) -> np.ndarray:
    """One SDWA source: a byte or word of it, zero- or sign-extended."""
    if select == "DWORD":
        return bits
    size, shift = _sdwa_field(select)
    field = (bits >> U32(shift)) & U32((1 << size) - 1)
    sign = U32(1 << (size - 1)) if signed else U32(0)
    return (field ^ sign) - sign


def sdwa_place(old: np.ndarray, bits: np.ndarray, mods: dict[str, str]) -> np.ndarray:
    """The destination register after an SDWA write of ``bits``."""
    select = mods.get("dst_sel", "DWORD")
    if select == "DWORD":
        return bits
    size, shift = _sdwa_field(select)
    mask = (1 << size) - 1
    unused = mods.get("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_SEXT":
        return sdwa_select(bits, f"{select[:4]}_0", signed=True) << U32(shift)
    field = (bits & U32(mask)) << U32(shift)
    kept = old & U32(~(mask << shift) & 0xFFFFFFFF) if unused == "UNUSED_PRESERVE" else U32(0)
    return kept | field


def _readfirstlane(waves: Waves, i: Instruction) -> None:
    """v_readfirstlane_b32: the lowest active lane, lane 0 if none is."""
    first = waves.exec.argmax(1)
    bits = waves.vgpr(i.operands[1].index)
    waves.write_scalar(i.operands[0], bits[np.arange(len(first)), first])


def _readlane(waves: Waves, i: Instruction) -> None:
    """v_readlane_b32: one lane, active or not."""
    lane = waves.read_scalar(i.operands[2]) % waves.lanes
    bits = waves.vgpr(i.operands[1].index)
    waves.write_scalar(i.operands[0], bits[np.arange(len(lane)), lane])


def _writelane(waves: Waves, i: Instruction) -> None:
    """v_writelane_b32: one lane, active or not."""
    lane = waves.read_scalar(i.operands[2]) % waves.lanes
    index = i.operands[0].index
    value = i.operands[1]
    # A spilled register may never have been written: copying it is no read.
    bits = waves.s[value.index] if value.kind == "s" else waves.read_scalar(value)
    waves.v[index, np.arange(len(lane)), lane] = bits
    waves.v_set[index] = True


def _permlane16(waves: Waves, i: Instruction) -> None:
    """v_permlane16_b32 and v_permlanex16_b32: any lane of the own, or of the partner row of 16.

    RDNA3 ISA, "V_PERMLANE16_B32": eight 4-bit lane numbers in each of two scalars; op_sel bit 0
    fetches inactive lanes, bit 1 is bound_ctrl.
    """
    dst, src, low, high = i.operands
    fetch_inactive, bound = i.bits("op_sel", 0, 4)[:2]
    lane = np.arange(waves.lanes)
    at = lane & 15
    words = np.where(at < 8, waves.read_scalar(low)[:, None], waves.read_scalar(high)[:, None]) >> (
        (at & 7) * 4
    ).astype(U32)
    row = (lane & ~15) ^ (16 if "permlanex16" in i.name else 0)
    source = row + (words & U32(15)).astype(np.int64)
    moved = np.take_along_axis(waves.vgpr(src.index), source, 1)
    valid = np.take_along_axis(waves.exec, source, 1) | bool(fetch_inactive)
    if bound:
        waves.write(dst, np.where(valid, moved, U32(0)))
    else:
        waves.write(dst, moved, valid)


def _permlane_swap(waves: Waves, i: Instruction) -> None:
    """v_permlane16_swap_b32 / v_permlane32_swap_b32: odd rows of dst for even rows of src."""
    size = 16 if "permlane16" in i.name else 32
    a, b = (waves.vgpr(o.index).copy() for o in i.operands)
    lane = np.arange(waves.lanes)
    odd = (lane // size) % 2 == 1
    new_a = np.where(odd, b[:, lane ^ size], a)
    new_b = np.where(odd, b, a[:, lane ^ size])
    waves.write(i.operands[0], new_a)
    waves.write(i.operands[1], new_b)


def _lane_named(waves: Waves, i: Instruction) -> np.ndarray:
    """(W, L) lane that each lane's byte address stands for."""
    at = waves.read(i.operands[1], "u32") + U32(int(i.mods.get("offset", "0"), 0))
    return (at >> U32(2)).astype(np.int64) % waves.lanes


def _bpermute(waves: Waves, i: Instruction) -> None:
    """ds_bpermute_b32: each lane pulls from lane address / 4; an inactive source gives 0."""
    dst, _, data = i.operands
    source = _lane_named(waves, i)
    moved = np.take_along_axis(waves.vgpr(data.index), source, 1)
    waves.write(dst, np.where(np.take_along_axis(waves.exec, source, 1), moved, U32(0)))


def _permute(waves: Waves, i: Instruction) -> None:
    """ds_permute_b32: each active lane pushes to lane address / 4; the highest lane wins."""
    dst, _, data = i.operands
    target = _lane_named(waves, i)
    out = np.zeros_like(waves.v[data.index])
    wave, lane = np.nonzero(waves.exec)
    out[wave, target[wave, lane]] = waves.vgpr(data.index)[wave, lane]
    waves.write(dst, out)


def _swizzle(waves: Waves, i: Instruction) -> None:
    """ds_swizzle_b32 (CDNA3 ISA, "DS_SWIZZLE_B32"): quad permute, or masks within 32 lanes."""
    lane = np.arange(waves.lanes)
    mode, *args = re.findall(r"[\w]+", i.mods["offset"].removeprefix("swizzle"))
    if mode == "SWAP":
        source = lane ^ int(args[0])
    elif mode == "REVERSE":
        source = lane ^ (int(args[0]) - 1)
    elif mode == "BROADCAST":
        source = (lane & -int(args[0])) + int(args[1])
    elif mode == "QUAD_PERM":
        source = _select(lane, [int(a) for a in args])
    elif mode == "BITMASK_PERM":
        keep, one, flip = (
            int("".join(str(int(c in which)) for c in args[0]), 2) for which in ("pi", "1", "i")
        )
        source = (lane & ~31) + ((lane & keep | one) ^ flip)
    else:
        raise EmulationError(f"unknown swizzle in: {i.text}")
    bits = waves.vgpr(i.operands[1].index)[:, source]
    waves.write(i.operands[0], np.where(waves.exec[:, source], bits, U32(0)))


FAMILIES = (
    family("v_readfirstlane_b32", _readfirstlane),
    family("v_readlane_b32", _readlane),
    family("v_writelane_b32", _writelane),
    family("v_permlanex?16_b32", _permlane16, "op_sel"),
    family("v_permlane(16|32)_swap_b32", _permlane_swap),
    family("ds_bpermute_b32", _bpermute, "offset"),
    family("ds_permute_b32", _permute, "offset"),
    family("ds_swizzle_b32", _swizzle, "offset"),
)
