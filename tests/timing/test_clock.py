"""Planners with hostile estimates, and the CPU lane on a ring of buffers."""

import contextlib
import gc
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mlakit.records import Cell
from mlakit.timing import buffers, clock, controls


@pytest.mark.parametrize("estimate", [0.05e3, 2.0, 0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("launches", [1, 2, 14, 5000])
@pytest.mark.parametrize("slots", [1, 7, 400, 15_000])
def test_graph_plans_stay_small_and_whole(estimate, launches, slots):
    plan = clock.plan_graph(estimate, 3e6, slots_wanted=slots, launches=launches)
    assert 1 <= plan.calls * min(launches, clock.MAX_NODES) <= clock.MAX_NODES
    assert plan.calls % plan.slots == 0
    assert plan.flush == (plan.slots < slots)


def test_graph_plan_fills_the_window_and_the_ring():
    assert clock.plan_graph(10.0, 500.0) == clock.GraphPlan(50, 1, flush=False)
    assert clock.plan_graph(10.0, 500.0, slots_wanted=120) == clock.GraphPlan(120, 120, False)
    assert clock.plan_graph(10.0, 500.0, slots_wanted=8) == clock.GraphPlan(48, 8, False)
    assert clock.plan_graph(1e6, 500.0, slots_wanted=1).calls == 1


def test_inner_plan():
    assert clock.plan_inner(100.0, 500.0) == 5
    assert clock.plan_inner(1e9) == 1
    for bad in (0.0, math.nan, -3.0):
        assert clock.plan_inner(bad) == clock.MAX_INNER


CELL = Cell("cpu", 3, 20, 12, ("torch_native",), qk_rope_head_dim=4)
GRAPH = replace(CELL, clock="graph")


def test_ring_covers_twice_the_cache_and_slots_differ():
    count = buffers.slots_for(GRAPH, 10_000)
    assert count * buffers.bytes_moved(CELL) >= 20_000
    ring = buffers.Ring(GRAPH, "cpu", count)
    q, _, _, k, _, _ = ring.slots[1].args
    assert q.shape == (3, 20)
    assert q.stride() == (36, 1)
    assert k.data_ptr() - q.data_ptr() == 20 * 2
    assert all(s.args[0].data_ptr() % 64 == 0 for s in ring.slots)
    firsts = {float(s.args[0][0, 0]) for s in ring.slots}
    assert len(firsts) > 1
    assert ring.slots[0].out[0].isnan().all()
    assert [s.index for s in ring.take(count + 1)][-1] == 0


def test_bytes_by_hand():
    # 3 rows of 32 bf16 in and out, 32 weights; fresh outputs are none of what rotates.
    assert buffers.bytes_moved(CELL) == 3 * 32 * 2 * 2 + 64
    assert buffers.slots_for(CELL, 2560) == 20
    assert buffers.slots_for(GRAPH, 2560) == 12
    assert buffers.slots_for(Cell("cpu", 3, 20, 12, ("x",), cache="hot"), 10_000) == 1


def test_what_graphs_hold_by_hand():
    # 100,000 rows of 32 bf16, 12.8 MB a call: 128 us at 100 GB/s, so four calls fill 500 us.
    cell = replace(GRAPH, m=100_000)
    assert clock.graphs_hold(cell, 3, 1 << 20, 100.0) == (3 * 4 + 20) * 100_000 * 32 * 2
    # At three rows a thousand nodes are the limit: 22 turns of the ring's 45 slots.
    assert clock.graphs_hold(GRAPH, 1, 10_000, 1.0) == (22 * 45 + 20) * 3 * 32 * 2


@pytest.mark.parametrize("layout", ["split", "contiguous"])
def test_ring_notices_changed_inputs_even_in_the_rope_part(layout):
    cell = Cell("cpu", 3, 20, 12, ("x",), qk_rope_head_dim=4, layout=layout)
    ring = buffers.Ring(cell, "cpu", 4)
    assert all(ring.intact(s) for s in ring.slots)
    q = ring.slots[2].args[0]
    last = q.as_strided((1,), (1,), q.storage_offset() + (35 if layout == "split" else 19))
    last += 1
    assert [ring.intact(s) for s in ring.slots] == [True, True, False, True]


def test_loop_lane_times_calls_and_keeps_the_last_output():
    ring = buffers.Ring(CELL, "cpu", 4)
    lane = clock.make_lane("cpu", controls.copy_torch, ring, device="cpu", cache_bytes=1000)
    assert lane.take() > 0
    slot, (q_out, k_out) = lane.seen[-1]
    assert torch.equal(q_out, slot.args[0])
    assert torch.equal(k_out, slot.args[3])
    assert q_out.is_contiguous()
    lane.poison()
    assert q_out.isnan().all()
    assert lane.seen == []


def test_copy_bandwidth_is_a_positive_figure():
    assert controls.device_copy_gbps("cpu", 1 << 20) > 0.01


def test_rows_beyond_those_drawn_differ(monkeypatch):
    monkeypatch.setattr(buffers, "_ROWS_MADE", 8)
    ring = buffers.Ring(replace(CELL, m=40), "cpu", 2)
    assert all(ring.intact(s) for s in ring.slots)
    rows = ring.slots[0].args[0].float()
    assert torch.equal(rows[8].abs() / rows[8].abs()[0], rows[0].abs() / rows[0].abs()[0])
    assert len({float(v) for v in rows[::8, 0]}) > 2


INTERPRETED = """
import torch
from mlakit.timing import controls
for m, nq, nk in ((1, 20, 12), (5, 48, 7), (9, 0, 16), (3, 5000, 130)):
    buffer = torch.randn(m, nq + nk + 4).bfloat16()
    q, k = buffer[:, :nq], buffer[:, nq:nq + nk]
    for warps in controls.COPY_CONFIGS[::3]:
        args = q, torch.ones(nq), 0, k, torch.ones(nk), 0
        out = controls.copy_triton(*args, warps=warps)
        assert torch.equal(out[0], q) and torch.equal(out[1], k), (m, nq, nk, warps)
        assert out[0].is_contiguous() and out[1].is_contiguous()
controls.empty_triton()
"""


def test_the_triton_copy_copies_under_the_interpreter():
    pytest.importorskip("triton")
    child = [sys.executable, "-c", INTERPRETED]
    subprocess.run(child, check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=120)


class FakeGraph:
    def __init__(self, call, slots):
        self.work = [(call, s) for s in slots]
        self.replays = 0

    def replay(self):
        self.replays += 1
        self.outs = [call(*s.args, out=s.out) for call, s in self.work]


def fake_capture(call, slots):
    graph = FakeGraph(call, slots)
    graph.replay()
    return graph, graph.outs


def test_a_failed_capture_says_what_the_call_said(monkeypatch):
    class Failing(FakeGraph):
        def __init__(self):
            pass

        def capture_begin(self, capture_error_mode):
            pass

        def capture_end(self):
            raise RuntimeError("operation failed due to a previous error during capture")

    class Side:
        synchronize = staticmethod(lambda: None)

    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Failing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: contextlib.nullcontext())
    warm = buffers.Ring(replace(GRAPH, m=7), "cpu", 1).slots[0]
    answers = iter(["warm"])

    def call(*args, out=None):  # warms up well, then fails where it is captured
        if next(answers, None) is None:
            raise ValueError("this path allocates on the host")

    with pytest.raises(ValueError, match="allocates on the host"):
        clock.capture(call, [warm])
    assert gc.isenabled()


def test_graph_lane_replays_rotating_slots_and_checks_what_was_timed(monkeypatch):
    monkeypatch.setattr(clock, "capture", fake_capture)
    monkeypatch.setattr(clock, "event_us", lambda run: run() or 600.0)
    ring = buffers.Ring(replace(GRAPH, m=7), "cpu", 6)
    plan = clock.GraphPlan(calls=12, slots=6, flush=True)
    lane = clock.GraphLane(controls.copy_torch, ring, plan, cache_bytes=1 << 12)
    assert lane.take() == pytest.approx(600 / 12)
    assert {s.index for _, s in lane.graph.work} == set(range(6))
    ring.fill(1)
    lane.poison()
    assert all(out[1].isnan().all() for _, out in lane.seen)
    lane.take()
    assert [s.index for s, _ in lane.seen] == [0, 0, 5]
    assert all(torch.equal(out[0], s.args[0]) for s, out in lane.seen)


def test_kernel_lane_adds_the_kernels_of_a_call(monkeypatch):
    def fake_profile(run):
        run()
        return [(name, i, us) for i in range(20) for name, us in (("q", 2.0), ("k", 1.0))]

    monkeypatch.setattr(clock, "profile", fake_profile)
    ring = buffers.Ring(replace(CELL, clock="kernel"), "cpu", 4)
    lane = clock.KernelLane(controls.copy_torch, ring, 20, lambda: None)
    assert lane.take() == pytest.approx(3.0)
    assert lane.kernels == ("q", "k")
    slot, out = lane.seen[-1]
    assert out[0].data_ptr() == slot.out[0].data_ptr()


def test_a_ring_of_short_rows_makes_the_slots_that_are_asked_for(monkeypatch):
    """At 8 + 8 twice a cache is a million slots; a run takes a few thousand of them."""
    made = []
    real = buffers.Ring._slot
    monkeypatch.setattr(buffers.Ring, "_slot", lambda ring, i: made.append(i) or real(ring, i))
    ring = buffers.Ring(Cell("cpu", 1, 8, 8, ("torch_native",)), "cpu", 1000)
    assert len(ring.slots) == 1000
    taken = [ring.take(3), ring.take(3)]
    assert [s.index for part in taken for s in part] == made == [0, 1, 2, 3, 4, 5]
    assert ring.take(998)[-3] is taken[0][1]
