"""The controls of a cell: the empty call, the same-traffic copy, and the device's plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from itertools import product

import torch

from mlakit.timing import clock
from mlakit.timing.buffers import Ring, slots_for

_HAS_TRITON = find_spec("triton") is not None
COPY_CONFIGS = (
    (4, 4, 1), (4, 4, 2), (4, 4, 4), (4, 2, 1), (2, 2, 2), (1, 1, 1), (8, 8, 1), (8, 8, 2),
)  # fmt: skip
"""(warps a program, warps a row of q, of kv) tried for the same-traffic copy; the fastest is the
limit. Each of them was the fastest at some M on an H200."""
EARLY = ("", "after", "before")
"""launched after the kernel ahead of it; early, releasing the next one after its wait or before"""
_PICK_US = 100.0
"""what one sample of a candidate lasts"""


def copy_triton(
    q, q_weight, q_eps, k, k_weight, k_eps, *, out=None, warps=(4, 4, 1), early=""
):  # fmt: skip
    """The step's traffic and none of its arithmetic, in one launch. Shapes as a path's call.

    ``warps``: of ``COPY_CONFIGS``. ``early``: of ``EARLY``; launched before the kernel ahead of it
    has ended (NVIDIA, from sm_90 on), as ``triton_fused`` is at small M: back to back, such
    launches overlap.
    """
    from mlakit.paths.triton_copy_kernels import copy_kernel

    q_out, k_out = out or (q.new_empty(q.shape), k.new_empty(k.shape))
    m, nq, nk = k.shape[0], q.shape[1], k.shape[1]
    num_warps, q_warps, k_warps = warps
    grid = -(-m // (num_warps // k_warps)) + (-(-m // (num_warps // q_warps)) if nq else 0)
    copy_kernel[(grid,)](
        q, q_weight, k, k_weight, q_out, k_out, m, q.stride(0), k.stride(0), NQ=nq, NK=nk,
        WARPS=num_warps, Q_WARPS=q_warps, K_WARPS=k_warps, VEC=16 // k.element_size(),
        EVICT="evict_first" if m <= 1024 else "", EARLY=early, num_warps=num_warps,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return q_out, k_out


def copy_torch(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """The same through torch, one copy a part; the weights are not read."""
    q_out, k_out = out or (q.new_empty(q.shape), k.new_empty(k.shape))
    return q_out.copy_(q), k_out.copy_(k)


def empty_triton(*args, out=None):
    """An empty Triton kernel."""
    from mlakit.paths.triton_copy_kernels import empty_kernel

    empty_kernel[(1,)](num_warps=1)
    return None


def floor_call(clock_name: str, device: str) -> Callable:
    """The least a call can cost under this clock.

    ``eager`` takes torch's smallest launch, a fill of one element, because Triton's launch takes
    longer on the host than torch's.
    """
    if device == "cpu":
        return lambda *args, out=None: None
    if _HAS_TRITON and clock_name != "eager":
        return empty_triton
    one = torch.zeros(1, device=device, dtype=torch.float32)
    return lambda *args, out=None: one.zero_()


def _copy_calls(device: str) -> Iterator[tuple[str, bool, Callable]]:
    """The candidates for the same-traffic copy: (configuration, launches overlap, call)."""
    yield "torch", False, copy_torch
    if device != "cpu" and _HAS_TRITON:
        overlaps = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
        for warps, early in product(COPY_CONFIGS, EARLY if overlaps else EARLY[:1]):
            name = f"triton warps={'/'.join(map(str, warps))}{early and f' pdl {early}'}"
            yield name, bool(early), partial(copy_triton, warps=warps, early=early)


def best_copies(
    ring: Ring, device: str, cache_bytes: int, *, clock_name: str
) -> dict[str, tuple[str, Callable]]:
    """``copy_limit``, the fastest candidate here, and ``copy_plain``, the fastest without overlap.

    (configuration, call) of each; by cold device time, except where the host is on the clock. No
    ``copy_plain`` where no launch overlaps.
    """
    candidates = list(_copy_calls(device))
    if len(candidates) == 1:
        return {"copy_limit": ("torch", copy_torch)}
    slots = slots_for(ring.cell, cache_bytes)
    on_host = clock_name == "eager"
    first_us = clock.estimate_us(copy_triton, ring, device=device, graph=not on_host)
    plan = clock.plan_graph(first_us, _PICK_US, slots_wanted=slots, max_nodes=100)

    def median_us(call: Callable) -> float:
        if on_host:
            return clock.estimate_us(call, ring, device=device, graph=False)
        lane = clock.GraphLane(call, ring, plan, cache_bytes)
        return sorted(lane.take() for _ in range(5))[2]

    timed = sorted(
        ((median_us(call), name, pdl, call) for name, pdl, call in candidates), key=lambda t: t[0]
    )
    best = {"copy_limit": timed[0]}
    if any(pdl for _, pdl, _ in candidates):
        best["copy_plain"] = next(t for t in timed if not t[2])
    return {control: (name, call) for control, (_, name, _, call) in best.items()}


@cache
def device_copy_gbps(device: str, cache_bytes: int) -> float:
    """Plain copy bandwidth of the device's memory in GB/s, read plus written, best of ten.

    Both buffers together are eight times the cache; the best, because it stands for a limit.
    """
    size = max((64 if device == "cpu" else 512) * 2**20, 4 * cache_bytes)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    best_s = float("inf")
    for _ in range(10):
        if device == "cpu":
            start = time.perf_counter()
            target.copy_(source)
            best_s = min(best_s, time.perf_counter() - start)
            continue
        target.copy_(source)
        best_s = min(best_s, clock.event_us(lambda: target.copy_(source)) / 1e6)
    return 2 * source.nbytes / best_s / 1e9
