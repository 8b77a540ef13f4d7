"""What each path does to a card: its launches, from sources, before anything was timed.

A launch is described by what its source says: programs and their threads, how many reads of a
program wait for one another, bytes, whether threads of several warps meet, and whether each
element's address is computed from strides. ``mlakit.latency`` turns that into microseconds; no
number of a path's own speed is in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlakit import archs
from mlakit.errors import one_of
from mlakit.paths import registry, triton_config
from mlakit.shapes import Widths

ITEMSIZE = triton_config.ITEMSIZE
KINDS = {
    "copy": "moves rows, computes nothing",
    "row": "a row once through registers",
    "loop": "walks a row twice, the second time from a cache",
    "map": "elementwise over contiguous memory",
    "gather": "elementwise with strides or broadcasts",
    "reduce": "torch's sum over each row",
}
"""How a kernel works. Only on a CPU has each kind a rate of its own; on a GPU it is a name."""


@dataclass(frozen=True)
class Launch:
    """One kernel, as its source describes it; elements and bytes are of the whole launch."""

    kind: str
    programs: float
    """independent pieces: thread blocks; on a CPU, pieces that threads share"""
    threads: int
    """of one program"""
    elements: float
    moved: float
    """bytes to or from memory"""
    cached: float = 0.0
    """bytes read that the launch before wrote, where they still fit the last cache"""
    reads: float = 1.0
    """reads of memory by one program that wait for one another"""
    rereads: float = 0.0
    """the same from a cache"""
    meets: int = 0
    """1 where several warps exchange a sum"""
    indexed: int = 0
    """1 where each element's address is computed from strides, 2 where its type is looked up too"""
    starts: int = 1
    """0 where it begins while the kernel before it drains (programmatic dependent launch)"""
    side: int = 0
    """1 on a second stream"""


def _after(launch: Launch, read_bytes: float, cache_bytes: float) -> Launch:
    """``launch`` whose input of ``read_bytes`` was just written: a cache has it if it fits."""
    if not 0 < read_bytes <= cache_bytes:
        return launch
    return replace(
        launch,
        moved=launch.moved - read_bytes,
        cached=read_bytes,
        reads=0,
        rereads=launch.rereads + launch.reads,
    )


def _power_of_two(n: float) -> int:
    return 1 << (int(n) - 1).bit_length()


@dataclass(frozen=True)
class _Step:
    """One part of a call, and where it runs."""

    m: int
    width: int
    size: int
    cache_bytes: float
    contiguous: bool

    @property
    def n(self) -> int:
        return self.m * self.width

    @property
    def bytes(self) -> int:
        """Rows read and written once, and weights read once."""
        return (2 * self.m + 1) * self.width * self.size


def _piece(
    s: _Step, kind: str, n: float, read: int, wrote: int, a_thread: float, *, fresh=True, indexed=0
) -> Launch:
    """One of torch's elementwise kernels: blocks of 128 threads (``thread_constants.h``)."""
    programs = max(1.0, n / (128 * a_thread))
    launch = Launch(kind, programs, 128, n, n * (read + wrote), indexed=indexed)
    return _after(launch, n * read, s.cache_bytes) if fresh else launch


def _copy_out(s: _Step) -> Launch:
    """``out.copy_(result)``: contiguous, one dtype: a memcpy of what was just written."""
    return _piece(s, "map", s.n, s.size, s.size, 4 * 16 / s.size)


def _gather(s: _Step) -> Launch:
    """A view made contiguous: 4 elements a thread (2 of four bytes), addresses from strides."""
    a_thread = 2 if s.size == 4 else 4
    return _piece(s, "gather", s.n, s.size, s.size, a_thread, indexed=1, fresh=False)


def _torch_norm(s: _Step) -> Launch:
    """``vectorized_layer_norm_kernel``: 128 threads a row, 4 elements each, two serial walks."""
    turns = -(-s.width // 512)
    rows = s.n * s.size
    launch = Launch("loop", s.m, 128, s.n, s.bytes + 4 * s.m, reads=turns, rereads=turns, meets=1)
    strided = not s.contiguous and s.m > 1
    return _after(launch, rows, s.cache_bytes) if strided else launch


def _mean(s: _Step) -> Launch:
    """torch's sum of a row, 4 floats a read; ``setReduceConfig`` gives a row fewer threads the
    more rows there are, down to one warp from 16 on."""
    reads = s.width // 4
    wide = max(1, min(512, _power_of_two(reads + 1) // 2))
    high = min(_power_of_two(s.m + 1) // 2, 512 // min(wide, 32))
    across = min(wide, 512 // high)
    programs, turns = max(1.0, s.m / high), -(-reads // across)
    meets = int(across > 32)
    launch = Launch("reduce", programs, across * high, s.n, 4 * s.n, reads=turns, meets=meets)
    return _after(launch, 4 * s.n, s.cache_bytes)


def _eager(s: _Step) -> list[Launch]:
    """torch_native's eight operations on one part, in order, all in float32."""
    small = Launch("map", max(1.0, s.m / 1024), 128, s.m, 8 * s.m)
    small = _after(small, 4 * s.m, s.cache_bytes)
    one = s.contiguous or s.m == 1
    cast, spread = "map" if one else "gather", "map" if s.m == 1 else "gather"
    return [
        _piece(s, cast, s.n, s.size, 4, 4, indexed=1 if one else 2, fresh=False),
        _piece(s, "map", s.n, 4, 4, 8),
        _mean(s),
        small,
        small,
        _piece(s, spread, s.n, 4, 4, 2, indexed=1),
        _piece(s, spread, s.n, 4, 4, 4, indexed=2),
        _piece(s, "map", s.n, 4, s.size, 8),
    ]  # fmt: skip


def _liger(s: _Step) -> Launch:
    """Liger's ``calculate_settings``; 16 rows a program from 32,768 rows of at most 256 on."""
    lanes = _power_of_two(s.width)
    warps = next(
        w for limit, w in ((2048, 4), (8192, 8), (32768, 16), (1 << 31, 32)) if lanes < limit
    )
    programs = s.m / 16 if lanes <= 256 and s.m >= 32768 else s.m
    return Launch("row", programs, 32 * warps, s.n, s.bytes + s.size * s.m, meets=1)


def _inductor(s: _Step) -> Launch:
    """``triton_heuristics``, compiled at few rows: up to 1024 lanes a row stays in registers,
    above it is walked twice, a block holding a whole row (``add_persistent_rblock``), or two."""
    lanes = _power_of_two(s.width)
    if lanes <= 1024:
        warps = max(2, min(8, lanes // 128))
        return Launch("row", s.m, 32 * warps, s.n, s.bytes, meets=1)
    rows = min(2, s.m) if lanes == 2048 else 1
    return Launch("loop", s.m / rows, 512, s.n, s.bytes, rereads=1, meets=1)


def _quack(s: _Step) -> Launch:
    """``rmsnorm_config``: 128 threads, a warp a row up to 3072 elements, two up to 6144."""
    a_row = next((t for n, t in ((64, 8), (128, 16), (3072, 32), (6144, 64)) if s.width <= n), 128)
    return Launch("row", s.m * a_row / 128, 128, s.n, s.bytes, meets=int(a_row > 32))


def _flashinfer(s: _Step) -> Launch:
    """A program a row, 16 bytes a thread, up to 1024 threads; the row is read again from L1."""
    threads = max(32, min(1024, s.width * s.size // 16))
    turns = -(-s.width * s.size // 16 // threads)
    return Launch("loop", s.m, threads, s.n, s.bytes, reads=turns, rereads=turns, meets=1)


_NORMS: dict[str, Callable[[_Step], Launch]] = {
    "liger_rms_norm": _liger,
    "quack_rms_norm": _quack,
    "flashinfer_rms_norm": _flashinfer,
    "inductor": _inductor,
    "torch_rms_norm": _torch_norm,
    "torch_rms_norm_copied": _torch_norm,
    "dual_stream": _torch_norm,
}
ONE_LAUNCH = ("triton_fused", "aiter_fused", "cpu_fused")
"""Fused paths: one launch, or one a part from the path's own ``splits_from_m`` rows on."""
ROW_PAIRS = ("quack_rms_norm", "liger_rms_norm", "flashinfer_rms_norm")
MODELLED = ("copy_limit", "launch_floor", "torch_native", *ONE_LAUNCH, *_NORMS)
"""Names that ``plan`` knows how they work; quantised paths are not modelled."""


def _one(path: str, widths: Widths, m: int, dtype: str, arch: str) -> Launch:
    """The launch of a fused path, or of the same-traffic copy."""
    parts = [w for w in (widths.q_lora_rank, widths.kv_lora_rank) if w]
    size, n = ITEMSIZE[dtype], m * sum(parts)
    moved = (2 * m + 1) * sum(parts) * size
    if path == "copy_limit":
        starts = 0 if archs.from_sm_90(arch) else 1
        return Launch("copy", n * size / 2048, 128, n, moved, starts=starts)
    if path == "triton_fused":
        c = triton_config.heuristic(arch, m, widths.q_lora_rank, widths.kv_lora_rank, dtype)
        programs = triton_config.programs(c, m, widths.q_lora_rank, 1)
        starts = 0 if c.pdl else 1
        threads = c.num_warps * triton_config.lanes_of(arch)
        return Launch("row", programs, threads, n, moved, starts=starts, meets=1)
    # AITER's kernel is instantiated with 256 threads for a part of a row.
    return Launch("row", m * len(parts), 256, n, moved, meets=1)


def plan(
    path: str,
    widths: Widths,
    m: int,
    dtype: str = "bf16",
    *,
    arch: str,
    into_out: bool = False,
    contiguous: bool = False,
) -> list[Launch]:
    """The launches one call takes.

    Args:
        path: a path, or ``copy_limit`` / ``launch_floor`` (a cell's controls).
        widths: elements of the two parts.
        m: rows.
        dtype: of inputs and outputs.
        arch: one of ``data/archs.csv``; on a CPU F.rms_norm is the eager operations in C++.
        into_out: outputs are given; a path that makes its own then copies them.
        contiguous: the parts are not views of one buffer.

    Raises:
        MisuseError: a path whose working is not described here, or no such dtype.
    """
    one_of("path to model", MODELLED, path)
    one_of("dtype", ITEMSIZE, dtype)
    if path == "launch_floor":
        return [Launch("copy", 0, 0, 0, 0, reads=0)]
    parts = [w for w in (widths.q_lora_rank, widths.kv_lora_rank) if w]
    if path in ONE_LAUNCH or path == "copy_limit":
        splits_from_m = registry.get(path).splits_from_m if path in ONE_LAUNCH else None
        if splits_from_m is not None and m >= splits_from_m:
            return [_one(path, Widths(0, width), m, dtype, arch) for width in parts]
        return [_one(path, widths, m, dtype, arch)]
    cpu = arch == "cpu"
    if cpu and path == "torch_native" and not widths.q_lora_rank:
        parts = [0, *parts]  # eager operations on an empty tensor are dispatched all the same
    found: list[Launch] = []
    for i, width in enumerate(parts):
        s = _Step(m, width, ITEMSIZE[dtype], _cache_bytes(arch), contiguous or m == 1)
        if path == "torch_native" or (cpu and path.startswith("torch_rms_norm")):
            if path.endswith("_copied") and not s.contiguous:
                found.append(_gather(s))
            found += _eager(replace(s, contiguous=True) if path.endswith("_copied") else s)
            # A cast into the given output is the last operation; only F.rms_norm adds a copy.
            found += [_copy_out(s)] if into_out and path != "torch_native" else []
            continue
        gathers = _NORMS[path] is _torch_norm and not s.contiguous
        own = [_gather(s)] if gathers else []
        own.append(replace(_NORMS[path](s), kind="loop") if cpu else _NORMS[path](s))
        own += [_copy_out(s)] if into_out and path != "inductor" else []
        side = int(path == "dual_stream" and i > 0)
        found += [replace(x, side=side) for x in own]
    return found


def _cache_bytes(arch: str) -> float:
    """Of the last cache before memory; 0 where no table says."""
    product = next((p for p in archs.products() if p.name == arch), None)
    return 2**20 * ((product.llc_mib or product.l2_mib or 0) if product else 0)
