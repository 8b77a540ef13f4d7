"""One cell on the CPU: rows, refusals, wrong answers and failures, on paths made for the test."""

import re
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mlakit.context import Context
from mlakit.errors import MisuseError
from mlakit.paths import registry
from mlakit.records import CONTROLS, TIMING_COLUMNS, Cell
from mlakit.timing import guard, measure, sensors


def norms(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    parts = (q, q_weight, q_eps), (k, k_weight, k_eps)
    return tuple(F.rms_norm(x, (x.shape[1],), w, e) if x.shape[1] else x for x, w, e in parts)


def slow(*args, out=None):
    time.sleep(0.0005)
    return norms(*args)


def neighbours_row(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    return norms(q, q_weight, q_eps, k.roll(1, 0), k_weight, k_eps)


def stale(*args, out=None):
    stale.kept = getattr(stale, "kept", None) or norms(*args)
    return stale.kept


def in_place(q, *rest, out=None):
    got = norms(q, *rest)
    q.mul_(2)
    return got


def raises(*args, out=None):
    raise ValueError("no such kernel\nand a long trace")


def out_of_memory(*args, out=None):
    raise torch.OutOfMemoryError("tried to allocate 4 GiB")


def made(name, call, **more):
    fields = {"supports": lambda context: None, "rounding": "round_once", "launches": 2}
    return registry.Path(name=name, text=name, call=call, **(fields | more))


PATHS = {
    p.name: p
    for p in (
        made("two", norms),
        made("slow", slow),
        made("fused", norms, fused=True, launches=1),
        made("split", norms, fused=True, launches=1, splits_from_m=4),
        made("neighbour", neighbours_row, fused=True),
        made("stale", stale, fused=True),
        made("in_place", in_place, fused=True),
        made("raises", raises),
        made("oom", out_of_memory),
        made("refuses", norms, supports=lambda context: f"needs a GPU, not {context.arch}"),
        made("interpreted", norms, timed=False),
    )
}


@pytest.fixture(autouse=True)
def _test_paths(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "get", PATHS.__getitem__)
    monkeypatch.setattr(guard, "_cpu_cache_bytes", lambda: 1 << 20)
    monkeypatch.setenv("MLAKIT_LOCK_DIR", str(tmp_path))


def rows_of(*paths, m=5, **more):
    cell = Cell("cpu", m, 48, 16, paths, qk_rope_head_dim=8, budget_s=0.2, **more)
    result = measure.measure_cell(cell, run={"run_id": "r1"})
    return {r["path_requested"]: r for r in result.rows}, result


def test_a_good_cell_has_complete_rows_controls_and_raw_samples():
    rows, result = rows_of("two", "slow", "fused")
    assert list(rows) == ["two", "slow", "fused", *CONTROLS[:2]]
    assert all(tuple(r) == TIMING_COLUMNS for r in result.rows)
    assert {r["status"] for r in result.rows} == {"ok"}
    assert {(r["run_id"], r["evidence"], r["arch"]) for r in result.rows} == {
        ("r1", "measured", "cpu")
    }
    for name, row in rows.items():
        assert row["p50_us"] == pytest.approx(np.median(result.samples_us[name]))
        assert row["n"] == len(result.samples_us[name])
    assert len({len(v) for v in result.samples_us.values()}) == 1
    fused, base = rows["fused"], rows["two"]
    assert fused["ratio_to"] == "two"
    assert fused["ratio_lo"] <= fused["ratio"] <= fused["ratio_hi"]
    assert rows["slow"]["ratio"] < 1
    assert base["ratio"] == base["ratio_lo"] == base["ratio_hi"] == 1
    assert all(rows[c]["ratio"] is None for c in CONTROLS[:2])
    assert fused["bytes_moved"] == 5 * 64 * 2 * 2 + 128
    assert fused["gbps"] == pytest.approx(fused["bytes_moved"] / fused["p50_us"] / 1e3)
    copy_us = rows["copy_limit"]["p50_us"]
    assert fused["pct_of_limit"] == pytest.approx(100 * copy_us / fused["p50_us"])
    assert fused["launch_floor_us"] == rows["launch_floor"]["p50_us"] < fused["p50_us"]


@pytest.mark.parametrize("pdl", [True, False])
def test_a_path_is_held_against_the_copy_that_is_launched_as_it_is(monkeypatch, pdl):
    path = made(
        "fused",
        norms if pdl else slow,
        fused=True,
        launches=1,
        knobs=lambda context: {"pdl": pdl},
        launched=lambda early: norms if early else slow,
    )
    monkeypatch.setitem(PATHS, "fused", path)
    copies = {"copy_limit": ("early", norms), "copy_plain": ("plain", slow)}
    monkeypatch.setattr(measure.controls, "best_copies", lambda *a, **k: copies)
    rows, _ = rows_of("two", "fused")
    other = "fused_plain" if pdl else "fused_early"
    assert list(rows) == ["two", "fused", "copy_limit", "copy_plain", "launch_floor", other]
    assert set(rows) - {"two", "fused"} < set(CONTROLS)
    early, plain = ("fused", other) if pdl else (other, "fused")
    assert rows[plain]["p50_us"] > rows[early]["p50_us"] + 400
    for name, limit in (
        *((early, "copy_limit"), ("copy_limit", "copy_limit")),
        *((plain, "copy_plain"), ("two", "copy_plain"), ("copy_plain", "copy_plain")),
    ):
        share = 100 * rows[limit]["p50_us"] / rows[name]["p50_us"]
        assert rows[name]["pct_of_limit"] == pytest.approx(share), name
    assert rows["fused"]["config"] == f'{{"pdl": {str(pdl).lower()}}}'


@pytest.mark.parametrize("output", ["none", "fp8_token"])
def test_a_pair_of_launches_is_timed_both_ways_too(monkeypatch, output):
    def narrow(call):
        # What delivers q quantised takes no plain outputs, whichever way it is launched.
        def quantised(*args):
            q_out, k_out = call(*args)
            return q_out.to(torch.int8), k_out

        return quantised

    kept = narrow if output != "none" else lambda call: call

    def pair(early):
        return kept(norms if early else slow)

    more = {"knobs": lambda context: {"pdl": True}, "launched": pair, "output": output}
    for name, fused in (("one", True), ("apart", False), ("again", False)):
        path = made(name, kept(norms), fused=fused, launches=2 - fused, **more)
        monkeypatch.setitem(PATHS, name, path)
    copies = {"copy_limit": ("early", norms), "copy_plain": ("plain", slow)}
    monkeypatch.setattr(measure.controls, "best_copies", lambda *a, **k: copies)
    monkeypatch.setattr(measure.check, "wrong_output", lambda *a: None)  # nothing is quantised
    rows, _ = rows_of("one", "apart", "again")
    assert {"fused_plain", "pair_plain"} == set(rows) - {"one", "apart", "again", *CONTROLS[:3]}
    assert rows["pair_plain"]["p50_us"] > rows["apart"]["p50_us"] + 400
    assert rows["one"]["ratio_to"] in ("apart", "again")
    assert rows["fused_plain"]["bytes_moved"] == rows["one"]["bytes_moved"]
    assert rows["pair_plain"]["bytes_moved"] == rows["apart"]["bytes_moved"]


def test_a_path_that_makes_its_outputs_is_given_none(monkeypatch):
    def strict(*args, out=None):
        assert out is None
        return norms(*args)

    monkeypatch.setitem(PATHS, "own", made("own", strict, makes_outputs=True))
    assert rows_of("own")[0]["own"]["status"] == "ok"
    assert "AssertionError" in rows_of("own", layout="split_out")[0]["own"]["reason"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("neighbour", "ulp from float64"),
        ("stale", "ulp|written"),
        ("in_place", "inputs .* changed"),
    ],
)
def test_wrong_answers_have_a_reason_and_no_figures(name, why):
    rows, _ = rows_of(name)
    assert rows[name]["status"] == "wrong"
    assert re.search(why, rows[name]["reason"])
    assert rows[name]["p50_us"] is None


def test_faults_are_rows_and_the_others_go_on():
    rows, _ = rows_of("raises", "oom", "refuses", "interpreted", "two")
    assert rows["raises"]["reason"] == "ValueError: no such kernel"
    assert [rows[n]["status"] for n in ("raises", "oom", "refuses", "interpreted", "two")] == [
        "failed",
        "oom",
        "skipped",
        "skipped",
        "ok",
    ]
    assert rows["refuses"]["reason"] == "needs a GPU, not cpu"
    assert rows["interpreted"]["reason"].startswith("correctness only")
    assert rows["raises"]["path_ran"] is None


def test_split_rows_are_no_rows_of_the_fused_path():
    rows, _ = rows_of("two", "split", m=4)
    assert rows["split"]["path_ran"] == "split (split)"
    assert "split" in rows["split"]["flags"].split(",")
    assert "M = 4" in rows["split"]["reason"]
    rows, _ = rows_of("two", "split", m=3)
    assert rows["split"]["path_ran"] == "split"


def test_no_unfused_path_no_ratio():
    rows, _ = rows_of("fused")
    assert rows["fused"]["status"] == "ok"
    assert rows["fused"]["ratio"] is None
    assert rows["fused"]["ratio_to"] is None


def test_faster_than_memory_is_implausible_when_cold(monkeypatch):
    monkeypatch.setattr(measure.controls, "device_copy_gbps", lambda *_: 1e-6)
    rows, _ = rows_of("two")
    assert rows["two"]["status"] == "implausible"
    assert "GB/s" in rows["two"]["reason"]
    hot, _ = rows_of("two", cache="hot")
    assert hot["two"]["status"] == "ok"
    assert "cache-hot" in hot["two"]["flags"]


def test_too_large_for_memory_names_both_sizes(monkeypatch):
    monkeypatch.setattr(sensors, "free_host_bytes", lambda: 1 << 10)
    rows, _ = rows_of("two")
    assert rows["two"]["status"] == "skipped"
    assert rows["two"]["reason"] == "needs 0.0 GiB, 0.0 GiB free"


def test_outputs_that_graphs_hold_are_reckoned_on_a_card(monkeypatch):
    cell = Cell("sm_90", 1 << 20, 1536, 512, ("two", "own"), clock="graph")
    monkeypatch.setitem(PATHS, "own", made("own", norms, makes_outputs=True))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))
    monkeypatch.setattr(measure.probe, "context_for", lambda cell, device: Context(arch="sm_90"))
    entries = [measure.Entry(name) for name in cell.paths]
    monkeypatch.setattr(guard, "device_of", lambda device: device)
    measuring = measure._Measurement(cell, "cuda:0", {"cache_bytes": 50 << 20}, entries)
    measuring._admit()
    outputs = cell.m * 2048 * 2
    need = 9 * (outputs + cell.m * 2112 * 2 + 4096) + (1 + 20) * outputs
    assert {e.reason for e in entries} == {f"needs {need / 2**30:.1f} GiB, 100.0 GiB free"}


def test_layouts_that_are_not_timed_are_skipped_rows():
    rows, _ = rows_of("two", layout="rank3")
    assert rows["two"]["status"] == "skipped"
    assert "rank3" in rows["two"]["reason"]


def test_a_cell_of_another_arch_or_clock_is_refused():
    with pytest.raises(MisuseError, match="nothing is timed for hardware that is not here"):
        measure.measure_cell(Cell("gfx950", 1, 48, 16, ("two",), clock="graph"))
    with pytest.raises(MisuseError, match="clock 'graph' does not exist on cpu"):
        measure.measure_cell(Cell("cpu", 1, 48, 16, ("two",), clock="graph"))


def test_no_q_latent_is_a_cell_too():
    cell = Cell("cpu", 5, 0, 16, ("two",), budget_s=0.1)
    rows = measure.measure_cell(cell).rows
    assert [r["status"] for r in rows] == ["ok"] * 3
    assert rows[0]["bytes_moved"] == 5 * 16 * 2 * 2 + 32


def test_nothing_is_timed_under_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(MisuseError, match="TRITON_INTERPRET is set"):
        rows_of("two")
