"""Build the dispatch table: from timing rows to thresholds in M."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from mlakit.archs import base_name
from mlakit.datafiles import data_dir
from mlakit.dispatch import table
from mlakit.errors import MisuseError
from mlakit.records import CONTROLS, with_figure
from mlakit.sweep.parquet import replace_whole

_HYSTERESIS = 0.01
"""A path that is within this share of the fastest keeps its place: two paths that are level would
otherwise alternate from one M to the next, by noise alone."""

GROUP = "q_lora_rank kv_lora_rank dtype quant clock".split()


def candidates(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that may be chosen: with a figure, cold cache, split views, no fallback."""
    frame = with_figure(frame)
    real = (frame["path_ran"] == frame["path_requested"]) & ~frame["path_ran"].isin(CONTROLS)
    return frame[real & (frame["cache"] == "cold") & (frame["layout"] == "split")]


def ladder_steps(part: pd.DataFrame) -> list[tuple[int, str]]:
    """(m_from, path) for one kind of call; ``part``: its rows over M.

    Between two measured M the threshold is their geometric middle: time is nearly a power law in M
    on either side of a crossing.
    """
    times = part.groupby(["m", "path_ran"])["p50_us"].median().unstack()
    steps: list[tuple[int, str]] = []
    before = None
    for m, row in times.iterrows():
        fastest = row.idxmin()
        held = steps[-1][1] if steps else None
        if held is None:
            steps.append((1, fastest))
        elif not row.get(held, math.inf) <= row[fastest] * (1 + _HYSTERESIS):
            steps.append((math.ceil(math.sqrt(before * m)), fastest))
        before = m
    return steps


def build(frame: pd.DataFrame, source: str) -> list[dict]:
    """Table lines (``table.COLUMNS``) of one arch.

    Raises:
        MisuseError: no usable row, or rows of several archs.
    """
    rows = candidates(frame)
    if rows.empty:
        raise MisuseError("no timing row to tune from: sweep first, cold cache, split layout")
    if rows["arch"].nunique() > 1:
        raise MisuseError(
            f"rows of several archs: {', '.join(sorted(set(rows['arch'])))}; tune one"
        )
    lines = []
    for key, part in rows.groupby(GROUP, sort=True):
        for m_from, path in ladder_steps(part):
            lines.append(dict(zip(GROUP, key, strict=True)) | {"m_from": m_from, "path": path})
    return [line | {"source": source} for line in lines]


def write(arch: str, lines: list[dict], folder: str | Path | None = None) -> Path:
    """Write an arch's table, whole or not at all; the file."""
    target = Path(folder or data_dir() / "dispatch") / f"{base_name(arch)}.csv"
    frame = pd.DataFrame(lines, columns=table.COLUMNS)
    replace_whole(target, lambda temporary: frame.to_csv(temporary, index=False))
    table.ladders.cache_clear()
    return target
