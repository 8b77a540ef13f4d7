"""Published kernel times of AMD cards: what the latency model makes of them, and how far it is off.

Each card is predicted by a fit on the other card's figures.
"""

from __future__ import annotations

import pandas as pd

from mlakit import archs
from mlakit.datafiles import data_dir
from mlakit.sweep.calibrate import fit, predict, required, with_error

_PUBLISHED_PRODUCTS = {"MI308": "MI308X", "MI350": "MI350X"}
"""Hardware as ``data/published.csv`` names it, and as ``data/archs.csv`` does."""
NO_MEMORY = {"gbps": 1e5}
"""The published sizes, 134 MB at most, fit the 256 MB cache behind the L2 and were timed again and
again: rows of a hot cache, whose bandwidth goes with the compute units, and none of memory's."""
WEIGHT = 0.1
"""The a-priori values are an NVIDIA card's: an AMD card's own figures say more."""
FITTED_OP = "HIP"
"""Of the published kernels, the one that is fitted: it is at or near the front on both cards."""


def published_cells() -> pd.DataFrame:
    """Every published kernel time of an AMD card with rows, one width and a number: as timing rows.

    All are single norms by profilers of others, cache state not stated; ``op`` names the kernel.
    """
    frame = pd.read_csv(data_dir() / "published.csv")
    frame = frame[(frame["metric"] == "kernel_time") & frame["hardware"].isin(_PUBLISHED_PRODUCTS)]
    m, us = (pd.to_numeric(frame[c], errors="coerce") for c in ("m", "value"))
    width = frame["n_q"].fillna(frame["n_kv"])
    frame = frame.assign(m=m, p50_us=us, width=width).dropna(subset=["m", "p50_us", "width"])
    columns = {
        "arch": frame["hardware"].map(lambda h: card(h).name),
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


def card(hardware: str) -> archs.Arch:
    """The line of ``data/archs.csv`` for a card as ``data/published.csv`` names it."""
    return next(p for p in archs.products() if p.product == _PUBLISHED_PRODUCTS[hardware])


def units(hardware: str) -> int:
    """Compute units of a card as ``data/published.csv`` names it."""
    return required(card(hardware).compute_units, f"compute units of {hardware}")


def score_published() -> pd.DataFrame:
    """``published_cells`` with ``modelled_us`` and ``error_pct``: each card by the other's fit."""
    cells = published_cells()
    scored = []
    for hardware, part in cells.groupby("device", sort=True):
        other = cells[(cells["device"] != hardware) & (cells["op"] == FITTED_OP)]
        there = units(other["device"].iloc[0])
        p = fit(other, there, NO_MEMORY, WEIGHT)
        p["cache_gbps"] *= units(hardware) / there
        scored.append(with_error(part, predict(part, p, units(hardware))))
    return pd.concat(scored, ignore_index=True)
