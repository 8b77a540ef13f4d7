"""The knobs of ``triton_fused``, apart from the kernel: config, heuristic, search space, validity.

Pure functions of arch, rows and widths: none needs a GPU or triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from mlakit.archs import from_sm_90, vendor_of

MAX_WIDTH = 16384
MAX_THREADS = 1024
"""threads a program may have on every card that Triton compiles for"""
MAX_ELEMENTS_PER_THREAD = 128
"""above this a thread's row no longer fits 255 registers beside its weights, and spills"""
MAX_WARPS_PER_ROW = 8
VECTOR_BYTES = 16
"""the widest load one thread makes, on NVIDIA (ld.v4.b32) as on AMD (global_load_dwordx4)"""
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


ANY_M = 1 << 62
PROGRAMS = {
    # More programs than a card starts, one in about 1.2 ns, are what binds small ones: 65,536 rows
    # of 768 + 256 take 69.4 us with two warps a program where four take 67.6.
    ("q and kv", "wide"): ((1024, 1, 1), (ANY_M, 4, 1)),
    # Two rows a warp. 768 + 256, launches apart and overlapping: 18.3 and 17.7 us against 18.4 and
    # 18.2 at M = 16384, 66.5 and 68.0 against 67.5 and 69.0 at 65536.
    ("q and kv", "narrow"): ((1024, 1, 1), (8192, 4, 1), (ANY_M, 2, 2)),
    # From M = 1024 on four warps gain 2 %; at 64 they would lose 2 %.
    ("kv", "wide"): ((128, 1, 1), (ANY_M, 4, 1)),
    # kv alone 512: four warps 0.93 us, one 0.94 at M = 1; eight 2.21, four 2.26 at 512; launches
    # overlapping two 3.23, four 3.34 at 4096, and two with two rows each 5.36, four 5.59 at 8192.
    ("kv", "narrow"): (
        *((4, 4, 1), (128, 1, 1), (256, 4, 1), (768, 8, 1), (2048, 4, 1)),
        *((4096, 2, 1), (8192, 2, 2), (ANY_M, 4, 1)),
    ),
}
"""Up to this many rows: fewest warps of a program, and rows that a warp holds at once. Narrow is
1 KiB of a row of kv alone, 2 KiB of both parts."""


@dataclass(frozen=True)
class Config:
    """Every knob of one launch. Rows are rows per program; warps are warps that share one row.

    A row's sum has the tree of its width (``warps_per_row``), of which ``q_warps`` and ``k_warps``
    hold a part or the whole: no knob but ``own_tree`` changes a bit of the result.
    """

    q_rows: int = 1
    k_rows: int = 1
    q_warps: int = 2
    k_warps: int = 2
    num_warps: int = 2
    separate: bool = True
    """one program normalises rows of q or of kv; otherwise each does both parts of its rows"""
    persistent: bool = False
    """programs walk over the rows, as many as fit the card at once, and keep their weights"""
    hoist_weight: bool = True
    """weights are asked for before the reduction rather than after it"""
    evict_first: bool = False
    """rows leave the L2 first: they are read once"""
    pdl: bool = False
    """programmatic dependent launch: start while the kernel before drains (sm_90 and later)"""
    release_first: bool = False
    """with ``pdl``: let the next kernel start before this one has waited, rather than after"""
    own_tree: bool = False
    """the row's sum has the tree of the warps that hold it, not its width's"""


def lanes_of(arch: str) -> int:
    """Threads of a warp that Triton compiles for: 64 on CDNA (gfx9), else 32."""
    return 64 if arch.startswith("gfx9") else 32


def vector_width(dtype: str) -> int:
    """Elements of ``dtype`` that one thread loads at once."""
    return VECTOR_BYTES // ITEMSIZE[dtype]


def warps_per_row(arch: str, width: int, dtype: str) -> int:
    """Warps of the reduction tree of a row of ``width`` elements, whatever M is.

    As few as leave a thread two vectors of the row: on an H200 at 1536 + 512 in bf16 this tree is
    within 1 % of the best of nine at every M but 2048 (3 %), and one warp more or less a row costs
    2 to 5 % at some M.
    """
    warps = 1
    while width > 2 * vector_width(dtype) * lanes_of(arch) * warps and warps < MAX_WARPS_PER_ROW:
        warps *= 2
    return warps


def trees_of(config: Config, arch: str, q_width: int, k_width: int, dtype: str) -> tuple[int, int]:
    """Warps of the tree of a row's sum, of q and of k, under ``config``."""
    if config.own_tree:
        return config.q_warps, config.k_warps
    return warps_per_row(arch, q_width, dtype), warps_per_row(arch, k_width, dtype)


def heuristic(
    arch: str,
    m: int,
    q_width: int,
    k_width: int,
    dtype: str = "bf16",
    *,
    batch_invariant: bool = True,
) -> Config:
    """The config for ``m`` rows on ``arch``, from a recorded search on an H200 (sm_90).

    Other archs get the same shape of launch from their own wave size; nobody measured it there.
    """
    k_warps = warps_per_row(arch, k_width, dtype)
    q_warps = warps_per_row(arch, q_width, dtype) if q_width else k_warps
    if arch == "cpu":
        # The interpreter's cost is per operation, whatever the tile: few programs of many rows.
        return Config(64, 64, q_warps, k_warps, max(q_warps, k_warps))
    if 1024 < m <= 2048 and q_warps == 4 and q_width <= 1536:
        # Four warps leave a quarter of their lanes empty: 6.02 us against 5.98 with two at
        # M = 2048, 1536 + 512; at 1024 and 4096 two lose 2 and 1 %, at 2048 + 512 always.
        q_warps = 2
    narrow = (q_width + k_width) * ITEMSIZE[dtype] <= (2048 if q_width else 1024)
    programs = PROGRAMS["q and kv" if q_width else "kv", "narrow" if narrow else "wide"]
    fewest, rows = next(p[1:] for p in programs if m <= p[0])
    num_warps = max(q_warps, k_warps, fewest)
    nvidia = vendor_of(arch) == "nvidia"
    # Between two matrix products the step adds 0.5 us instead of 1.4 at M = 1, 0.9 instead of 2.1
    # at 128, 8.6 instead of 9.4 at 4096; but 2.5 instead of 1.8 at 256 and the same or more from
    # there to 2048.
    early = from_sm_90(arch) and (m <= 192 or m >= 4096)
    return Config(
        q_rows=num_warps // q_warps * rows,
        k_rows=num_warps // k_warps * rows,
        q_warps=q_warps,
        k_warps=k_warps,
        num_warps=num_warps,
        # One program for both parts of a row never won: 2.95 us against 2.23 at M = 128, 129.5
        # against 129.2 at 65536.
        separate=True,
        # Asked for early, weights cost no wait: 1.83 us against 1.99 at M = 1, and still 129.2
        # against 130.3 at M = 65536, where registers could have been the price.
        hoist_weight=True,
        # 2.04 us against 2.11 at M = 64; from M = 2048 on it costs: 132.2 against 129.2 at 65536.
        evict_first=nvidia and m <= 1024,
        pdl=early,
        # Back to back 5 to 6 % faster up to M = 8, 1 % at 32; from 64 on 1 to 7 % slower.
        release_first=early and m <= 32,
        own_tree=not batch_invariant,
    )


def launched(config: Config, early: bool) -> Config:
    """``config`` with early launches, or with none: each waits until the one ahead has ended."""
    return replace(config, pdl=early, release_first=early and config.release_first)


def check(config: Config, arch: str, q_width: int, k_width: int, dtype: str = "bf16") -> str | None:
    """None if the kernel can run with ``config``, else one line that says why not."""
    lanes, vec = lanes_of(arch), vector_width(dtype)
    if config.num_warps * lanes > MAX_THREADS:
        return f"{config.num_warps} warps of {lanes} are over {MAX_THREADS} threads"
    if config.persistent and config.separate:
        return "a persistent program does both q and kv: separate must be False"
    if not config.separate and q_width and config.q_rows != config.k_rows:
        return f"one program for both parts needs equal rows, not {config.q_rows}, {config.k_rows}"
    if config.pdl and not from_sm_90(arch):
        return f"{arch} has no programmatic dependent launch (sm_90 and later)"
    trees = trees_of(config, arch, q_width, k_width, dtype)
    for name, rows, warps, tree, width in (
        ("q", config.q_rows, config.q_warps, trees[0], q_width),
        ("k", config.k_rows, config.k_warps, trees[1], k_width),
    ):
        if not width:
            continue
        if min(rows, warps) < 1 or rows & (rows - 1) or warps & (warps - 1):
            return f"{name}: rows {rows} and warps {warps} must be powers of two"
        if warps > tree:
            return f"{name}: {warps} warps a row; the tree of {width} elements has {tree}"
        if config.num_warps % warps or rows * warps < config.num_warps:
            return f"{name}: {rows} rows of {warps} warps do not fill {config.num_warps} warps"
        chunk = warps * lanes * vec
        held = rows * warps * -(-width // chunk) * vec // config.num_warps
        if held > MAX_ELEMENTS_PER_THREAD and arch != "cpu":
            return f"{name}: {held} elements a thread, over {MAX_ELEMENTS_PER_THREAD}"
    return None


def search_space(
    arch: str,
    m: int,
    q_width: int,
    k_width: int,
    dtype: str = "bf16",
    *,
    batch_invariant: bool = True,
) -> list[Config]:
    """Every valid config worth timing for ``m`` rows, of the width's tree if batch-invariant."""
    most = [warps_per_row(arch, n, dtype) if batch_invariant else 8 for n in (q_width, k_width)]
    held = [w for w in product((1, 2, 4, 8), repeat=2) if w[0] <= most[0] and w[1] <= most[1]]
    if not q_width:
        held = [(w, w) for w in (1, 2, 4, 8) if w <= most[1]]
    launches = [(False, False), (True, False), (True, True)]
    launches = launches if vendor_of(arch) == "nvidia" else launches[:1]
    found: dict[Config, None] = {}
    for (q_warps, k_warps), num_warps, rows, separate in product(
        held, (1, 2, 4, 8), (1, 2, 4), (True, False)
    ):
        q_rows, k_rows = (num_warps // w * rows for w in (q_warps, k_warps))
        if not separate:
            q_rows = k_rows = max(q_rows, k_rows)
        if not q_rows or not k_rows or rows > m:
            continue
        for hoist, evict, persistent, launch in product(
            (True, False), (True, False), (False, True), launches
        ):
            rest = separate, persistent, hoist, evict, *launch
            config = Config(q_rows, k_rows, q_warps, k_warps, num_warps, *rest, not batch_invariant)
            if check(config, arch, q_width, k_width, dtype) is None:
                found[config] = None
    return list(found)


def resident(config: Config, compute_units: int) -> int:
    """Programs that a card holds at once at 64 registers a thread: 32 warps a compute unit.

    Persistent programs lost on the H200 at every M (37.1 us against 34.3 at M = 16384), so no
    heuristic chooses them.
    """
    return compute_units * max(1, 32 // config.num_warps)


def programs(config: Config, m: int, q_width: int, resident: int) -> int:
    """Programs of the grid's x axis for ``m`` rows; ``resident``: as many as fit the card."""
    k_programs = -(-m // config.k_rows)
    if config.separate and q_width:
        return -(-m // config.q_rows) + k_programs
    return min(k_programs, resident) if config.persistent else k_programs


def constants(
    config: Config,
    arch: str,
    q_width: int,
    k_width: int,
    dtype: str,
    *,
    q_aligned: bool = True,
    k_aligned: bool = True,
) -> dict[str, object]:
    """The kernel's compile-time arguments, in its order, for one config on one arch."""
    trees = trees_of(config, arch, q_width, k_width, dtype)
    return {
        "Q_N": q_width,
        "K_N": k_width,
        "Q_ROWS": config.q_rows,
        "K_ROWS": config.k_rows,
        "Q_WARPS": config.q_warps,
        "K_WARPS": config.k_warps,
        "Q_TREE": trees[0],
        "K_TREE": trees[1],
        "NUM_WARPS": config.num_warps,
        "LANES": lanes_of(arch),
        "VEC": vector_width(dtype),
        "SEPARATE": config.separate,
        "PERSISTENT": config.persistent,
        "HOIST": config.hoist_weight,
        "EVICT": "evict_first" if config.evict_first else "",
        "PDL": ("before" if config.release_first else "after") if config.pdl else "",
        "Q_ALIGNED": q_aligned,
        "K_ALIGNED": k_aligned,
    }
