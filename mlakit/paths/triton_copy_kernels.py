"""The controls' Triton kernels: nothing, and the step's traffic without its arithmetic.

Import this only where triton is.
"""

# Triton compiles these functions: it knows no tuple unpacking.
# ruff: noqa: RUF005, SIM102
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.paths.triton_kernels import prefetch


@triton.jit
def empty_kernel():
    """Nothing: what a launch alone costs."""
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
def copy_kernel(
    q, qw, k, kw, qo, ko, m, q_stride, k_stride,
    NQ: tl.constexpr, NK: tl.constexpr, WARPS: tl.constexpr, Q_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr, VEC: tl.constexpr, EVICT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The step's reads and writes, weights included, and none of its arithmetic."""
    if EARLY == "before":
        gdc_launch_dependents()
    K_ROWS: tl.constexpr = WARPS // K_WARPS
    Q_ROWS: tl.constexpr = WARPS // Q_WARPS
    program = tl.program_id(0)
    if EARLY != "":
        if program == 0:
            if NQ > 0:
                prefetch(qw, NQ)
            prefetch(kw, NK)
    k_programs = (m + K_ROWS - 1) // K_ROWS
    if program < k_programs:
        _copy_part(k, kw, ko, program * K_ROWS, m, k_stride, NK, K_WARPS, K_ROWS, VEC, EVICT, EARLY)
    elif NQ > 0:
        _copy_part(
            q, qw, qo, (program - k_programs) * Q_ROWS, m, q_stride,
            NQ, Q_WARPS, Q_ROWS, VEC, EVICT, EARLY,
        )  # fmt: skip
