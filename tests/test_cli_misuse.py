"""Every command, every option, with what a person may type wrongly: one line, the right exit code.

Nothing is measured: where a command would start to, it has accepted its arguments.
"""

import sys

import pytest
import typer

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
def here(tmp_path, monkeypatch):
    """A folder of things that are not what a command wants; no command measures anything."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "garbage.bin").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "garbage.json").write_text('{"a": [')
    (tmp_path / "model").mkdir()
    (tmp_path / "q.jsonl").write_text('{"id": 1, "prompt": "1+1=", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typer.main, "get_command", lambda app: GROUP)

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


def run(monkeypatch, capsys, *arguments) -> tuple[int | None, str]:
    """(exit code, what was said on standard error); the code is None where work would begin."""
    monkeypatch.setattr(sys, "argv", ["mlakit", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0), capsys.readouterr().err
    except AcceptedError:
        return None, capsys.readouterr().err
    raise AssertionError("main returned")


def assert_sound(monkeypatch, capsys, *arguments) -> None:
    code, said = run(monkeypatch, capsys, *arguments)
    assert "Traceback" not in said, f"{arguments}: {said[-600:]}"
    assert code in (None, 0, ExitCode.REGRESSION, ExitCode.MISUSE), f"{arguments}: {code} {said}"
    if code == ExitCode.MISUSE:
        assert said.startswith("mlakit: ")
        assert len(said.strip().splitlines()) == 1, f"{arguments}: {said}"
        assert len(said) < 1500


def names(here) -> set[str]:
    return {str(p.relative_to(here)) for p in here.rglob("*")}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_options_that_are_not_there_and_values_that_are_not_given(
    here, monkeypatch, capsys, command
):
    good, before = GOOD.get(command, []), names(here)
    options = [o for p in COMMANDS[command].params for o in p.opts if o.startswith("--")]
    wrong = [["--nosuch"], ["--" + "x" * 3000], ["a", "b", "c", "d"] * 4]
    wrong += [[o] for p in COMMANDS[command].params for o in p.opts[:1] if not is_flag(p)]
    if command == "tune":
        wrong.remove(["a", "b", "c", "d"] * 4)
    assert options
    for more in wrong:
        if more == [COMMANDS[command].params[0].opts[0]] and not more[0].startswith("-"):
            continue
        code, said = run(monkeypatch, capsys, command, *good, *more)
        assert code == ExitCode.MISUSE, (more, said)
        assert len(said.strip().splitlines()) == 1, said
    assert names(here) == before


def is_flag(parameter) -> bool:
    return getattr(parameter, "is_flag", False) or not parameter.opts[0].startswith("-")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_value_that_makes_no_sense_is_one_line(here, monkeypatch, capsys, command):
    good = GOOD.get(command, [])
    for parameter in COMMANDS[command].params:
        if is_flag(parameter) and parameter.opts[0].startswith("-"):
            continue
        for value in HOSTILE:
            option = parameter.opts[0]
            given = [option, value] if option.startswith("-") else []
            kept = list(good)
            if option in kept:
                at = kept.index(option)
                del kept[at : at + 2]
            if not given:
                positional = [p for p in COMMANDS[command].params if not p.opts[0].startswith("-")]
                at = positional.index(parameter)
                kept[at : at + 1] = [value]
            assert_sound(monkeypatch, capsys, command, *kept, *given)


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json", "txt"])
def test_sweep_files_that_are_none(here, monkeypatch, capsys, suffix):
    for data in (b"", b"\x00\xff", b"[1, 2]", b"a", b"{", b"preset: [", b'nosuch = "x"'):
        file = here / f"s.{suffix}"
        file.write_bytes(data)
        assert_sound(monkeypatch, capsys, "sweep", "--spec", str(file))


def test_an_unexpected_error_is_no_regression(here, monkeypatch, capsys):
    """Python's own exit code for an exception, 1, means something else here."""

    def breaks(*arguments, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("mlakit.report.build.build", breaks)
    code, said = run(monkeypatch, capsys, "report")
    assert code == ExitCode.FAILED
    assert "ZeroDivisionError" in said
