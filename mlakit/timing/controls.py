"""The controls of a cell: the empty call, the same-traffic copy, and the device's plain copy."""

# Triton compiles some of these functions: it knows no tuple unpacking.
# ruff: noqa: RUF005
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

import torch

from mlakit.timing import clock
from mlakit.timing.buffers import Ring, slots_for

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    triton = None

COPY_CONFIGS = (
    (4, 4, 1),
    (4, 4, 2),
    (4, 4, 4),
    (4, 2, 1),
    (2, 2, 2),
    (1, 1, 1),
    (8, 8, 1),
    (8, 8, 2),
)
"""(warps a program, warps a row of q, of kv) tried for the same-traffic copy; the fastest is the
limit. Each of them was the fastest at some M on an H200."""
EARLY = ("", "after", "before")
"""launched after the kernel ahead of it; early, releasing the next one after its wait or before"""
_PICK_US = 100.0
"""what one sample of a candidate lasts"""

if triton is not None:

    @triton.jit
    def _empty_kernel():
        return

    @triton.jit
    def _copy_part(
        x, w, y, first_row, m, x_stride,
        N: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr, VEC: tl.constexpr,
        EVICT: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        CHUNK: tl.constexpr = WARPS * 32 * VEC
        rows = first_row + tl.arange(0, ROWS)[:, None]
        here = rows < m
        columns = tl.zeros((ROWS, 1), tl.int32) + tl.arange(0, CHUNK)[None, :]
        source = x + rows.to(tl.int64) * x_stride
        target = y + rows.to(tl.int64) * N
        if EARLY != "":
            gdc_wait()
        if EARLY == "after":
            gdc_launch_dependents()
        held = ()
        weights = ()
        for start in tl.static_range(0, N, CHUNK):
            at = columns + start
            inside = here & (at < N) if start + CHUNK > N else here
            held = held + (tl.load(source + at, mask=inside, other=0.0, eviction_policy=EVICT),)
            weights = weights + (tl.load(w + at, mask=at < N, other=0.0),)
        for i in tl.static_range(len(held)):
            at = columns + i * CHUNK
            # The weights are part of the traffic; this is the cheapest way to need them.
            value = tl.where(weights[i] == weights[i], held[i], 0.0)
            tl.store(target + at, value, mask=here & (at < N) if i * CHUNK + CHUNK > N else here)

    @triton.jit(do_not_specialize=["m"])  # one build serves every M
    def _copy_kernel(
        q, qw, k, kw, qo, ko, m, q_stride, k_stride,
        NQ: tl.constexpr, NK: tl.constexpr, WARPS: tl.constexpr, Q_WARPS: tl.constexpr,
        K_WARPS: tl.constexpr, VEC: tl.constexpr, EVICT: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY == "before":
            gdc_launch_dependents()
        K_ROWS: tl.constexpr = WARPS // K_WARPS
        Q_ROWS: tl.constexpr = WARPS // Q_WARPS
        program = tl.program_id(0)
        k_programs = (m + K_ROWS - 1) // K_ROWS
        if program < k_programs:
            _copy_part(
                k, kw, ko, program * K_ROWS, m, k_stride, NK, K_WARPS, K_ROWS, VEC, EVICT, EARLY
            )
        elif NQ > 0:
            _copy_part(
                q, qw, qo, (program - k_programs) * Q_ROWS, m, q_stride,
                NQ, Q_WARPS, Q_ROWS, VEC, EVICT, EARLY,
            )  # fmt: skip


def copy_triton(
    q, q_weight, q_eps, k, k_weight, k_eps, *, out=None, warps=(4, 4, 1), early=""
):  # fmt: skip
    """The step's traffic and none of its arithmetic, in one launch. Shapes as a path's call.

    ``warps``: of ``COPY_CONFIGS``. ``early``: of ``EARLY``; launched before the kernel ahead of it
    has ended (NVIDIA, from sm_90 on), as ``triton_fused`` is at small M: back to back, such
    launches overlap.
    """
    q_out, k_out = out or (_fresh(q), _fresh(k))
    m, nq, nk = k.shape[0], q.shape[1], k.shape[1]
    warps, q_warps, k_warps = warps
    grid = triton.cdiv(m, warps // k_warps) + (triton.cdiv(m, warps // q_warps) if nq else 0)
    _copy_kernel[(grid,)](
        q,
        q_weight,
        k,
        k_weight,
        q_out,
        k_out,
        m,
        q.stride(0),
        k.stride(0),
        NQ=nq,
        NK=nk,
        WARPS=warps,
        Q_WARPS=q_warps,
        K_WARPS=k_warps,
        VEC=16 // k.element_size(),
        EVICT="evict_first" if m <= 1024 else "",
        EARLY=early,
        num_warps=warps,
        **({"launch_pdl": True} if early else {}),
    )
    return q_out, k_out


def copy_torch(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """The same through torch, one copy a part; the weights are not read."""
    q_out, k_out = out or (_fresh(q), _fresh(k))
    return q_out.copy_(q), k_out.copy_(k)


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def empty_python(*args, out=None):
    """Nothing: what the timing loop and a Python call cost."""
    return None


def empty_triton(*args, out=None):
    """An empty Triton kernel."""
    _empty_kernel[(1,)](num_warps=1)
    return None


def floor_call(clock_name: str, device: str) -> Callable:
    """The least a call can cost under this clock.

    ``eager`` takes torch's smallest launch, a fill of one element, because Triton's launch takes
    longer on the host than torch's.
    """
    if device == "cpu":
        return empty_python
    if triton is not None and clock_name != "eager":
        return empty_triton
    one = torch.zeros(1, device=device)
    return lambda *args, out=None: one.zero_()


def copy_calls(device: str) -> Iterator[tuple[str, bool, Callable]]:
    """The candidates for the same-traffic copy: (configuration, launches overlap, call)."""
    yield "torch", False, copy_torch
    if device != "cpu" and triton is not None:
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
    candidates = list(copy_calls(device))
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
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target.copy_(source)
        start_event.record()
        target.copy_(source)
        end_event.record()
        end_event.synchronize()
        best_s = min(best_s, start_event.elapsed_time(end_event) / 1e3)
    return 2 * source.nbytes / best_s / 1e9
