"""The lanes of a decode stack: a step in all layers of it, and the step's microbenchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import rms_norm

from mlakit import rounding
from mlakit.dispatch.probe import context_for
from mlakit.inputs import DTYPE_NAMES
from mlakit.models import mla
from mlakit.paths import registry
from mlakit.paths.quantised import dequantise
from mlakit.records import Cell
from mlakit.timing import clock, guard, sampler
from mlakit.timing.buffers import Slot

if TYPE_CHECKING:
    from mlakit.models.stack import Stack

DELETED = "no_step"
"""passes q and k on as they are"""
LANES = (
    "torch_native torch_rms_norm torch_rms_norm_copied dual_stream inductor triton_fused "
    f"triton_fp8_group128 {DELETED}"
).split()
BASE = "torch_rms_norm"
_FAR = {"none": 2**-8, "fp8_group128": 2**-4, "mxfp4": 2**-2}
"""relative error, by quant, above which a step is wrong: a step of its format"""
COPIES = 6
"""Graphs captured of a lane: the same kernels at other addresses differ by up to 0.9 us a layer on
an H200. The lowest and highest of six are a 97 % interval of their median, whatever their law."""
_CALLS = 200
"""of a microbenchmark's graph: 800 KB of norm weights, each read once a replay"""
MICRO = {
    "given": "with outputs given, as in `mlakit sweep`: a path that takes none copies into them",
    "hot": "with outputs of its own",
    "cold": "with outputs of its own and norm weights from memory, where a stack finds them",
    "between": "between the products before and after it, in all layers",
}
"""The microbenchmarks, each nearer to the stack than the one before it."""
PREDICTOR = "cold"
"""the one that gains are predicted from: the last of the step alone"""


def step_of(lane: str) -> Callable:
    """The step that a lane name stands for: a path or ``no_step``."""
    if lane == DELETED:
        return _deleted
    path = registry.get(lane)
    if path.output == "fp8_group128":
        return partial(path.call, options=mla.BLOCK_SCALED)
    return path.call


def _deleted(q, q_weight, q_eps, k, k_weight, k_eps):
    return q, k


class StepLane:
    """One decode step a sample: a graph's replay on a GPU, wall time on a CPU."""

    def __init__(self, stack: Stack, hidden: torch.Tensor, step: Callable) -> None:
        self.run, self.graphs = partial(stack.decode, hidden, step), []
        self.run()
        if hidden.is_cuda:
            slots = [Slot(0, (), None)]
            self.graphs = [clock.capture(lambda out: self.run(), slots)[0] for _ in range(COPIES)]
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def take(self) -> float:
        """Microseconds a step. On a GPU the lane's graphs take turns; an untimed replay first hides
        the launch of the timed.
        """
        if not self.graphs:
            start = time.perf_counter_ns()
            self.run()
            return (time.perf_counter_ns() - start) / 1e3
        graph = self.graphs[0]
        self.graphs = [*self.graphs[1:], graph]
        graph.replay()
        self.start.record()
        graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) * 1e3


def refusal(stack: Stack, hidden: torch.Tensor, lane: str, arch: str) -> str | None:
    """Why a lane cannot be timed here: its path's own reason, or a wrong answer in layer 0."""
    if lane == DELETED:
        return None
    path = registry.get(lane)
    if path.output not in ("none", mla.QUANTS.get(stack.weights)):
        return f"delivers q as {path.output}, q_b is {stack.weights}"
    why = path.supports(context_for(_cell(stack, len(hidden), arch, (lane,)), stack.device))
    if why or (arch == "cpu" and not path.timed):
        return why or "on a CPU it is the interpreter: correctness only"
    args = arguments(stack, hidden)
    q, k = step_of(lane)(*args)
    if path.output != "none":
        q = dequantise(path.output, q)
    for got, given, quant in ((q, args[:3], path.output), (k, args[3:], "none")):
        want = rounding.oracle(*given)
        if float((got.double() - want).norm() / want.norm()) > _FAR[quant]:
            return "wrong: it does not agree with float64 in layer 0"
    return None


def arguments(stack: Stack, hidden: torch.Tensor) -> tuple:
    """A step's six arguments in layer 0."""
    d, layer = stack.dims, stack.layers[0]
    x = rms_norm(hidden, (d.hidden_size,), layer.input_norm, d.eps)
    q, k, _ = mla.product(x, layer.qkv_a, x.dtype).split([d.q_lora_rank, d.kv_lora_rank, d.rope], 1)
    return q, layer.q_norm, d.eps, k, layer.k_norm, d.eps


def _cell(stack: Stack, batch: int, arch: str, paths: tuple[str, ...]) -> Cell:
    d, path = stack.dims, registry.get(paths[0])
    return Cell(
        arch, batch, d.q_lora_rank, d.kv_lora_rank, paths, d.rope, eps=d.eps, quant=path.output,
        cache="hot", clock="cpu" if stack.device == "cpu" else "graph", budget_s=0.4,
        dtype=DTYPE_NAMES.get(stack.dtype, "fp32"),
    )  # fmt: skip


def microbenchmarks(stack: Stack, hidden: torch.Tensor, lanes: Sequence[str]) -> dict:
    """Medians in us by kind (``MICRO``) and lane; of ``between``, products included."""
    d, args = stack.dims, arguments(stack, hidden)
    q, q_weight, eps, k, k_weight, _ = args
    x = rms_norm(hidden, (d.hidden_size,), stack.layers[0].input_norm, d.eps)
    outs = q.new_empty(q.shape), k.new_empty(k.shape)
    norms = [(q_weight.clone(), k_weight.clone()) for _ in range(_CALLS)]
    slots = {
        "given": [Slot(0, args, outs)],
        "hot": [Slot(0, args, None)],
        "cold": [Slot(i, (q, a, eps, k, b, eps), None) for i, (a, b) in enumerate(norms)],
        "between": [Slot(i, (layer,), None) for i, layer in enumerate(stack.layers)],
    }

    # What they make is dropped at once, so that the allocator reuses it, as it does in the stack.
    def between(step: Callable, layer: mla.Layer, out: None = None) -> None:
        row = mla.product(x, layer.qkv_a, x.dtype)
        q, k, _ = row.split([d.q_lora_rank, d.kv_lora_rank, d.rope], 1)
        q, k = step(q, layer.q_norm, eps, k, layer.k_norm, eps)
        mla.product(q, layer.q_b, x.dtype)

    def alone(step: Callable, *given, out=None) -> None:
        q, _ = step(*given) if out is None else step(*given, out=out)
        mla.quantised_for(q, stack.layers[0].q_b)

    made = {}
    for lane, kind in product(lanes, MICRO):
        if kind == "between" or (
            lane != DELETED and (kind != "given" or registry.get(lane).output == "none")
        ):
            call = partial(between if kind == "between" else alone, step_of(lane))
            made[f"{kind} {lane}"] = _micro_lane(call, slots[kind], stack.device)
    done = sampler.sample(made, budget_s=3.0, min_rounds=20, max_rounds=20)
    found: dict = {kind: {} for kind in MICRO}
    for name in done.alive(list(made)):
        kind, lane = name.split(" ")
        found[kind][lane] = float(np.median(done.samples_us[name]))
    return found


def _micro_lane(call: Callable, slots: list[Slot], device: str) -> clock.LoopLane | clock.GraphLane:
    ring: Any = SimpleNamespace(
        slots=slots, device=device, take=lambda n: [*islice(cycle(slots), n)]
    )
    if device == "cpu":
        return clock.LoopLane(call, ring, min(len(slots), 20), lambda: None)
    # Weights are cold where each call has its own and the cache is read out before.
    plan = clock.GraphPlan(max(_CALLS, len(slots)) // len(slots) * len(slots), len(slots), True)
    return clock.GraphLane(call, ring, plan, guard.cache_bytes(device))
