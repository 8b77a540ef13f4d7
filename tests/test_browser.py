"""The report's pages in a headless Chromium: they load, show their figures, and fetch nothing.

axe-core, which looks for what shuts people out, is no part of this project: npm fetches it, or
``MLAKIT_AXE`` names it.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from devtools import browser, required
from hostile import BARE, mlakit

from mlakit.report.build import NOTEBOOKS

AXE = "axe-core@4.14.1"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The smallest whole report, made as cron would: no HOME, no display, a bare PATH."""
    out = tmp_path_factory.mktemp("report")
    command = mlakit("report", "--arch", "cpu", "--batch", "1,64", "--drift-batch", "16")
    command += ["--budget-s", "0.3", "--out", str(out)]
    done = subprocess.run(
        command, env=BARE, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return next(out.glob("*/index.html")).parent


def test_pages_refer_to_nothing_outside(report):
    for page in report.glob("*.html"):
        text = page.read_text()
        assert not re.search(r"<script|<link|<iframe|@import|url\(\s*['\"]?http", text), page
        for target in re.findall(r'(?:src|href)="([^"]*)"', text):
            assert target.startswith(("data:", "#")) or "/" not in target, target


def test_the_index_says_first_what_matters(report):
    """Chosen, how fast, how far, what changed and what not, before the pages."""
    text = (report / "index.html").read_text()
    places = [text.index(said) for said in (
        "Chosen on cpu by mlakit: ",
        "Fastest on cpu (measured on",
        "of elements correctly rounded",
        "What changed since the baseline",
        "Nothing is compared: this is the first run here",
        "What could not be judged, and why",
        "<h2>Pages</h2>",
    )]  # fmt: skip
    assert places == sorted(places)


def test_report_folder_says_the_same_to_machines(report):
    from mlakit.sweep.store import read_rows

    summary = json.loads((report / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("ok", 0)
    assert len(summary["runs"]) == len(NOTEBOOKS)
    assert summary["figures"] > 0
    rows = read_rows(report / f"{report.name}-timing")
    assert set(rows["arch"]) == {"cpu"}
    assert rows.loc[rows["status"] == "ok", "p50_us"].gt(0).all()
    assert summary["changed"][0].startswith("Nothing is compared: this is the first run here")
    assert {r["path"] for r in summary["unjudged"]} & {"aiter_fused", "triton_fused"}
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


def violations(page, axe: str, scheme: str, only: str = "") -> list[str]:
    """What axe finds on the page that is open; ``only``: one rule."""
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", features=wanted)
    page.run(axe + "; 0")
    options = json.dumps({"runOnly": {"type": "rule", "values": [only]}} if only else {})
    found = json.loads(page.run(f"axe.run({options}).then(r => JSON.stringify(r.violations))"))
    return [f"({scheme}) {v['id']}: {v['help']}: {v['nodes'][0]['html'][:160]}" for v in found]


def test_pages_load_without_errors_and_shut_nobody_out(axe, report, tmp_path):
    """Every page, that of a run that never started, and the history; in the dark, only colours
    can differ."""
    from mlakit.report import history, page, runbook

    failed = runbook.NotebookRun("02_speed", {"arch": "cpu"}, "killed", "the kernel died", 1.0, "")
    broken = page.write_notebook(tmp_path / "f.html", tmp_path / "none.ipynb", failed, "a footer")
    pages = sorted(report.glob("*.html"))
    assert len(pages) == 1 + len(NOTEBOOKS)
    found = []
    with browser(tmp_path / "profile") as opened:
        for file in (*pages, broken, history.write(report.parent)):
            opened.open(file.as_uri())
            found += [f"{file.name} {v}" for v in violations(opened, axe, "light")]
            found += [f"{file.name} {v}" for v in violations(opened, axe, "dark", "color-contrast")]
            alts = opened.run("[...document.images].map(i => i.complete ? i.alt : '')")
            found += [f"{file.name}: an image without text" for alt in alts if len(alt) < 10]
            assert opened.run("document.querySelector('footer').innerText.length > 5")
        assert not found, "\n".join(found)
        assert opened.errors == []


def test_the_check_sees_a_violation(axe, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<html><body><img src='x.png'><p style='color:#eee'>pale</p></body></html>")
    with browser(tmp_path / "profile") as opened:
        opened.open(bad.as_uri())
        found = " ".join(violations(opened, axe, "light"))
        dark = violations(opened, axe, "dark", "color-contrast")
    assert "image-alt" in found
    assert "color-contrast" in found
    assert len(dark) == 1
