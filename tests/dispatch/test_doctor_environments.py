"""The doctor in five environments, as docs/doctor.md shows it: each is run, none is invented."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from package_index import install

from mlakit.datafiles import data_dir

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


def ask(folder, *options):
    """The doctor's rows in a fresh interpreter that has ``folder`` first on its path."""
    code = (
        "import json\n"
        "from mlakit.dispatch.doctor import doctor\n"
        "print(json.dumps(doctor().to_rows()))"
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-800:]
    assert "Traceback" not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def lines(rows, subjects, folder=None):
    """Rows of ``subjects`` in the page's form; the folder that packages lie in as SITE."""
    found = []
    for row in rows:
        if row["section"] in ("machine", "devices", "packages", "imports") and (
            row["subject"] in subjects
        ):
            text = f"{row['section']} {row['subject']}: {row['state']}: {row['found']}"
            text += f" -> {row['todo']}" if row["todo"] else ""
            found.append(text.replace(str(folder), "SITE") if folder else text)
    return found


def shown(heading):
    """The lines of the code block below a heading of the page."""
    part = PAGE.partition(f"## {heading}\n")[2]
    return part.partition("```\n")[2].partition("```")[0].splitlines()


def test_no_aiter(tmp_path):
    assert lines(ask(tmp_path), {"aiter"}) == shown("No AITER")


@pytest.mark.upstream
def test_the_unrelated_aiter_of_the_package_index(tmp_path):
    install("aiter", tmp_path)
    assert lines(ask(tmp_path), {"aiter"}, tmp_path) == shown("The wrong aiter")


@pytest.mark.upstream
def test_amds_own_wheel_without_rocm(tmp_path):
    install("amd-aiter", tmp_path)
    assert lines(ask(tmp_path), {"aiter"}, tmp_path) == shown("AMD's wheel without ROCm")


def test_triton_missing(tmp_path):
    """An environment of its own: every installed package but Triton."""
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("triton", "pytorch_triton", "__editable__", "_virtualenv")):
            (tmp_path / entry.name).symlink_to(entry)
    rows = ask(tmp_path, "-S")
    assert lines(rows, {"triton"}) == shown("Triton missing")


def test_an_h200():
    recorded = json.loads(
        (data_dir() / "recorded" / "h200" / "2026-11-30-doctor.json").read_text(encoding="utf-8")
    )
    subjects = {"torch", "GPU 0", "triton", "liger_kernel", "quack", "aiter"}
    assert lines(recorded["findings"], subjects) == shown("An NVIDIA H200")
