"""The choice from measurements: thresholds in M by arch, widths, dtype, quantisation and clock.

``data/dispatch/<arch>.csv`` is built by ``mlakit tune`` from timing rows; each line says from which
M a path is the fastest measured one, and in which recorded run. Reading it costs one small file.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cache

from mlakit.context import Context
from mlakit.datafiles import data_dir, read_table
from mlakit.paths import registry

COLUMNS = "q_lora_rank kv_lora_rank dtype quant clock m_from path source".split()


@dataclass(frozen=True)
class Ladder:
    """One kind of call: from ``m_from[i]`` rows on, ``paths[i]`` was the fastest measured path."""

    q_lora_rank: int
    kv_lora_rank: int
    dtype: str
    quant: str
    clock: str
    m_from: tuple[int, ...]
    paths: tuple[str, ...]
    source: str

    def at(self, m: int) -> tuple[int, str]:
        """(from which M on, path) for ``m`` rows; the first one below the smallest measured M."""
        step = max(0, bisect.bisect_right(self.m_from, m) - 1)
        return self.m_from[step], self.paths[step]


@cache
def ladders(arch: str) -> tuple[Ladder, ...]:
    """Every ladder of an arch; empty where nothing was measured on it."""
    file = data_dir() / "dispatch" / f"{arch}.csv"
    if not file.is_file():
        return ()
    groups: dict[tuple, list[tuple]] = {}
    for kind, step in read_table(file, _step):
        groups.setdefault(kind, []).append(step)
    found = []
    for (q, kv, dtype, quant, clock), steps in groups.items():
        m_from, paths, sources = zip(*sorted(steps), strict=True)
        found.append(Ladder(q, kv, dtype, quant, clock, m_from, paths, sources[0]))
    return tuple(found)


def _step(r: dict) -> tuple[tuple, tuple]:
    """(kind of call, (from which M on, path, source)) of one line."""
    if r["path"] not in registry.names():
        raise ValueError(f"no path {r['path']!r}")
    kind = int(r["q_lora_rank"]), int(r["kv_lora_rank"]), r["dtype"], r["quant"], r["clock"]
    return kind, (int(r["m_from"]), r["path"], r["source"])


def clock_of(context: Context) -> str:
    """The clock a context's calls are timed by: ``cpu``, ``graph`` in a capture, ``eager``."""
    if context.vendor == "cpu":
        return "cpu"
    return "graph" if context.capture else "eager"


def choose(context: Context) -> tuple[str, str] | None:
    """(path, reason) from measurements, or None where none speaks for this context.

    Widths that were not measured take the ladder of the nearest total width, and the reason says
    so; dtype, quantisation and clock must match, 16-bit dtypes standing for each other.
    """
    near = []
    for ladder in ladders(context.arch):
        same = ladder.quant == context.quant and ladder.clock == clock_of(context)
        alike = ladder.dtype == context.dtype or {ladder.dtype, context.dtype} == {"bf16", "fp16"}
        # kv alone is another kind of call: nothing is fused, so nothing stands for it.
        kind = (ladder.q_lora_rank == 0) == (context.q_lora_rank == 0)
        if same and alike and kind:
            apart = abs(ladder.q_lora_rank - context.q_lora_rank)
            apart += abs(ladder.kv_lora_rank - context.kv_lora_rank)
            near.append((apart, ladder.dtype != context.dtype, ladder))
    if not near:
        return None
    apart, other_dtype, ladder = min(near, key=lambda n: n[:2])
    m_from, path = ladder.at(context.m)
    shape = f"{ladder.q_lora_rank}+{ladder.kv_lora_rank} {ladder.dtype}"
    how = f"nearest measured: {shape}" if apart or other_dtype else f"measured at {shape}"
    return path, f"fastest from M = {m_from} on by {ladder.source} ({how}, {ladder.clock} clock)"
