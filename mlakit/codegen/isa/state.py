"""Registers of a group of waves, and how operands read and write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlakit.codegen.isa.parse import VCC, EmulationError, Instruction, Operand, const_bits

_SGPRS = 128
VCC_MASK = Operand("s", VCC, 2, text="vcc")
_LETTERS = {"b": "u", "u": "u", "i": "i", "f": "f"}
DTYPES = {f"{k}{n}": np.dtype(f"{v}{n // 8}") for k, v in _LETTERS.items() for n in (16, 32, 64)}
DTYPES["bf16"] = np.dtype("u2")
"""numpy's type of an operand type: bits, unsigned, signed, float; of bf16 the bits"""
_WAVE_AXIS = dict(s=1, v=1, s_set=1, v_set=1, exec=0, scc=0, group=0, rank=0, scratch=0)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


class Family(NamedTuple):
    """Instructions that one function runs: those whose plain name a pattern matches whole."""

    pattern: re.Pattern
    run: Callable[[Waves, Instruction], None]
    mods: frozenset[str]
    """the modifiers that ``run`` knows; ``*`` for any"""


def family(pattern: str, run: Callable, mods: str = "") -> Family:
    """A ``Family``; ``mods`` with spaces between."""
    return Family(re.compile(pattern), run, frozenset(mods.split()))


def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """uint64 from two uint32 halves."""
    return low.astype(np.uint64) | (high.astype(np.uint64) << _32)


def signed(bits: np.ndarray, op: Operand) -> np.ndarray:
    """Unsigned ``bits`` of a float with the operand's |x| and -x applied to the sign bit."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    bits = bits & ~sign if op.absolute else bits
    return bits ^ sign if op.neg else bits


class Waves:
    """Waves at one program counter: W waves of L lanes.

    ``s``: (128, W) uint32; ``v``: (registers, W, L) uint32; ``exec``: (W, L) bool; ``scc``: (W,)
    bool; ``scratch``: (W, L, bytes) uint8; ``group``: (W,) workgroup of each wave; ``rank``: (W,)
    wave number in its workgroup.
    ``s_set`` and ``v_set`` say which registers were ever written, by wave. ``memory`` and ``lds``
    are shared by all waves of a launch. What reads a register that was never written, or an
    operand that it cannot read, raises ``EmulationError``.
    """

    def __init__(self, group, rank, lanes: int, vgprs: int, gfx: int, memory, lds, scratch=0):
        waves = len(group)
        self.lanes, self.gfx, self.group, self.rank = lanes, gfx, group, rank
        self.memory, self.lds = memory, lds
        self.s = np.zeros((_SGPRS, waves), np.uint32)
        self.v = np.zeros((vgprs, waves, lanes), np.uint32)
        self.s_set = np.zeros((_SGPRS, waves), bool)
        self.v_set = np.zeros((vgprs, waves), bool)
        self.exec = np.ones((waves, lanes), bool)
        self.exec_full = True
        self.scc = np.zeros(waves, bool)
        self.scratch = np.full((waves, lanes, scratch + (-scratch % 4)), 0xFF, np.uint8)
        self.fp16_ovfl = False
        self.pc, self.waiting = 0, False

    def take(self, keep: np.ndarray) -> Waves:
        """The waves where ``keep`` is true, as a group of their own."""
        part = object.__new__(Waves)
        part.__dict__.update(self.__dict__)
        for name, axis in _WAVE_AXIS.items():
            setattr(part, name, np.compress(keep, getattr(self, name), axis=axis))
        part.exec_full = bool(part.exec.all())
        return part

    def join(self, other: Waves) -> Waves:
        """Both groups as one; they are at the same program counter."""
        for name, axis in _WAVE_AXIS.items():
            both = np.concatenate([getattr(self, name), getattr(other, name)], axis=axis)
            setattr(self, name, both)
        self.exec_full = self.exec_full and other.exec_full
        return self

    def pack(self, mask: np.ndarray) -> np.ndarray:
        """(W, L) bool to the wave's 64-bit mask, (W,) uint64."""
        if mask.ndim < 2 or mask.shape != self.exec.shape:
            mask = np.broadcast_to(mask, self.exec.shape)
        packed = np.zeros((mask.shape[0], 8), np.uint8)
        packed[:, : self.lanes // 8] = np.packbits(mask, axis=1, bitorder="little")
        return packed.view(np.uint64)[:, 0]

    def unpack(self, bits: np.ndarray) -> np.ndarray:
        """(W,) uint64 to (W, L) bool."""
        as_bytes = np.ascontiguousarray(bits, np.uint64).view(np.uint8).reshape(-1, 8)
        return np.unpackbits(as_bytes, axis=1, bitorder="little", count=self.lanes).view(bool)

    def set_exec(self, mask: np.ndarray) -> None:
        """Replace the execution mask by (W, L) bool."""
        self.exec = mask
        self.exec_full = bool(mask.all())

    def read_scalar(self, op: Operand, kind: str = "u32") -> np.ndarray:
        """(W,) value of a scalar operand, as ``kind``."""
        wide = kind.endswith("64")
        dtype = np.uint64 if wide else np.uint32
        if op.kind == "s":
            if not self.s_set[op.index : op.index + 1 + wide].all():
                raise EmulationError(f"register {op.text} is read but was never written")
            if not wide:
                bits = self.s[op.index]
            elif op.count == 1 and self.lanes == 32:
                bits = self.s[op.index].astype(np.uint64)
            else:
                bits = pair(self.s[op.index], self.s[op.index + 1])
        elif op.kind == "const":
            bits = np.full(len(self.scc), const_bits(op.text, kind), dtype)
        elif op.kind == "exec":
            bits = self.pack(self.exec)
            if not wide:
                bits = (bits >> (_32 if op.index else np.uint64(0))).astype(np.uint32)
        elif op.kind in ("scc", "null"):
            bits = (self.scc & (op.kind == "scc")).astype(dtype)
        else:
            raise EmulationError(f"operand {op.text!r} is not a scalar this emulator knows")
        if kind.endswith("16"):
            bits = bits.astype(np.uint16)
        return bits.view(DTYPES[kind])

    def write_scalar(self, op: Operand, value: np.ndarray) -> None:
        """Write (W,) 32- or 64-bit ``value``; the operand's own width decides."""
        wide = value.dtype.itemsize == 8
        bits = value.view(np.uint64 if wide else np.uint32)
        if op.kind == "exec":
            if not wide and self.lanes == 64:
                raise EmulationError("a write to half of exec in a 64-lane wave")
            self.set_exec(self.unpack(bits.astype(np.uint64)))
        elif op.kind == "s":
            self.s[op.index] = bits & _LOW if wide else bits
            self.s_set[op.index] = True
            if wide and op.count > 1:
                self.s[op.index + 1] = bits >> _32
                self.s_set[op.index + 1] = True
        elif op.kind != "null":
            raise EmulationError(f"operand {op.text!r} cannot be written as a scalar")

    def write_mask(self, op: Operand, mask: np.ndarray) -> None:
        """Write a lane mask (as a comparison or a carry makes it); inactive lanes give 0."""
        bits = self.pack(mask if self.exec_full else mask & self.exec)
        self.write_scalar(op, bits if self.lanes == 64 else bits.astype(np.uint32))

    def read_mask(self, op: Operand) -> np.ndarray:
        """A scalar operand as a lane mask, (W, L) bool."""
        return self.unpack(self.read_scalar(op, "u64" if self.lanes == 64 else "u32"))

    def vgpr(self, index: int) -> np.ndarray:
        """(W, L) bits of one vector register; stops if an active wave never wrote it."""
        if not self.v_set[index].all():
            unset = ~self.v_set[index] & self.exec.any(1)
            if unset.any():
                raise EmulationError(f"register v{index} is read but was never written")
        return self.v[index]

    def read(self, op: Operand, kind: str, high: int = 0) -> np.ndarray:
        """A vector operand as ``kind``, broadcastable to (W, L); ``high``: its high 16 bits."""
        wide = "u64" if kind.endswith("64") else "u32"
        if op.kind == "v":
            bits = self.vgpr(op.index)
            if wide == "u64":
                bits = pair(bits, self.vgpr(op.index + 1))
        elif op.kind == "const":
            bits = np.full((1, 1), const_bits(op.text, kind), DTYPES[wide])
        else:
            bits = self.read_scalar(op, wide)[:, None]
        if kind.endswith("16"):
            shift = np.uint32(16 if (op.half or high) else 0)
            bits = (bits >> shift).astype(np.uint16)
        return signed(bits, op).view(DTYPES[kind])

    def write(self, op: Operand, value: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Write 32 or 64 bits per lane where exec (and ``lanes``, if given) allow."""
        if op.kind != "v":
            raise EmulationError(f"operand {op.text!r} cannot be written by a vector instruction")
        if value.dtype.itemsize == 8:
            bits = value.view(np.uint64)
            self.write_vgpr(op.index, (bits & _LOW).astype(np.uint32), lanes)
            self.write_vgpr(op.index + 1, (bits >> _32).astype(np.uint32), lanes)
        else:
            self.write_vgpr(op.index, value.view(np.uint32), lanes)

    def write_vgpr(self, index: int, bits: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Write (W, L) uint32 to one vector register under exec and ``lanes``."""
        if self.exec_full and lanes is None:
            self.v[index] = bits
            self.v_set[index] = True
            return
        where = self.exec if lanes is None else self.exec & lanes
        np.copyto(self.v[index], bits, where=where)
        self.v_set[index] |= where.any(1)

    def write_half(self, op: Operand, value: np.ndarray, high: int, keep: bool, lanes=None) -> None:
        """Write 16 bits to one half; the other half is kept, or zeroed where ``keep`` is false."""
        bits = np.broadcast_to(value, self.exec.shape).view(np.uint16).astype(np.uint32)
        if high or op.half:
            bits = (bits << np.uint32(16)) | (self.v[op.index] & np.uint32(0xFFFF))
        elif keep:
            bits = bits | (self.v[op.index] & np.uint32(0xFFFF0000))
        self.write_vgpr(op.index, bits, lanes)
