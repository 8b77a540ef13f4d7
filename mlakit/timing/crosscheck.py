"""The ``graph`` and ``kernel`` clocks, each held against a timer of another mechanism.

``graph`` reads events around a replay; it is held against CUPTI's (or roctracer's) own time stamps
of the kernels inside such a replay, first start to last end. ``kernel`` reads CUPTI's durations of
single calls; it is held against the events around the replay. What is left between a call's kernels
and its share of the replay is the gap from one graph node to the next: a third of a microsecond to
a few, which is why the two clocks differ at small M and agree at large. (A loop of plain calls
between two events is no timer here: the host takes 20 us and more to issue one.)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np
import torch

from mlakit.errors import MisuseError
from mlakit.paths import registry
from mlakit.records import Cell
from mlakit.timing import buffers, clock, guard

_LIMIT = 0.03
"""agreement asked for from ``_LARGE_M`` rows on"""
_LARGE_M = 4096
_ROUNDS = 30


def crosscheck(paths: Sequence[str], batches: Sequence[int], *, device="cuda") -> list[dict]:
    """One row a path and M: both clocks, CUPTI's span and sum of a replay, in us, medians of 30.

    At 1536 + 512 in bf16.

    ``agrees``: both within 3 % of their independent timer; None below M = 4096, where the gaps
    between launches are part of one figure and not of the other.

    Raises:
        MisuseError: no GPU.
    """
    found = guard.device_of(device)
    if found is None:
        raise MisuseError("the clocks to check are a GPU's: give device='cuda'")
    torch.cuda.set_device(found.index)
    with guard.device_lock(device, wait_s=600), torch.no_grad():
        return [
            _row(Cell(found.arch, m, 1536, 512, (name,), clock="graph"), device)
            for name in paths
            for m in batches
        ]


def _row(cell: Cell, device: str) -> dict:
    path, cache = registry.get(cell.paths[0]), guard.cache_bytes(device)
    count = min(buffers.slots_for(cell, cache), clock.MAX_NODES)
    ring = buffers.Ring(cell, device, count)
    path.call(*ring.slots[0].args)
    graph = clock.make_lane(
        "graph", path.call, ring, device=device, cache_bytes=cache, launches=path.launches
    )
    kernel = clock.make_lane("kernel", path.call, ring, device=device, cache_bytes=cache)
    graph_us = float(np.median([graph.take() for _ in range(_ROUNDS)]))
    kernel_us = float(np.median([kernel.take() for _ in range(_ROUNDS)]))
    span_us, busy_us = np.median([_replay_us(graph) for _ in range(_ROUNDS)], axis=0)
    off = graph_us / float(span_us) - 1, kernel_us / graph_us - 1
    return {
        "path": path.name,
        "m": cell.m,
        "graph_us": graph_us,
        "cupti_span_us": float(span_us),
        "kernel_us": kernel_us,
        "cupti_kernels_in_graph_us": float(busy_us),
        "gap_us": float(span_us - busy_us),
        "graph_off": off[0],
        "kernel_off": off[1],
        "agrees": max(map(abs, off)) <= _LIMIT if cell.m >= _LARGE_M else None,
    }


def _replay_us(lane) -> tuple[float, float]:
    """Per call of one replay, by the profiler: first start to last end, and kernels added up."""
    kernels = clock.profile(lane.graph.replay)
    span = max(start + us for _, start, us in kernels) - kernels[0][1]
    return span / lane.plan.calls, sum(us for *_, us in kernels) / lane.plan.calls


def main() -> None:
    """Print the rows as JSON lines: ``python -m mlakit.timing.crosscheck --m 64 4096``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", nargs="+", default=["triton_fused", "torch_rms_norm"])
    parser.add_argument("--m", nargs="+", type=int, default=[1, 64, 1024, 4096, 16384, 65536])
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    for row in crosscheck(given.paths, given.m, device=given.device):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
