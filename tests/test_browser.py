"""The report's pages in a headless Chromium: they load, show their figures, and fetch nothing."""

import os
import re
import shutil
import subprocess
import sys

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --enable-logging=stderr --v=0 --virtual-time-budget=3000"
).split()

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        if os.environ.get("MLAKIT_REQUIRE_BROWSER"):
            pytest.fail("no chromium here, and MLAKIT_REQUIRE_BROWSER is set")
        pytest.skip("no chromium on PATH")
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
    assert len(pages) == 7
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
    import json

    from mlakit.sweep.store import read_rows

    summary = json.loads((report / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("ok", 0)
    assert len(summary["runs"]) == 6
    assert summary["figures"] > 0
    rows = read_rows(report / f"{report.name}-timing")
    assert set(rows["arch"]) == {"cpu", "gfx950"}
    assert rows.loc[rows["arch"] == "gfx950", "p50_us"].isna().all()
    text = "".join(p.read_text() for p in report.glob("*.*"))
    assert str(report) not in text
