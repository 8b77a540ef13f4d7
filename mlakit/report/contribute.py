"""Contributions: record the standard grid on whatever card is here, and take such files in.

A contribution is one Parquet file: timing rows, and in its metadata a provenance (environment,
grid) and a hash of the rows. It holds no host name, user or path.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd

from mlakit import archs
from mlakit.datafiles import data_dir
from mlakit.errors import MisuseError, one_line, one_of
from mlakit.records import CONTROLS, TEXT_COLUMNS, Cell, check_row, instant, with_figure
from mlakit.report import scrub
from mlakit.sweep import grid, parquet, store

GRID = {
    "models": ["DeepSeek-V3"],
    "hidden": ["768+256", "2048+512", "0+512"],
    "batches": [1, 8, 64, 256, 1024, 4096, 16384],
    "dtypes": ["bf16"],
    "budget_s": 2.0,
}
"""The standard grid: small enough for ten minutes, wide enough to calibrate the latency model."""

AA_BATCHES = (64, 4096)
"""Batches of DeepSeek-V3 that are measured twice: the A/A control of a file."""

AA_LIMIT = 0.10
"""Two measurements of one cell may differ by this much (ratio of medians) before a file is
refused: on shared machines medians of everything move together by several percent."""

BANDWIDTH_MARGIN = 1.05
"""A cold result may reach this share of the datasheet's bandwidth: more is a cache or a mistake."""

_KEY = b"mlakit_provenance"
_SHAPE = "arch q_lora_rank kv_lora_rank m dtype quant layout clock cache path_ran".split()


def cells(arch: str) -> list[Cell]:
    """The standard grid for ``arch``, its A/A cells at the end."""
    found = grid.expand(archs=[arch], **GRID)
    again = [c for c in found if c.model == "DeepSeek-V3" and c.m in AA_BATCHES]
    return [*found, *(replace(c, repeat=1) for c in again)]


def _rows_hash(frame: pd.DataFrame) -> str:
    """sha256 of the rows as CSV in the file's order: any change of a figure changes it."""
    text = frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    return hashlib.sha256(text.encode()).hexdigest()


def pack(run_dir: str | Path, file: str | Path) -> Path:
    """Write a finished run's timing rows as a contribution.

    Raises:
        MisuseError: the run has no row with a figure, or no A/A control.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    exported = store.export(run_dir, file, recorded=True)
    # The samples stay with whoever measured: a contribution is one file.
    exported.with_name(f"{exported.stem}-samples.parquet").unlink(missing_ok=True)
    frame = store.read_rows(exported)
    for column in _texts(frame):
        frame[column] = frame[column].map(scrub.text, na_action="ignore")
    _check_figures(frame)
    _check_aa(frame)
    record = store.show_run(run_dir)
    provenance = {
        "environment": scrub.values(record["environment"]),
        "started_at": record["started_at"],
        "grid": GRID,
        "rows_sha256": _rows_hash(frame),
    }
    table = pq.read_table(exported)
    clean = pa.Table.from_pandas(frame, schema=table.schema, preserve_index=False)
    metadata = dict(table.schema.metadata or {}) | {_KEY: json.dumps(provenance).encode()}
    parquet.write_table(clean.replace_schema_metadata(metadata), exported)
    return exported


def file_name(run_dir: str | Path) -> str:
    """``<device>-<date>.parquet`` for a run: the card's name, the day it was started.

    Raises:
        MisuseError: the run has no row with a figure.
    """
    frame = store.read_rows(run_dir)
    device = frame.loc[frame["status"] == "ok", "device"]
    if device.empty:
        raise MisuseError(f"{Path(run_dir).name} has no figure to record: nothing ran here")
    started = store.show_run(run_dir)["started_at"][:10]
    return f"{_slug(device.iloc[0])}-{started}.parquet"


def _slug(device: str) -> str:
    """A folder's name for a device: ``h200`` for ``NVIDIA H200``, ``mi300x`` for an Instinct."""
    name = re.sub(r"^(nvidia|amd instinct|amd radeon)\s+", "", device.lower().strip())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown"


def validate(file: str | Path) -> pd.DataFrame:
    """The rows of a contribution, if the file is whole, untouched, plausible and controlled.

    Raises:
        MisuseError: what is wrong with it, in one line.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = Path(file)
    if not file.is_file():
        raise MisuseError(f"no file {file}: name a contribution that `mlakit record` wrote")
    try:
        metadata = pq.read_schema(file).metadata or {}
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise MisuseError(f"{file.name} does not read as Parquet: {one_line(error):.120}") from None
    if _KEY not in metadata:
        raise MisuseError(f"{file.name} has no provenance: only files of `mlakit record` are taken")
    try:
        provenance = json.loads(metadata[_KEY])
        claimed = provenance["rows_sha256"]
    except (ValueError, KeyError, TypeError):
        raise MisuseError(f"{file.name}: its provenance is damaged; record it again") from None
    _check_columns(table, file.name)
    frame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    if _rows_hash(frame) != claimed:
        raise MisuseError(f"{file.name}: its rows are not those that were recorded (hash differs)")
    try:
        for row in frame.to_dict("records"):
            check_row({k: None if pd.isna(v) else v for k, v in row.items()})
        one_of("arch", archs.known(), *frame["arch"].unique())
    except ValueError as error:
        raise MisuseError(f"{file.name}: {error}") from None
    _check_figures(frame)
    _check_identity(frame)
    _check_plausible(frame)
    _check_aa(frame)
    for column in _texts(frame):
        for value in frame[column].dropna().unique():
            if re.search(r"(^|[\s'\"=:])/(home|Users|root|tmp|mnt|data)/", value):
                raise MisuseError(f"{file.name}: column {column} holds a path of a machine")
    return frame


def _texts(frame: pd.DataFrame) -> list[str]:
    """The schema's text columns; a dtype's name for text changed between pandas 2 and 3."""
    return [c for c in frame.columns if c in TEXT_COLUMNS]


def _check_columns(table, name: str) -> None:
    """The columns of timing rows, each once and of its type, and every float a number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = parquet.schema("timing")
    if sorted(table.column_names) != sorted(schema.names):
        differ = sorted(set(table.column_names) ^ set(schema.names)) or ["one is there twice"]
        raise MisuseError(
            f"{name}: its columns are not those of timing rows ({', '.join(differ):.120}): "
            "record it again with this mlakit"
        )
    for column in schema:
        values = table[column.name]
        if values.type != column.type:
            raise MisuseError(
                f"{name}: column {column.name} is {values.type}, not {column.type}: "
                "record it again with this mlakit"
            )
        if pa.types.is_floating(values.type) and pc.all(pc.is_finite(values)).as_py() is False:
            raise MisuseError(f"{name}: column {column.name} holds what is no finite number")


def _check_identity(frame: pd.DataFrame) -> None:
    """What a file is named and judged by: when each row was begun, and what of."""
    for start in frame["started_at"].unique():
        if not isinstance(start, str) or instant(start) != start:
            raise MisuseError(f"started_at is {start!r:.60}: a time such as 2026-11-30T08:00:00Z")
    of = frame.loc[frame["status"] == "ok", ["device", "cell_id", *_SHAPE]]
    for column in of.columns[of.isna().any()]:
        raise MisuseError(f"a row with a figure has no {column}: record it again with this mlakit")


def _check_figures(frame: pd.DataFrame) -> None:
    if not (frame["status"] == "ok").any():
        raise MisuseError("no row holds a figure: nothing ran on that machine")


def _check_aa(frame: pd.DataFrame) -> None:
    """Some cell must have been measured twice, and its medians must agree."""
    ok = with_figure(frame[~frame["path_ran"].isin(CONTROLS)])
    pairs = [g["p50_us"] for _, g in ok.groupby(_SHAPE) if g["cell_id"].nunique() > 1]
    if not pairs:
        raise MisuseError("no A/A control: no cell was measured twice; use `mlakit record`")
    apart = sorted(p.max() / p.min() - 1 for p in pairs)
    median = apart[len(apart) // 2]
    if median > AA_LIMIT:
        raise MisuseError(
            f"the A/A control fails: one cell measured twice differs by {median:.0%} "
            f"(limit {AA_LIMIT:.0%}); record again on a quieter machine"
        )


def _check_plausible(frame: pd.DataFrame) -> None:
    """No figure absent or below zero, or above what the card's memory can move."""
    ok = frame[frame["status"] == "ok"]
    ordered = (ok["p05_us"] <= ok["p50_us"]) & (ok["p50_us"] <= ok["p95_us"])
    if not ((ok["p05_us"] > 0) & ordered).all():
        raise MisuseError("a time is absent or not positive, or its quantiles are out of order")
    cold = ok[(ok["cache"] == "cold") & ok["bytes_moved"].notna()]
    gbps = cold["bytes_moved"].astype(float) / cold["p50_us"] / 1e3
    for arch, part in gbps.groupby(cold["arch"]):
        peaks = [p.hbm_gbps for p in archs.products() if p.name == arch and p.hbm_gbps]
        if arch.startswith(("gfx", "sm_")) and peaks and part.max() > max(peaks) * BANDWIDTH_MARGIN:
            raise MisuseError(
                f"implausible: {part.max():,.0f} GB/s cold on {arch}, whose memory moves "
                f"{max(peaks):,.0f} GB/s at most"
            )


def ingest(file: str | Path, into: str | Path | None = None) -> Path:
    """File a contribution under ``data/recorded/<device>/``; the new path.

    Raises:
        MisuseError: it is refused (the reason), or the same rows are there already.
    """
    frame = validate(file)
    ok = frame[frame["status"] == "ok"]
    folder = Path(into or data_dir() / "recorded") / _slug(ok["device"].iloc[0])
    for there in folder.glob("*.parquet"):
        if there.read_bytes() == Path(file).read_bytes():
            raise MisuseError(f"{Path(file).name} is filed already, as {there.name}")
    name = f"{ok['started_at'].min()[:10]}-contributed-{_rows_hash(frame)[:8]}.parquet"
    parquet.replace_whole(folder / name, lambda there: there.write_bytes(Path(file).read_bytes()))
    return folder / name
