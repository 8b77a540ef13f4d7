"""The report's pages in a headless Chromium: they load, show their figures, and fetch nothing.

axe-core, which looks for what shuts people out, is no part of this project: npm fetches it, or
``MLAKIT_AXE`` names it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from devtools import browser, required

from mlakit.report.build import NOTEBOOKS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --enable-logging=stderr --v=0 --virtual-time-budget=3000"
).split()

AXE = "axe-core@4.14.1"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        required("no chromium on PATH")
    return CHROMIUM


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The smallest whole report: one absent arch and the CPU, two batches."""
    out = tmp_path_factory.mktemp("report")
    command = [sys.executable, "-m", "mlakit.cli", "report", "--arch", "cpu,gfx950"]
    command += ["--batch", "1,64", "--budget-s", "0.3", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*/index.html")).parent


def load(chromium, page, profile) -> tuple[str, str]:
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, done.stderr


def test_pages_load_without_errors_and_show_what_they_should(chromium, report, tmp_path):
    pages = sorted(report.glob("*.html"))
    assert len(pages) == 1 + 2 * len(NOTEBOOKS)
    for page in pages:
        dom, log = load(chromium, page, tmp_path / page.stem)
        assert "CONSOLE" not in log, log
        assert "</footer>" in dom
        for image in re.findall(r"<img[^>]*>", dom):
            assert re.search(r'alt="[^"]{10,}"', image), image[:80]
    index, _ = load(chromium, report / "index.html", tmp_path / "again")
    assert index.index("Fastest on cpu (measured on") < index.index("<h2>Pages</h2>")
    assert "No time is stated for gfx950: gfx950 is not on this machine" in index


def test_pages_refer_to_nothing_outside(report):
    for page in report.glob("*.html"):
        text = page.read_text()
        assert not re.search(r"<script|<link|<iframe|@import|url\(\s*['\"]?http", text), page
        for target in re.findall(r'(?:src|href)="([^"]*)"', text):
            assert target.startswith(("data:", "#")) or "/" not in target, target


def test_report_folder_says_the_same_to_machines(report):
    from mlakit.sweep.store import read_rows

    summary = json.loads((report / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("ok", 0)
    assert len(summary["runs"]) == 2 * len(NOTEBOOKS)
    assert summary["figures"] > 0
    rows = read_rows(report / f"{report.name}-timing")
    assert set(rows["arch"]) == {"cpu", "gfx950"}
    assert rows.loc[rows["arch"] == "gfx950", "p50_us"].isna().all()
    text = "".join(p.read_text() for p in report.glob("*.*"))
    assert str(report) not in text


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """The source of axe.min.js."""
    if named := os.environ.get("MLAKIT_AXE"):
        return Path(named).read_text(encoding="utf-8")
    if shutil.which("npm") is None:
        required("no npm on PATH to fetch axe-core with")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, AXE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        required(f"npm cannot fetch {AXE}: {done.stderr.strip()[-200:]}")
    return (folder / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


def violations(page, axe: str, file: Path, scheme: str) -> list[str]:
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", features=wanted)
    page.open(file.as_uri())
    page.run(axe + "; 0")
    found = json.loads(page.run("axe.run().then(r => JSON.stringify(r.violations))"))
    return [
        f"{file.name} ({scheme}) {v['id']}: {v['help']}: {v['nodes'][0]['html'][:160]}"
        for v in found
    ]


def test_no_page_has_a_violation(axe, report, tmp_path):
    """Light and dark, of every page, and of the page of a run that never started."""
    from mlakit.report import history, page, runbook

    failed = runbook.NotebookRun("02_speed", {"arch": "cpu"}, "killed", "the kernel died", 1.0, "")
    broken = tmp_path / "failed.html"
    page.write_notebook(broken, tmp_path / "none.ipynb", failed, "a footer")
    pages = [*sorted(report.glob("*.html")), broken, history.write(report.parent)]
    with browser(tmp_path / "profile") as opened:
        found = [
            text
            for file in pages
            for scheme in ("light", "dark")
            for text in violations(opened, axe, file, scheme)
        ]
        assert not found, "\n".join(found)
        assert opened.errors == []


def test_the_check_sees_a_violation(axe, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<html><body><img src='x.png'><p style='color:#eee'>pale</p></body></html>")
    with browser(tmp_path / "profile") as opened:
        found = " ".join(violations(opened, axe, bad, "light"))
    assert "image-alt" in found
    assert "color-contrast" in found
