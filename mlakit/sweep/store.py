"""The store: a run's folder, its Parquet parts, and reading them back whatever happened to them.

A run is one folder: ``run.json`` (what and how it ended), ``parts/<cell_id>.parquet`` (timing
rows), ``accuracy/<cell_id>.parquet`` (accuracy rows) and ``samples/<cell_id>.parquet`` (every raw
sample). Parts are the record: a part is written under a temporary name and renamed, so it is
there whole or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mlakit import __version__, locks
from mlakit.datafiles import data_dir, read_json
from mlakit.errors import LockedError, MisuseError, one_of
from mlakit.records import COLUMNS, SCHEMA_VERSION, Cell, check_row, instant, now
from mlakit.sweep import parquet
from mlakit.sweep.parquet import migrate, read_file, replace_whole, schema, write_table

PIN = "baseline.txt"
"""The file below a folder of runs that names the pinned one."""
FOLDERS = {"timing": "parts", "accuracy": "accuracy"}
"""What can be measured of a cell, and the folder its parts go to."""
_LOCK_WAIT_S = 0.5
"""a lock's patience with those who only look whether it is held"""
_RECORD: dict = {"run_id": str, "status": str, "started_at": str}
_RECORD |= dict.fromkeys(("measure", "cells", "cell_ids"), list)
_RECORD |= dict(environment=dict | None, summary=dict | None, other_environments=list | None)


# ---- parts


def part_path(run_dir: Path, kind: str, cell_id: str) -> Path:
    """Where the rows of a cell go."""
    return Path(run_dir) / FOLDERS[kind] / f"{cell_id}.parquet"


def write_part(run_dir: Path, kind: str, cell_id: str, rows: Iterable[dict], samples=None) -> None:
    """Write a cell's rows, and its raw samples before them: a part that is there is complete.

    Args:
        run_dir: the run's folder.
        kind: ``timing`` or ``accuracy``.
        cell_id: the cell's id.
        rows: rows as ``mlakit.records.check_row`` takes them.
        samples: by path, every sample in microseconds in the order taken.

    Raises:
        ValueError: an illegal row, or no row at all; nothing is written.
    """
    import pyarrow as pa

    checked = [check_row(r, kind) for r in rows]
    if not checked:
        raise ValueError(f"cell {cell_id} gave no rows")
    table = pa.Table.from_pylist(checked, schema=schema(kind))
    if samples:
        flat = [
            {"cell_id": cell_id, "path": path, "sample": i, "us": float(us)}
            for path, values in samples.items()
            for i, us in enumerate(values)
        ]
        write_table(pa.Table.from_pylist(flat), Path(run_dir) / "samples" / f"{cell_id}.parquet")
    write_table(table, part_path(run_dir, kind, cell_id))


def is_done(run_dir: Path, kind: str, cell_id: str) -> bool:
    """Whether the cell's part is there and reads; a damaged one is set aside."""
    path = part_path(run_dir, kind, cell_id)
    return path.is_file() and read_file(path, []) is not None


def _part_files(folder: Path, kind: str) -> list[Path]:
    """Part files of one file, one run, or every run below a root."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise MisuseError(f"no run at {folder}: name a run's folder, a folder of runs, or a file")
    runs = [folder] if (folder / "run.json").exists() else [folder, *sorted(folder.iterdir())]
    return [p for run in runs for p in sorted((run / FOLDERS[kind]).glob("*.parquet"))]


def read_rows(folder: str | Path, kind: str = "timing"):
    """Rows as a pandas DataFrame: of one run, of every run below a folder, or of one Parquet file.

    Integer columns are pandas' nullable ``Int64``. ``frame.attrs["damaged"]`` names the parts
    that did not read; each is renamed ``*.damaged``, a warning says so, and the rest is returned.

    Raises:
        MisuseError: nothing there, unknown kind, or written by a newer schema.
    """
    import pandas as pd
    import pyarrow as pa

    one_of("kind of rows", FOLDERS, kind)
    damaged: list[str] = []
    tables = []
    for path in _part_files(Path(folder), kind):
        table = read_file(path, damaged, keep=Path(folder).is_file())
        if table is not None:
            tables.append(migrate(table, kind, path.name))
    tables = tables or [schema(kind).empty_table().replace_schema_metadata(None)]
    merged = pa.concat_tables(tables, promote_options="default")
    frame = merged.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    frame.attrs["damaged"] = damaged
    return frame


def recorded_rows(pattern: str = "*/*.parquet"):
    """The committed timing rows as a DataFrame; ``file`` says where below ``data/recorded``."""
    import pandas as pd

    folder = data_dir() / "recorded"
    files = parquet.timing_files(folder, pattern)
    frames = [read_rows(f).assign(file=f.relative_to(folder).as_posix()) for f in files]
    empty = pd.DataFrame(columns=[*COLUMNS["timing"], "file"])
    return pd.concat(frames, ignore_index=True) if frames else empty


def read_samples(run_dir: str | Path, cell_id: str | None = None):
    """Raw samples as a DataFrame (``cell_id, path, sample, us``) of one cell or of the whole run.

    Raises:
        MisuseError: the run has no samples (of that cell).
    """
    import pyarrow as pa

    files = sorted((Path(run_dir) / "samples").glob(f"{cell_id or '*'}.parquet"))
    damaged: list[str] = []
    tables = [t for t in (read_file(f, damaged) for f in files) if t is not None]
    if not tables:
        raise MisuseError(f"no samples of {cell_id or 'any cell'} in {Path(run_dir).name}")
    frame = pa.concat_tables(tables).to_pandas()
    frame.attrs["damaged"] = damaged
    return frame


def export(
    run_dir: str | Path, file: str | Path, kind: str = "timing", *, recorded: bool = False
) -> Path:
    """Write a run's rows to one Parquet file, sorted; its samples beside it as ``*-samples``.

    Args:
        run_dir: the run's folder.
        file: the file to write.
        kind: ``timing`` or ``accuracy``.
        recorded: mark measured rows as ``recorded``, as a file kept in ``data/recorded`` wants.

    Raises:
        MisuseError: the run has no rows.
    """
    import pyarrow as pa

    rows = read_rows(run_dir, kind)
    if rows.empty:
        raise MisuseError(f"{Path(run_dir).name} has no {kind} rows to export")
    if recorded:
        rows.loc[rows.evidence == "measured", "evidence"] = "recorded"
    order = ["arch", "q_lora_rank", "kv_lora_rank", "dtype", "m", "clock", "cache", "cell_id"]
    rows = rows.sort_values(order, kind="stable")
    file = Path(file)
    write_table(pa.Table.from_pandas(rows, schema=schema(kind), preserve_index=False), file)
    if kind == "timing" and any((Path(run_dir) / "samples").glob("*.parquet")):
        flat = pa.Table.from_pandas(read_samples(run_dir), preserve_index=False)
        write_table(flat, file.with_name(f"{file.stem}-samples.parquet"))
    return file


# ---- runs


@dataclass
class Run:
    """An open run: its folder, what ``run.json`` says, and the lock that keeps others out."""

    path: Path
    record: dict
    _lock: int = field(repr=False)

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.record["run_id"]

    @property
    def cells(self) -> list[Cell]:
        """The cells the run was started for."""
        return [Cell.from_json(c) for c in self.record["cells"]]

    def save(self, **changes) -> None:
        """Change ``run.json``, all of it or nothing."""
        self.record.update(changes)
        text = json.dumps(self.record, indent=1)
        replace_whole(self.path / "run.json", lambda t: t.write_text(text, encoding="utf-8"))

    def close(self) -> None:
        """Let others in."""
        os.close(self._lock)


def report_run(report: Path, kind: str = "timing") -> Path:
    """The run of one kind in a report's folder, whose name makes the run's id its own."""
    return report / f"{report.name}-{kind}"


def new_run_dir(root: str | Path = "runs") -> Path:
    """A name for a new run below ``root``: ``<UTC time>-<short id>``; nothing is created."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path(root) / f"{stamp}-{secrets.token_hex(3)}"


def lock(path: Path) -> int:
    """Make a folder if there is none, and take its lock; ``os.close`` lets it go.

    Raises:
        LockedError: somebody has it; they are named.
        MisuseError: the folder cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise MisuseError(
            f"cannot write {path} ({error.strerror}): name a folder that you can write to"
        ) from None
    if holder := locks.take(descriptor, wait_s=_LOCK_WAIT_S):
        os.close(descriptor)
        raise LockedError(f"{path.name} is in use by {holder}: wait for it, or name another folder")
    locks.sign(descriptor, f"process {os.getpid()} since {now()}")
    return descriptor


def create_run(path: str | Path, cells: list[Cell], **record) -> Run:
    """Make a run's folder and ``run.json``. The caller closes the run.

    Raises:
        MisuseError: the folder holds something already, or cannot be written.
        LockedError: it is in use.
    """
    run = _locked(Path(path), _nothing_in)
    about = {"schema_version": SCHEMA_VERSION, "mlakit": __version__, "environment": None}
    about |= {"run_id": run.path.resolve().name, "cell_ids": [c.id for c in cells]}
    about |= {"status": "running", "started_at": now(), "ended_at": None}
    run.save(cells=[c.to_json() for c in cells], **about, **record)
    return run


def _nothing_in(path: Path) -> dict:
    """No record; what a process killed in a run's first save left does not count."""
    inside = path.iterdir() if path.is_dir() else ()
    if any(p.name != "lock" and not p.match(".run.json.*.tmp") for p in inside):
        raise MisuseError(f"{path} is not empty: name a new folder, or resume the run in it")
    return {}


def open_run(path: str | Path) -> Run:
    """Open an existing run to go on with it. The caller closes the run.

    Raises:
        MisuseError: no run there, or ``run.json`` does not read.
        LockedError: it is in use by another process.
    """
    run = _locked(Path(path), _record_of)
    if run.record["status"] == "running":
        run.record["status"] = "crashed"  # or its process would hold the lock
    return run


def _locked(path: Path, look: Callable[[Path], dict]) -> Run:
    """A run of what ``look`` finds at ``path``, with its lock.

    It looks first, so that nothing is made where it refuses, and again under the lock: another
    process may have been here in between.
    """
    look(path)
    held = lock(path)
    try:
        run = Run(path, look(path), held)
    except BaseException:
        os.close(held)
        raise
    for left_over in (*path.glob(".*.tmp"), *path.glob("*/.*.tmp")):
        left_over.unlink(missing_ok=True)
    return run


def _in_use(path: Path) -> bool:
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        return locks.take(descriptor, shared=True) is not None
    finally:
        os.close(descriptor)


def show_run(path: str | Path) -> dict:
    """What ``run.json`` says, and ``done``: parts by kind. "running" with no process is "crashed".

    Raises:
        MisuseError: no run there, or its ``run.json`` does not read.
    """
    path = Path(path)
    record = _record_of(path)
    if record["status"] == "running" and not _in_use(path):
        record["status"] = "crashed"
    record["done"] = {k: len(list((path / f).glob("*.parquet"))) for k, f in FOLDERS.items()}
    return record


def _record_of(path: Path) -> dict:
    """``run.json`` as it is, its types checked."""
    if not (path / "run.json").exists():
        raise MisuseError(f"no run at {path}: `mlakit runs` lists the runs there are")
    record = read_json(path / "run.json")
    if not isinstance(record, dict):
        raise MisuseError(f"{path / 'run.json'} is no run's record: name another run")
    for name, kind in _RECORD.items():
        if not isinstance(record.get(name), kind):
            raise MisuseError(f"{path / 'run.json'} is damaged at {name!r}: name another run")
    if set(record["measure"]) - set(FOLDERS):
        raise MisuseError(f"{path / 'run.json'} is damaged at 'measure': name another run")
    devices = (record.get("environment") or {"devices": {}}).get("devices")
    if not isinstance(devices, dict) or any(type(d) is not dict for d in devices.values()):
        raise MisuseError(f"{path / 'run.json'} is damaged at 'environment': name another run")
    return record


def start_of(run: Path) -> str:
    """When a run was started, by its record or else its name, as ``records.now`` writes it."""
    try:
        said = instant(_record_of(run)["started_at"])
    except MisuseError:
        said = ""
    return said or instant(run.name[: len("20261130-085424")])


def runs_below(root: str | Path) -> list[tuple[Path, Path]]:
    """(folder, run with its timing rows) of every run and report below ``root``, oldest first.

    They are one folder but for a report, whose run lies inside it. What says no start comes first.
    """
    found = []
    for folder in sorted(p for p in Path(root).glob("*") if p.is_dir()):
        run = folder if (folder / "run.json").exists() else report_run(folder)
        if (run / "run.json").exists() or (folder / "summary.json").exists():
            found.append((folder, run))
    return sorted(found, key=lambda pair: start_of(pair[1]))


def list_runs(root: str | Path = "runs"):
    """Every run below ``root``, oldest first, as a DataFrame; an unreadable one is listed so."""
    import pandas as pd

    rows: list[dict] = []
    for _, run in runs_below(root):
        if not (run / "run.json").exists():
            continue  # a report that has no run of its own
        try:
            record = show_run(run)
        except MisuseError:
            rows.append({"run_id": run.name, "status": "unreadable"})
            continue
        record |= {"measure": ",".join(record["measure"]), "cells": len(record["cell_ids"])}
        record |= {"done": sum(record["done"].values())}
        rows.append(record | {"wall_s": (record.get("summary") or {}).get("wall_s")})
    columns = "run_id status started_at ended_at measure cells done wall_s".split()
    return pd.DataFrame(rows, columns=columns)


def pinned(root: str | Path) -> str:
    """The name of the run that ``root`` compares with, empty where none is pinned."""
    file = Path(root) / PIN
    return file.read_text(encoding="utf-8", errors="replace").strip()[:200] if file.exists() else ""


def prune(root: str | Path = "runs", *, keep: int) -> list[str]:
    """Delete all but the newest ``keep`` runs below ``root``, never the pinned or one in use.

    Raises:
        MisuseError: ``keep`` below 0.
    """
    if keep < 0:
        raise MisuseError(f"keep is {keep}: give 0 or more runs to keep")
    runs = [folder for folder, _ in runs_below(root)]
    old = [r for r in runs[: max(0, len(runs) - keep)] if r.name != pinned(root)]
    gone = [r for r in old if not any(map(_in_use, (r, *r.glob(f"{r.name}-*"))))]
    for run in gone:
        shutil.rmtree(run)
    return [run.name for run in gone]
