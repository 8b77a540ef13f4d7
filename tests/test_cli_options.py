"""What options and arguments do together: tuning on folders, going on, flags beside figures."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
from timing_rows import row

from mlakit import __version__
from mlakit.cli import main
from mlakit.cli.base import print_rows
from mlakit.datafiles import data_dir
from mlakit.errors import ExitCode
from mlakit.records import Cell
from mlakit.sweep import store

RECORDED = data_dir() / "recorded"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder: (exit code, output, what was said on standard error)."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlakit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return command


def table(out: str, title: str) -> list[dict]:
    """The rows of a printed table."""
    lines = out.split(f"# {title}")[1].split("\n# ")[0].splitlines()[1:]
    return list(csv.DictReader(lines, delimiter="\t"))


# ---- tune


def test_a_recorded_folder_tunes_to_the_table_that_is_kept(call):
    code, out, said = call("tune", RECORDED / "h200", "--dry-run")
    assert code == 0, said
    made = table(out, "thresholds")
    assert {line.pop("source") for line in made} == {"h200"}
    kept = list(csv.DictReader((data_dir() / "dispatch" / "sm_90.csv").open()))
    assert [{k: v.replace(",", "") for k, v in line.items()} for line in made] == [
        {k: v for k, v in line.items() if k != "source"} for line in kept
    ]


def test_of_a_folder_only_its_own_timing_rows_are_tuned_on_and_judged(call, tmp_path):
    folder, source = tmp_path / "card", RECORDED / "amd-epyc-x2"
    (folder / "quack").mkdir(parents=True)
    shutil.copy(source / "2026-11-30-cpu-paths.parquet", folder)
    for other in ("x-samples", "x-accuracy", "quack/timing"):
        (folder / f"{other}.parquet").write_text("read by nobody")
    code, out, said = call("tune", folder, "--judge", folder, "--dry-run")
    assert (code, said) == (0, "")
    assert [(line["m_from"], line["path"]) for line in table(out, "thresholds")] == [
        ("1", "cpu_fused")
    ]
    regret = {line["policy"]: line for line in table(out, "regret")}
    assert float(regret["torch_only"]["mean_pct"]) > 50
    assert {"worst_pct", "weighted_pct"} < set(regret["mlakit"])


@pytest.mark.parametrize("option", [(), ("--judge",)])
def test_an_argument_without_a_row_to_tune_from_is_named(call, tmp_path, option):
    (tmp_path / "runs").mkdir()
    code, out, said = call("tune", RECORDED / "h200", *option, "runs", "--dry-run")
    assert (code, out) == (ExitCode.MISUSE, "")
    assert "mlakit: runs holds no timing row to tune from" in said


# ---- record


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_recording_that_was_interrupted_goes_on_where_it_stopped(
    call, tmp_path, monkeypatch, elsewhere
):
    """In another environment it begins anew instead."""
    from mlakit.sweep import run

    log = tmp_path / "log"
    monkeypatch.setenv("DOUBLES_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "sweep"))
    monkeypatch.setenv("MLAKIT_LOCK_DIR", str(tmp_path))
    monkeypatch.setattr(run, "FUNCTIONS", {"timing": "doubles:measure"})
    monkeypatch.setattr("mlakit.cli.run.here", lambda: ("cpu",))

    def stop_at_three(done, *job):
        if done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("mlakit.cli.run.progress", lambda: stop_at_three)
    assert call("record", "--keep", "runs")[0] == ExitCode.INCOMPLETE
    (stopped,) = (tmp_path / "runs").iterdir()
    if elsewhere:
        record = json.loads((stopped / "run.json").read_text())
        record["environment"]["devices"]["cpu"]["torch"] = "2.0"
        (stopped / "run.json").write_text(json.dumps(record))

    monkeypatch.setattr("mlakit.cli.run.progress", lambda: None)
    code, out, said = call("record", "--keep", "runs")
    assert code == 0, said
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    begun = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("begin")]
    assert len(begun) - len(set(begun)) == (3 if elsewhere else 0)
    assert len(list((tmp_path / "runs").iterdir())) == (2 if elsewhere else 1)
    assert ("going on with" in said) != elsewhere
    assert ("3 from before" in out) != elsewhere
    # what is whole is not gone on with
    assert call("record", "--keep", "runs")[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == (3 if elsewhere else 2)


# ---- what is printed


def test_flags_are_printed_beside_their_figures_below_what_the_figures_are(call, tmp_path):
    cells = [Cell("cpu", m, 1536, 512, ("torch_native", "cpu_fused")) for m in (1, 64)]
    run = store.create_run(tmp_path / "runs" / "x", cells, measure=["timing"])
    run.close()
    for cell in cells:
        flags = {"flags": "busy-host,drift" if cell.m == 64 else ""}
        rows = [row("torch_native", 5, **cell.columns), row("cpu_fused", 2, 2.5, **cell.columns)]
        rows[1] |= flags
        store.write_part(run.path, "timing", cell.id, rows)
    code, out, _ = call("runs", "--show", "x")
    assert code == 0
    assert "# median microseconds per call; x: times as fast as the best unfused path" in out
    figures = [line["cpu_fused"] for line in table(out, "median")]
    assert figures == ["2 (2.50x)", "2 (2.50x) [1]"]
    assert table(out, "flags") == [{"mark": "[1]", "flags": "busy-host,drift"}]


def test_a_table_on_a_terminal_keeps_what_is_in_brackets(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_rows([{"do": "pip install mlakit[triton]", "figure": "2 [1]"}], "here")
    out = capsys.readouterr().out
    assert "mlakit[triton]" in out
    assert "2 [1]" in out


def test_the_version_is_printed(call):
    assert call("--version")[:2] == (0, f"mlakit {__version__}\n")
