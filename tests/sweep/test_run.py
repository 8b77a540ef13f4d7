"""Sweeps that lose nothing: faults are rows, a killed sweep resumes, two never share a folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from mlakit.errors import ExitCode, MisuseError
from mlakit.sweep import __main__ as bare
from mlakit.sweep import store, worker
from mlakit.sweep.grid import expand
from mlakit.sweep.run import SweepSummary, run_sweep
from mlakit.sweep.worker import difference, plain_reason
from mlakit.timing.guard import LockedError

MEASURE = {"timing": "doubles:measure", "accuracy": "doubles:accuracy"}
FAULTS = (1001, 1002, 1003, 1004, 1005, 1006)


def cells_of(*batches, **given):
    return expand(batches=batches, paths=["torch_native", "cpu_fused"], **given)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_every_fault_is_a_row_and_the_sweep_goes_on(tmp_path, doubles_log):
    cells = cells_of(1, *FAULTS, 2)
    cells += cells_of(64, archs=["gfx950"])
    seen = []
    summary = run_sweep(
        cells,
        tmp_path / "run",
        functions=MEASURE,
        time_limit_s=1.5,
        progress=lambda *a: seen.append(a),
    )
    assert summary.done == summary.jobs == len(cells) == len(seen)
    rows = store.read_rows(tmp_path / "run").set_index("m")
    assert rows.loc[[1, 2], "status"].tolist() == ["ok"] * 4
    faults = {m: (rows.loc[m, "status"], rows.loc[m, "reason"]) for m in FAULTS}
    assert faults == {
        1001: ("timeout", "over the time limit of 1.5 s"),
        1002: ("failed", "the worker died of SIGSEGV"),
        1003: ("failed", "RuntimeError: no kernel image in kernel.so"),
        1004: ("killed", "the worker died of SIGKILL"),
        1005: ("oom", "MemoryError: cannot allocate"),
        1006: ("failed", "ValueError: a skipped row may not hold figures: ['p50_us']"),
    }
    assert rows.loc[64, "status"] == "skipped"
    assert rows.loc[64, "reason"] == "gfx950 is not on this machine (here: cpu)"
    assert rows.p50_us.notna().sum() == 4
    assert rows.loc[1001, "path_requested"] == "torch_native,cpu_fused"
    assert (rows.run_id == "run").all()
    forked = [
        int(line.split()[2]) for line in doubles_log.read_text().splitlines() if "fork" in line
    ]
    assert forked
    assert not any(alive(pid) for pid in forked)
    record = store.show_run(tmp_path / "run")
    assert record["status"] == "failed"
    assert record["ended_at"]
    assert summary.exit_code == ExitCode.KILLED


def test_rows_name_no_path_user_or_host(tmp_path, doubles_log):
    run_sweep(cells_of(1003, 1), tmp_path / "run", functions=MEASURE)
    rows = store.read_rows(tmp_path / "run")
    text = " ".join(map(str, rows.to_numpy().ravel()))
    assert "/home" not in text
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text


def test_timing_and_accuracy_go_to_their_own_folders(tmp_path, doubles_log):
    cells = expand(batches=[1, 2], paths=["cpu_fused"], caches=["cold", "hot"])
    measure = ["timing", "accuracy"]
    summary = run_sweep(cells, tmp_path / "run", measure=measure, functions=MEASURE)
    assert summary.jobs == 6  # accuracy does not depend on the cache
    accuracy = store.read_rows(tmp_path / "run", "accuracy")
    assert sorted(accuracy.m) == [1, 2]
    assert accuracy.share_correct.tolist() == [1.0, 1.0]
    assert len(store.read_rows(tmp_path / "run")) == 4


def test_a_killed_driver_resumes_with_what_is_missing(tmp_path, doubles_log):
    run_dir = tmp_path / "run"
    code = (
        "import sys; from mlakit.sweep.run import run_sweep; from mlakit.sweep.grid import expand;"
        "run_sweep(expand(batches=[1, 2, 3, 4, 5, 6], paths=['cpu_fused']), sys.argv[1],"
        " functions={'timing': 'doubles:slow'})"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, str(run_dir)])
    deadline = time.monotonic() + 40
    while len(list((run_dir / "parts").glob("*.parquet"))) < 2:
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(LockedError, match=f"in use by process {driver.pid}"):
        run_sweep(None, run_dir)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    workers = {int(line.split()[2]) for line in doubles_log.read_text().splitlines()}
    deadline = time.monotonic() + 5
    while any(map(alive, workers)):
        assert time.monotonic() < deadline, "a worker outlived its driver"
        time.sleep(0.05)
    assert store.show_run(run_dir)["status"] == "crashed"
    kept = len(list((run_dir / "parts").glob("*.parquet")))
    summary = run_sweep(None, run_dir, functions={"timing": "doubles:slow"})
    assert (summary.reused, summary.done, summary.jobs) == (kept, 6, 6)
    ends = Counter(
        line.split()[1] for line in doubles_log.read_text().splitlines() if "end" in line
    )
    assert set(ends.values()) == {1}
    assert store.show_run(run_dir)["status"] == "ok"
    assert len(store.read_rows(run_dir)) == 6


def test_ctrl_c_leaves_nothing_half_written(tmp_path, doubles_log):
    def interrupt(done, total, cell, words):
        if done == 2:
            raise KeyboardInterrupt

    cells = cells_of(1, 2, 3)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(cells, tmp_path / "run", functions=MEASURE, progress=interrupt)
    assert store.show_run(tmp_path / "run")["status"] == "interrupted"
    assert len(list((tmp_path / "run/parts").iterdir())) == 2
    summary = run_sweep(cells, tmp_path / "run", functions=MEASURE)
    assert summary.reused == 2
    with pytest.raises(MisuseError, match="holds a run already"):
        run_sweep(cells, tmp_path / "run", resume=False)
    with pytest.raises(MisuseError, match="other cells"):
        run_sweep(cells[:1], tmp_path / "run")


def test_another_environment_is_refused_unless_forced(tmp_path, doubles_log):
    run_dir = tmp_path / "run"
    run_sweep(cells_of(1, 2), run_dir, functions=MEASURE)
    record = json.loads((run_dir / "run.json").read_text())
    record["environment"]["devices"]["cpu"]["torch"] = "1.0"
    (run_dir / "run.json").write_text(json.dumps(record))
    next((run_dir / "parts").glob("*.parquet")).write_bytes(b"PAR1 cut off")
    with (
        pytest.warns(UserWarning, match="damaged part"),
        pytest.raises(MisuseError, match=r"torch 1\.0 there, .* here") as refused,
    ):
        run_sweep(None, run_dir, functions=MEASURE)
    assert "\n" not in str(refused.value)
    assert store.show_run(run_dir)["status"] == "ok"
    summary = run_sweep(None, run_dir, functions=MEASURE, force=True)
    assert (summary.reused, summary.done) == (1, 2)
    assert store.show_run(run_dir)["other_environments"][0]["devices"]["cpu"]["torch"] == "1.0"


def test_failed_cells_are_measured_again_on_request(tmp_path, doubles_log):
    run_dir = tmp_path / "run"
    run_sweep(cells_of(1, 1003), run_dir, functions=MEASURE)
    assert run_sweep(None, run_dir, functions=MEASURE).reused == 2
    again = run_sweep(None, run_dir, functions={"timing": "doubles:slow"}, retry=["failed"])
    assert again.reused == 1
    assert set(store.read_rows(run_dir).status) == {"ok"}


def test_a_held_device_ends_the_sweep_without_rows(tmp_path, doubles_log, monkeypatch):
    """The worker waits for the device's lock, and a device held throughout is no cell's fault."""
    monkeypatch.setattr(worker, "LOCK_WAIT_S", 0.1)
    holder = "import time\nfrom mlakit.timing.guard import device_lock\n"
    holder += "with device_lock('cpu'):\n    print('held', flush=True)\n    time.sleep(60)"
    command = [sys.executable, "-c", holder]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=str(process.pid)):
            run_sweep(cells_of(1), tmp_path / "run", functions=MEASURE)
        process.kill()
    assert store.show_run(tmp_path / "run")["status"] == "incomplete"
    assert store.read_rows(tmp_path / "run").empty
    assert run_sweep(None, tmp_path / "run", functions=MEASURE).statuses == {"ok": 2}


def test_no_run_folder_is_made_for_a_bad_request(tmp_path):
    with pytest.raises(MisuseError, match="no run at"):
        run_sweep(None, tmp_path / "none")
    with pytest.raises(MisuseError, match="kind of measurement"):
        run_sweep(cells_of(1), tmp_path / "none", measure=["time"])
    for limit in (0, float("nan"), float("inf"), 1e30):
        with pytest.raises(MisuseError, match="seconds above 0"):
            run_sweep(cells_of(1), tmp_path / "none", time_limit_s=limit)
    assert not (tmp_path / "none").exists()


def test_a_job_whose_part_is_not_there_is_not_done(tmp_path):
    def loses_the_second(run_dir, jobs, settle, functions, limit_s):
        env = {"python": "3", "devices": {"cpu": {"arch": "cpu"}}}
        settle(env, 1)
        for i, (kind, cell) in enumerate(jobs):
            if i != 1:
                worker.write_fault(run_dir, kind, cell, env, "skipped", "a test")
            yield cell, {"statuses": ["skipped"]}

    summary = run_sweep(cells_of(1, 2, 3), tmp_path / "run", run_jobs=loses_the_second)
    assert (summary.done, summary.jobs, summary.exit_code) == (2, 3, ExitCode.INCOMPLETE)
    record = store.show_run(tmp_path / "run")
    assert (record["status"], record["summary"]["done"]) == ("incomplete", 2)
    store.part_path(tmp_path / "run", "timing", cells_of(2)[0].id).mkdir()  # which is no part
    summary = run_sweep(None, tmp_path / "run", run_jobs=loses_the_second)
    assert (summary.reused, summary.done, summary.exit_code) == (2, 3, ExitCode.NO_KERNEL)


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ExitCode.FAILED, "No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), ExitCode.MISUSE, "x: Perm"),
        (RuntimeError("a bug"), ExitCode.FAILED, "RuntimeError: a bug"),
    ],
)
def test_the_bare_command_ends_with_the_codes_of_the_whole_one(
    tmp_path, monkeypatch, capsys, error, code, last
):
    def fails(*arguments, **options):
        raise error from ValueError("what went before")

    monkeypatch.setattr(bare, "run_asked", fails)
    assert bare.main(["--archs", "cpu", "--out", str(tmp_path)]) == code
    said = capsys.readouterr().err
    assert last in said.splitlines()[-1]
    assert ("Traceback" in said) == isinstance(error, RuntimeError)
    assert len(said.splitlines()) == 1 or "Traceback" in said


def test_bare_command(tmp_path, doubles_log, capsys):
    assert bare.main(["--archs", "cpu", "--batches", "0", "--out", str(tmp_path)]) == 2
    assert "whole number of rows" in capsys.readouterr().err
    assert bare.main(["--archs", "gfx950", "--batches", "1,2", "--out", str(tmp_path)]) == 7
    last = capsys.readouterr().out.splitlines()[-1]
    assert store.show_run(last)["status"] == "ok"
    assert bare.main(["--resume", last, "--time-limit-s", "9"]) == 7
    assert bare.main(["--resume", last, "--batches", "4"]) == 2
    assert "keeps its own batches" in capsys.readouterr().err


def test_a_bare_gpu_machine_needs_no_more_than_it_has(tmp_path, doubles_log):
    """The driver and the worker, with every package blocked that such a machine lacks."""
    blocked = "pydantic", "typer", "rich", "scipy", "numba", "dask", "distributed", "yaml"
    block = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(block)
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    command = "-m mlakit.sweep --archs cpu --batches 3 --paths cpu_fused --out".split()
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "runs")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert done.stdout.splitlines()[-1] == str(run_dir), done.stderr
    assert "Traceback" not in done.stderr
    assert len(store.read_rows(run_dir)) >= 1
    assert not any(name in (run_dir / "worker.log").read_text() for name in blocked)


@pytest.mark.parametrize(
    ("statuses", "done", "code"),
    [
        ({"ok": 3}, 4, ExitCode.OK),
        ({"ok": 3}, 3, ExitCode.INCOMPLETE),
        ({"ok": 1, "wrong": 1}, 4, ExitCode.FAILED),
        ({"failed": 1, "timeout": 1}, 4, ExitCode.TIMED_OUT),
        ({"ok": 1, "oom": 1}, 4, ExitCode.KILLED),
        ({"skipped": 4}, 4, ExitCode.NO_KERNEL),
        ({"skipped": 3, "ok": 1}, 4, ExitCode.OK),
    ],
)
def test_exit_codes(statuses, done, code):
    assert SweepSummary("r", "r", jobs=4, done=done, statuses=statuses).exit_code == code


def test_difference_names_what_differs():
    def machine(torch, *gpus):
        names = {"cpu": "EPYC"} | {f"cuda:{i}": g for i, g in enumerate(gpus)}
        versions = {"driver": None, "torch": torch, "triton": "3", "mlakit": "1", "git_sha": "a"}
        return {"devices": {k: {"device": v} | versions for k, v in names.items()}}

    h200 = machine("2.11", "NVIDIA H200")
    assert difference(h200, machine("2.11", "NVIDIA H200", "NVIDIA H200")) is None
    expected = "device EPYC, NVIDIA H200 there, EPYC here; torch 2.11 there, 2.13 here"
    assert difference(h200, machine("2.13")) == expected


def test_reasons_keep_no_folders():
    error = OSError("cannot open '/home/me/x/y.so': see /usr/lib/z and a/b\nsecond line")
    assert plain_reason(error) == "OSError: cannot open 'y.so': see z and a/b"
    assert plain_reason(ValueError()) == "ValueError: no message"
