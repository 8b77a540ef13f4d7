"""The Triton kernel of the quantised paths: q normalised and quantised, kv normalised, one launch.

Import this only where triton is. Rows are taken in chunks, as in ``triton_kernels``; a chunk holds
whole groups, so a group's scale needs no second look at the row. With ``NORMALISE`` off the same
kernel is the second launch of the unfused pair.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _e2m1(magnitude):
    """Bits whose lowest byte is the code 0 to 7 of a float32 magnitude: to nearest, ties to even.

    The code is min(2v, v + 2, v/2 + 4), whose pieces meet at representable values. Beside 2^23 a
    float32's last bit is worth 1, so each fused multiply-add rounds its piece to a whole code,
    and the least of the rounded pieces is the rounded least.
    """
    fine = tl.fma(magnitude, 2.0, 8388608.0)
    middle = magnitude + 8388610.0
    coarse = tl.fma(magnitude, 0.5, 8388612.0)
    return tl.minimum(fine, tl.minimum(middle, coarse)).to(tl.int32, bitcast=True)


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
def _fp8(y, scale, MAXIMUM: tl.constexpr, BIAS: tl.constexpr, OUT: tl.constexpr):
    """E4M3 of y, whose last axis shares ``scale``; OUT is an FP8 dtype, or uint8 for its bytes."""
    inverse = 1.0 / scale
    # No clamp: the largest magnitude comes out as MAXIMUM give or take two float32 steps, and
    # rounds to it.
    scaled = y * tl.expand_dims(inverse, -1)
    if OUT.is_fp8():
        return scaled.to(OUT)
    else:
        return _e4m3_bytes(scaled, BIAS)


@triton.jit
def _mxfp4(y, RULE_BITS: tl.constexpr):
    """(R, G, 32) float32 -> packed (R, G, 16) uint8 and E8M0 scales (R, G) uint8."""
    amax = tl.reduce(tl.abs(y), 2, _max).to(tl.int32, bitcast=True)
    scale = tl.maximum(((amax + RULE_BITS) >> 23) - 2, 0)
    scale = tl.where(amax >= 0x7F800000, 255, scale)
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    magnitude = tl.abs(y * inverse[:, :, None])
    if RULE_BITS == 0:
        # The other rules leave every magnitude below 7, which rounds to 6 without a clamp.
        magnitude = tl.minimum(magnitude, 6.0)
    code = _e2m1(magnitude) | ((y.to(tl.int32, bitcast=True) >> 28) & 8)
    even, odd = tl.split(tl.reshape(code, (y.shape[0], y.shape[1], y.shape[2] // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8), scale.to(tl.uint8)


@triton.jit
def _shuffled(row, column, COLUMNS: tl.constexpr):
    """Where ``formats.mxfp4.shuffle_scale`` puts byte [row, column] of ``COLUMNS`` padded ones."""
    tile = (row // 32) * (COLUMNS // 8) + column // 8
    r, c = row % 32, column % 8
    return tile * 256 + (c % 4) * 64 + (r % 16) * 4 + (c // 4) * 2 + r // 16


@triton.jit
def _rstd(loaded, eps, N: tl.constexpr):
    """(R, 1) float32 of rows loaded as chunks."""
    # float32 results must match a float64 statistic; for 16-bit ones a float32 sum is enough.
    WIDE: tl.constexpr = tl.float64 if loaded[0].dtype == tl.float32 else tl.float32
    squares = tl.zeros(loaded[0].shape, WIDE)
    for c in tl.static_range(len(loaded)):
        value = loaded[c].to(WIDE)
        squares += value * value
    mean = tl.sum(squares, 1) * (1.0 / N) + tl.cast(eps, WIDE)
    return tl.rsqrt(mean).to(tl.float32)[:, None]


@triton.jit
def _store_group_chunk(
    y, c, unquantised, values, scales, scale_row_stride, scale_group_stride, rows, m, scale_rows,
    N: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, UNQUANTISED: tl.constexpr,
    MAXIMUM: tl.constexpr, BIAS: tl.constexpr, RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """Quantise chunk c, y: (R, CHUNK), in groups. SHUFFLED: the shuffled scales' columns, or 0."""
    ROWS: tl.constexpr = y.shape[0]
    CHUNK: tl.constexpr = y.shape[1]
    GROUPS: tl.constexpr = CHUNK // GROUP
    row = rows.to(tl.int64)[:, None]
    here = (rows < m)[:, None]
    at = (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
    if UNQUANTISED:
        rounded = y.to(unquantised.dtype.element_ty)
        tl.store(unquantised + row * N + at, rounded, mask=here & (at < N))
    y = tl.reshape(y, (ROWS, GROUPS, GROUP))
    group = (tl.arange(0, GROUPS) + c * GROUPS)[None, :]
    scale_at = row * scale_row_stride + group * scale_group_stride
    scale_here = here & (group < N // GROUP)
    if QUANT == "mxfp4":
        packed, scale = _mxfp4(y, RULE_BITS)
        at = (tl.arange(0, CHUNK // 2) + c * (CHUNK // 2))[None, :]
        packed = tl.reshape(packed, (ROWS, CHUNK // 2))
        tl.store(values + row * (N // 2) + at, packed, mask=here & (at < N // 2))
        if SHUFFLED:
            scale_at = _shuffled(row, group, SHUFFLED)
            scale_here = (rows < scale_rows)[:, None] & (group < SHUFFLED)
    else:
        scale = _fp8_scale(tl.reduce(tl.abs(y), 2, _max), MAXIMUM)
        coded = _fp8(y, scale, MAXIMUM, BIAS, values.dtype.element_ty)
        coded = tl.reshape(coded, (ROWS, CHUNK))
        tl.store(values + row * N + at, coded, mask=here & (at < N))
    tl.store(scales + scale_at, scale, mask=scale_here)


@triton.jit
def _store_token(
    chunks, unquantised, values, scales, scale_row_stride, rows, m,
    N: tl.constexpr, UNQUANTISED: tl.constexpr, MAXIMUM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Quantise rows held as chunks with one scale a row."""
    CHUNK: tl.constexpr = chunks[0].shape[1]
    row = rows.to(tl.int64)[:, None]
    largest = tl.abs(chunks[0])
    for c in tl.static_range(1, len(chunks)):
        largest = _max(largest, tl.abs(chunks[c]))
    scale = _fp8_scale(tl.reduce(largest, 1, _max), MAXIMUM)
    tl.store(scales + rows.to(tl.int64) * scale_row_stride, scale, mask=rows < m)
    for c in tl.static_range(len(chunks)):
        at = (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        inside = (rows < m)[:, None] & (at < N)
        if UNQUANTISED:
            rounded = chunks[c].to(unquantised.dtype.element_ty)
            tl.store(unquantised + row * N + at, rounded, mask=inside)
        coded = _fp8(chunks[c], scale, MAXIMUM, BIAS, values.dtype.element_ty)
        tl.store(values + row * N + at, coded, mask=inside)


@triton.jit(do_not_specialize=["m", "scale_rows"])
def norm_and_quantise(
    q, q_weight, values, scales, unquantised, k, k_weight, k_out,
    q_stride, k_stride, scale_row_stride, scale_group_stride, m, scale_rows,
    q_eps: tl.float64, k_eps: tl.float64,
    Q_N: tl.constexpr, K_N: tl.constexpr, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr,
    Q_CHUNK: tl.constexpr, K_CHUNK: tl.constexpr, Q_SPREAD: tl.constexpr, K_SPREAD: tl.constexpr,
    SEPARATE: tl.constexpr, LOOPED: tl.constexpr, EVICT: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr, UNQUANTISED: tl.constexpr,
    MAXIMUM: tl.constexpr, BIAS: tl.constexpr, RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """q: (m, Q_N), k: (m, K_N) of any row strides; ``values`` and ``k_out`` contiguous.

    ``scale_rows`` is m, or the shuffled layout's padded rows, whose padding is written as 0.
    SPREAD: with rows side by side in a program a weight is loaded once a row, laid out like the
    row: broadcasting it would move it through shared memory.
    """
    program = tl.program_id(0)
    q_programs = (scale_rows + Q_ROWS - 1) // Q_ROWS
    if program < q_programs:
        CHUNKS: tl.constexpr = (Q_N + Q_CHUNK - 1) // Q_CHUNK
        rows = program * Q_ROWS + tl.arange(0, Q_ROWS)
        here = (rows < m)[:, None]
        cols = tl.arange(0, Q_CHUNK)[None, :]
        # An int32 offset overflows at row 1,016,801 of a 2112-wide buffer.
        source = q + rows.to(tl.int64)[:, None] * q_stride + cols
        weight_cols = cols + tl.zeros((Q_SPREAD, 1), tl.int32)
        loaded = ()
        weights = ()
        for c in tl.static_range(CHUNKS if NORMALISE or not LOOPED else 0):
            inside = here & (cols < Q_N - c * Q_CHUNK)
            loaded += (
                tl.load(source + c * Q_CHUNK, mask=inside, other=0.0, eviction_policy=EVICT),
            )
        if NORMALISE:
            for c in tl.static_range(0 if LOOPED else CHUNKS):
                at = weight_cols + c * Q_CHUNK
                weights += (tl.load(q_weight + at, mask=at < Q_N, other=0.0),)
            rstd = _rstd(loaded, q_eps, Q_N)
        if LOOPED:
            # One copy of the code for all chunks; a row comes a second time, from the L1.
            for c in tl.range(0, CHUNKS):
                inside = here & (cols < Q_N - c * Q_CHUNK)
                y = tl.load(source + c * Q_CHUNK, mask=inside, other=0.0).to(tl.float32)
                if NORMALISE:
                    at = weight_cols + c * Q_CHUNK
                    weight = tl.load(q_weight + at, mask=at < Q_N, other=0.0)
                    y = (y * rstd) * weight.to(tl.float32)
                _store_group_chunk(
                    y, c, unquantised, values, scales, scale_row_stride, scale_group_stride,
                    rows, m, scale_rows,
                    Q_N, QUANT, GROUP, UNQUANTISED, MAXIMUM, BIAS, RULE_BITS, SHUFFLED,
                )  # fmt: skip
        else:
            chunks = ()
            for c in tl.static_range(CHUNKS):
                y = loaded[c].to(tl.float32)
                if NORMALISE:
                    y = (y * rstd) * weights[c].to(tl.float32)
                chunks += (y,)
            if QUANT == "fp8_token":
                _store_token(
                    chunks, unquantised, values, scales, scale_row_stride, rows, m,
                    Q_N, UNQUANTISED, MAXIMUM, BIAS,
                )  # fmt: skip
            else:
                for c in tl.static_range(CHUNKS):
                    _store_group_chunk(
                        chunks[c], c, unquantised, values, scales, scale_row_stride,
                        scale_group_stride, rows, m, scale_rows,
                        Q_N, QUANT, GROUP, UNQUANTISED, MAXIMUM, BIAS, RULE_BITS, SHUFFLED,
                    )  # fmt: skip
    if NORMALISE and (not SEPARATE or program >= q_programs):
        first = program * K_ROWS if not SEPARATE else (program - q_programs) * K_ROWS
        rows = first + tl.arange(0, K_ROWS)
        _normalise_k(k, k_stride, k_weight, k_out, rows, m, k_eps, K_N, K_CHUNK, K_SPREAD, EVICT)


@triton.jit
def _normalise_k(
    k, k_stride, weight, out, rows, m, eps,
    N: tl.constexpr, CHUNK: tl.constexpr, SPREAD: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    here = (rows < m)[:, None]
    cols = tl.arange(0, CHUNK)[None, :]
    source = k + rows.to(tl.int64)[:, None] * k_stride + cols
    weight_cols = cols + tl.zeros((SPREAD, 1), tl.int32)
    loaded = ()
    weights = ()
    for c in tl.static_range(CHUNKS):
        inside = here & (cols < N - c * CHUNK)
        loaded += (tl.load(source + c * CHUNK, mask=inside, other=0.0, eviction_policy=EVICT),)
        at = weight_cols + c * CHUNK
        weights += (tl.load(weight + at, mask=at < N, other=0.0),)
    rstd = _rstd(loaded, eps, N)
    target = out + rows.to(tl.int64)[:, None] * N + cols
    for c in tl.static_range(CHUNKS):
        y = (loaded[c].to(tl.float32) * rstd) * weights[c].to(tl.float32)
        inside = here & (cols < N - c * CHUNK)
        tl.store(target + c * CHUNK, y.to(out.dtype.element_ty), mask=inside)
