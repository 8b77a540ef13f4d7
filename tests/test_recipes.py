"""docs/reports.md: its recipes parse, its commands are mlakit's, its table names real tests."""

import ast
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from mlakit import cli
from mlakit.cli.base import app

assert cli
ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reports.md").read_text("utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.S | re.M)


def check(command: str) -> None:
    """Parse ``... mlakit NAME OPTIONS`` as the command line would, without doing it."""
    words = shlex.split(command.split(">")[0])
    at = next(i for i, w in enumerate(words) if w.rsplit("/", 1)[-1] == "mlakit")
    group = typer.main.get_command(app)
    name, *rest = words[at + 1 :]
    assert name in group.commands, command
    group.commands[name].make_context(name, rest)


def test_the_check_sees_a_mistake():
    with pytest.raises(Exception, match="No such option"):
        check("mlakit report --nosuch")


def test_cron():
    (text,) = blocks("cron")
    line = text.splitlines()[-1]
    assert re.match(r"(\S+ ){5}cd /srv/mlakit && ", line)
    steps = [s for s in line.split("&&") if "bin/mlakit " in s]
    assert len(steps) == 2
    for step in steps:
        check(step)
    assert "%" not in line  # to cron, the end of the command


def test_the_cron_line_runs(tmp_path):
    """With /bin/sh, cron's PATH and nothing else; mlakit's own work stubbed: it's tested above."""
    shell = blocks("cron")[0].splitlines()[-1].split(" ", 5)[5]
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    tool = tmp_path / ".venv" / "bin" / "mlakit"
    tool.write_text('#!/bin/sh\necho "$@"\nexit ${CODE:-0}\n')
    tool.chmod(0o755)
    given = {"PATH": "/usr/bin:/bin"}
    shell = shell.replace("/srv/mlakit", shlex.quote(str(tmp_path)))
    for code, lines in ((0, ["report --out runs", "runs --prune 30"]), (1, ["report --out runs"])):
        (tmp_path / "report.log").unlink(missing_ok=True)
        done = subprocess.run(
            ["/bin/sh", "-c", shell], env=given | {"CODE": str(code)}, check=False
        )
        assert done.returncode == code
        assert (tmp_path / "report.log").read_text().splitlines() == lines


def test_systemd_units(tmp_path):
    service, timer = blocks("systemd")
    for line in service.splitlines():
        if line.startswith("Exec"):
            check(line.split("=", 1)[1])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze to verify the units with")
    tool = tmp_path / "srv" / "mlakit" / ".venv" / "bin" / "mlakit"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    here = service.replace("/srv/mlakit", str(tmp_path / "srv" / "mlakit"))
    (tmp_path / "mlakit-report.service").write_text(here.replace("User=mlakit", "User=root"))
    (tmp_path / "mlakit-report.timer").write_text(timer)
    verify = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no"]
    for unit in ("mlakit-report.service", "mlakit-report.timer"):
        done = subprocess.run(
            [*verify, str(tmp_path / unit)], capture_output=True, text=True, check=False
        )
        ours = [line for line in done.stderr.splitlines() if "mlakit" in line]
        assert (done.returncode, ours) == (0, []), done.stderr
    (tmp_path / "mlakit-report.timer").write_text(timer.replace("03:00:00", "25:00:00"))
    bad = [*verify, str(tmp_path / "mlakit-report.timer")]
    done = subprocess.run(bad, capture_output=True, text=True, check=False)
    assert "25:00:00" in done.stderr  # the check sees a mistake


def test_github_actions(tmp_path):
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("yaml")
    flow = yaml.safe_load(text)
    assert flow[True] == {"schedule": [{"cron": "0 3 * * *"}]}  # YAML 1.1 reads `on` so
    (job,) = flow["jobs"].values()
    steps = [s["run"] for s in job["steps"] if "run" in s]
    assert all("uses" in s or "run" in s for s in job["steps"])
    targets = (ROOT / "Makefile").read_text("utf-8")
    for step in steps:
        if "mlakit " in step:
            check(step)
        elif step.startswith("make "):
            assert f"\n{step.removeprefix('make ')}:" in targets
    for name in ("20261129-a", "20261130-b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "summary.md").write_text(name)
    out = tmp_path / "summary"
    (shown,) = [s for s in steps if "GITHUB_STEP_SUMMARY" in s]
    subprocess.run(
        ["/bin/bash", "-ec", shown],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "GITHUB_STEP_SUMMARY": str(out)},
        check=True,
    )
    assert out.read_text() == "20261130-b"


def test_the_table_names_real_tests():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) >= 12
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
        assert test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, test


def test_pictures_are_there_and_small():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    sizes = [(ROOT / "docs" / name).stat().st_size for name in pictures]
    assert len(sizes) >= 4
    assert max(sizes) < 150_000
    assert sum(sizes) < 800_000
