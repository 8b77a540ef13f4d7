"""``data/latency.csv``: the latency model's parameters and errors, a line each with its source.

``python -m mlakit.sweep.latency_table`` makes it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from mlakit import archs
from mlakit.datafiles import data_dir
from mlakit.sweep import calibrate, published
from mlakit.sweep.parquet import replace_whole
from mlakit.sweep.store import read_rows, recorded_rows


def lines(arch: str, device: str, what: str, source: str, values: Mapping, path: str = ""):
    """Lines of ``data/latency.csv``, one a value."""

    def unit(name: str) -> str:
        ends = {"gbps": "GB/s", "_us": "us", "_pct": "%"}
        found = next((u for end, u in ends.items() if name.split(":")[0].endswith(end)), "1")
        return "elements/ns/thread" if name[:5] == "rate:" else found

    return [
        {"arch": arch, "device": device, "what": what, "path": path, "name": name}
        | {"value": v if isinstance(v, int) else f"{v:.5g}", "unit": unit(name)}
        | {"source": source}
        for name, v in values.items()
    ]


def ranges(frame: pd.DataFrame, units: int) -> dict[str, int]:
    """Compute units, and what the rows that a card was calibrated on range over."""
    wide = pd.concat([frame["q_lora_rank"], frame["kv_lora_rank"]])
    wide = wide[wide > 0]
    found = {"m_from": frame["m"].min(), "m_to": frame["m"].max()}
    found |= {"width_from": wide.min(), "width_to": wide.max()}
    return {"units": units} | {name: int(value) for name, value in found.items()}


def error_lines(scores: pd.DataFrame, arch: str, device: str, what: str, source: str) -> list[dict]:
    """Lines of ``calibrate.score``'s rows, two a path."""
    found: list[dict] = []
    for r in scores.to_dict("records"):
        known_errors = {n: r[n] for n in ("median_pct", "p90_pct")}
        found += lines(arch, device, what, source, known_errors, r["path_ran"])
    return found


def lines_of(frame: pd.DataFrame, source: str) -> list[dict]:
    """Lines of ``data/latency.csv`` for one device's rows: parameters, range, errors.

    A path's own ``error`` is on width pairs that the fit never saw; that of ``all`` is for a path
    never timed: neither the pair nor the path was in the fit. ``seen`` (all paths together, pair
    unseen) and ``unseen`` (each path, pair and path unseen) complete the picture for a reader.

    Raises:
        MisuseError: no usable rows, several devices, or one width pair only.
    """
    frame = calibrate.usable(frame)
    arch, device, units = _named(frame), _device(frame), calibrate.units_of(frame)
    pairs, strict = (
        calibrate.score(calibrate.held_out(frame, paths_too=too)) for too in (False, True)
    )
    pair, both = (
        f"cross-validation, {own['cells'].iloc[0]} cells, {what}; {source}"
        for own, what in ((pairs, PAIR_UNSEEN), (strict, BOTH_UNSEEN))
    )
    return [
        *lines(
            arch, device, "parameter", source, calibrate.fit(frame, units) | ranges(frame, units)
        ),
        *error_lines(strict[:1], arch, device, "error", both),
        *error_lines(pairs[1:], arch, device, "error", pair),
        *error_lines(pairs[:1], arch, device, "seen", pair),
        *error_lines(strict[1:], arch, device, "unseen", both),
    ]


PAIR_UNSEEN, BOTH_UNSEEN = "width pair unseen", "width pair and path unseen"


def _named(frame: pd.DataFrame) -> str:
    return archs.base_name(frame["arch"].iloc[0]) if len(frame) else "cpu"


def _device(frame: pd.DataFrame) -> str:
    arch = _named(frame)
    return "cpu" if arch == "cpu" else calibrate.product_of(arch, frame["device"].iloc[0]).product


def blind(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Cells predicted before they were recorded, with ``error_pct``; None where there are none.

    By a fit that had seen their paths at other width pairs, and by one that had not. ``folder``
    holds ``*blind-predictions.csv``, committed first, and ``*latency-blind.parquet``.
    """
    files = sorted(folder.glob("*blind-predictions.csv")), sorted(folder.glob("*blind.parquet"))
    if not all(files):
        return None
    said = pd.read_csv(files[0][-1]).rename(columns={"path": "path_ran"})
    rows = calibrate.usable(read_rows(files[1][-1])).merge(
        said, on=["path_ran", "q_lora_rank", "kv_lora_rank", "m", "dtype"]
    )
    seen, unseen = rows["modelled_us"], rows["path_unseen_us"]
    return calibrate.with_error(rows, seen), calibrate.with_error(rows, unseen)


def _blind_lines(name: str) -> list[dict]:
    """``blind`` as lines of the table, for a folder of ``data/recorded``."""
    folder = data_dir() / "recorded" / name / "heldout"
    found = []
    for cells, what in zip(blind(folder) or (), (PAIR_UNSEEN, BOTH_UNSEEN), strict=False):
        words = f"blind: {len(cells)} cells predicted before they were recorded, {what}; {name}"
        found += error_lines(calibrate.score(cells), _named(cells), _device(cells), "blind", words)
    return found


def _published_lines(share_of_peak: float) -> list[dict]:
    """Lines for AMD: gfx950 from published figures, errors of both cards, one launch cost.

    ``share_of_peak``: of memory bandwidth, as a measured card reaches it; no published figure of a
    norm tells it for AMD.
    """
    cells = published.published_cells()
    own = cells[(cells["device"] == "MI350") & (cells["op"] == published.FITTED_OP)]
    card, units = published.card("MI350"), published.units("MI350")
    p = calibrate.fit(own, units, published.NO_MEMORY, published.WEIGHT)
    p["gbps"] = share_of_peak * calibrate.required(card.hbm_gbps, f"bandwidth of {card.product}")
    source = f"published single norms, {own['source'].iloc[0]}; bandwidth: peak x another's share"
    found = lines(card.name, card.product, "parameter", source, p | ranges(own, units))
    for device, part in published.score_published().groupby("device", sort=True):
        card = published.card(str(device))
        words = f"{len(part)} published single norms on {device}, fitted on the other card's"
        row = calibrate.score(part)[:1].assign(path_ran="row")
        found += error_lines(row, card.name, card.product, "error", words)
    floor = pd.read_csv(data_dir() / "published.csv")
    floor = floor[floor["metric"] == "hip_graph_dispatch_time"]
    for r in floor[floor["op"].str.contains("941 dispatches 1 block")].itertuples():
        value = {"launch_us": float(r.value)}
        found += lines(r.arch, r.hardware, "launch", r.source_url, value)
    return found


def write(found: Iterable[dict], path: str | Path | None = None) -> Path:
    """Write ``data/latency.csv``, whole or not at all; the file."""
    target, frame = Path(path or data_dir() / "latency.csv"), pd.DataFrame(list(found))
    replace_whole(target, lambda temporary: frame.to_csv(temporary, index=False))
    return target


def recorded_frames() -> dict[str, pd.DataFrame]:
    """Committed timing rows by folder; by file for CPUs, whose files may differ in threads."""
    rows = recorded_rows()
    of_folder = rows["file"].str.partition("/")[0]
    names = rows["file"].where(rows["arch"] == "cpu", of_folder)
    return {str(name): part for name, part in rows.groupby(names, sort=False)}


def main() -> None:
    """Make ``data/latency.csv`` anew from ``data/recorded`` and ``data/published.csv``.

    Of several recorded devices of one arch, the one with the most usable rows.
    """
    best: dict[str, tuple[str, pd.DataFrame]] = {}
    for name, frame in recorded_frames().items():
        rows = calibrate.usable(frame)
        for arch in rows["arch"].unique():
            if len(rows) > len(best.get(arch, ("", []))[1]):
                best[arch] = name, rows
    found = [
        x
        for name, rows in best.values()
        for x in [*lines_of(rows, f"data/recorded/{name}"), *_blind_lines(name)]
    ]
    reached = {x["device"]: float(x["value"]) for x in found if x["name"] == "gbps"}
    peaks = {p.product: p.hbm_gbps for p in archs.products() if p.hbm_gbps}
    shares = [gbps / peaks[device] for device, gbps in reached.items() if device in peaks]
    print(write([*found, *_published_lines(max(shares))]))


if __name__ == "__main__":
    main()
