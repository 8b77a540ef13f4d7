"""The nightly report where nothing can be relied on; the table of docs/reports.md names each test.

A whole report with no HOME, no display and a bare PATH is in test_browser.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile import BARE, CHECKOUT, mlakit, mounted, no_mounts, notebook, read_only

from mlakit.cli import main
from mlakit.errors import ExitCode, LockedError
from mlakit.report import build, runbook, scrub
from mlakit.sweep import store

needs_mounts = pytest.mark.skipif(bool(no_mounts()), reason=f"needs to mount: {no_mounts()}")
QUICK = ("report", "--arch", "gfx950", "--batch", "1", "--notebook", "01_dispatch")


def run(command: list, **more) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, **more)


@needs_mounts
def test_a_read_only_checkout_is_enough(tmp_path):
    ours = read_only(CHECKOUT)
    done = run(mounted([ours], mlakit(*QUICK, "--out", tmp_path / "runs"), BARE))
    assert done.returncode == ExitCode.OK, done.stderr
    assert json.loads(next(tmp_path.glob("runs/*/summary.json")).read_text())["figures"] > 0
    refused = run(mounted([ours], ["/bin/touch", CHECKOUT / "never"], BARE))
    assert "Read-only file system" in refused.stderr


@needs_mounts
def test_a_read_only_folder_is_one_line(tmp_path):
    done = run(mounted([read_only(tmp_path), f"cd {tmp_path}"], mlakit(*QUICK), BARE))
    assert done.returncode == ExitCode.MISUSE
    assert done.stderr == (
        "mlakit: cannot write runs (Read-only file system): name a folder that you can write to\n"
    )


@needs_mounts
@pytest.mark.parametrize("size", ["8k", "40k"])
def test_a_full_disk_is_no_regression(tmp_path, size):
    """Full before the first row, and later: one line, and the exit code of a failure."""
    mounts = [f"mount -t tmpfs -o size={size} tmpfs {tmp_path}"]
    done = run(mounted(mounts, mlakit(*QUICK, "--out", tmp_path / "runs"), BARE))
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@needs_mounts
def test_a_notebook_that_fills_the_disk_failed(tmp_path):
    source = notebook(tmp_path, "print('x' * 100_000)\nfrom mlakit.report import show\nshow.end()")
    (tmp_path / "disk").mkdir()
    code = "import sys, pathlib\nfrom mlakit.report import runbook\na, b = map(pathlib.Path, "
    code += "sys.argv[1:])\nd = runbook.run_notebook(a, b, {})\nprint(d.status, '|', d.reason)"
    mounts = [f"mount -t tmpfs -o size=40k tmpfs {tmp_path / 'disk'}"]
    command = [sys.executable, "-c", code, source, tmp_path / "disk" / "out.ipynb"]
    done = run(mounted(mounts, command, BARE))
    assert re.match(r"failed \| .*No space left on device", done.stdout), done.stdout + done.stderr


def test_the_second_of_two_starts_names_the_holder(tmp_path, monkeypatch, capsys):
    held = store.lock(tmp_path)
    try:
        with pytest.raises(LockedError, match=f"in use by process {os.getpid()} since 20"):
            build.build(build.Options(), tmp_path)
        monkeypatch.setattr("sys.argv", ["mlakit", *QUICK, "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        os.close(held)
    assert ended.value.code == ExitCode.INCOMPLETE
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"process {os.getpid()}" in said


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path):
    assert len({store.new_run_dir(tmp_path) for _ in range(50)}) == 50


def test_the_pinned_run_is_never_pruned(tmp_path):
    names = [f"20261130-00000{i}-aaaaaa" for i in range(4)]
    for name in names:
        store.create_run(tmp_path / name, [], measure=["timing"]).close()
    (tmp_path / store.PIN).write_text(names[0] + "\n")
    assert store.prune(tmp_path, keep=1) == names[1:3]
    assert (tmp_path / names[0] / "run.json").exists()


@pytest.mark.parametrize("backend", [None, "", "TkAgg", "module://nonsense"])
def test_any_mplbackend_is_set_aside(tmp_path, monkeypatch, backend):
    monkeypatch.delenv("MPLBACKEND", raising=False)
    if backend is not None:
        monkeypatch.setenv("MPLBACKEND", backend)
    assert runbook._environment(tmp_path)["MPLBACKEND"] == "agg"


def test_a_user_without_a_home_is_no_error(monkeypatch):
    """A container's user has neither HOME nor an entry that names one."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)
    scrub._replacements.cache_clear()
    try:
        assert scrub.text("/home/maria/x ~ y") == "[home]/x ~ y"
    finally:
        scrub._replacements.cache_clear()


def test_a_report_that_is_killed_leaves_no_kernel(tmp_path):
    """The OOM killer and ``timeout -s KILL`` give nobody a chance to tidy up."""
    pid_file = tmp_path / "pid"
    code = f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    source = notebook(tmp_path, code + "\ntime.sleep(120)")
    script = "import sys, pathlib\nfrom mlakit.report import runbook\n"
    script += "runbook.run_notebook(*map(pathlib.Path, sys.argv[1:]), {})"
    parent = subprocess.Popen([sys.executable, "-c", script, source, tmp_path / "out.ipynb"])
    try:
        end = time.monotonic() + 120
        while not (pid_file.exists() and pid_file.read_text()):
            assert parent.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    kernel = Path("/proc", pid_file.read_text())
    for _ in range(200):
        if not kernel.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"kernel {kernel.name} still runs")


def test_a_crash_is_not_taken_for_a_regression(monkeypatch, capsys):
    """Python's own exit code for an exception is 1, which mlakit says of a regression."""

    def crash(*_, **__):
        raise RuntimeError("a bug of mlakit's own")

    monkeypatch.setattr(build, "build", crash)
    monkeypatch.setattr("sys.argv", ["mlakit", *QUICK])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.FAILED
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("mlakit: RuntimeError: a bug of mlakit's own")
