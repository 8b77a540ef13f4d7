"""A notebook's status is what happened, not what papermill saved."""

import json
import os
import time
from pathlib import Path

import nbformat
import pytest
from hostile import notebook

from mlakit.errors import MisuseError
from mlakit.report import page, runbook

END = "from mlakit.report import show\nshow.end()"


def run(folder: Path, *cells: str, **limits) -> runbook.NotebookRun:
    return runbook.run_notebook(
        notebook(folder, *cells), folder / "out.ipynb", {"arch": "cpu"}, **limits
    )


def written(folder: Path, done: runbook.NotebookRun) -> str:
    """The text of a run's page."""
    return page.write_notebook(
        folder / "page.html", folder / "out.ipynb", done, "footer"
    ).read_text()


def test_ok_counts_figures(tmp_path):
    plot = (
        "from matplotlib.figure import Figure\nfrom mlakit.report import show\n"
        "show.figure(Figure(), 'an empty figure')"
    )
    done = run(tmp_path, plot, END)
    assert (done.status, done.reason, done.figures) == ("ok", "", 1)


@pytest.mark.parametrize(
    ("cells", "limits", "status", "reason"),
    [
        (("1 / 0", END), {}, "failed", "ZeroDivisionError"),
        (("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", END), {}, "killed", "kernel"),
        (("import time\ntime.sleep(60)", END), {"cell_limit_s": 2}, "timed out", "limit of 2 s"),
        (("x = 1",), {}, "incomplete", "end marker"),
    ],
)
def test_status_is_what_happened(tmp_path, cells, limits, status, reason):
    done = run(tmp_path, *cells, **limits)
    assert done.status == status
    assert reason in done.reason
    if status != "incomplete" and (tmp_path / "out.ipynb").exists():
        kept = json.loads((tmp_path / "out.ipynb").read_text())["metadata"]["mlakit"]
        assert (kept["status"], kept["complete"]) == (status, False)


def test_no_ipykernel_is_no_kernel(tmp_path, monkeypatch):
    """The interpreter's own kernel is used; where it cannot start, the run says so."""
    blocker = tmp_path / "block"
    blocker.mkdir()
    (blocker / "ipykernel_launcher.py").write_text("raise SystemExit('no kernel here')")
    monkeypatch.setenv("PYTHONPATH", str(blocker))
    done = run(tmp_path, END)
    assert done.status == "no kernel"
    assert "did not start" in done.reason


def test_nothing_is_left_running(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        f"import os, time, pathlib\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(120)"
    )
    done = run(tmp_path, code, run_limit_s=8)
    assert (done.status, done.reason) == ("timed out", "over the run limit of 8 s")
    pid = int(pid_file.read_text())
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"kernel {pid} still runs")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"batch": [1]}, "did you mean 'batches'"),
        ({"batches": ["64"]}, "list of whole numbers"),
        ({"batches": [0]}, "1 or more"),
        ({"arch": "gfx9500"}, "unknown arch"),
    ],
)
def test_parameters_are_refused_before_a_kernel_starts(tmp_path, given, text):
    with pytest.raises(MisuseError, match=text):
        runbook.run_notebook(notebook(tmp_path, END), tmp_path / "out.ipynb", given)
    assert not (tmp_path / "out.ipynb").exists()


def test_a_notebook_needs_exactly_one_parameters_cell(tmp_path):
    path = notebook(tmp_path, END)
    nb = nbformat.read(path, as_version=4)
    nb.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(nb, path)
    with pytest.raises(MisuseError, match="2 cells tagged"):
        runbook.declared_parameters(path)


def test_failed_page_has_error_and_configuration_on_top(tmp_path):
    done = run(tmp_path, "print('\\x1b[31mred\\x1b[0m')\nraise ValueError('widths <b>')", END)
    text = written(tmp_path, done)
    top = text[text.index("<main>") : text.index("<main>") + 700]
    assert "failed" in top
    assert "ValueError: widths &lt;b&gt;" in top
    assert "arch=&#39;cpu&#39;" in top
    assert "\x1b" not in text


def test_page_exists_where_nothing_was_saved(tmp_path):
    done = runbook.NotebookRun("02_speed", {"arch": "cpu"}, "no kernel", "no such kernel", 0.1, "")
    assert "never started" in written(tmp_path, done)


def test_planted_secrets_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("USER", "maria.planted")
    home = os.path.expanduser("~")
    code = (
        "api_token = 'hf_PLANTEDPLANTED'\n"
        f"print('{home}/secret/file', api_token, 'password=hunter22')\n"
        "print('/home/maria.planted/x')\n"
        "raise RuntimeError('ghp_PLANTEDPLANTEDPLANTED at /home/maria.planted/work')"
    )
    done = run(tmp_path, code)
    saved = (tmp_path / "out.ipynb").read_text()
    text = written(tmp_path, done)
    for artefact in (saved, text, done.reason):
        for planted in ("PLANTEDPLANTED", "hunter22", "maria.planted", str(tmp_path)):
            assert planted not in artefact


@pytest.mark.parametrize(("already", "expected"), [(None, "1"), ("3", "3")])
def test_notebooks_that_run_at_once_share_the_cores(tmp_path, monkeypatch, already, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if already:
        monkeypatch.setenv("OMP_NUM_THREADS", already)
    cores = len(os.sched_getaffinity(0))
    cell = f"import os\nassert os.environ['OMP_NUM_THREADS'] == '{expected}'"
    assert run(tmp_path, cell, END, at_once=cores).status == "ok"
