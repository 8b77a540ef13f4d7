"""Memory: checked buffers, LDS, and the scalar, global, buffer and LDS instructions.

Sections: CDNA3 ISA "Scalar Memory Operations", "Vector Memory Operations" (buffer resource, range
checking), "Flat Memory Instructions", "Data Share Operations"; LLVM for gfx1250's 57-bit base.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from mlakit.codegen.isa.parse import EmulationError, Instruction, Operand
from mlakit.codegen.isa.state import Waves, family, pair
from mlakit.errors import MisuseError

U32, U64 = np.uint32, np.uint64
_SPACING = 36
_NAMED = {
    (4, ""): "dword b32",
    (8, ""): "dwordx2 b64",
    (12, ""): "dwordx3 b96",
    (16, ""): "dwordx4 b128",
    (32, ""): "dwordx8 b256",
    (64, ""): "dwordx16 b512",
    (1, ""): "ubyte u8 byte b8",
    (1, "sign"): "sbyte i8",
    (2, ""): "ushort u16 short b16",
    (2, "sign"): "sshort i16",
    (2, "low"): "short_d16 d16_b16 u16_d16",
    (2, "high"): "short_d16_hi d16_hi_b16 u16_d16_hi b16_d16_hi",
    (1, "low"): "ubyte_d16 d16_u8 u8_d16",
    (1, "high"): "ubyte_d16_hi d16_hi_u8 u8_d16_hi byte_d16_hi b8_d16_hi d16_hi_b8",
}
SIZES = {name: found for found, names in _NAMED.items() for name in names.split()}
"""By name: bytes, and whether they are sign-extended or half of a register."""


class Bytes:
    """An array of uint8 that lanes load from and store to; offsets (N,), values (words, N)."""

    def __init__(self, data: np.ndarray):
        self.data = data

    def _words(self, offset: np.ndarray, size: int) -> np.ndarray | None:
        """The array as uint32, if every access is of whole words."""
        whole = size >= 4 and not (offset & 3).any() and self.data.ctypes.data % 4 == 0
        return self.data[: len(self.data) & ~3].view(U32) if whole else None

    def load(self, offset: np.ndarray, size: int, what: str = "") -> np.ndarray:
        """(words, N) uint32 of ``size`` bytes at each offset."""
        if (words := self._words(offset, size)) is not None:
            return np.stack([words[(offset >> 2) + k] for k in range(size // 4)])
        raw = np.zeros((len(offset), -(-size // 4) * 4), np.uint8)
        raw[:, :size] = self.data[offset[:, None] + np.arange(size)]
        return raw.view(U32).T

    def store(self, offset: np.ndarray, values: np.ndarray, size: int, what: str = "") -> None:
        """The inverse; the last writer of a byte wins."""
        if (words := self._words(offset, size)) is not None:
            for k in range(size // 4):
                words[(offset >> 2) + k] = values[k]
            return
        raw = np.ascontiguousarray(values.T).view(np.uint8)
        self.data[offset[:, None] + np.arange(size)] = raw[:, :size]


class Memory:
    """Global memory: each given array at an address of its own, and only its own bytes."""

    def __init__(self):
        self.regions: list[tuple[np.ndarray, np.ndarray, str]] = []
        self.traffic: Counter[str] = Counter()
        """bytes moved, by kind: scalar_load, load, store, lds_load, lds_store"""

    def add(self, array: np.ndarray, name: str) -> int:
        """Map an array in place and return the address of its first element.

        Raises:
            MisuseError: not a numpy array, or one with a negative stride.
        """
        if not isinstance(array, np.ndarray) or any(s < 0 for s in array.strides):
            raise MisuseError(f"argument {name}: give a numpy array with no negative stride")
        item = array.dtype.itemsize
        reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
        extent = sum(reach) + item if array.size else 0
        given = np.zeros(extent + (-extent % 16), np.uint8)
        data = np.zeros(0, np.uint8)
        if array.size:
            first = array[(slice(0, 1),) * array.ndim].reshape(1)
            if not np.shares_memory(first, array):
                raise MisuseError(f"argument {name}: give an array that can be written in place")
            stride = np.lib.stride_tricks.as_strided
            data = stride(first.view(np.uint8), (extent,), (1,))
            shape, strides = (*array.shape, item), (*array.strides, 1)
            stride(given, shape, strides)[...] = 1
        self.regions.append((data, given, name))
        return len(self.regions) << _SPACING

    def _locate(self, address: np.ndarray, size: int, what: str):
        """Region of ``address`` (N,) and offsets in it; every byte must be a given array's."""
        region = int(address[0] >> U64(_SPACING))
        offset = (address - U64(region << _SPACING)).view(np.int64)
        if not 0 < region <= len(self.regions):
            raise EmulationError(f"{what}: address {int(address[0]):#x} is outside every buffer")
        data, given, name = self.regions[region - 1]
        bad = (offset < 0) | (offset + size > len(data))
        if not bad.any():
            step = next(s for s in (4, 2, 1) if size % s == 0 and not (offset % s).any())
            as_units = given.view(f"u{step}")
            whole = as_units.dtype.type(int.from_bytes(b"\1" * step, "little"))
            at = offset // step
            for k in range(size // step):
                bad |= as_units[at + k] != whole
        if bad.any():
            at = int(offset[bad.argmax()])
            raise EmulationError(f"{what}: byte {at} of argument {name} was not given")
        return data, offset

    def load(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        """(N,) addresses to (ceil(size / 4), N) uint32; every access is checked."""
        regions = address >> U64(_SPACING)
        if (regions != regions[:1]).any():
            out = np.zeros((-(-size // 4), len(address)), U32)
            for region in np.unique(regions):
                these = regions == region
                out[:, these] = self.load(address[these], size, what)
            return out
        data, offset = self._locate(address, size, what)
        return Bytes(data).load(offset, size)

    def store(self, address: np.ndarray, values: np.ndarray, size: int, what: str) -> None:
        """Write (words, N) uint32 to (N,) addresses; the last writer of a byte wins."""
        for region in np.unique(address >> U64(_SPACING)):
            these = (address >> U64(_SPACING)) == region
            data, offset = self._locate(address[these], size, what)
            Bytes(data).store(offset, values[:, these], size)


def _offset(i: Instruction, key: str = "offset") -> int:
    return int(i.mods.get(key, "0"), 0)


def _move(waves: Waves, i: Instruction, first: Operand, what, active, place, at) -> None:
    """Load registers from ``first`` on, or store them, for the ``active`` lanes (W, L).

    ``what``: the kind of traffic, then size and form of ``SIZES``; ``place``: what has ``load`` and
    ``store``; ``at``: (N,) address of each active lane there.
    """
    kind, size, form = what
    words = range(max(1, size // 4))
    waves.memory.traffic[kind] += size * len(at)
    if kind.endswith("store"):
        values = np.stack([waves.vgpr(first.index + k)[active] for k in words])
        if len(at):
            place.store(at, values >> U32(16 if form == "high" else 0), size, i.text)
        return
    out = np.zeros((len(words), *active.shape), U32)
    if len(at):
        out[:, active] = place.load(at, size, i.text)
    if form in ("low", "high"):
        waves.write_half(first, out[0].astype(np.uint16), form == "high", keep=True)
        return
    for k, word in enumerate(_extend(out, size) if form == "sign" else out):
        waves.write_vgpr(first.index + k, word)


def _vector_operands(i: Instruction, family: str) -> tuple[str, int, str, list[Operand]]:
    """load or store, size, form and operands (register, address, base) of a vector access."""
    kind, what = re.fullmatch(rf"{family}_(load|store)_(\w+)", i.name).groups()
    first, second, *rest = i.operands
    swap = kind == "store" and family != "buffer"
    return kind, *SIZES[what], [second, first, *rest] if swap else i.operands


def _scalar_load(waves: Waves, i: Instruction) -> None:
    """s_load_*: one address per wave."""
    size, form = SIZES[i.name.removeprefix("s_load_")]
    dst, base, *rest = i.operands
    address = waves.read_scalar(base, "u64")
    for o in rest:
        step = waves.read_scalar(o, "u32" if o.kind == "s" else "i32")
        address = address + step.astype(np.int64).view(U64)
    address = address + U64(_offset(i))
    words = waves.memory.load(address, size, i.text)
    waves.memory.traffic["scalar_load"] += size * len(address)
    for k, word in enumerate(_extend(words, size) if form == "sign" else words):
        waves.write_scalar(Operand("s", dst.index + k, text=dst.text), word)


def _extend(words: np.ndarray, size: int) -> np.ndarray:
    sign = U32(1 << (8 * size - 1))
    return (words ^ sign) - sign


def _global_access(waves: Waves, i: Instruction) -> None:
    """global_load_* and global_store_*: a 64-bit address, or a scalar base and a 32-bit offset."""
    *what, (first, address, base) = _vector_operands(i, "global")
    if base.kind == "off":
        at = waves.read(address, "u64")
    else:
        scale = U64(what[1] if "scale_offset" in i.mods else 1)
        offset = waves.read(address, "u32").astype(U64) * scale
        at = waves.read_scalar(base, "u64")[:, None] + offset
    at = at + np.array(_offset(i), np.int64).view(U64)
    _move(waves, i, first, what, waves.exec, waves.memory, at[waves.exec])


def _resource(waves: Waves, op: Operand) -> tuple[np.ndarray, np.ndarray]:
    """Base address and size in bytes, (W,) each, of a raw buffer resource."""
    word = [waves.read_scalar(Operand("s", op.index + k, text=op.text)) for k in range(4)]
    low = pair(word[0], word[1])
    if waves.gfx >= 1250:
        base = low & U64((1 << 57) - 1)
        records = (low >> U64(57)) | ((pair(word[2], word[3]) & U64((1 << 38) - 1)) << U64(7))
        return base, records
    if ((word[1] >> U32(16)) & U32(0x3FFF)).any():
        raise EmulationError("a buffer resource with a stride: only raw buffers are emulated")
    return low & U64((1 << 48) - 1), word[2].astype(U64)


def _buffer_access(waves: Waves, i: Instruction) -> None:
    """buffer_load_* and buffer_store_* on raw buffers: out of range loads 0 and stores nothing."""
    *what, (first, address, resource, step) = _vector_operands(i, "buffer")
    base, records = _resource(waves, resource)
    offset = np.zeros_like(waves.exec, U64) + U64(_offset(i)) + waves.read_scalar(step)[:, None]
    if "offen" in i.mods:
        offset = offset + waves.read(address, "u32")
    active = waves.exec & (offset + U64(what[1]) <= records[:, None])
    at = (base[:, None] + offset)[active]
    _move(waves, i, first, what, active, waves.memory, at)


class Lds(Bytes):
    """Shared memory: one row of bytes a workgroup, filled with NaN until it is written."""

    def __init__(self, groups: int, size: int):
        self.size = size
        self.pitch = size + (-size % 16)
        super().__init__(np.full(groups * self.pitch, 0xFF, np.uint8))

    def offsets(self, waves, address, active, size, what) -> np.ndarray:
        """Byte offsets into ``data`` for the active lanes of (W, L) addresses."""
        at = np.broadcast_to(address, active.shape)[active].astype(np.int64)
        if at.size and (at.max() + size > self.size):
            raise EmulationError(f"{what}: LDS byte {at.max()} of {self.size}")
        row = np.broadcast_to(waves.group[:, None], active.shape)[active]
        return at + row * self.pitch


_LDS = r"ds_(load|store|read|write)(2|_2addr)?(st64|_stride64)?_({})"


def _lds_access(waves: Waves, i: Instruction) -> None:
    """ds_read / ds_write (ds_load / ds_store from gfx11), one or two addresses."""
    verb, two, strided, name = re.fullmatch(_LDS.format(r"\w+"), i.name).groups()
    load = verb in ("load", "read")
    size, form = SIZES[name]
    what = "lds_load" if load else "lds_store", size, form
    scale = size * (64 if strided else 1)
    steps = [_offset(i, f"offset{k}") * scale for k in (0, 1)] if two else [_offset(i)]
    address = waves.read(i.operands[1 if load else 0], "u32")
    lds, active = waves.lds, waves.exec
    places = [lds.offsets(waves, address + U32(s), active, size, i.text) for s in steps]
    for k, at in enumerate(places):
        first = i.operands[0 if load else 1 + k]
        if load:
            first = first._replace(index=first.index + k * max(1, size // 4))
        _move(waves, i, first, what, active, lds, at)


def _scratch_access(waves: Waves, i: Instruction) -> None:
    """scratch_load_* and scratch_store_*: bytes private to a lane (CDNA3 ISA, "Scratch")."""
    kind, size, form, (first, address, base) = _vector_operands(i, "scratch")
    at = np.full(waves.exec.shape, _offset(i), np.int64)
    if address.kind != "off":
        at = at + waves.read(address, "u32")
    if base.kind != "off":
        at = at + waves.read_scalar(base)[:, None]
    if (at + size > waves.scratch.shape[2]).any() or (at < 0).any():
        raise EmulationError(f"{i.text}: outside {waves.scratch.shape[2]} bytes of scratch")
    flat = np.ravel_multi_index((*np.nonzero(waves.exec), at[waves.exec]), waves.scratch.shape)
    what, place = ("scratch_" + kind, size, form), Bytes(waves.scratch.reshape(-1))
    _move(waves, i, first, what, waves.exec, place, flat)


_HINTS = "glc slc dlc sc0 sc1 nt th scope offset "
_ANY = "|".join(SIZES)
FAMILIES = (
    family(rf"s_load_({_ANY})", _scalar_load, _HINTS),
    family(rf"global_(load|store)_({_ANY})", _global_access, _HINTS + "scale_offset"),
    family(rf"buffer_(load|store)_({_ANY})", _buffer_access, _HINTS + "offen"),
    family(rf"scratch_(load|store)_({_ANY})", _scratch_access, _HINTS),
    family(_LDS.format(_ANY), _lds_access, "offset offset0 offset1"),
)
