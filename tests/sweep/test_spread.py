"""The sweep over dask: a killed worker loses nothing, no cell runs twice, no torch in dask."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from mlakit.errors import MisuseError
from mlakit.sweep import run, store
from mlakit.sweep.grid import expand

distributed = pytest.importorskip("distributed")

from mlakit.sweep import spread  # noqa: E402

SLOW = {"timing": "doubles:slow"}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def torch_is_loaded() -> bool:
    return "torch" in sys.modules


def test_a_killed_worker_loses_nothing_and_no_cell_runs_twice(tmp_path, doubles_log):
    cells = expand(batches=range(1, 9), paths=["cpu_fused"]) + expand(
        archs=["sm_90"], batches=[1], paths=["cpu_fused"]
    )
    killed = []

    def kill_one_at_work():
        while not killed:
            begun = [line.split() for line in doubles_log.read_text().splitlines()]
            ended = {i for what, i, _ in begun if what == "end"}
            at_work = [int(pid) for what, i, pid in begun if what == "begin" and i not in ended]
            if len(ended) >= 3 and at_work:
                killed.append(parent_of(at_work[0]))
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.02)

    threading.Thread(target=kill_one_at_work, daemon=True).start()
    with spread.local_cluster(["cpu", "cpu"]) as cluster:
        with pytest.raises(MisuseError, match="kind of measurement"):
            spread.over_dask(
                cells, tmp_path / "bad", scheduler=cluster.scheduler_address, measure=["x"]
            )
        summary = spread.over_dask(
            cells,
            tmp_path / "run",
            scheduler=cluster.scheduler_address,
            functions=SLOW,
        )
        with distributed.Client(cluster, set_as_default=False) as client:
            assert not any(client.run(torch_is_loaded).values())
    assert killed
    assert not (tmp_path / "bad").exists()
    rows = store.read_rows(tmp_path / "run")
    assert len(rows) == summary.done == summary.jobs == len(cells)
    assert rows.status.value_counts().to_dict() == {"ok": 8, "skipped": 1}
    (reason,) = rows.reason.dropna()
    assert reason == "no dask worker offers sm_90 (offered: cpu)"
    notes = [line.split() for line in doubles_log.read_text().splitlines()]
    ends = Counter(i for what, i, _ in notes if what == "end")
    begins = Counter(i for what, i, _ in notes if what == "begin")
    assert set(ends.values()) == {1}
    assert sum(begins.values()) == 9, "only the cell that was cut off begins again"
    record = store.show_run(tmp_path / "run")
    assert record["status"] == "ok"
    assert not (tmp_path / "run/claims").exists()


def test_two_sweeps_whose_folders_share_a_name_both_have_all_their_cells(tmp_path, doubles_log):
    """Both at once on one scheduler, as two nightly runs below different folders."""
    cells = expand(batches=range(1, 4), paths=["cpu_fused"])
    done = {}

    def sweep(where: str, address: str) -> None:
        options = {"scheduler": address, "functions": SLOW}
        done[where] = spread.over_dask(cells, tmp_path / where / "nightly", **options)

    with spread.local_cluster(["cpu"]) as cluster:
        arguments = [(where, cluster.scheduler_address) for where in ("a", "b")]
        threads = [threading.Thread(target=sweep, args=each) for each in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for where in ("a", "b"):
        assert len(store.read_rows(tmp_path / where / "nightly")) == done[where].done == 3


def test_a_claimed_cell_waits_and_is_not_measured_again(tmp_path, doubles_log, monkeypatch):
    (cell,) = expand(batches=[1], paths=["cpu_fused"])
    monkeypatch.setattr(spread, "_DEVICE", spread.worker.WarmDevice(""))
    env = spread._environment()
    arguments = (str(tmp_path), "timing", cell.to_json(), env, "doubles:slow")
    try:
        with spread._claim(tmp_path / "claims" / f"timing-{cell.id}", 1.0):
            monkeypatch.setattr(spread.worker, "START_S", 0.2)
            with pytest.raises(TimeoutError, match="claimed elsewhere"):
                spread._run_cell(*arguments, 0.2)
        assert spread._run_cell(*arguments, 20.0)["statuses"] == ["ok"]
        assert spread._run_cell(*arguments, 20.0) == {"cell_id": cell.id, "statuses": []}
        env["devices"]["cpu"] = env["devices"]["cpu"] | {"torch": "1.0"}
        other = {"python": "3", "devices": {"cpu": env["devices"]["cpu"] | {"torch": "2.0"}}}
        with pytest.raises(MisuseError, match=r"torch 2\.0 there, 1\.0 here"):
            spread._run_cell(str(tmp_path), "timing", cell.to_json(), other, "doubles:slow", 20.0)
    finally:
        spread._DEVICE.stop()
    assert doubles_log.read_text().count("begin") == 1


def test_a_worker_of_many_threads_measures_one_cell_at_a_time(tmp_path, monkeypatch):
    at_work, most = [], []
    known = dict.fromkeys("device driver torch triton mlakit git_sha".split())
    env = {"python": "3", "devices": {"cpu": known | {"arch": "cpu"}}}

    class Device:
        environment = env

        def measure(self, folder, kind, cell, *rest):
            at_work.append(cell.id)
            most.append(len(at_work))
            time.sleep(0.05)
            at_work.remove(cell.id)
            return {"statuses": []}

    monkeypatch.setattr(spread, "_DEVICE", Device())
    threads = [
        threading.Thread(
            target=spread._run_cell,
            args=(str(tmp_path), "timing", cell.to_json(), env, "doubles:slow", 1.0),
        )
        for cell in expand(batches=[1, 2, 3], paths=["cpu_fused"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


def test_a_lost_scheduler_is_one_line_and_the_run_goes_on_later(
    tmp_path, doubles_log, monkeypatch, capfd
):
    cells = expand(batches=[1, 2], paths=["cpu_fused"])

    class Lost:
        def result(self):
            raise CancelledError

    def lost(client, queues, submit):
        yield queues["cpu"][0], Lost()

    with spread.local_cluster(["cpu"]) as cluster:
        options = {"scheduler": cluster.scheduler_address, "functions": SLOW}
        with monkeypatch.context() as patched:
            patched.setattr(spread, "_one_a_device", lost)
            with pytest.raises(MisuseError, match="scheduler was lost"):
                spread.over_dask(cells, tmp_path / "run", **options)
        assert store.show_run(tmp_path / "run")["status"] == "incomplete"
        assert spread.over_dask(None, tmp_path / "run", **options).done == 2
    assert "INFO" not in capfd.readouterr().err


def test_a_sweep_says_that_its_last_worker_is_gone_and_goes_on_with_the_next(
    tmp_path, doubles_log, monkeypatch, capfd
):
    monkeypatch.setattr(spread, "_LOOK_S", 0.2)
    cells = expand(batches=range(1, 5), paths=["cpu_fused"])
    said = []

    def take_away_and_bring_back(cluster):
        while "end" not in doubles_log.read_text():
            time.sleep(0.02)
        spec, cluster.worker_spec = cluster.worker_spec, {}
        cluster.sync(cluster._correct_state)
        while "waiting" not in "".join(said):
            time.sleep(0.3)
            said.append(capfd.readouterr().err)
        time.sleep(1)
        cluster.worker_spec = spec
        cluster.sync(cluster._correct_state)

    with spread.local_cluster(["cpu"]) as cluster:
        thread = threading.Thread(target=take_away_and_bring_back, args=(cluster,), daemon=True)
        thread.start()
        options = {"scheduler": cluster.scheduler_address, "functions": SLOW}
        summary = spread.over_dask(cells, tmp_path / "run", **options)
        thread.join(30)
    assert summary.done == 4
    said = "".join(said) + capfd.readouterr().err
    assert said.count("waiting: no dask worker offers cpu any more") == 1


def test_long_cells_go_first_and_each_worker_has_its_share_of_the_cores():
    cells = expand(batches=[2048, 64, 65536, 512, 1], paths=["cpu_fused"])
    jobs = run.longest_first([("timing", c) for c in cells])
    assert [c.m for _, c in jobs] == [1, 64, 65536, 512, 2048]
    with spread.local_cluster(["cpu"]) as cluster:
        options = cluster.worker_spec[0]["options"]
    assert options["env"]["OMP_NUM_THREADS"] == os.environ.get(
        "OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))
    )
