"""The store: types, atomic parts, damaged and older parts, runs listed and pruned."""

from __future__ import annotations

import os
import threading

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timing_rows

from mlakit import locks
from mlakit.errors import LockedError, MisuseError
from mlakit.records import ACCURACY_COLUMNS, TIMING_COLUMNS
from mlakit.sweep import store
from mlakit.sweep.grid import expand


def row(cell_id: str, **changes) -> dict:
    return timing_rows.row("p", 1.25, cell_id=cell_id, **changes)


def test_columns_and_types_come_back(tmp_path):
    big = 2**53 + 1  # not a float64
    store.write_part(tmp_path, "timing", "a", [row("a", cache_bytes=big), row("a")])
    rows = store.read_rows(tmp_path)
    assert list(rows.columns) == list(TIMING_COLUMNS)
    assert rows.cache_bytes[0] == big
    assert pd.isna(rows.cache_bytes[1])
    assert rows.p50_us.dtype == "float64"
    assert rows.note.isna().all()
    metadata = pq.read_schema(store.part_path(tmp_path, "timing", "a")).metadata
    assert metadata[b"mlakit_schema_version"] == b"1"


def test_accuracy_rows_have_their_own_columns(tmp_path):
    figures = {"share_correct": 1.0, "max_ulp": 2}
    accuracy = {k: v for k, v in row("a").items() if k in ACCURACY_COLUMNS} | figures
    store.write_part(tmp_path, "accuracy", "a", [accuracy])
    rows = store.read_rows(tmp_path, "accuracy")
    assert list(rows.columns) == list(ACCURACY_COLUMNS)
    assert (rows.max_ulp[0], rows.share_correct[0]) == (2, 1.0)
    with pytest.raises(MisuseError, match="unknown kind of rows"):
        store.read_rows(tmp_path, "speed")


def test_an_illegal_row_writes_nothing(tmp_path):
    for rows in (
        [],
        [row("a", status="failed")],
        [row("a", status="fine")],
        [timing_rows.ROW | {"x": 1}],
    ):
        with pytest.raises(ValueError, match="row"):
            store.write_part(tmp_path, "timing", "a", rows)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_a_damaged_part_is_named_and_set_aside(tmp_path, keep):
    for name in ("a", "b", "c"):
        store.write_part(tmp_path, "timing", name, [row(name)])
    part = store.part_path(tmp_path, "timing", "b")
    part.write_bytes(part.read_bytes()[:keep])
    with pytest.warns(UserWarning, match=r"damaged part b\.parquet"):
        rows = store.read_rows(tmp_path)
    assert rows.cell_id.tolist() == ["a", "c"]
    assert rows.attrs["damaged"] == ["b.parquet"]
    assert part.with_name("b.parquet.damaged").exists()
    assert not store.is_done(tmp_path, "timing", "b")
    assert store.read_rows(tmp_path).attrs["damaged"] == []


def test_older_parts_read_and_newer_ones_are_refused(tmp_path):
    old = pa.table(
        {"cell_id": ["old"], "m": [8], "p50_us": [3.0], "former": ["kept"]},
        metadata={b"mlakit_schema_version": b"0"},
    )
    (tmp_path / "parts").mkdir()
    pq.write_table(old, tmp_path / "parts/old.parquet")
    store.write_part(tmp_path, "timing", "new", [row("new")])
    rows = store.read_rows(tmp_path).set_index("cell_id")
    assert rows.loc["old", "former"] == "kept"
    assert rows.p50_us.to_dict() == {"new": 1.25, "old": 3.0}
    assert pd.isna(rows.loc["old", "status"])
    newer = old.replace_schema_metadata({b"mlakit_schema_version": b"99"})
    pq.write_table(newer, tmp_path / "parts/newer.parquet")
    with pytest.raises(MisuseError, match=r"schema version 99.*update mlakit"):
        store.read_rows(tmp_path)


def test_samples_keep_every_value_in_order(tmp_path):
    samples = {"x": [3.0, 1.0, 1e9], "y": [2.0]}
    store.write_part(tmp_path, "timing", "a", [row("a")], samples)
    read = store.read_samples(tmp_path, "a")
    assert read[read.path == "x"].us.tolist() == samples["x"]
    assert read[read.path == "y"].us.tolist() == samples["y"]
    with pytest.raises(MisuseError, match="no samples"):
        store.read_samples(tmp_path, "b")


def test_export_is_sorted_and_marked_recorded(tmp_path):
    for name, m in (("a", 64), ("b", 1)):
        rows = [row(name, m=m), row(name, m=m, evidence="modelled")]
        store.write_part(tmp_path / "run", "timing", name, rows, {"x": [1.0]})
    file = store.export(tmp_path / "run", tmp_path / "out.parquet", recorded=True)
    rows = store.read_rows(file)
    assert rows.m.tolist() == [1, 1, 64, 64]
    assert set(rows.evidence) == {"recorded", "modelled"}
    assert len(pq.read_table(tmp_path / "out-samples.parquet")) == 2
    with pytest.raises(MisuseError, match="no accuracy rows"):
        store.export(tmp_path / "run", tmp_path / "no.parquet", "accuracy")


def test_runs_are_listed_and_pruned_but_never_one_in_use(tmp_path):
    cells = expand(batches=[1, 2])
    open_runs = [store.create_run(tmp_path / f"run-{i}", cells, measure=["timing"]) for i in "abc"]
    open_runs[1].save(status="ok", ended_at=store.now())
    for run in open_runs[1:]:
        run.close()
    (tmp_path / "run-d").mkdir()
    (tmp_path / "run-d/run.json").write_text("{")
    (tmp_path / "report-without-a-run").mkdir()
    (tmp_path / "report-without-a-run/summary.json").write_text("{}")
    listed = store.list_runs(tmp_path).set_index("run_id").status
    assert listed.to_dict() == {
        "run-a": "running",
        "run-b": "ok",
        "run-c": "crashed",
        "run-d": "unreadable",
    }
    with pytest.raises(LockedError, match="in use by process"):
        store.open_run(tmp_path / "run-a")
    assert store.prune(tmp_path, keep=1) == ["report-without-a-run", "run-d", "run-b"]
    assert store.list_runs(tmp_path).run_id.tolist() == ["run-a", "run-c"]
    open_runs[0].close()
    with pytest.raises(MisuseError, match="0 or more"):
        store.prune(tmp_path, keep=-1)


def made(path, started_at: str = "") -> None:
    run = store.create_run(path, expand(batches=[1]), measure=["timing"])
    run.save(**({"started_at": started_at} if started_at else {}))
    run.close()


def test_the_newest_are_kept_whatever_their_names_are(tmp_path):
    made(tmp_path / "zz-old", "2020-01-01T00:00:00Z")
    made(tmp_path / "b", "2026-01-03")
    made(tmp_path / "a", "2026-01-02T23:00:00-05:00")
    made(tmp_path / "20260102-000000-aaaaaa", "2026-01-02T00:00:00Z")
    made(tmp_path / "20260104-000000-torn")
    (tmp_path / "20260104-000000-torn" / "run.json").write_text("{")
    made(tmp_path / "torn-too", "yesterday")
    oldest_first = ["torn-too", "zz-old", "20260102-000000-aaaaaa", "b", "a"]
    assert store.list_runs(tmp_path).run_id.tolist() == [*oldest_first, "20260104-000000-torn"]
    assert store.prune(tmp_path, keep=2) == oldest_first[:-1]


# ---- locks


def test_who_only_looks_keeps_no_writer_out(tmp_path):
    made(tmp_path / "run")
    looked, let_go = os.open(tmp_path / "run" / "lock", os.O_RDONLY), threading.Event()
    assert locks.take(looked, shared=True) is None
    threading.Timer(0.1, lambda: (os.close(looked), let_go.set())).start()
    store.open_run(tmp_path / "run").close()
    assert let_go.is_set()


def in_between(monkeypatch, other) -> None:
    """``other()`` is done by another process just before the next lock is taken."""
    real = store.lock

    def lock(path):
        monkeypatch.setattr(store, "lock", real)
        other()
        return real(path)

    monkeypatch.setattr(store, "lock", lock)


def test_a_run_is_read_under_its_lock(tmp_path, monkeypatch):
    made(tmp_path / "run")

    def other() -> None:
        run = store.open_run(tmp_path / "run")
        run.save(status="ok", environment={"devices": {"cpu": {"device": "another"}}})
        run.close()

    in_between(monkeypatch, other)
    run = store.open_run(tmp_path / "run")
    run.save(ended_at=store.now())
    run.close()
    record = store.show_run(tmp_path / "run")
    assert record["environment"]["devices"]["cpu"]["device"] == "another"
    assert record["status"] == "ok"


def test_a_run_made_in_between_is_not_taken_over(tmp_path, monkeypatch):
    in_between(monkeypatch, lambda: made(tmp_path / "run", "2026-01-01T00:00:00Z"))
    with pytest.raises(MisuseError, match="not empty"):
        store.create_run(tmp_path / "run", expand(batches=[2]), measure=["timing"])
    assert store.show_run(tmp_path / "run")["started_at"] == "2026-01-01T00:00:00Z"
    store.open_run(tmp_path / "run").close()  # the refused one let go of the lock


def test_what_a_process_killed_in_a_save_left_is_removed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()
    left = [folder / ".run.json.123-abc.tmp", folder / "parts" / ".x.parquet.1-a.tmp"]
    left[0].write_text("{")
    made(folder)
    assert not left[0].exists()
    left[1].parent.mkdir()
    for file in left:
        file.touch()
    store.open_run(folder).close()
    assert not any(file.exists() for file in left)


def test_a_folder_that_holds_something_is_never_taken_over(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(MisuseError, match="not empty"):
        store.create_run(tmp_path, [])
    with pytest.raises(MisuseError, match="cannot write"):
        store.create_run(tmp_path / "mine.txt" / "run", [])
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(MisuseError, match="cannot write"):
        store.create_run(tmp_path / "run", [])
