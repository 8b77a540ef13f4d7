"""The command line: a user's mistake is one line and exit code 2, never a traceback."""

import json
import os
import subprocess
import sys

import pytest


def mlakit(*arguments, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mlakit.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sweep", "--model", "DeepSek-V3"], "did you mean 'DeepSeek-V3'"),
        (["sweep", "--arch", "gfx9500"], "unknown arch"),
        (["sweep", "--arch", "gfx9-4-generic"], "generic compile target"),
        (["sweep", "--dtype", "bf61"], "did you mean 'bf16'"),
        (["sweep", "--path", "triton_fussed"], "did you mean 'triton_fused'"),
        (["sweep", "--batch", "0"], "1 or more"),
        (["sweep", "--batch", "1.5"], "whole number"),
        (["sweep", "--batch", "-3"], "whole number"),
        (["sweep", "--hidden", "1536"], "unknown model"),
        (["sweep", "--preset", "qknorm"], "did you mean 'qk-norm'"),
        (["sweep", "--budget-s", "nan"], "budget_s"),
        (["sweep", "--resume", "nowhere"], "no run at nowhere"),
        (["sweep", "--spec", "nowhere.toml"], "nowhere.toml"),
        (["report", "--model", "DeepSek"], "unknown model"),
        (["report", "--batch", "many"], "whole number"),
        (["report", "--notebook", "02_sped"], "did you mean '02_speed'"),
        (["report", "--policy", "sglang_tody"], "sglang_today"),
        (["explain", "--policy", "nobody"], "unknown policy"),
        (["explain", "--arch", "gfx942", "--quant", "mxfp4"], "no MXFP4"),
        (["explain", "--aiter"], "--arch"),
        (["paths", "--arch", "h100"], "unknown arch"),
        (["compare", "nowhere", "nowhere"], "no run at nowhere"),
        (["runs", "--prune", "-1"], "give 0 or more"),
        (["ingest", "nowhere.parquet"], "no file nowhere.parquet"),
        (["audit", "torch_nativ"], "torch_native"),
        (["fingerprint", "json:nosuch"], "nosuch"),
        (["significance", "--a", "2.5", "--b", "0.9", "--n", "100"], "2.5"),
        (["significance", "--a", "0.9", "--b", "0.8"], "n"),
        (["fingerprint", "torch_rms_norm", "--dtype", "zz"], "unknown dtype"),
        (["audit", "torch_rms_norm", "--device", "cuda:7"], "unknown device"),
        (["report", "--jobs", "0"], "jobs"),
        (["sweep", "--dask", "tcp://127.0.0.1:9"], "no dask scheduler"),
        (["drift", "--emulate"], "--arch gfx942"),
        (["drift", "--emulate", "--arch", "sm_90"], "AMD"),
        (["nosuch"], "No such command"),
        (["sweep", "--nosuch"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, arguments, says):
    done = mlakit(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_one_line(tmp_path):
    target = tmp_path / "closed"
    target.write_text("a file where a folder is wanted")
    done = mlakit("sweep", "--batch", "1", "--out", str(target / "runs"), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="needs a folder closed to root too")
@pytest.mark.parametrize("command", ["sweep", "report", "drift"])
def test_a_folder_that_nobody_may_write_is_one_line(tmp_path, command):
    """/sys takes no new folder from anyone, root included."""
    done = mlakit(command, "--batch", "1", "--out", "/sys/kernel/mlakit", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "/sys/kernel/mlakit" in done.stderr


def test_every_command_has_help_with_an_example():
    listed = mlakit("--help")
    assert listed.returncode == 0
    commands = "doctor paths explain sweep report compare runs drift audit fingerprint"
    for command in (commands + " significance eval tune record ingest history").split():
        assert command in listed.stdout
        text = mlakit(command, "--help").stdout
        assert f"Example: mlakit {command}" in text


def test_the_bug_of_the_story_can_be_seen():
    asked = ["explain", "--arch", "gfx950", "--aiter", "--json", "--policy"]
    before = json.loads(mlakit(*asked, "sglang_before_fix").stdout)
    after = json.loads(mlakit(*asked, "sglang_after_fix").stdout)
    assert before["path"] == "torch_native"
    assert after["path"] == "aiter_fused"


def test_output_that_is_no_terminal_is_plain_lines():
    done = mlakit("paths")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[0].split("\t")[0] == "path"


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m mlakit.cli paths | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_a_named_file_that_is_no_parquet_is_refused_and_left_alone(tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("not Parquet")
    done = mlakit("compare", "notes.md", "notes.md", cwd=tmp_path)
    assert done.returncode == 2
    assert "does not read as Parquet" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["notes.md"]


@pytest.mark.parametrize("text", ["not json", "1", "[1]", "\xff"])
def test_damaged_question_files_are_one_line(tmp_path, text):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    done = mlakit("significance", "--a", "a.jsonl", "--b", "b.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("record", ["[]", "{}", "no json"])
def test_a_damaged_run_record_is_one_line(tmp_path, record):
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(record)
    for command in (["runs", "runs", "--show", "x"], ["sweep", "--resume", "runs/x"]):
        done = mlakit(*command, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
