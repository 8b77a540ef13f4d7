"""The command line: whatever a person types wrongly is one line and the right exit code.

Everything runs in this process. In ``here`` nothing is measured: where a command would start to,
it has accepted its arguments.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
import typer
from hostile import mlakit

from mlakit.cli import main
from mlakit.cli.base import app
from mlakit.errors import ExitCode

GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands
GOOD = {
    "compare": ["run", "run"],
    "eval": ["model", "--questions", "q.jsonl"],
    "ingest": ["kept.parquet"],
    "fingerprint": ["torch_rms_norm"],
    "audit": ["torch_rms_norm"],
    "significance": ["--a", "0.9", "--b", "0.8", "--n", "100"],
    "tune": ["run"],
}
"""arguments that a command cannot do without; everything else has a default"""
HOSTILE = ("", "-1", "nan", "9" * 30, "missing", "folder", "empty", "garbage.bin", "garbage.json")
HOSTILE += ("🙂\n%s{x}", "a,b,,", "x" * 300, "empty/x")


class AcceptedError(BaseException):
    """The command's arguments were in order and it began its work."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder: (exit code, output, what was said on standard error).

    The code is None where work would begin; a misuse is one line.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typer.main, "get_command", lambda app: GROUP)

    def command(*arguments) -> tuple[int | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlakit", *arguments])
        code = None
        try:
            main()
            raise AssertionError("main returned")
        except SystemExit as ended:
            code = int(ended.code or 0)
        except AcceptedError:
            pass
        out, said = capsys.readouterr()
        if code == ExitCode.MISUSE:
            assert said.startswith("mlakit: ")
            assert len(said.strip().splitlines()) == 1, f"{arguments}: {said}"
        return code, out, said

    return command


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of things that are not what a command wants; no command measures anything."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "garbage.bin").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "garbage.json").write_text('{"a": [')
    (tmp_path / "model").mkdir()
    (tmp_path / "q.jsonl").write_text('{"id": 1, "prompt": "1+1=", "answer": "2"}\n')

    def begins(*arguments, **options):
        raise AcceptedError

    for name in (
        "mlakit.sweep.run.Worker",
        "mlakit.sweep.run.run_sweep",
        "mlakit.sweep.spread.over_dask",
        "mlakit.report.build.build",
        "mlakit.drift.evals.evaluate",
        "mlakit.drift.flips.flips",
        "mlakit.dispatch.doctor.doctor",
        "mlakit.drift.audit.adapt",
    ):
        monkeypatch.setattr(name, begins)
    from mlakit.drift import audit, fingerprint

    def loads(target, **options):
        audit.load_target(target) if isinstance(target, str) else None
        raise AcceptedError

    monkeypatch.setattr(audit, "audit", loads)
    monkeypatch.setattr(fingerprint, "fingerprint", loads)
    return tmp_path


def names(folder) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


# ---- one line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("sweep --model DeepSek-V3", "did you mean 'DeepSeek-V3'"),
        ("sweep --arch gfx9500", "unknown arch"),
        ("sweep --arch gfx9-4-generic", "generic compile target"),
        ("sweep --dtype bf61", "did you mean 'bf16'"),
        ("sweep --path triton_fussed", "did you mean 'triton_fused'"),
        ("sweep --batch 0", "1 or more"),
        ("sweep --batch 1.5", "whole number"),
        ("sweep --batch -3", "whole number"),
        ("sweep --hidden 1536", "unknown model"),
        ("sweep --preset qknorm", "did you mean 'qk-norm'"),
        ("sweep --budget-s nan", "budget_s"),
        ("sweep --resume nowhere", "no run at nowhere"),
        ("sweep --resume nowhere --batch 3 --spec x.toml", "keeps its own batches, spec"),
        ("sweep --resume nowhere --out x", "--out would do nothing with --resume"),
        ("sweep --retry timeout", "--retry would do nothing without --resume"),
        ("sweep --force", "--force would do nothing without --resume"),
        ("sweep --spec nowhere.toml", "nowhere.toml"),
        ("report --model DeepSek", "unknown model"),
        ("report --batch many", "whole number"),
        ("report --notebook 02_sped", "did you mean '02_speed'"),
        ("report --policy sglang_tody", "sglang_today"),
        ("report --jobs 0", "jobs"),
        ("report --run-limit-s 1e30", "seconds above 0, to 1e6"),
        ("report --cell-limit-s inf", "seconds above 0, to 1e6"),
        ("explain --policy nobody", "unknown policy"),
        ("explain --arch gfx942 --quant mxfp4", "no MXFP4"),
        ("explain --arch MI300X", "did you mean 'gfx942'"),
        ("explain --quant fp8", "did you mean 'fp8_group128' or 'fp8_token'"),
        ("explain --aiter", "--arch"),
        ("explain --arch gfx950 --aiter-api pair", "nothing without --aiter"),
        ("explain --arch gfx950 --aiter --aiter-api pear", "did you mean 'pair'"),
        ("paths --arch h100", "unknown arch"),
        ("compare nowhere nowhere", "no run at nowhere"),
        ("runs --prune -1", "--prune"),
        ("runs nowhere", "no folder nowhere"),
        ("runs nowhere --prune 1", "no folder nowhere"),
        ("runs . --show x --prune 1", "--prune would do nothing with --show"),
        ("eval --small --a torch_native", "--a would do nothing with --small"),
        ("eval model --questions q --n 5", "--n would do nothing without --small"),
        ("ingest nowhere.parquet", "no file nowhere.parquet"),
        ("audit torch_nativ", "torch_native"),
        ("audit torch_rms_norm --device cuda:7", "unknown device"),
        ("fingerprint json:nosuch", "nosuch"),
        ("fingerprint torch_rms_norm --dtype zz", "unknown dtype"),
        ("significance --a 2.5 --b 0.9 --n 100", "2.5"),
        ("significance --a 0.9 --b 0.8", "n"),
        ("sweep --dask tcp://127.0.0.1:9", "no dask scheduler"),
        ("tune nowhere --traffic busy", "unknown traffic profile"),
        ("drift --emulate", "--arch gfx942"),
        ("drift --emulate --arch sm_90", "AMD"),
        ("drift --emulate --arch gfx942 --path cpu_fused", "--path would do nothing"),
        ("nosuch", "No such command"),
        ("sweep --nosuch", "No such option"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, run, command, says):
    code, out, said = run(*command.split())
    assert (code, out) == (ExitCode.MISUSE, "")
    assert says in said
    assert names(tmp_path) == set()


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="needs a folder closed to root too")
@pytest.mark.parametrize("command", ["sweep", "report", "drift"])
def test_a_folder_that_nobody_may_write_is_one_line(tmp_path, run, command):
    """/sys takes no new folder from anyone, root included; nor does a file."""
    (tmp_path / "closed").write_text("a file where a folder is wanted")
    for folder in ("/sys/kernel/mlakit", "closed/runs"):
        code, _, said = run(command, "--batch", "1", "--out", folder)
        assert code == ExitCode.MISUSE
        assert folder in said


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_options_that_are_not_there_and_values_that_are_not_given(here, run, command):
    good, before = GOOD.get(command, []), names(here)
    parameters = COMMANDS[command].params
    wrong = [["--nosuch"], ["--" + "x" * 3000]]
    wrong += [] if command == "tune" else [["a", "b", "c", "d"] * 4]
    wrong += [[p.opts[0]] for p in parameters if not (is_flag(p) or is_argument(p))]
    for more in wrong:
        assert run(command, *good, *more)[0] == ExitCode.MISUSE, more
    assert names(here) == before


def is_argument(parameter) -> bool:
    return not parameter.opts[0].startswith("-")


def is_flag(parameter) -> bool:
    return getattr(parameter, "is_flag", False)


def assert_sound(run, *arguments) -> None:
    code, _, said = run(*arguments)
    assert "Traceback" not in said, f"{arguments}: {said[-600:]}"
    assert code in (None, 0, ExitCode.REGRESSION, ExitCode.MISUSE), f"{arguments}: {code} {said}"
    assert code != ExitCode.MISUSE or len(said) < 1500


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_value_that_makes_no_sense_is_one_line(here, run, command):
    parameters = [p for p in COMMANDS[command].params if not is_flag(p)]
    positional = [p for p in parameters if is_argument(p)]
    for parameter in parameters:
        option = parameter.opts[0]
        for value in HOSTILE:
            given = list(GOOD.get(command, []))
            if parameter in positional:
                at = positional.index(parameter)
                given[at : at + 1] = [value]
            else:
                at = given.index(option) if option in given else len(given)
                given[at : at + 2] = [option, value]
            assert_sound(run, command, *given)


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json", "txt"])
def test_sweep_files_that_are_none(here, run, suffix):
    for data in (b"", b"\x00\xff", b"[1, 2]", b"a", b"{", b"preset: [", b'nosuch = "x"'):
        (here / f"s.{suffix}").write_bytes(data)
        assert_sound(run, "sweep", "--spec", f"s.{suffix}")


def test_a_named_file_that_is_no_parquet_is_refused_and_left_alone(tmp_path, run):
    (tmp_path / "notes.md").write_text("not Parquet")
    code, _, said = run("compare", "notes.md", "notes.md")
    assert code == ExitCode.MISUSE
    assert "does not read as Parquet" in said
    assert names(tmp_path) == {"notes.md"}


@pytest.mark.parametrize("text", ["not json", "1", "[1]", "\xff"])
def test_damaged_question_files_are_one_line(tmp_path, run, text):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    assert run("significance", "--a", "a.jsonl", "--b", "b.jsonl")[0] == ExitCode.MISUSE


WHOLE = '{"run_id":"x","status":"ok","started_at":"","measure":[],"cells":[],"cell_ids":[],'


@pytest.mark.parametrize(
    "record",
    ["[]", "{}", "no json", WHOLE + '"environment": 3}', WHOLE + '"environment": {"python": "3"}}',
     WHOLE + '"environment": {"devices": {"cpu": 3}}}', WHOLE + '"summary": 3}'],
)  # fmt: skip
def test_a_damaged_run_record_is_one_line(tmp_path, run, record):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "run.json").write_text(record)
    for command in ("runs runs --show x", "sweep --resume runs/x"):
        assert run(*command.split())[0] == ExitCode.MISUSE
    assert "unreadable" in run("runs", "runs")[1]


# ---- what is printed


def test_every_command_has_help_with_an_example(run):
    code, listed, _ = run("--help")
    assert code == 0
    commands = "doctor paths explain sweep report compare runs drift audit fingerprint"
    for command in (commands + " significance eval tune record ingest history").split():
        assert command in listed
        assert f"Example: mlakit {command}" in run(command, "--help")[1]


def test_the_bug_of_the_story_can_be_seen(run):
    asked = "explain --arch gfx950 --aiter --json --policy".split()
    before, after = (
        json.loads(run(*asked, f"sglang_{when}_fix")[1])["path"] for when in ("before", "after")
    )
    assert (before, after) == ("torch_native", "aiter_fused")


def test_output_that_is_no_terminal_is_plain_lines():
    done = subprocess.run(mlakit("paths"), capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    title, columns = done.stdout.splitlines()[:2]
    assert title.startswith("# paths on ")
    assert columns.split("\t")[0] == "path"


@pytest.mark.parametrize("command", ["paths", "paths --json", "runs .", "--help"])
def test_a_closed_pipe_ends_a_command_as_it_ends_others(command):
    """Not with 1, which would say "regression"."""
    reader, writer = os.pipe()
    os.close(reader)
    call = mlakit(*command.split())
    done = subprocess.run(call, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
