"""Regret: the time a policy loses against the best available path, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from mlakit.context import Context
from mlakit.dispatch import policies
from mlakit.dispatch.choice import OUTSIDE
from mlakit.dispatch.probe import weight_dtype_for
from mlakit.errors import MisuseError, RefusedError, one_of
from mlakit.sweep.store import recorded_rows
from mlakit.sweep.tune import candidates

TRAFFIC: dict[str, Callable[[int], float]] = {
    "even": lambda m: 1.0,
    "decode-heavy": lambda m: 1.0 / m,
    "prefill-heavy": lambda m: float(m),
}
"""Weight of a cell by its M: ``decode-heavy`` as if every M served as many rows, in more calls."""

_NOTHING = "no timing row to judge: sweep first, cold cache, split layout"
CELL = "arch q_lora_rank kv_lora_rank m dtype quant clock".split()


@dataclass(frozen=True)
class Regret:
    """Shares of time lost; 0.02 is 2 %. ``cells`` judged, ``unjudged`` without a figure."""

    policy: str
    mean: float
    worst: float
    weighted: float
    traffic: str
    cells: int
    unjudged: int
    worst_cell: str
    stand_ins: str
    """paths of the engine that mlakit does not have, and what was timed in their place"""


def _context_of(cell: dict) -> Context:
    """The context in which a timing row's call was made."""
    arch, dtype, quant = cell["arch"], cell["dtype"], cell["quant"]
    sizes: dict = {c: int(cell[c]) for c in ("m", "q_lora_rank", "kv_lora_rank")}
    return Context(
        arch, **sizes, dtype=dtype, norm_weight_dtype=dtype, quant=quant,
        weight_dtype=weight_dtype_for(arch, dtype, quant), block_scale=quant != "fp8_token",
        capture=cell["clock"] == "graph",
    )  # fmt: skip


def _cell_regrets(frame: pd.DataFrame, policy: str) -> pd.DataFrame:
    """A row a cell: the policy's path, the best one, and the share lost outside the interval.

    The interval of a cell is that of its headline ratio; a loss inside it counts as none. Where
    the policy's path has no figure the share is NaN, and ``note`` says why.
    """
    rows = []
    for key, part in candidates(frame).groupby(CELL, sort=False):
        cell = dict(zip(CELL, key, strict=True))
        times = part.groupby("path_ran")["p50_us"].median()
        half = part["ratio_hi"].sub(part["ratio_lo"]).div(2).div(part["ratio"])
        half = half.groupby(part["path_ran"]).median().fillna(0.0)
        best = times.idxmin()
        path, note = _path_of(policy, cell)
        lost = np.nan
        if path in times.index:
            lost = times[path] / times[best] - 1
            lost = max(0.0, lost - float(np.hypot(half.get(path, 0), half.get(best, 0))))
        elif not note:
            note = f"{path} was not timed"
        rows.append(cell | {"path": path, "best": best, "regret": lost, "note": note})
    return pd.DataFrame(rows)


def _path_of(policy: str, cell: dict) -> tuple[str, str]:
    try:
        choice = policies.choose(_context_of(cell), policy)
    except RefusedError as error:
        return "", str(error)
    stand_in = OUTSIDE[choice.path].stand_in if choice.path in OUTSIDE else None
    if stand_in:
        return stand_in, f"{stand_in} stands in for {choice.path}"
    return choice.path, ""


def regret(frame: pd.DataFrame, policy: str, traffic: str = "even") -> Regret:
    """A policy's regret over the cells of ``frame`` (timing rows of one device).

    Raises:
        MisuseError: unknown policy or traffic profile.
    """
    one_of("traffic profile", TRAFFIC, traffic)
    policies.get(policy)
    if candidates(frame).empty:
        raise MisuseError(_NOTHING)
    cells = _cell_regrets(frame, policy)
    judged = cells[cells["regret"].notna()]
    if judged.empty:
        nan = float("nan")
        return Regret(policy, nan, nan, nan, traffic, 0, len(cells), "", "")
    weights = judged["m"].astype(float).map(TRAFFIC[traffic])
    worst = judged.loc[judged["regret"].idxmax()]
    lost = float(judged["regret"].mean()), float(judged["regret"].max())
    weighted = float(np.average(judged["regret"], weights=weights))
    where = (
        f"{worst['q_lora_rank']}+{worst['kv_lora_rank']} M={worst['m']} {worst['dtype']} "
        f"{worst['clock']}: {worst['path']}, best {worst['best']}"
    )
    stand_ins = "; ".join(sorted({n for n in judged["note"] if n}))
    counts = len(judged), len(cells) - len(judged)
    return Regret(policy, *lost, weighted, traffic, *counts, where, stand_ins)


def held_out() -> pd.DataFrame:
    """The committed timing rows that no table was tuned on and no model was fitted to."""
    return recorded_rows("*/heldout/*.parquet")


def by_policy(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """What each policy loses over ``frame``'s cells, in percent: a row a device and policy.

    Columns: device, policy, mean_pct, worst_pct, one ``_pct`` a traffic profile but the even one,
    cells, unjudged (the policy's path was not timed, or its engine fails there), worst_cell,
    stand_ins, evidence. A device without a timing row to judge has no row here.

    Raises:
        MisuseError: no device has one, or an unknown policy.
    """
    rows = []
    parts = [found for found in frame.groupby("device") if len(candidates(found[1]))]
    if not parts:
        raise MisuseError(_NOTHING)
    for (device, part), name in product(parts, tuple(names)):
        found = {traffic: regret(part, name, traffic) for traffic in TRAFFIC}
        even = found.pop("even")
        rows.append(
            {"device": device, "policy": even.policy}
            | {"mean_pct": 100 * even.mean, "worst_pct": 100 * even.worst}
            | {f"{traffic}_pct": 100 * of.weighted for traffic, of in found.items()}
            | {k: getattr(even, k) for k in ("cells", "unjudged", "worst_cell", "stand_ins")}
            | {"evidence": ", ".join(sorted(set(part["evidence"])))}
        )
    return pd.DataFrame(rows)
