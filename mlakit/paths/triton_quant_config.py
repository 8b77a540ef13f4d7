"""Config, heuristic and search space of the quantised kernel: ``triton_config.Config``'s knobs.

Pure functions of arch, rows and widths: none needs a GPU or triton.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

from mlakit import archs
from mlakit.context import Context
from mlakit.paths import triton_config
from mlakit.paths.triton_config import ANY_M, Config, lanes_of

FEW_ROWS = 512
"""rows up to which the L2 is told that rows are read once (2 % at M = 64, nothing at 1024)"""
TREE = 2
"""Warps of the tree of a row that two warps hold at 64 elements a thread"""
_FEW, _K2, _K4 = (2, 1, 1, 2, True), (2, 1, 2, 2, True), (2, 1, 4, 2, True)
_TWO = (2, 1, 1, 4, True)
_ALONE = (1, 1, 1, 1, False)
SECOND = {
    "fp8": ((1024, *_FEW), (ANY_M, *_TWO)),
    "mxfp4": ((2048, *_FEW), (ANY_M, *_TWO)),
}
"""``SHAPES`` of the pair's second launch: 12.5 us a pair instead of 14.3 at M = 4096 (FP8), and 5.5
instead of 6.2 at 1024 (MXFP4)"""
SHAPES = {
    # Two rows a program are 1 to 3 % slower back to back up to 1024 than one, 1.5 % faster at 4096;
    # between two FP8 products they add 3.1 and 4.7 us instead of 3.5 and 5.3 at 1536 and 2048.
    ("fp8", True): ((1024, *_FEW), (4096, *_TWO), (32768, *_K2), (ANY_M, *_ALONE)),
    ("fp8", False): ((256, *_FEW), (32768, *_K2), (ANY_M, *_ALONE)),
    ("mxfp4", True): ((2048, *_FEW), (8192, *_K2), (ANY_M, *_ALONE)),
    ("mxfp4", False): ((256, *_FEW), (768, *_K2), (1536, *_K4), (8192, *_K2), (ANY_M, *_ALONE)),
}
"""By format and whether launches overlap: up to this many rows, warps a row of q, its turns and
kv's, warps of a program, and whether a program takes q or kv. The fastest of a dozen on an H200, at
1536 + 512 in bf16."""


def heuristic(
    quant: str,
    arch: str,
    m: int,
    q_width: int,
    k_width: int,
    dtype: str = "bf16",
    *,
    normalise: bool = True,
    early: bool = True,
) -> Config:
    """The config for ``m`` rows on ``arch``, from an H200 (sm_90) at 1536 + 512 in bf16.

    Launches overlap where the card can, unless ``early`` is False. Other archs get the shapes that
    do not, from their own wave size; nobody measured them there.
    """
    q_tree, k_tree = trees_of(arch, q_width, k_width, dtype)
    if arch == "cpu":
        # The interpreter's cost is per operation, whatever the tile: few programs of many rows.
        return Config(64, 64, q_tree, k_tree, 64 * max(q_tree, k_tree))
    early = early and archs.from_sm_90(arch)
    kind = quant.partition("_")[0]
    shapes = SHAPES[kind, early] if normalise else SECOND[kind]
    _, q_warps, q_turns, k_turns, num_warps, separate = next(s for s in shapes if m <= s[0])
    # Wider rows than 1536 and 512 share in as many warps more as their trees have.
    q_warps = q_warps * q_tree // TREE
    num_warps = max(min(num_warps * q_tree // TREE, triton_config.MAX_WARPS_PER_ROW), q_warps)
    k_warps = min(k_tree, num_warps)
    launch = triton_config.heuristic(arch, m, q_width, k_width, dtype)
    launch = triton_config.launched(launch, early)
    q_rows, k_rows = num_warps // q_warps * q_turns, num_warps // k_warps * k_turns
    return replace(
        launch, q_rows=q_rows, k_rows=k_rows, q_warps=q_warps, k_warps=k_warps, num_warps=num_warps,
        separate=separate or q_rows != k_rows, evict_first=m <= FEW_ROWS,
    )  # fmt: skip


def knobs(quant: str, context: Context) -> dict:
    """The config that a plain call of the fused launch takes in ``context``."""
    widths = context.q_lora_rank, context.kv_lora_rank
    return asdict(heuristic(quant, context.arch, context.m, *widths, context.dtype))


def norms(
    arch: str, m: int, q_width: int, k_width: int, dtype: str = "bf16", *, early: bool = True
) -> Config:
    """The config of the pair's first launch: ``triton_fused``'s, but for the overlap."""
    config = triton_config.heuristic(arch, m, q_width, k_width, dtype)
    return triton_config.launched(config, early and archs.from_sm_90(arch))


def unfused_knobs(quant: str, context: Context) -> dict:
    """The config of the pair's first launch in ``context``, and of its ``second``."""
    arch, m, width, dtype = context.arch, context.m, context.q_lora_rank, context.dtype
    second = heuristic(quant, arch, m, width, width, dtype, normalise=False)
    return asdict(norms(arch, m, width, context.kv_lora_rank, dtype)) | {"second": asdict(second)}


def trees_of(arch: str, q_width: int, k_width: int, dtype: str) -> tuple[int, int]:
    """Warps of a row's tree: of q twice as many as hold it at 64 elements a thread."""
    q_warps = TREE
    while q_width > q_warps // 2 * lanes_of(arch) * 64 and q_warps < 8:
        q_warps *= 2
    return q_warps, triton_config.warps_per_row(arch, k_width, dtype)


def check(
    quant: str, config: Config, arch: str, q_width: int, k_width: int, dtype: str = "bf16"
) -> str | None:
    """None if the kernel can run with ``config``, else one line that says why not.

    ``q_warps`` and ``k_warps`` are those that share a row here, at most as many as the width's tree
    has (kv's is ``triton_fused``'s): each warp then does the work of several. Of a part's rows as
    many lie side by side as the warps hold, the rest follow in turns.
    """
    if config.persistent:
        return "the quantised kernel is not persistent"
    if config.own_tree:
        return "the quantised kernel has its width's tree only"
    if config.pdl and not archs.from_sm_90(arch):
        return f"{arch} has no programmatic dependent launch (sm_90 and later)"
    if not config.separate and config.q_rows != config.k_rows:
        return f"one program for both parts needs equal rows, not {config.q_rows}, {config.k_rows}"
    warps = config.num_warps
    trees = trees_of(arch, q_width, k_width, dtype)
    if warps < 1 or warps & (warps - 1):
        return f"{warps} warps: must be a power of two"
    if warps * lanes_of(arch) > triton_config.MAX_THREADS and arch != "cpu":
        return f"{warps} warps of {lanes_of(arch)} are over {triton_config.MAX_THREADS} threads"
    for name, rows, together, tree, width in (
        ("q", config.q_rows, config.q_warps, trees[0], q_width),
        ("k", config.k_rows, config.k_warps, trees[1], k_width),
    ):
        if together not in (1, 2, 4, 8)[: tree.bit_length()] or warps % together:
            return f"{name}: {together} of {warps} warps a row; the width's tree has {tree}"
        if rows < 1 or rows & (rows - 1) or (rows * together < warps and arch != "cpu"):
            return f"{name}: {rows} rows of {together} warps do not fill {warps} warps"
        held = -(-rows * width // (warps * lanes_of(arch)))
        if held > triton_config.MAX_ELEMENTS_PER_THREAD and arch != "cpu":
            return f"{name}: {held} elements a thread, over {triton_config.MAX_ELEMENTS_PER_THREAD}"
    return None


def search_space(
    quant: str, arch: str, m: int, q_width: int, k_width: int, dtype: str = "bf16"
) -> list[Config]:
    """Every valid config worth timing for ``m`` rows."""
    q_tree, k_tree = trees_of(arch, q_width, k_width, dtype)
    found = []
    for num_warps, q_rows, k_rows, q_warps, k_warps, separate, evict, pdl in product(
        *((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)),
        *((True, False), (False, True), (False, True)),
    ):
        config = Config(
            q_rows, k_rows, q_warps, k_warps, num_warps, separate, evict_first=evict, pdl=pdl
        )
        whole = q_warps * 2 >= q_tree and k_warps == min(k_tree, num_warps)
        if whole and q_rows <= m and not check(quant, config, arch, q_width, k_width, dtype):
            found.append(config)
    return found
