"""The Triton kernel of the quantised paths: q normalised and quantised, kv normalised, one launch.

Import this only where triton is. A row is taken in pieces of which each thread holds VEC
neighbours (16 bytes); a piece holds whole groups, so a group's scale needs no second look at the
row. A row's sum has one tree, whatever the rows and warps of a program; kv's is ``triton_fused``'s.
The norm is never written out: x * weight is exact in float32 for 16-bit inputs, and what then
multiplies it, 1/rms and the scale's inverse, is one factor a group. With ``NORMALISE`` off the same
kernel is the second launch of the unfused pair.
"""

# Triton compiles these functions: it knows no tuple unpacking.
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl

from mlakit.paths.triton_kernels import _reciprocal_root, _row_total


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _e4m3(magnitude, BIAS: tl.constexpr):
    """Codes 0 to 127 of float32 magnitudes in range: to nearest, ties to even.

    With e the exponent, but at least the lowest, steps are 2^(e - 3). Adding 2^(e + 20), whose
    last bit is worth one, leaves the steps; the code is those plus 8 (e - lowest).
    """
    LOWEST: tl.constexpr = 128 - BIAS
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True), LOWEST << 23) & 0x7F800000
    placed = magnitude + (power + (20 << 23)).to(tl.float32, bitcast=True)
    placed = placed.to(tl.int32, bitcast=True)
    return (placed & 31) + ((placed >> 23) - (LOWEST + 20)) * 8


@triton.jit
def _e4m3_bytes(scaled, BIAS: tl.constexpr):
    """E4M3 bytes of clamped float32, where the target's (or the interpreter's) cast is no use."""
    code = _e4m3(tl.abs(scaled), BIAS)
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    if BIAS == 8:
        # FNUZ has no negative zero: 0x80 is its NaN.
        code = tl.where(scaled == scaled, tl.where(code == 0, 0, code | sign), 0x80)
    else:
        code = tl.where(scaled == scaled, code | sign, 0x7F)
    return code.to(tl.uint8)


@triton.jit
def _fp8_scale(amax, MAXIMUM: tl.constexpr):
    """max(amax, 1e-10) / MAXIMUM."""
    amax = tl.maximum(amax, 1e-10, propagate_nan=tl.PropagateNan.ALL)
    return amax / MAXIMUM


@triton.jit
def _fp8(scaled, BIAS: tl.constexpr, OUT: tl.constexpr):
    """E4M3 of scaled values; OUT is an FP8 dtype, or uint8 for its bytes.

    No clamp: the largest magnitude is the encoding's maximum give or take a few float32 steps, and
    rounds to it.
    """
    if OUT.is_fp8():
        return scaled.to(OUT)
    else:
        return _e4m3_bytes(scaled, BIAS)


@triton.jit
def _eight(p):
    """(R, C) -> tuple of eight (R, C / 32, 4): each thread's neighbours, without moving them."""
    left, right = tl.split(tl.reshape(p, (p.shape[0], p.shape[1] // 32, 4, 2, 2, 2)))
    p04, p26 = tl.split(left)
    p15, p37 = tl.split(right)
    p0, p4 = tl.split(p04)
    p1, p5 = tl.split(p15)
    p2, p6 = tl.split(p26)
    p3, p7 = tl.split(p37)
    return (p0, p1, p2, p3, p4, p5, p6, p7)


@triton.jit
def _mxfp4(p, rstd, RULE_BITS: tl.constexpr):
    """Quantise p * rstd, p: (R, C) -> codes of 8 neighbours (R, C / 8) int32, E8M0 (R, C / 32).

    A code is min(2v, v + 2, v/2 + 4) of its scaled magnitude v, whose pieces meet at representable
    values. Beside 2^22 a float32's last bit is worth a half, so a fused multiply-add rounds half
    of a piece to a whole code, ties to even, and the least of the rounded pieces is the rounded
    least. Where a whole group is under 1e-34 the factor is capped, for float32's range.
    """
    p = _eight(p)
    largest = tl.abs(p[0])
    for i in tl.static_range(1, 8):
        largest = _max(largest, tl.abs(p[i]))
    # The absolute value again: on some targets 0 * inf is a negative NaN.
    amax = tl.abs(tl.reduce(largest, 2, _max) * rstd).to(tl.int32, bitcast=True)
    scale = tl.maximum(((amax + RULE_BITS) >> 23) - 2, 0)
    scale = tl.where(amax >= 0x7F800000, 255, scale)
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    factor = tl.minimum(factor * rstd, 1.7014118e38)[:, :, None]
    word = tl.zeros(p[0].shape, tl.int32)
    signs = tl.zeros(p[0].shape, tl.uint32)
    for i in tl.static_range(8):
        v = tl.abs(p[7 - i])
        fine = tl.fma(v, factor, 4194304.0)
        middle = tl.fma(v, factor * 0.5, 4194305.0)
        code = tl.minimum(fine, tl.minimum(middle, tl.fma(v, factor * 0.25, 4194306.0)))
        if RULE_BITS == 0:
            # The other rules leave every magnitude below 7, which rounds to 6 without a clamp.
            code = tl.minimum(code, 4194307.5)
        word = (word << 4) + code.to(tl.int32, bitcast=True)
        signs = (signs << 4) | (p[7 - i].to(tl.uint32, bitcast=True) >> 28)
    # What is left of eight times the bits of 2^22; then the sign bit of each nibble.
    word = (word - 0x72800000) | (signs & 0x88888888).to(tl.int32, bitcast=True)
    return tl.reshape(word, (word.shape[0], word.shape[1] * 4)), scale.to(tl.uint8)


@triton.jit
def _shuffled(row, column, COLUMNS: tl.constexpr):
    """Where ``formats.mxfp4.shuffle_scale`` puts byte [row, column] of ``COLUMNS`` padded ones."""
    tile = (row // 32) * (COLUMNS // 8) + column // 8
    r, c = row % 32, column % 8
    return tile * 256 + (c % 4) * 64 + (r % 16) * 4 + (c // 4) * 2 + r // 16


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
def _rstd(
    pieces, eps, N: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr
):
    """(R, 1) float32; the sum's tree is that of WARPS warps a row, of which a piece holds some."""
    # float32 results must match a float64 statistic; for 16-bit ones a float32 sum is enough.
    WIDE: tl.constexpr = tl.float64 if pieces[0].dtype == tl.float32 else tl.float32
    HELD: tl.constexpr = pieces[0].shape[1] // (LANES * VEC)
    totals = ()
    for first in tl.static_range(WARPS // HELD):
        squares = tl.zeros(pieces[0].shape, WIDE)
        for c in tl.static_range(first, len(pieces), WARPS // HELD):
            value = _float(pieces[c]).to(WIDE)
            squares += value * value
        totals = totals + (_row_total((squares,), HELD, LANES),)
    for _ in tl.static_range(5):
        if len(totals) > 1:
            halved = ()
            for i in tl.static_range(len(totals) // 2):
                halved = halved + (totals[2 * i] + totals[2 * i + 1],)
            totals = halved
    mean = totals[0] * (1.0 / N) + tl.cast(eps, WIDE)
    return _reciprocal_root(mean, pieces[0].dtype)[:, None]


@triton.jit
def _store_groups(
    p, rstd, c, values, scales, scale_row_stride, scale_group_stride, rows, m, scale_rows,
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
        word, scale = _mxfp4(p, rstd, RULE_BITS)
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
            scale_at = _shuffled(row, group, SHUFFLED)
            scale_here = (rows < scale_rows)[:, None] & (group < SHUFFLED)
    else:
        p = tl.reshape(p, (ROWS, GROUPS, GROUP))
        scale = _fp8_scale(tl.reduce(tl.abs(p), 2, _max) * rstd, MAXIMUM)
        coded = _fp8(p * (rstd * (1.0 / scale))[:, :, None], BIAS, values.dtype.element_ty)
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
def _store_token(
    pieces, rstd, values, scales, scale_row_stride, rows, m,
    N: tl.constexpr, SHARE: tl.constexpr, MAXIMUM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Quantise rows held as pieces, times rstd, with one scale a row; a warp holds SHARE of one."""
    PIECE: tl.constexpr = pieces[0].shape[1]
    row = rows.to(tl.int64)[:, None]
    here = (rows < m)[:, None]
    largest = tl.abs(pieces[0])
    for i in tl.static_range(1, len(pieces)):
        largest = _max(largest, tl.abs(pieces[i]))
    # As in ``_row_total``: reduced at once, a row in several warps would take two barriers.
    amax = tl.reduce(tl.reshape(largest, (largest.shape[0], PIECE // SHARE, SHARE)), 2, _max)
    for _ in tl.static_range(5):
        if amax.shape[1] > 1:
            left, right = tl.split(tl.reshape(amax, (amax.shape[0], amax.shape[1] // 2, 2)))
            amax = _max(left, right)
    amax = tl.reshape(amax, (amax.shape[0],))[:, None]
    scale = _fp8_scale(amax * rstd, MAXIMUM)
    tl.store(scales + row * scale_row_stride, scale, mask=here)
    factor = rstd * (1.0 / scale)
    for i in tl.static_range(len(pieces)):
        at = (tl.arange(0, PIECE) + i * PIECE)[None, :]
        inside = here & (at < N) if (i + 1) * PIECE > N else here
        coded = _fp8(pieces[i] * factor, BIAS, values.dtype.element_ty)
        tl.store(values + row * N + at, coded, mask=inside)


@triton.jit(do_not_specialize=["m", "scale_rows"])
def norm_and_quantise(
    q, q_weight, values, scales, unquantised, k, k_weight, k_out,
    q_stride, k_stride, scale_row_stride, scale_group_stride, m, scale_rows,
    q_eps: tl.float64, k_eps: tl.float64,
    Q_N: tl.constexpr, K_N: tl.constexpr, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr,
    Q_WARPS: tl.constexpr, K_WARPS: tl.constexpr, Q_PIECE: tl.constexpr, K_PIECE: tl.constexpr,
    Q_SPREAD: tl.constexpr, K_SPREAD: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    SEPARATE: tl.constexpr, HOIST: tl.constexpr, EVICT: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr, UNQUANTISED: tl.constexpr,
    MAXIMUM: tl.constexpr, BIAS: tl.constexpr, RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """q: (m, Q_N), k: (m, K_N) of any row strides; ``values`` and ``k_out`` contiguous.

    ``scale_rows`` is m, or the shuffled layout's padded rows, whose padding is written as 0.
    SPREAD: with rows side by side in a program a weight is loaded once a row, laid out like the
    row: broadcasting it would move it through shared memory. WORDS: MXFP4's values start on 4
    bytes.
    """
    program = tl.program_id(0)
    q_programs = (scale_rows + Q_ROWS - 1) // Q_ROWS
    if not SEPARATE or program < q_programs:
        # Shuffled scales are padded, to whole tiles of 8 groups.
        WIDTH: tl.constexpr = max(Q_N, SHUFFLED * GROUP)
        rows = program * Q_ROWS + tl.arange(0, Q_ROWS)
        here = (rows < m)[:, None]
        # An int32 offset overflows at row 1,016,801 of a 2112-wide buffer.
        row = rows.to(tl.int64)[:, None]
        held = _load(q + row * q_stride, Q_N, WIDTH, Q_PIECE, here, EVICT)
        rstd = 1.0
        if NORMALISE:
            if HOIST:
                weight = _load_weight(q_weight, Q_N, WIDTH, Q_PIECE, Q_SPREAD)
            rstd = _rstd(held, q_eps, Q_N, Q_WARPS, LANES, VEC)
            if not HOIST:
                weight = _load_weight(q_weight, Q_N, WIDTH, Q_PIECE, Q_SPREAD)
        pieces = ()
        for i in tl.static_range(len(held)):
            p = _float(held[i])
            if NORMALISE:
                p = p * _float(weight[i])
            if UNQUANTISED:
                at = (tl.arange(0, Q_PIECE) + i * Q_PIECE)[None, :]
                y = (p * rstd).to(unquantised.dtype.element_ty)
                tl.store(unquantised + row * Q_N + at, y, mask=here & (at < Q_N))
            if QUANT == "fp8_token":
                pieces = pieces + (p,)
            else:
                _store_groups(
                    p, rstd, i * Q_PIECE, values, scales, scale_row_stride, scale_group_stride,
                    rows, m, scale_rows,
                    Q_N, QUANT, GROUP, VEC, MAXIMUM, BIAS, RULE_BITS, SHUFFLED, WORDS,
                )  # fmt: skip
        if QUANT == "fp8_token":
            _store_token(
                pieces, rstd, values, scales, scale_row_stride, rows, m,
                Q_N, LANES * VEC, MAXIMUM, BIAS,
            )  # fmt: skip
    if NORMALISE and (not SEPARATE or program >= q_programs):
        first = program * K_ROWS if not SEPARATE else (program - q_programs) * K_ROWS
        _normalise_k(
            k, k_stride, k_weight, k_out, first + tl.arange(0, K_ROWS), m, k_eps,
            K_N, K_WARPS, K_PIECE, K_SPREAD, LANES, VEC, HOIST, EVICT,
        )  # fmt: skip


@triton.jit
def _normalise_k(
    k, k_stride, k_weight, out, rows, m, eps,
    N: tl.constexpr, WARPS: tl.constexpr, PIECE: tl.constexpr, SPREAD: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr, HOIST: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """``triton_kernels._normalise`` with any number of warps a row, bit for bit."""
    here = (rows < m)[:, None]
    row = rows.to(tl.int64)[:, None]
    held = _load(k + row * k_stride, N, N, PIECE, here, EVICT)
    if HOIST:
        weight = _load_weight(k_weight, N, N, PIECE, SPREAD)
    rstd = _rstd(held, eps, N, WARPS, LANES, VEC)
    if not HOIST:
        weight = _load_weight(k_weight, N, N, PIECE, SPREAD)
    for i in tl.static_range(len(held)):
        y = (_float(held[i]) * rstd) * _float(weight[i])
        at = (tl.arange(0, PIECE) + i * PIECE)[None, :]
        inside = here & (at < N) if (i + 1) * PIECE > N else here
        tl.store(out + row * N + at, y.to(out.dtype.element_ty), mask=inside)
