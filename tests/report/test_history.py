"""History: every run keeps its place, gaps show, a regression is found and leads to its cell."""

import json
import re

import numpy as np
import pytest
from timing_rows import row

from mlakit.errors import ExitCode, MisuseError
from mlakit.records import CONTROLS, Cell
from mlakit.report import build, history
from mlakit.sweep import store

CELLS = [Cell("cpu", m, 1536, 512, ("torch_native", "cpu_fused")) for m in (1, 8, 64, 512)]


def record(root, name, day, *, slow=(), seed=0, cells=CELLS, report=True, status="ok"):
    """A report's folder (or a bare run's) of a day; ``slow``: batches 20 % slower."""
    rng = np.random.default_rng(seed)
    folder = root / name / f"{name}-timing" if report else root / name
    run = store.create_run(folder, CELLS, measure=["timing"])
    for cell in cells:
        samples = {}
        for path in (*cell.paths, CONTROLS[0]):
            factor = 1.2 if path == "cpu_fused" and cell.m in slow else 1.0
            samples[path] = 5 * factor * (1 + 0.01 * rng.standard_normal(100))
        rows = [row(path, float(np.median(us)), **cell.columns) for path, us in samples.items()]
        store.write_part(folder, "timing", cell.id, rows, samples=samples)
    run.save(status=status, started_at=f"2026-11-{day:02d}T03:00:00Z")
    run.close()
    if report:
        (root / name / "summary.json").write_text(json.dumps({"status": status}))
        (root / name / "index.html").write_text("<h1>report</h1>")
        (root / name / "02_speed-cpu-DeepSeek-V3.html").write_text("<h1>speed</h1>")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    record(root, "first", 1, seed=1)
    record(root, "second", 2, seed=2)
    record(root, "killed", 3, seed=3, cells=[], status="killed")
    record(root, "bare", 4, seed=4, report=False)
    record(root, "slow", 9, seed=5, slow=(8, 64))
    (root / "notes").mkdir()
    return root


def test_every_run_keeps_its_place(root):
    found = history.history(root)
    assert [e.name for e in found] == ["first", "second", "killed", "bare", "slow"]
    assert [e.comparison is not None for e in found] == [True, True, False, True, True]
    assert found[2].note
    frame = history.trend_frame(found)
    assert list(frame["at"].dt.day) == [1, 2, 3, 4, 9]
    assert np.isnan(frame["ratio"][2])
    assert frame["ratio"].iloc[-1] == pytest.approx(1.2**0.25, rel=0.01)
    assert (frame["lo"].dropna() <= frame["ratio"].dropna()).all()


def test_the_regression_is_found_where_it_is_and_only_there(root):
    by_name = {e.name: e for e in history.history(root)}
    slower = [c for c in by_name["slow"].comparison.changes if c.verdict == "slower"]
    assert {(c.path, c.cell["m"]) for c in slower} == {("cpu_fused", 8), ("cpu_fused", 64)}
    assert by_name["slow"].exit_code == ExitCode.REGRESSION
    assert by_name["second"].exit_code == by_name["bare"].exit_code == ExitCode.OK


def test_the_page_links_the_cells_and_refers_to_nothing_outside(root):
    file = history.write(root)
    text = file.read_text()
    assert 'href="slow/02_speed-cpu-DeepSeek-V3.html"' in text
    assert 'href="#slow"' in text
    assert 'id="slow"' in text
    assert "Runs against first (not pinned" in text
    assert "1 of 5 runs have no figure" in text
    for target in re.findall(r'href="([^"#]+)"', text):
        assert (root / target).exists(), target
    assert not re.search(r"<script|<link|https?://(?!www.w3.org)", text)
    assert str(root) not in text


def test_a_pin_is_obeyed_and_kept(tmp_path):
    record(tmp_path, "old", 1, seed=1, slow=(1, 8, 64, 512))
    record(tmp_path, "new", 2, seed=2)
    assert history.history(tmp_path)[1].comparison.counts["faster"] == 4
    history.pin(tmp_path, "new")
    assert history.history(tmp_path)[0].comparison.counts["slower"] == 4
    assert "Runs against new</h1>" in history.write(tmp_path).read_text()
    assert history.history(tmp_path, "old")[1].comparison.counts["faster"] == 4


def test_what_changed_since_a_pinned_baseline_can_be_a_regression(tmp_path):
    record(tmp_path, "first", 1, seed=1)
    alone = history.since(tmp_path / "first")
    assert alone.sentences[0].startswith("Nothing is compared: this is the first run here")
    assert "mlakit history" in alone.sentences[1]
    record(tmp_path, "slow", 2, seed=2, slow=(8, 64))
    slow = tmp_path / "slow"
    told = history.since(slow)
    assert "Against first, the oldest ok run (none is pinned): 2 slower" in told.sentences[0]
    assert not told.regressed
    history.pin(tmp_path, "first")
    told = history.since(slow)
    assert "the pinned baseline: 2 slower" in told.sentences[0]
    assert sum("Slower: cpu_fused at 1536+512 M=" in s for s in told.sentences) == 2
    assert told.regressed
    rows = {"timing": store.read_rows(store.report_run(slow))}
    assert build._status(build.Report(slow, "", [], "", told, rows)) == "regression"
    assert build._status(build.Report(slow, "", [], "", alone, rows)) == "ok"


def test_misuse_is_named(tmp_path):
    with pytest.raises(MisuseError, match="no runs in"):
        history.history(tmp_path)
    record(tmp_path, "one", 1)
    with pytest.raises(MisuseError, match="'two' is no run"):
        history.history(tmp_path, "two")
    with pytest.raises(MisuseError, match="no run 'two'"):
        history.pin(tmp_path, "two")
    with pytest.raises(MisuseError, match="baseline 'two' is no run"):
        build.build(build.Options(baseline="two"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("said", "start"),
    [
        ("2026-11-02", "2026-11-02T00:00:00Z"),
        ("2026-11-02T05:00:00+05:00", "2026-11-02T00:00:00Z"),
        ("0001-01-01T00:00:00+05:00", ""),
        ("0001-01-01", ""),
        ("yesterday", ""),
        ("", ""),
    ],
)
def test_a_start_that_is_none_costs_nobody_the_page(tmp_path, said, start):
    record(tmp_path, "one", 1)
    record(tmp_path, "two", 3, report=False)
    file = tmp_path / "two" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"started_at": said}))
    found = {e.name: e for e in history.history(tmp_path, "one")}
    assert found["two"].started_at == start
    assert found["two"].comparison
    assert ("when it began is not known" in found["two"].note) == (not start)
    text = history.write(tmp_path, "one").read_text()
    assert ("not in the trend" in text) == (not start)
    history.write(tmp_path, "two")  # as the baseline
    history.pin(tmp_path, "two")
    for other in (tmp_path / "one").rglob("run.json"):
        other.write_text("{")
    history.write(tmp_path)  # and alone


def test_an_unreadable_run_is_shown(tmp_path):
    record(tmp_path, "one", 1)
    record(tmp_path, "torn", 2)
    (tmp_path / "torn" / "torn-timing" / "run.json").write_text("{")
    entries = {e.name: e for e in history.entries(tmp_path)}
    assert entries["torn"].status == "unreadable"
    assert "torn" in history.write(tmp_path).read_text()
