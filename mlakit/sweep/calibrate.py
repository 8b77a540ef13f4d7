"""Fit the latency model to timing rows, and score it on what the fit never saw.

A held-out cell's width pair *and* path are both absent from the fit that predicts it. Errors are
absolute, in percent of the measured median. ``mlakit.sweep.latency_table`` makes
``data/latency.csv`` of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from mlakit import archs, latency, launches
from mlakit.errors import MisuseError
from mlakit.records import CONTROLS, with_figure
from mlakit.shapes import Widths

PRIOR: dict[str, dict[str, float]] = {
    "gpu": {
        "launch_us": 0.7, "program_us": 0.5, "read_us": 0.5, "reread_us": 0.3, "meet_us": 0.1,
        "index_us": 0.7, "loaded_us": 0.3, "half_loaded": 0.3, "crowd": 1.5, "gbps": 4000.0,
        "cache_gbps": 8000.0,
    },
    "cpu": {"launch_us": 1.0, "gbps": 30.0}
    | {f"call_us:{k}": 2.0 for k in latency.KINDS}
    | {f"rate:{k}": 1.0 if k == "gather" else 2.0 for k in latency.KINDS},
}  # fmt: skip
"""Where a fit starts and what a parameter that no row tells anything of stays at: guesses made
before the first fit."""
PRIOR_WEIGHT = 1.0
"""How hard a fit is held to its start: a parameter moved e-fold costs as much as a cell missed by a
factor of e. Of 0.1, 0.3 and 1, nested cross-validation chose this for every fit of an earlier H200
recording (420 cells)."""
FAMILIES = {"torch_rms_norm_copied": "torch_rms_norm", "dual_stream": "torch_rms_norm"}
"""Paths of the same kernels: one of them does not count as unseen while the other is seen."""


def usable(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows the model speaks of: a figure, cold cache, 16-bit or float32, a path it knows."""
    frame = with_figure(frame)
    keep = (
        (frame["cache"] == "cold")
        & (frame["quant"] == "none")
        & frame["clock"].isin(["graph", "cpu"])
        & frame["path_ran"].isin(launches.MODELLED)
        & (frame["path_ran"].isin(CONTROLS) | (frame["path_ran"] == frame["path_requested"]))
    )
    return frame[keep].reset_index(drop=True)


def units_of(frame: pd.DataFrame) -> int:
    """Compute units of the rows' device: threads on a CPU (from the rows' notes).

    Raises:
        MisuseError: no rows, rows of several devices, or a card whose units no table has.
    """
    devices = frame["device"].unique()
    if len(devices) != 1:
        raise MisuseError(f"rows of {len(devices)} devices: calibrate one device at a time")
    arch = archs.base_name(frame["arch"].iloc[0])
    if arch == "cpu":
        threads = re.search(r"torch threads (\d+)", " ".join(frame["note"].dropna()))
        return int(threads.group(1)) if threads else 1
    return required(product_of(arch, devices[0]).compute_units, f"compute units of {devices[0]}")


def required(value, what: str):
    """``value``, unless ``data/archs.csv`` leaves it empty; ``what`` it is, for the message.

    Raises:
        MisuseError: it is None.
    """
    if value is None:
        raise MisuseError(f"data/archs.csv has no {what}: add it, with its source")
    return value


def product_of(arch: str, device: str) -> archs.Arch:
    """The line of ``data/archs.csv`` for a device's own name, else the arch's first line."""
    of_arch = [p for p in archs.products() if p.name == arch]
    named = [p for p in of_arch if p.product.split()[0].lower() in device.lower()]
    return (named or of_arch)[0]


class _Design:
    """The launches of every row, flat, so that a fit predicts all rows in one pass."""

    def __init__(self, frame: pd.DataFrame) -> None:
        made: list = []
        call: list[int] = []
        for i, r in enumerate(frame.itertuples()):
            own = launches.plan(
                r.path_ran,
                Widths(int(r.q_lora_rank), int(r.kv_lora_rank)),
                int(r.m),
                r.dtype,
                arch=archs.base_name(r.arch),
                into_out=r.layout.endswith("_out"),
                contiguous=r.layout == "contiguous",
            )
            if r.cache == "hot":
                own = [replace(x, moved=0.0, cached=x.moved + x.cached) for x in own]
            made += own
            call += [i] * len(own)
        self.columns, self.call, self.rows = latency.columns_of(made), np.array(call), len(frame)
        self.resident = latency.resident_threads(archs.base_name(frame["arch"].iloc[0]))

    def predict(self, parameters: Mapping[str, float], units: int) -> np.ndarray:
        """Microseconds of each row."""
        found = latency.by_cause(
            parameters, units, self.resident, self.columns, self.call, self.rows
        )
        return np.sum(list(found.values()), axis=0)


def predict(frame: pd.DataFrame, parameters: Mapping[str, float], units: int) -> np.ndarray:
    """Modelled microseconds of rows as ``usable`` returns them."""
    return _Design(frame).predict(parameters, units)


def fit(
    frame: pd.DataFrame,
    units: int,
    fixed: Mapping[str, float] | None = None,
    weight: float = PRIOR_WEIGHT,
) -> dict[str, float]:
    """Parameters that fit rows (of ``usable``, one device) best, by least squares on logarithms.

    Every path weighs the same, however many rows it has. ``fixed`` parameters are kept; the launch
    cost is the launch floor's own median where the rows have one. ``weight``: see
    ``PRIOR_WEIGHT``.

    Raises:
        MisuseError: no rows.
    """
    from scipy.optimize import least_squares

    if frame.empty:
        raise MisuseError("no timing row to calibrate from: sweep first, cold cache, no quant")
    cpu = frame["clock"].iloc[0] == "cpu"
    floor = frame.loc[frame["path_ran"] == "launch_floor", "p50_us"]
    rest = frame[frame["path_ran"] != "launch_floor"]
    held = ({"launch_us": float(floor.median())} if len(floor) else {}) | dict(fixed or {})
    start = PRIOR["cpu" if cpu else "gpu"] | held
    names = [n for n in start if n not in held]
    most = np.full(len(names), np.inf)
    if "gbps" in names and not cpu:
        product = product_of(archs.base_name(frame["arch"].iloc[0]), frame["device"].iloc[0])
        start["gbps"] = 0.85 * required(product.hbm_gbps, f"bandwidth of {product.product}")
        most[names.index("gbps")] = np.log(1 / 0.85)
    design, truth = _Design(rest), np.log(rest["p50_us"].to_numpy(float))
    cells = rest.groupby("path_ran")["p50_us"].transform("size").to_numpy()
    share = np.sqrt(len(rest) / cells / rest["path_ran"].nunique())

    def parameters(x: np.ndarray) -> dict[str, float]:
        return start | {n: start[n] * np.exp(v) for n, v in zip(names, x, strict=True)}

    def residuals(x: np.ndarray) -> np.ndarray:
        missed = np.log(design.predict(parameters(x), units)) - truth
        return np.concatenate([share * missed, weight * x])

    bounds, first = (np.full(len(most), -np.inf), most), np.zeros(len(most))
    found = least_squares(residuals, first, bounds=bounds, loss="soft_l1", f_scale=0.1, max_nfev=80)
    return {n: float(v) for n, v in parameters(found.x).items()}


def with_error(cells: pd.DataFrame, modelled_us) -> pd.DataFrame:
    """``cells`` with ``modelled_us`` and its signed ``error_pct``."""
    error = 100 * (modelled_us - cells["p50_us"]) / cells["p50_us"]
    return cells.assign(modelled_us=modelled_us, error_pct=error).reset_index(drop=True)


def held_out(
    frame: pd.DataFrame, *, paths_too: bool = True, weight: float = PRIOR_WEIGHT
) -> pd.DataFrame:
    """``frame`` with ``modelled_us`` and ``error_pct``, each cell predicted by a stranger's fit.

    Args:
        frame: rows of one device.
        paths_too: leave the cell's path (and its family) out of the fit as well as its width pair;
            the controls (copy, launch floor) stay, at the other pairs.
        weight: of ``fit``.

    Raises:
        MisuseError: fewer than two width pairs.
    """
    frame = usable(frame)
    units, family = units_of(frame), frame["path_ran"].replace(FAMILIES)
    pairs = frame["q_lora_rank"].astype(str) + "+" + frame["kv_lora_rank"].astype(str)
    if pairs.nunique() < 2:
        raise MisuseError("rows of one width pair: nothing can be held out; sweep another pair")
    parts = []
    for (pair, group), part in frame.groupby([pairs, family if paths_too else pairs]):
        cells = part[~part["path_ran"].isin(CONTROLS)]
        if len(cells):
            train = frame[(pairs != pair) & (family != (group if paths_too else ""))]
            parts.append(with_error(cells, predict(cells, fit(train, units, weight=weight), units)))
    return pd.concat(parts, ignore_index=True)


def score(cells: pd.DataFrame) -> pd.DataFrame:
    """Median and ninth decile of the absolute error by path, and over all; bias is signed."""

    def summary(name: str, part: pd.DataFrame) -> dict:
        size = part["error_pct"].abs()
        return {
            "path_ran": name,
            "cells": len(part),
            "median_pct": size.median(),
            "p90_pct": size.quantile(0.9),
            "bias_pct": part["error_pct"].median(),
        }

    groups = [summary(name, part) for name, part in cells.groupby("path_ran", sort=True)]
    return pd.DataFrame([summary("all", cells), *groups])


def measured_fusion(frame: pd.DataFrame, widths: Widths, dtype: str = "bf16") -> pd.DataFrame:
    """By m: the best fused path's and the best unfused path's median, and their difference.

    Columns m, measured_fused_us, measured_pair_us, measured_saved_us, fused_path, pair_path; rows
    of one device, one clock (graph before cpu), cold cache. Paths that copy are pairs too.
    """
    from mlakit.paths import registry

    rows = usable(frame)
    rows = rows[
        (rows["q_lora_rank"] == widths.q_lora_rank)
        & (rows["kv_lora_rank"] == widths.kv_lora_rank)
        & (rows["dtype"] == dtype)
        & ~rows["path_ran"].isin(CONTROLS)
    ]
    found = []
    for m, part in rows.groupby("m"):
        times = part.groupby("path_ran")["p50_us"].median()
        fused = times[[registry.get(n).fused for n in times.index]]
        pair = times.drop(fused.index)
        if len(fused) and len(pair):
            row = {"m": int(m), "measured_fused_us": fused.min(), "measured_pair_us": pair.min()}
            row |= {"measured_saved_us": pair.min() - fused.min()}
            found.append(row | {"fused_path": fused.idxmin(), "pair_path": pair.idxmin()})
    return pd.DataFrame(found)
