"""Memory: checked buffers, LDS, and the scalar, global, buffer and LDS instructions.

Sections: CDNA3 ISA "Scalar Memory Operations", "Vector Memory Operations" (buffer resource, range
checking), "Flat Memory Instructions", "Data Share Operations"; LLVM for gfx1250's 57-bit base.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from mlakit.codegen.isa.parse import EmulationError, Instruction, Operand
from mlakit.codegen.isa.state import Waves, pair
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
_SIZES = {name: found for found, names in _NAMED.items() for name in names.split()}
"""By name: bytes, and whether they are sign-extended or half of a register."""


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
        return gather(data, offset, size)

    def store(self, address: np.ndarray, values: np.ndarray, size: int, what: str) -> None:
        """Write (words, N) uint32 to (N,) addresses; the last writer of a byte wins."""
        for region in np.unique(address >> U64(_SPACING)):
            these = (address >> U64(_SPACING)) == region
            data, offset = self._locate(address[these], size, what)
            scatter(data, offset, values[:, these], size)


def gather(data: np.ndarray, offset: np.ndarray, size: int) -> np.ndarray:
    """(words, N) uint32 of ``size`` bytes at each byte ``offset`` (N,) of uint8 ``data``."""
    if size >= 4 and not (offset & 3).any() and data.ctypes.data % 4 == 0:
        words = data[: len(data) & ~3].view(U32)
        at = offset >> 2
        return np.stack([words[at + k] for k in range(size // 4)])
    raw = np.zeros((len(offset), -(-size // 4) * 4), np.uint8)
    raw[:, :size] = data[offset[:, None] + np.arange(size)]
    return raw.view(U32).T


def scatter(data: np.ndarray, offset: np.ndarray, values: np.ndarray, size: int) -> None:
    """The inverse of ``gather``."""
    if size >= 4 and not (offset & 3).any() and data.ctypes.data % 4 == 0:
        words = data[: len(data) & ~3].view(U32)
        for k in range(size // 4):
            words[(offset >> 2) + k] = values[k]
        return
    raw = np.ascontiguousarray(values.T).view(np.uint8)
    data[offset[:, None] + np.arange(size)] = raw[:, :size]


def _offset(i: Instruction, key: str = "offset") -> int:
    return int(i.mods.get(key, "0"), 0)


def _size(name: str) -> tuple[int, str]:
    found = _SIZES.get(name)
    if found is None:
        raise EmulationError(f"unknown memory size {name!r}")
    return found


def scalar_load(waves: Waves, i: Instruction, memory: Memory) -> None:
    """s_load_*: one address per wave."""
    size, form = _size(i.name.removeprefix("s_load_"))
    dst, base, *rest = i.operands
    address = waves.read_scalar(base, "u64")
    for o in rest:
        step = waves.read_scalar(o, "u32" if o.kind == "s" else "i32")
        address = address + step.astype(np.int64).view(U64)
    address = address + U64(_offset(i))
    words = memory.load(address, size, i.text)
    memory.traffic["scalar_load"] += size * len(address)
    if form == "sign":
        words = _extend(words, size)
    for k, word in enumerate(words):
        waves.write_scalar(Operand("s", dst.index + k, text=dst.text), word)


def _extend(words: np.ndarray, size: int) -> np.ndarray:
    sign = U32(1 << (8 * size - 1))
    return (words ^ sign) - sign


def _write_loaded(waves: Waves, dst: Operand, words: np.ndarray, size: int, form: str) -> None:
    """Write loaded words ((n, W, L) uint32) to consecutive registers."""
    if form == "sign":
        words = _extend(words, size)
    if form in ("low", "high"):
        waves.write_half(dst, words[0].astype(np.uint16), form == "high", keep=True)
        return
    for k, word in enumerate(words):
        waves.write_vgpr(dst.index + k, word)


def _stored(waves: Waves, src: Operand, size: int, form: str, active: np.ndarray) -> np.ndarray:
    words = [waves.vgpr(src.index + k)[active] for k in range(max(1, size // 4))]
    return np.stack(words) >> U32(16 if form == "high" else 0)


def _access(waves, i, memory, address, active, kind, dst, size, form):
    """Load to, or store from, ``dst`` at (W, L) addresses under ``active``."""
    words = max(1, size // 4)
    if kind == "store":
        if active.any():
            memory.store(address[active], _stored(waves, dst, size, form, active), size, i.text)
            memory.traffic["store"] += size * int(active.sum())
        return
    out = np.zeros((words, *active.shape), U32)
    if active.any():
        out[:, active] = memory.load(address[active], size, i.text)
        memory.traffic["load"] += size * int(active.sum())
    _write_loaded(waves, dst, out, size, form)


def global_access(waves: Waves, i: Instruction, memory: Memory) -> None:
    """global_load_* and global_store_*: a 64-bit address, or a scalar base and a 32-bit offset."""
    kind, what = re.fullmatch(r"global_(load|store)_(\w+)", i.name).groups()
    size, form = _size(what)
    dst, address, base = i.operands if kind == "load" else (i.operands[1], *i.operands[::2])
    if base.kind == "off":
        at = waves.read(address, "u64")
    else:
        scale = U64(size if "scale_offset" in i.mods else 1)
        offset = waves.read(address, "u32").astype(U64) * scale
        at = waves.read_scalar(base, "u64")[:, None] + offset
    at = at + np.array(_offset(i), np.int64).view(U64)
    _access(waves, i, memory, at, waves.exec, kind, dst, size, form)


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


def buffer_access(waves: Waves, i: Instruction, memory: Memory) -> None:
    """buffer_load_* and buffer_store_* on raw buffers: out of range loads 0 and stores nothing."""
    kind, what = re.fullmatch(r"buffer_(load|store)_(\w+)", i.name).groups()
    size, form = _size(what)
    dst, address, resource, step = i.operands
    base, records = _resource(waves, resource)
    offset = np.zeros_like(waves.exec, U64) + U64(_offset(i))
    if "offen" in i.mods:
        offset = offset + waves.read(address, "u32")
    step = waves.read_scalar(step)[:, None]
    inside = offset + step + U64(size) <= records[:, None]
    at = base[:, None] + offset + step
    _access(waves, i, memory, at, waves.exec & inside, kind, dst, size, form)


class Lds:
    """Shared memory: one row of bytes a workgroup, filled with NaN until it is written."""

    def __init__(self, groups: int, size: int):
        self.size = size
        self.pitch = size + (-size % 16)
        self.data = np.full(groups * self.pitch, 0xFF, np.uint8)

    def offsets(self, waves, address, active, size, what) -> np.ndarray:
        """Byte offsets into ``data`` for the active lanes of (W, L) addresses."""
        at = np.broadcast_to(address, active.shape)[active].astype(np.int64)
        if at.size and (at.max() + size > self.size):
            raise EmulationError(f"{what}: LDS byte {at.max()} of {self.size}")
        row = np.broadcast_to(waves.group[:, None], active.shape)[active]
        return at + row * self.pitch


_LDS = re.compile(r"ds_(load|store|read|write)(2|_2addr)?(st64|_stride64)?_(\w+)")


def lds_access(waves: Waves, i: Instruction, lds: Lds, memory: Memory) -> None:
    """ds_read / ds_write (ds_load / ds_store from gfx11), one or two addresses."""
    verb, two, strided, what = _LDS.fullmatch(i.name).groups()
    load = verb in ("load", "read")
    size, form = _size(what)
    scale = size * (64 if strided else 1)
    steps = [_offset(i, f"offset{k}") * scale for k in (0, 1)] if two else [_offset(i)]
    address = waves.read(i.operands[0 if not load else 1], "u32")
    active = waves.exec
    words = max(1, size // 4)
    memory.traffic["lds_load" if load else "lds_store"] += size * len(steps) * int(active.sum())
    places = [lds.offsets(waves, address + U32(s), active, size, i.text) for s in steps]
    for k, at in enumerate(places):
        if load:
            out = np.zeros((words, *active.shape), U32)
            out[:, active] = gather(lds.data, at, size)
            first = i.operands[0]._replace(index=i.operands[0].index + k * words)
            _write_loaded(waves, first, out, size, form)
        else:
            values = _stored(waves, i.operands[1 + k], size, form, active)
            scatter(lds.data, at, values, size)


def scratch_access(waves: Waves, i: Instruction, memory: Memory) -> None:
    """scratch_load_* and scratch_store_*: bytes private to a lane (CDNA3 ISA, "Scratch")."""
    kind, what = re.fullmatch(r"scratch_(load|store)_(\w+)", i.name).groups()
    size, form = _size(what)
    dst, address, base = i.operands if kind == "load" else (i.operands[1], *i.operands[::2])
    at = np.full(waves.exec.shape, _offset(i), np.int64)
    if address.kind != "off":
        at = at + waves.read(address, "u32")
    if base.kind != "off":
        at = at + waves.read_scalar(base)[:, None]
    if (at + size > waves.scratch.shape[2]).any() or (at < 0).any():
        raise EmulationError(f"{i.text}: outside {waves.scratch.shape[2]} bytes of scratch")
    active, wave = waves.exec, np.nonzero(waves.exec)
    memory.traffic["scratch_" + kind] += size * int(active.sum())
    flat = np.ravel_multi_index((*wave, at[active]), waves.scratch.shape)
    data = waves.scratch.reshape(-1)
    if kind == "store":
        scatter(data, flat, _stored(waves, dst, size, form, active), size)
        return
    out = np.zeros((max(1, size // 4), *active.shape), U32)
    out[:, active] = gather(data, flat, size)
    _write_loaded(waves, dst, out, size, form)


_HINTS = frozenset("glc slc dlc sc0 sc1 nt th scope offset".split())
_FAMILIES = {
    "s_load": (scalar_load, _HINTS),
    "global": (global_access, _HINTS | {"scale_offset"}),
    "buffer": (buffer_access, _HINTS | {"offen"}),
    "scratch": (scratch_access, _HINTS),
}


def handler(name: str):
    """(function, modifiers it knows) of a memory instruction other than LDS, or None."""
    m = re.fullmatch(r"(?:(s_load)|(?:(global|buffer|scratch)_(?:load|store)))_\w+", name)
    return _FAMILIES[m.group(1) or m.group(2)] if m else None


def lds_handler(name: str):
    """The same for an LDS instruction."""
    mods = frozenset(["offset", "offset0", "offset1"])
    return (lds_access, mods) if _LDS.fullmatch(name) else None
