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
    mxfp4_scale,
    peaks_of,
    shared_peaks,
    shuffled_at,
)
from mlakit.paths.triton_kernels import prefetch, rstd_of, sums_of


@triton.jit
def _float(x):
    """float32 of x; of bfloat16 in one instruction an element, where the cast takes 1.5."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _here(rows, m, WHOLE: tl.constexpr):
    """(R, 1): which of the rows there are; all, if the program has one: masks cost it 2 %."""
    if WHOLE:
        return tl.full((rows.shape[0], 1), 1, tl.int1)
    else:
        return (rows < m)[:, None]


@triton.jit
def _load(
    start, N: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, here, WHOLE: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Pieces that cover WIDTH elements after the rows' ``start``: (R, 1); zero from N on."""
    cols = tl.arange(0, PIECE)[None, :]
    pieces = ()
    for c in tl.static_range(0, WIDTH, PIECE):
        if WHOLE and c + PIECE <= N:
            x = tl.load(start + cols + c, eviction_policy=EVICT)
        else:
            inside = here & (cols < N - c) if c + PIECE > N else here
            x = tl.load(start + cols + c, mask=inside, other=0.0, eviction_policy=EVICT)
        pieces = pieces + (x,)
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
def _sums(pieces, TREE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """Tuple of (R, WARPS): the sums of squares of ``triton_fused``'s tree of TREE warps a row."""
    values = ()
    for i in tl.static_range(len(pieces)):
        values = values + (_float(pieces[i]),)
    return sums_of(values, TREE, LANES, VEC, pieces[0].dtype)


@triton.jit
def _store_scales(
    scale, i, scales, scale_row_stride, scale_group_stride, rows, here, scale_rows,
    N: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    SHARE: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """Store the scales of piece i: (R, GROUPS, 1 or LANES), of which lane i % SHARE has its own.

    Addresses that grow with the lane, masked, make Triton leave a scale where it is; else it is
    moved to other threads first. SHUFFLED: the scales' columns, or 0.
    """
    lane = tl.arange(0, LANES)[None, None, :]
    group = tl.arange(0, GROUPS)[None, :, None]
    inside = lane == i % SHARE
    if SHUFFLED:
        rows = rows[:, None, None]
        group += i * GROUPS
        at = shuffled_at(rows.to(tl.int64), group, SHUFFLED) + lane - i % SHARE
        inside = inside & (rows < scale_rows) & (group < SHUFFLED)
        # Padding lies in no group, not even of a row whose groups are all NaN.
        scale = tl.where(group < N // GROUP, scale, tl.zeros_like(scale))
    else:
        inside = inside & here[:, :, None]
        at = rows.to(tl.int64)[:, None, None] * scale_row_stride
        at += group.to(tl.int64) * scale_group_stride + lane
        at += i * GROUPS * scale_group_stride - i % SHARE
        if (i + 1) * GROUPS * GROUP > N:
            inside = inside & (group < N // GROUP - i * GROUPS)
    tl.store(scales + at, tl.broadcast_to(scale, at.shape), mask=inside)


@triton.jit
def _store(y, c, out, row, here, N: tl.constexpr, EACH: tl.constexpr):
    """Store columns from c on, EACH of them an element of y; those from N on are left out."""
    at = (tl.arange(0, y.shape[1]) + c // EACH)[None, :]
    inside = here & (at < N // EACH) if c + y.shape[1] * EACH > N else here
    tl.store(out + row * (N // EACH) + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_words(word, c, values, row, here, N: tl.constexpr, WORDS: tl.constexpr):
    """Store MXFP4's words, of 8 columns each, from column c on."""
    if WORDS:
        _store(word, c, values.to(tl.pointer_type(tl.int32)), row, here, N, 8)
    else:
        at = (tl.arange(0, word.shape[1]) + c // 8)[None, :]
        for byte in tl.static_range(4):
            start = values + row * (N // 2) + byte
            coded = (word >> (8 * byte)).to(tl.uint8)
            tl.store(start + at * 4, coded, mask=here & (at < N // 8))


@triton.jit
def _across_warps(total, peak):
    """(R, WARPS) -> (R, 1), of the sums and of the peaks: both in one exchange."""
    if total.shape[1] > 1:
        both = tl.join(total, peak.to(total.dtype))
        for _ in tl.static_range(5):
            if both.shape[1] > 1:
                pairs = tl.reshape(both, (both.shape[0], both.shape[1] // 2, 2, 2))
                left, right = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
                left_total, left_peak = tl.split(left)
                right_total, right_peak = tl.split(right)
                both = tl.join(left_total + right_total, largest_of(left_peak, right_peak))
        whole, largest = tl.split(tl.reshape(both, (both.shape[0], 2)))
        return whole[:, None], largest.to(tl.float32)[:, None]
    else:
        return total, peak


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
    PACKED: tl.constexpr, WORDS: tl.constexpr, NVIDIA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q: (m, Q_N), k: (m, K_N) of any row strides; ``values`` and ``k_out`` contiguous.

    ``scale_rows`` is m, or the shuffled layout's padded rows, whose padding is written as 0.
    A program has SIDE rows side by side, each in its own warps, and TURNS of those one after
    another, all asked for at once. SPREAD: with rows side by side a weight is loaded once a row,
    laid out like the row: broadcasting it would move it through shared memory. PACKED: a row's
    scales lie side by side, row after row, whatever the strides say (ten instructions less, 1.7 %
    at M = 1024). WORDS: MXFP4's values start on 4 bytes.
    """
    if PDL == "before":
        gdc_launch_dependents()
    program = tl.program_id(0)
    if PDL != "" and NORMALISE:
        if program == 0:
            prefetch(q_weight, Q_N)
            prefetch(k_weight, K_N)
    # The kv programs hold more rows, so they go first.
    k_programs = tl.cdiv(m.to(tl.uint32), K_SIDE * K_TURNS).to(tl.int32)
    if NORMALISE and (not SEPARATE or program < k_programs):
        K_WHOLE: tl.constexpr = K_SIDE * K_TURNS == 1
        held = _load_rows(
            k, k_stride, program * K_SIDE * K_TURNS, m,
            K_SIDE, K_TURNS, K_N, K_N, K_PIECE, K_WHOLE, EVICT, PDL,
        )  # fmt: skip
        weight = _load_weight(k_weight, K_N, K_N, K_PIECE, K_SPREAD)
        for t in tl.static_range(K_TURNS):
            rows = (program * K_TURNS + t) * K_SIDE + tl.arange(0, K_SIDE)
            here = _here(rows, m, K_WHOLE)
            _normalise_rows(held[t], weight, k_out, rows, here, k_eps, K_N, K_TREE, LANES, VEC)
    if not SEPARATE or not NORMALISE or program >= k_programs:
        first = program - k_programs if SEPARATE and NORMALISE else program
        # Shuffled scales are padded, to whole tiles of 8 groups and 32 rows.
        Q_WHOLE: tl.constexpr = Q_SIDE * Q_TURNS == 1 and SHUFFLED == 0
        WIDTH: tl.constexpr = max(Q_N, SHUFFLED * GROUP)
        held = _load_rows(
            q, q_stride, first * Q_SIDE * Q_TURNS, m,
            Q_SIDE, Q_TURNS, Q_N, WIDTH, Q_PIECE, Q_WHOLE, EVICT, PDL,
        )  # fmt: skip
        weight = ()
        if NORMALISE:
            weight = _load_weight(q_weight, Q_N, WIDTH, Q_PIECE, Q_SPREAD)
        for t in tl.static_range(Q_TURNS):
            rows = (first * Q_TURNS + t) * Q_SIDE + tl.arange(0, Q_SIDE)
            here = _here(rows, m, Q_WHOLE)
            if QUANT == "fp8_token":
                _quantise_tokens(
                    held[t], weight, q_eps, values, scales, unquantised, scale_row_stride, rows,
                    here, Q_N, Q_TREE, LANES, VEC, NORMALISE, UNQUANTISED, MAXIMUM, BIAS, NVIDIA,
                )  # fmt: skip
            else:
                _quantise_groups(
                    held[t], weight, q_eps, values, scales, unquantised,
                    Q_N // GROUP if PACKED else scale_row_stride,
                    1 if PACKED else scale_group_stride, rows, here, scale_rows,
                    Q_N, Q_TREE, LANES, VEC, QUANT, GROUP, NORMALISE, UNQUANTISED,
                    MAXIMUM, BIAS, RULE_BITS, SHUFFLED, WORDS, NVIDIA,
                )  # fmt: skip


@triton.jit
def _load_rows(
    x, stride, first, m, SIDE: tl.constexpr, TURNS: tl.constexpr,
    N: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, WHOLE: tl.constexpr,
    EVICT: tl.constexpr, PDL: tl.constexpr,
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
        here = _here(rows + t * SIDE, m, WHOLE)
        held = held + (_load(start + t * SIDE * stride, N, WIDTH, PIECE, here, WHOLE, EVICT),)
    return held


@triton.jit
def _products(held, weight, NORMALISE: tl.constexpr):
    """Pieces of rows in float32, times the weight if they are to be normalised."""
    pieces = ()
    for i in tl.static_range(len(held)):
        p = _float(held[i])
        if NORMALISE:
            p = p * _float(weight[i])
        pieces = pieces + (p,)
    return pieces


@triton.jit
def _quantise_groups(
    held, weight, eps, values, scales, unquantised, scale_row_stride, scale_group_stride,
    rows, here, scale_rows,
    N: tl.constexpr, TREE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr, UNQUANTISED: tl.constexpr,
    MAXIMUM: tl.constexpr, BIAS: tl.constexpr, RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
    WORDS: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Normalise and quantise rows held as pieces. All but the last steps precede the row's sum."""
    ROWS: tl.constexpr = held[0].shape[0]
    PIECE: tl.constexpr = held[0].shape[1]
    GROUPS: tl.constexpr = PIECE // GROUP
    # Neighbours that one thread codes, and the threads of a group.
    TOGETHER: tl.constexpr = 8 if QUANT == "mxfp4" else VEC
    THREADS: tl.constexpr = GROUP // TOGETHER
    # An MXFP4 scale takes many steps: 8.1 us with each worked out by one lane, 8.7 by all of its
    # group (M = 4096). Of FP8's few the way back to the others costs more: 1.42 and 1.39 at M = 64.
    SHARE: tl.constexpr = THREADS if QUANT == "mxfp4" else 1
    pieces = _products(held, weight, NORMALISE)
    parts = ()
    for i in tl.static_range(len(pieces)):
        part = peaks_of(pieces[i], GROUP, TOGETHER)
        if SHARE == 1:
            part = tl.reduce(part, 2, largest_of, keep_dims=True)
        parts = parts + (part,)
    peaks = shared_peaks(parts) if SHARE > 1 else parts
    inverses = ()
    for j in tl.static_range(len(peaks)):
        inverses = inverses + (inverse_of(peaks[j], MAXIMUM, NVIDIA),)
    rstd = tl.full((ROWS, 1), 1.0, tl.float32)
    if NORMALISE:
        rstd = rstd_of(_sums(held, TREE, LANES, VEC), eps, N, held[0].dtype)
    row = rows.to(tl.int64)[:, None]
    if UNQUANTISED:
        for i in tl.static_range(len(pieces)):
            _store(pieces[i] * rstd, i * PIECE, unquantised, row, here, N, 1)
    own = ()
    factors = ()
    for j in tl.static_range(len(peaks)):
        if QUANT == "mxfp4":
            scale, factor = mxfp4_scale(peaks[j], rstd[:, :, None], RULE_BITS)
        else:
            scale, factor = fp8_scale(peaks[j], inverses[j], rstd[:, :, None], MAXIMUM)
        own = own + (scale,)
        factors = factors + (factor,)
    for i in tl.static_range(len(pieces)):
        factor = factors[i // SHARE]
        if SHARE > 1:
            factor = tl.gather(factor, tl.full(factor.shape, i % SHARE, tl.int32), 2)
        if QUANT == "mxfp4":
            word = mxfp4(pieces[i], factor, RULE_BITS)
            _store_words(word, i * PIECE, values, row, here, N, WORDS)
        else:
            p = tl.reshape(pieces[i], (ROWS, GROUPS, THREADS, VEC)) * factor[:, :, :, None]
            coded = fp8(tl.reshape(p, (ROWS, PIECE)), BIAS, values.dtype.element_ty)
            _store(coded, i * PIECE, values, row, here, N, 1)
        _store_scales(
            own[i // SHARE], i, scales, scale_row_stride, scale_group_stride,
            rows, here, scale_rows, N, GROUPS, GROUP, THREADS, SHARE, SHUFFLED,
        )  # fmt: skip


@triton.jit
def _quantise_tokens(
    held, weight, eps, values, scales, unquantised, scale_row_stride, rows, here,
    N: tl.constexpr, TREE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    NORMALISE: tl.constexpr, UNQUANTISED: tl.constexpr, MAXIMUM: tl.constexpr, BIAS: tl.constexpr,
    NVIDIA: tl.constexpr,
):  # fmt: skip
    """``_quantise_groups`` with one scale a row."""
    ROWS: tl.constexpr = held[0].shape[0]
    PIECE: tl.constexpr = held[0].shape[1]
    pieces = _products(held, weight, NORMALISE)
    largest = tl.abs(pieces[0])
    for i in tl.static_range(1, len(pieces)):
        largest = largest_of(largest, tl.abs(pieces[i]))
    # As of the sum, first by warp: reduced at once, a row in several warps would take two barriers.
    # As an integer, whose order is a magnitude's (NaN the largest), a warp's is one instruction.
    by_lane = peaks_of(largest, LANES * VEC, VEC).to(tl.int32, bitcast=True)
    by_warp = tl.max(by_lane, 2).to(tl.float32, bitcast=True)
    sums = (tl.zeros((ROWS, PIECE // (LANES * VEC)), tl.float32),)
    if NORMALISE:
        sums = _sums(held, TREE, LANES, VEC)
    totals = ()
    for i in tl.static_range(len(sums)):
        total, peak = _across_warps(sums[i], by_warp)
        totals = totals + (total,)
    inverse = inverse_of(peak, MAXIMUM, NVIDIA)
    rstd = tl.full((ROWS, 1), 1.0, tl.float32)
    if NORMALISE:
        rstd = rstd_of(totals, eps, N, held[0].dtype)
    row = rows.to(tl.int64)[:, None]
    if UNQUANTISED:
        for i in tl.static_range(len(pieces)):
            _store(pieces[i] * rstd, i * PIECE, unquantised, row, here, N, 1)
    scale, factor = fp8_scale(peak, inverse, rstd, MAXIMUM)
    tl.store(scales + row * scale_row_stride, scale, mask=here)
    for i in tl.static_range(len(pieces)):
        coded = fp8(pieces[i] * factor, BIAS, values.dtype.element_ty)
        _store(coded, i * PIECE, values, row, here, N, 1)


@triton.jit
def _normalise_rows(
    held, weight, out, rows, here, eps,
    N: tl.constexpr, TREE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """``triton_kernels._normalise`` with any number of warps a row, bit for bit."""
    PIECE: tl.constexpr = held[0].shape[1]
    row = rows.to(tl.int64)[:, None]
    rstd = rstd_of(_sums(held, TREE, LANES, VEC), eps, N, held[0].dtype)
    for i in tl.static_range(len(held)):
        y = (_float(held[i]) * rstd) * _float(weight[i])
        _store(y, i * PIECE, out, row, here, N, 1)
