"""The clocks. Each is a *lane*: one path on one cell, whose ``take`` gives one sample in us.

* ``cpu``: wall time of a calibrated number of calls, outputs fresh from the allocator.
* ``eager``: the same on a GPU, up to the device's end: the host's work is included.
* ``graph``: replay of a captured graph between two events; no host work.
* ``kernel``: device time of a call's kernels as the profiler saw them, added up; no gaps.

Two figures from different clocks are never divided by each other.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mlakit.records import Cell
from mlakit.timing.buffers import Ring, Slot, bytes_moved, bytes_read, slots_for

MAX_NODES = 1000
"""nodes in one graph: HIP graphs of tens of thousands crash (meta-pytorch/tritonbench#1034)"""
_WINDOW_US = 500.0
"""what one sample lasts at least: a thousand times the timers' resolution"""
MAX_INNER = 2000
_GUESSED = 20
"""calls of the graph that a first guess at a path's time takes"""


def plan_inner(estimate_us: float, window_us: float = _WINDOW_US) -> int:
    """Calls per sample for a loop; a zero or NaN estimate counts as a tenth of a microsecond."""
    estimate = estimate_us if math.isfinite(estimate_us) and estimate_us > 0 else 0.1
    return max(1, min(MAX_INNER, math.ceil(window_us / estimate)))


@dataclass(frozen=True)
class GraphPlan:
    """``calls`` captured over ``slots`` buffers, whole rounds; ``flush``: read the cache out."""

    calls: int
    slots: int
    flush: bool


def plan_graph(
    estimate_us: float,
    window_us: float = _WINDOW_US,
    *,
    slots_wanted: int = 1,
    launches: int = 1,
    max_nodes: int = MAX_NODES,
) -> GraphPlan:
    """How many calls a graph holds: enough for the window and for a whole turn of the ring.

    Precision comes from more replays, never from more than ``max_nodes`` nodes. Where a whole
    turn does not fit, every call still has a slot of its own and the cache is read out before
    each timed replay. A zero or NaN estimate asks for the whole window at 1 us a call.
    """
    cap = max(1, max_nodes // max(1, launches))
    estimate = estimate_us if math.isfinite(estimate_us) and estimate_us > 0 else 1.0
    calls = min(cap, max(1, math.ceil(window_us / estimate), slots_wanted))
    slots = min(calls, slots_wanted)
    return GraphPlan(calls - calls % slots, slots, flush=slots < slots_wanted)


def graphs_hold(cell: Cell, lanes: int, cache_bytes: int, gbps: float) -> int:
    """Bytes of outputs that the graphs of ``lanes`` paths hold which make their own at each call.

    ``gbps``: the memory's peak, since no more calls fit a graph's window. A first guess at one
    path's time is a graph of ``_GUESSED`` calls beside them.
    """
    least_us = bytes_moved(cell) / gbps / 1e3
    calls = plan_graph(least_us, slots_wanted=slots_for(cell, cache_bytes)).calls
    return (lanes * calls + _GUESSED) * (bytes_moved(cell) - bytes_read(cell))


class LoopLane:
    """``cpu`` and ``eager``: ``inner`` calls in a Python loop, then a wait for the device."""

    def __init__(self, call: Callable, ring: Ring, inner: int, wait: Callable[[], None]) -> None:
        self.call, self.ring, self.inner, self.wait = call, ring, inner, wait
        self.host_us: list[float] = []
        self.seen: list[tuple[Slot, object]] = []

    def take(self) -> float:
        """Microseconds a call."""
        call, slots = self.call, self.ring.take(self.inner)
        batch = [(s.args, {} if s.out is None else {"out": s.out}) for s in slots]
        out = None
        start = time.perf_counter_ns()
        for args, given in batch:
            out = call(*args, **given)
        issued = time.perf_counter_ns()
        self.wait()
        end = time.perf_counter_ns()
        self.host_us.append((issued - start) / 1e3 / self.inner)
        self.seen = [(slots[-1], out)]
        return (end - start) / 1e3 / self.inner

    def poison(self) -> None:
        """Leave NaN in the memory that the next call's outputs are likely to get."""
        _fill_with_nan(self.seen)
        self.seen = []


class GraphLane:
    """``graph``: ``plan.calls`` calls captured once, replayed between two events."""

    def __init__(self, call: Callable, ring: Ring, plan: GraphPlan, cache_bytes: int) -> None:
        self.plan = plan
        slots = [ring.slots[i % plan.slots] for i in range(plan.calls)]
        self.graph, outs = capture(call, slots)
        picks = sorted({0, plan.calls // 2, plan.calls - 1})
        self.seen = [(slots[i], outs[i]) for i in picks]
        self.host_us: list[float] = []
        size = cache_bytes // 2 if plan.flush else 0
        self._flush = torch.zeros(size, dtype=torch.float32, device=ring.device)

    def take(self) -> float:
        """Microseconds a call. An untimed replay goes first: it keeps the device busy until the
        timed one is queued, so that no launch gap lies between the events.
        """
        self.graph.replay()
        if self.plan.flush:
            # Reading, not writing: dirty lines would have to be written back inside the timing.
            self._flush.sum()
        return event_us(self.graph.replay) / self.plan.calls

    def poison(self) -> None:
        """NaN into every output that is looked at."""
        _fill_with_nan(self.seen)


class KernelLane(LoopLane):
    """``kernel``: the profiler's device time of ``inner`` calls; kernels that overlap add up."""

    kernels: tuple[str, ...] = ()
    """names of one call's kernels, in order, as last profiled; empty until then"""

    def take(self) -> float:
        """Microseconds of kernels a call."""
        slots = self.ring.take(self.inner)
        out = None

        def run() -> None:
            nonlocal out
            for slot in slots:
                out = self.call(*slot.args, out=slot.out)

        kernels = profile(run)
        self.seen = [(slots[-1], out)]
        self.kernels = tuple(k[0] for k in kernels[: -(-len(kernels) // self.inner)])
        return sum(us for *_, us in kernels) / self.inner


def _fill_with_nan(seen: list[tuple[Slot, object]]) -> None:
    for _, out in seen:
        for tensor in tensors(out):
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.fill_(float("nan"))


def tensors(out: object) -> list[torch.Tensor]:
    """Every tensor in what a call returned."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (tuple, list)):
        return [t for o in out for t in tensors(o)]
    return [t for t in getattr(out, "__dict__", {}).values() if isinstance(t, torch.Tensor)]


def event_us(run: Callable[[], object]) -> float:
    """Microseconds of device time between events recorded before and after ``run``."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def capture(call: Callable, slots: list[Slot]) -> tuple[torch.cuda.CUDAGraph, list]:
    """A graph of one call a slot, and what each call returned."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # torch.cuda.graph would collect garbage each time, which takes longer than the capture; it
    # must only not run meanwhile, since it could free another graph.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(side):
            for slot in slots[:2]:
                call(*slot.args, out=slot.out)
            side.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                outs = [call(*slot.args, out=slot.out) for slot in slots]
            except BaseException:
                # The end of a capture that failed says only that it did; the call says why.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if was_collecting:
            gc.enable()
    graph.replay()
    torch.cuda.synchronize()
    return graph, outs


def profile(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Kernels that ``run`` launched, in order: (name, start in us, duration in us).

    Raises:
        RuntimeError: the profiler saw no kernel (no permission, or no CUPTI / roctracer here).
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        e
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(e, "is_user_annotation", False)
    ]
    if not events:
        raise RuntimeError("the profiler saw no kernel: it needs CUPTI or roctracer, and leave")
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.start, e.time_range.elapsed_us()) for e in events]


def estimate_us(call: Callable, ring: Ring, *, device: str, graph: bool) -> float:
    """A first guess at a call's time, after warming up: device time by graph, else wall time."""
    if graph:
        slots = [ring.slots[i % len(ring.slots)] for i in range(_GUESSED)]
        replayed, _ = capture(call, slots)
        replayed.replay()
        return event_us(replayed.replay) / len(slots)
    lane = LoopLane(call, ring, 1, _wait_for(device))
    first = lane.take()
    lane.inner = plan_inner(first, 200.0)
    return min(lane.take() for _ in range(3))


def _wait_for(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device != "cpu" else lambda: None


def make_lane(
    clock: str, call: Callable, ring: Ring, *, device: str, cache_bytes: int, launches: int = 1
) -> LoopLane | GraphLane | KernelLane:
    """The lane of a clock, calibrated. ``call`` takes a path's arguments and ``out``."""
    if clock == "graph":
        guess = estimate_us(call, ring, device=device, graph=True)
        wanted = slots_for(ring.cell, cache_bytes)
        plan = plan_graph(guess, slots_wanted=wanted, launches=launches)
        return GraphLane(call, ring, plan, cache_bytes)
    if clock == "kernel":
        lane = KernelLane(call, ring, 20, torch.cuda.synchronize)
        lane.take()
        return lane
    guess = estimate_us(call, ring, device=device, graph=False)
    return LoopLane(call, ring, plan_inner(guess), _wait_for(device))
