"""Published kernel times of AMD cards: what the latency model makes of them, and how far it is off.

Each card is predicted by a fit on the other card's figures.
"""

from __future__ import annotations

import pandas as pd

from mlakit import archs
from mlakit.datafiles import data_dir
from mlakit.sweep.calibrate import (
    PRIOR_WEIGHTS,
    error_lines,
    fit,
    known,
    lines,
    predict,
    ranges,
    score,
)

PUBLISHED_PRODUCTS = {"MI308": ("gfx942", "MI308X"), "MI350": ("gfx950", "MI350X")}
"""Hardware as ``data/published.csv`` names it: arch and the line of ``data/archs.csv``."""
_NO_MEMORY = {"gbps": 1e5}
"""The published sizes, 134 MB at most, fit the 256 MB cache behind the L2 and were timed again and
again: rows of a hot cache, whose bandwidth goes with the compute units, and none of memory's."""
_FITTED_OP = "HIP"
"""Of the published kernels, the one that is fitted: it is at or near the front on both cards."""


def published_cells() -> pd.DataFrame:
    """Every published kernel time of an AMD card with rows, one width and a number: as timing rows.

    All are single norms by profilers of others, cache state not stated; ``op`` names the kernel.
    """
    frame = pd.read_csv(data_dir() / "published.csv")
    frame = frame[(frame["metric"] == "kernel_time") & frame["hardware"].isin(PUBLISHED_PRODUCTS)]
    m, us = (pd.to_numeric(frame[c], errors="coerce") for c in ("m", "value"))
    width = frame["n_q"].fillna(frame["n_kv"])
    frame = frame.assign(m=m, p50_us=us, width=width).dropna(subset=["m", "p50_us", "width"])
    columns = {
        "arch": frame["hardware"].map(lambda h: PUBLISHED_PRODUCTS[h][0]),
        "device": frame["hardware"],
        "op": frame["op"].str.replace("single RMSNorm, ", "", regex=False),
        "q_lora_rank": 0,
        "kv_lora_rank": frame["width"].astype(int),
        "m": frame["m"].astype(int),
        "p50_us": frame["p50_us"],
        "source": frame["source_url"],
    }
    same = {"status": "ok", "cache": "hot", "quant": "none", "clock": "graph", "dtype": "bf16"}
    # A fused path with no q part is one norm of the kind that all of these are.
    same |= {"layout": "contiguous", "path_ran": "aiter_fused", "path_requested": "aiter_fused"}
    return pd.DataFrame(columns).assign(**same, note="").reset_index(drop=True)


def _card(hardware: str) -> archs.Arch:
    product = PUBLISHED_PRODUCTS[hardware][1]
    return next(p for p in archs.products() if p.product == product)


def _units(hardware: str) -> int:
    return known(_card(hardware).compute_units, f"compute units of {hardware}")


def score_published() -> pd.DataFrame:
    """``published_cells`` with ``modelled_us`` and ``error_pct``: each card by the other's fit."""
    cells = published_cells()
    scored = []
    for hardware, part in cells.groupby("device", sort=True):
        other = cells[(cells["device"] != hardware) & (cells["op"] == _FITTED_OP)]
        there = _units(other["device"].iloc[0])
        p = fit(other, there, _NO_MEMORY, PRIOR_WEIGHTS[0])
        p["cache_gbps"] *= _units(hardware) / there
        modelled = predict(part, p, _units(hardware))
        error = 100 * (modelled - part["p50_us"]) / part["p50_us"]
        scored.append(part.assign(modelled_us=modelled, error_pct=error))
    return pd.concat(scored, ignore_index=True)


def published_lines(share_of_peak: float) -> list[dict]:
    """Lines for AMD: gfx950 from published figures, errors of both cards, one launch cost.

    ``share_of_peak``: of memory bandwidth, as a measured card reaches it; no published figure of a
    norm tells it for AMD.
    """
    cells = published_cells()
    own = cells[(cells["device"] == "MI350") & (cells["op"] == _FITTED_OP)]
    card, units = _card("MI350"), _units("MI350")
    p = fit(own, units, _NO_MEMORY, PRIOR_WEIGHTS[0])
    p["gbps"] = share_of_peak * known(card.hbm_gbps, f"bandwidth of {card.product}")
    source = f"published single norms, {own['source'].iloc[0]}; bandwidth: peak x another's share"
    found = lines(card.name, card.product, "parameter", source, p | ranges(own, units))
    for device, part in score_published().groupby("device", sort=True):
        card = _card(str(device))
        words = f"{len(part)} published single norms on {device}, fitted on the other card's"
        row = score(part)[:1].assign(path_ran="row")
        found += error_lines(row, card.name, card.product, "error", words)
    floor = pd.read_csv(data_dir() / "published.csv")
    floor = floor[floor["metric"] == "hip_graph_dispatch_time"]
    for r in floor[floor["op"].str.contains("941 dispatches 1 block")].itertuples():
        value = {"launch_us": float(r.value)}
        found += lines(r.arch, r.hardware, "launch", r.source_url, value)
    return found
