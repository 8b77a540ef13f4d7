"""The Triton kernel of the quantised paths: q normalised and quantised, kv normalised, one launch.

Import this only where triton is. A row is taken in pieces of which each thread holds VEC
neighbours (16 bytes); a piece holds whole groups, so a group's scale needs no second look at the
row. A row's sum has one tree, whatever the rows and warps of a program; kv's is ``triton_fused``'s.
The norm is never written out: x * weight is exact in float32 for 16-bit inputs, and what then
multiplies it, 1/rms and the scale's inverse, is one factor a group. With ``NORMALISE`` off the same
kernel is the second launch of the unfused pair.
"""

# Triton compiles these functions: it knows no tuple unpacking.
# ruff: noqa: RUF005, SIM102
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.paths.triton_encoders import (
    fp8,
    fp8_scale,
    inverse_of,
    largest_of,
    mxfp4,
    peaks_of,
    shuffled_at,
)
from mlakit.paths.triton_kernels import prefetch, rstd_of


@triton.jit
def _float(x):
    """float32 of x; of bfloat16 in one instruction an element, where the cast takes 1.5."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _load(
    start, N: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, here, EVICT: tl.constexpr
):
    """Pieces that cover WIDTH elements after the rows' ``start``: (R, 1); zero from N on."""
    cols = tl.arange(0, PIECE)[None, :]
    pieces = ()
    for c in tl.static_range(0, WIDTH, PIECE):
        inside = here & (cols < N - c) if c + PIECE > N else here
        pieces = pieces + (
            tl.load(start + cols + c, mask=inside, other=0.0, eviction_policy=EVICT),
        )
    return pieces


@triton.jit
def _load_weight(
    weight, N: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr
):
    """The weight's pieces, ROWS times the same."""
    cols = tl.arange(0, PIECE)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    pieces = ()
    for c in tl.static_range(0, WIDTH, PIECE):
        if c + PIECE > N:
            pieces = pieces + (tl.load(weight + cols + c, mask=cols < N - c, other=0.0),)
        else:
            pieces = pieces + (tl.load(weight + cols + c),)
    return pieces


@triton.jit
def _rstd(pieces, eps, N: tl.constexpr, TREE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """(R, 1) float32, by ``triton_fused``'s tree of TREE warps a row."""
    values = ()
    for i in tl.static_range(len(pieces)):
        values = values + (_float(pieces[i]),)
    return rstd_of(values, eps, N, TREE, LANES, VEC, pieces[0].dtype)


@triton.jit
def _store_groups(
    p, peak, inverse, rstd, c, values, scales, scale_row_stride, scale_group_stride,
    rows, m, scale_rows,
    N: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr,
    MAXIMUM: tl.constexpr, BIAS: tl.constexpr, RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Quantise p * rstd, p: (R, PIECE) from column c on. SHUFFLED: the scales' columns, or 0."""
    ROWS: tl.constexpr = p.shape[0]
    PIECE: tl.constexpr = p.shape[1]
    GROUPS: tl.constexpr = PIECE // GROUP
    row = rows.to(tl.int64)[:, None]
    here = (rows < m)[:, None]
    group = (tl.arange(0, GROUPS) + c // GROUP)[None, :]
    scale_at = row * scale_row_stride + group * scale_group_stride
    scale_here = here & (group < N // GROUP) if c + PIECE > N else here
    if QUANT == "mxfp4":
        word, scale = mxfp4(p, peak, rstd, RULE_BITS)
        at = (tl.arange(0, PIECE // 8) + c // 8)[None, :]
        inside = here & (at < N // 8) if c + PIECE > N else here
        if WORDS:
            start = values.to(tl.pointer_type(tl.int32)) + row * (N // 8)
            tl.store(start + at, word, mask=inside)
        else:
            for byte in tl.static_range(4):
                start = values + row * (N // 2) + byte
                tl.store(start + at * 4, (word >> (8 * byte)).to(tl.uint8), mask=inside)
        if SHUFFLED:
            scale_at = shuffled_at(row, group, SHUFFLED)
            scale_here = (rows < scale_rows)[:, None] & (group < SHUFFLED)
    else:
        p = tl.reshape(p, (ROWS, GROUPS, GROUP))
        scale, factor = fp8_scale(peak, inverse, rstd, MAXIMUM)
        coded = fp8(p * factor[:, :, None], BIAS, values.dtype.element_ty)
        at = (tl.arange(0, PIECE) + c)[None, :]
        inside = here & (at < N) if c + PIECE > N else here
        tl.store(values + row * N + at, tl.reshape(coded, (ROWS, PIECE)), mask=inside)
    # Each thread of a group holds its scale, and the first stores it. Addresses that grow with the
    # thread, masked, make Triton leave it there; else it is moved to other threads first.
    thread = tl.arange(0, GROUP // VEC)[None, None, :]
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, GROUP // VEC))
    inside = scale_here[:, :, None] & (thread == 0)
    tl.store(scales + scale_at[:, :, None] + thread, scale, mask=inside)


@triton.jit
def _row_peak(pieces, SHARE: tl.constexpr):
    """(R, 1) largest magnitude of rows held as pieces, of which a warp holds SHARE elements."""
    ROWS: tl.constexpr = pieces[0].shape[0]
    largest = tl.abs(pieces[0])
    for i in tl.static_range(1, len(pieces)):
        largest = largest_of(largest, tl.abs(pieces[i]))
    # As in ``_row_total``: reduced at once, a row in several warps would take two barriers.
    peak = peaks_of(largest, SHARE)
    for _ in tl.static_range(5):
        if peak.shape[1] > 1:
            left, right = tl.split(tl.reshape(peak, (ROWS, peak.shape[1] // 2, 2)))
            peak = largest_of(left, right)
    return tl.reshape(peak, (ROWS,))[:, None]


@triton.jit
def _store_token(
    pieces, peak, inverse, rstd, values, scales, scale_row_stride, rows, m,
    N: tl.constexpr, MAXIMUM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Quantise rows held as pieces, times rstd, with one scale a row."""
    PIECE: tl.constexpr = pieces[0].shape[1]
    row = rows.to(tl.int64)[:, None]
    here = (rows < m)[:, None]
    scale, factor = fp8_scale(peak, inverse, rstd, MAXIMUM)
    tl.store(scales + row * scale_row_stride, scale, mask=here)
    for i in tl.static_range(len(pieces)):
        at = (tl.arange(0, PIECE) + i * PIECE)[None, :]
        inside = here & (at < N) if (i + 1) * PIECE > N else here
        coded = fp8(pieces[i] * factor, BIAS, values.dtype.element_ty)
        tl.store(values + row * N + at, coded, mask=inside)


@triton.jit(do_not_specialize=["m", "scale_rows"])
def norm_and_quantise(
    q, q_weight, values, scales, unquantised, k, k_weight, k_out,
    q_stride, k_stride, scale_row_stride, scale_group_stride, m, scale_rows,
    q_eps: tl.float64, k_eps: tl.float64,
    Q_N: tl.constexpr, K_N: tl.constexpr, Q_SIDE: tl.constexpr, K_SIDE: tl.constexpr,
    Q_TURNS: tl.constexpr, K_TURNS: tl.constexpr, Q_TREE: tl.constexpr, K_TREE: tl.constexpr,
    Q_PIECE: tl.constexpr, K_PIECE: tl.constexpr, Q_SPREAD: tl.constexpr, K_SPREAD: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr, SEPARATE: tl.constexpr, EVICT: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr, UNQUANTISED: tl.constexpr,
    MAXIMUM: tl.constexpr, BIAS: tl.constexpr, RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q: (m, Q_N), k: (m, K_N) of any row strides; ``values`` and ``k_out`` contiguous.

    ``scale_rows`` is m, or the shuffled layout's padded rows, whose padding is written as 0.
    A program has SIDE rows side by side, each in its own warps, and TURNS of those one after
    another, all asked for at once. SPREAD: with rows side by side a weight is loaded once a row,
    laid out like the row: broadcasting it would move it through shared memory. WORDS: MXFP4's
    values start on 4 bytes.
    """
    if PDL == "before":
        gdc_launch_dependents()
    program = tl.program_id(0)
    if PDL != "" and NORMALISE:
        if program == 0:
            prefetch(q_weight, Q_N)
            prefetch(k_weight, K_N)
    # The kv programs hold more rows, so they go first.
    k_programs = (m + K_SIDE * K_TURNS - 1) // (K_SIDE * K_TURNS)
    if NORMALISE and (not SEPARATE or program < k_programs):
        held = _load_rows(
            k, k_stride, program * K_SIDE * K_TURNS, m,
            K_SIDE, K_TURNS, K_N, K_N, K_PIECE, EVICT, PDL,
        )  # fmt: skip
        weight = _load_weight(k_weight, K_N, K_N, K_PIECE, K_SPREAD)
        for t in tl.static_range(K_TURNS):
            rows = (program * K_TURNS + t) * K_SIDE + tl.arange(0, K_SIDE)
            _normalise_rows(held[t], weight, k_out, rows, m, k_eps, K_N, K_TREE, LANES, VEC)
    if not SEPARATE or not NORMALISE or program >= k_programs:
        first = program - k_programs if SEPARATE and NORMALISE else program
        # Shuffled scales are padded, to whole tiles of 8 groups.
        WIDTH: tl.constexpr = max(Q_N, SHUFFLED * GROUP)
        held = _load_rows(
            q, q_stride, first * Q_SIDE * Q_TURNS, m,
            Q_SIDE, Q_TURNS, Q_N, WIDTH, Q_PIECE, EVICT, PDL,
        )  # fmt: skip
        weight = ()
        if NORMALISE:
            weight = _load_weight(q_weight, Q_N, WIDTH, Q_PIECE, Q_SPREAD)
        for t in tl.static_range(Q_TURNS):
            _quantise_rows(
                held[t], weight, q_eps, values, scales, unquantised, scale_row_stride,
                scale_group_stride, (first * Q_TURNS + t) * Q_SIDE + tl.arange(0, Q_SIDE),
                m, scale_rows,
                Q_N, Q_TREE, LANES, VEC, QUANT, GROUP, NORMALISE, UNQUANTISED,
                MAXIMUM, BIAS, RULE_BITS, SHUFFLED, WORDS,
            )  # fmt: skip


@triton.jit
def _load_rows(
    x, stride, first, m, SIDE: tl.constexpr, TURNS: tl.constexpr,
    N: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, EVICT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """For each turn the pieces of its rows, SIDE of them, from row ``first`` on."""
    rows = first + tl.arange(0, SIDE)
    # An int32 offset overflows at row 1,016,801 of a 2112-wide buffer.
    start = x + rows.to(tl.int64)[:, None] * stride
    if PDL != "":
        # Nothing is read before the wait: the kernel before may have written rows or weights.
        gdc_wait()
    if PDL == "after":
        gdc_launch_dependents()
    held = ()
    for t in tl.static_range(TURNS):
        here = (rows + t * SIDE < m)[:, None]
        held = held + (_load(start + t * SIDE * stride, N, WIDTH, PIECE, here, EVICT),)
    return held


@triton.jit
def _quantise_rows(
    held, weight, eps, values, scales, unquantised, scale_row_stride, scale_group_stride,
    rows, m, scale_rows,
    N: tl.constexpr, TREE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr, UNQUANTISED: tl.constexpr,
    MAXIMUM: tl.constexpr, BIAS: tl.constexpr, RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Normalise and quantise rows held as pieces. All but the last steps precede the row's sum."""
    PIECE: tl.constexpr = held[0].shape[1]
    pieces = ()
    peaks = ()
    inverses = ()
    for i in tl.static_range(len(held)):
        p = _float(held[i])
        if NORMALISE:
            p = p * _float(weight[i])
        pieces = pieces + (p,)
        if QUANT == "fp8_group128":
            peaks = peaks + (peaks_of(p, GROUP),)
            inverses = inverses + (inverse_of(peaks[i], MAXIMUM),)
    if QUANT == "fp8_token":
        peak = _row_peak(pieces, LANES * VEC)
        inverse = inverse_of(peak, MAXIMUM)
    rstd = 1.0
    if NORMALISE:
        rstd = _rstd(held, eps, N, TREE, LANES, VEC)
    for i in tl.static_range(len(held)):
        if UNQUANTISED:
            row = rows.to(tl.int64)[:, None]
            at = (tl.arange(0, PIECE) + i * PIECE)[None, :]
            y = (pieces[i] * rstd).to(unquantised.dtype.element_ty)
            tl.store(unquantised + row * N + at, y, mask=(rows < m)[:, None] & (at < N))
        if QUANT == "mxfp4":
            # Not before the sum: held until after it they cost registers.
            peak = peaks_of(pieces[i], GROUP)
            inverse = peak
        if QUANT == "fp8_group128":
            peak = peaks[i]
            inverse = inverses[i]
        if QUANT != "fp8_token":
            _store_groups(
                pieces[i], peak, inverse, rstd, i * PIECE, values, scales,
                scale_row_stride, scale_group_stride, rows, m, scale_rows,
                N, QUANT, GROUP, VEC, MAXIMUM, BIAS, RULE_BITS, SHUFFLED, WORDS,
            )  # fmt: skip
    if QUANT == "fp8_token":
        _store_token(
            pieces, peak, inverse, rstd, values, scales, scale_row_stride, rows, m,
            N, MAXIMUM, BIAS,
        )  # fmt: skip


@triton.jit
def _normalise_rows(
    held, weight, out, rows, m, eps,
    N: tl.constexpr, TREE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """``triton_kernels._normalise`` with any number of warps a row, bit for bit."""
    PIECE: tl.constexpr = held[0].shape[1]
    here = (rows < m)[:, None]
    row = rows.to(tl.int64)[:, None]
    rstd = _rstd(held, eps, N, TREE, LANES, VEC)
    for i in tl.static_range(len(held)):
        y = (_float(held[i]) * rstd) * _float(weight[i])
        at = (tl.arange(0, PIECE) + i * PIECE)[None, :]
        inside = here & (at < N) if (i + 1) * PIECE > N else here
        tl.store(out + row * N + at, y.to(out.dtype.element_ty), mask=inside)
