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
def _placed(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr, EXTRA: tl.constexpr):
    """Float32 bits whose last bits count a small float's steps: to nearest, ties to even.

    2^e, e the magnitude's exponent but at least the small float's lowest, times 2^(23 - MANTISSA)
    has a last bit worth one step. Added, it leaves magnitude / step there, rounded, plus EXTRA.
    """
    LOWEST: tl.constexpr = (128 - BIAS) << 23
    FACTOR: tl.constexpr = 2.0 ** (23 - MANTISSA) + EXTRA * 2.0**-MANTISSA
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True), LOWEST) & 0x7F800000
    return tl.fma(power.to(tl.float32, bitcast=True), FACTOR, magnitude).to(tl.int32, bitcast=True)


@triton.jit
def _e2m1(magnitude):
    """Codes 0 to 7 of float32 magnitudes up to 6: steps of 2^(e - 1) plus 2e."""
    placed = _placed(magnitude, 1, 1, 6)  # 6 makes up for 2 * (127 + 22) modulo 8
    return (placed + (placed >> 22)) & 7


@triton.jit
def _e4m3(magnitude, BIAS: tl.constexpr):
    """Codes 0 to 127 of float32 magnitudes in range: steps of 2^(e - 3) plus 8 (e - lowest)."""
    placed = _placed(magnitude, 3, BIAS, 0)
    return (placed & 31) + ((placed >> 23) - (128 - BIAS + 20)) * 8


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
    """max(amax, 1e-10) / MAXIMUM, rounded once."""
    amax = tl.maximum(amax, 1e-10, propagate_nan=tl.PropagateNan.ALL)
    return tl.math.div_rn(amax, tl.full(amax.shape, MAXIMUM, tl.float32))


@triton.jit
def _fp8(y, scale, MAXIMUM: tl.constexpr, BIAS: tl.constexpr, OUT: tl.constexpr):
    """E4M3 of y, whose last axis shares ``scale``; OUT is an FP8 dtype, or uint8 for its bytes."""
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
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
    if RULE_BITS != 0x3FFFFF:  # rounded up, a scale never lets a value exceed 6
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
def _rows_of(
    x, x_stride, weight, rows, m, eps,
    N: tl.constexpr, CHUNK: tl.constexpr, EVICT: tl.constexpr, NORMALISE: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
):  # fmt: skip
    """The rows' chunks, each (R, CHUNK) float32, normalised or as they are; 0 where masked.

    WEIGHT_ROWS: with rows side by side in a program the weight is loaded once a row, laid out like
    the row: broadcasting it would move it through shared memory.
    """
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    cols = tl.arange(0, CHUNK)[None, :]
    # An int32 offset overflows at row 1,016,801 of a 2112-wide buffer.
    source = x + rows.to(tl.int64)[:, None] * x_stride
    here = (rows < m)[:, None]
    loaded = ()
    for c in tl.static_range(CHUNKS):
        at = cols + c * CHUNK
        loaded += (tl.load(source + at, mask=here & (at < N), other=0.0, eviction_policy=EVICT),)
    if NORMALISE:
        weight_at = cols + tl.zeros((WEIGHT_ROWS, 1), tl.int32)
        weights = ()
        for c in tl.static_range(CHUNKS):
            at = weight_at + c * CHUNK
            weights += (tl.load(weight + at, mask=at < N, other=0.0),)
        # float32 results must match a float64 statistic; for 16-bit ones a float32 sum is enough.
        WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float32 else tl.float32
        squares = tl.zeros((rows.shape[0], CHUNK), WIDE)
        for c in tl.static_range(CHUNKS):
            value = loaded[c].to(WIDE)
            squares += value * value
        mean = tl.sum(squares, 1) * (1.0 / N) + tl.cast(eps, WIDE)
        rstd = tl.rsqrt(mean).to(tl.float32)[:, None]
    chunks = ()
    for c in tl.static_range(CHUNKS):
        y = loaded[c].to(tl.float32)
        if NORMALISE:
            y = (y * rstd) * weights[c].to(tl.float32)
        chunks += (y,)
    return chunks


@triton.jit
def _store_rows(out, chunks, rows, m, N: tl.constexpr, CHUNK: tl.constexpr):
    """Store rows to contiguous ``out``, rounded to its dtype."""
    cols = tl.arange(0, CHUNK)[None, :]
    target = out + rows.to(tl.int64)[:, None] * N
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        at = cols + c * CHUNK
        tl.store(
            target + at, chunks[c].to(out.dtype.element_ty), mask=(rows < m)[:, None] & (at < N)
        )


@triton.jit
def _quantise(
    chunks, values, scales, scale_row_stride, scale_group_stride, rows, m, scale_rows,
    N: tl.constexpr, CHUNK: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, MAXIMUM: tl.constexpr, BIAS: tl.constexpr,
    RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """Quantise and store the rows' chunks. SHUFFLED: columns of the shuffled scales, or 0."""
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    ROWS: tl.constexpr = rows.shape[0]
    OUT: tl.constexpr = values.dtype.element_ty
    row = rows.to(tl.int64)[:, None]
    here = (rows < m)[:, None]
    cols = tl.arange(0, CHUNK)[None, :]
    if QUANT == "fp8_token":
        largest = tl.abs(chunks[0])
        for c in tl.static_range(1, CHUNKS):
            largest = _max(largest, tl.abs(chunks[c]))
        scale = _fp8_scale(tl.reduce(largest, 1, _max), MAXIMUM)
        tl.store(scales + rows.to(tl.int64) * scale_row_stride, scale, mask=rows < m)
        for c in tl.static_range(CHUNKS):
            at = cols + c * CHUNK
            coded = _fp8(chunks[c], scale, MAXIMUM, BIAS, OUT)
            tl.store(values + row * N + at, coded, mask=here & (at < N))
    else:
        GROUPS: tl.constexpr = CHUNK // GROUP
        for c in tl.static_range(CHUNKS):
            y = tl.reshape(chunks[c], (ROWS, GROUPS, GROUP))
            group = (c * GROUPS + tl.arange(0, GROUPS))[None, :]
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
                coded = tl.reshape(_fp8(y, scale, MAXIMUM, BIAS, OUT), (ROWS, CHUNK))
                at = cols + c * CHUNK
                tl.store(values + row * N + at, coded, mask=here & (at < N))
            tl.store(scales + scale_at, scale, mask=scale_here)


@triton.jit(do_not_specialize=["m", "scale_rows"])
def norm_and_quantise(
    q, q_weight, values, scales, unquantised, k, k_weight, k_out,
    q_stride, k_stride, scale_row_stride, scale_group_stride, m, scale_rows,
    q_eps: tl.float64, k_eps: tl.float64,
    Q_N: tl.constexpr, K_N: tl.constexpr, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr,
    Q_CHUNK: tl.constexpr, K_CHUNK: tl.constexpr, Q_SPREAD: tl.constexpr, K_SPREAD: tl.constexpr,
    SEPARATE: tl.constexpr, EVICT: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, NORMALISE: tl.constexpr, UNQUANTISED: tl.constexpr,
    MAXIMUM: tl.constexpr, BIAS: tl.constexpr, RULE_BITS: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """q: (m, Q_N), k: (m, K_N) of any row strides; ``values`` and ``k_out`` contiguous.

    ``scale_rows`` is m, or the shuffled layout's padded rows, whose padding is written as 0.
    """
    program = tl.program_id(0)
    q_programs = (scale_rows + Q_ROWS - 1) // Q_ROWS
    if program < q_programs:
        rows = program * Q_ROWS + tl.arange(0, Q_ROWS)
        chunks = _rows_of(
            q, q_stride, q_weight, rows, m, q_eps, Q_N, Q_CHUNK, EVICT, NORMALISE, Q_SPREAD
        )
        if UNQUANTISED:
            _store_rows(unquantised, chunks, rows, m, Q_N, Q_CHUNK)
        _quantise(
            chunks, values, scales, scale_row_stride, scale_group_stride, rows, m, scale_rows,
            Q_N, Q_CHUNK, QUANT, GROUP, MAXIMUM, BIAS, RULE_BITS, SHUFFLED,
        )  # fmt: skip
    if NORMALISE and (not SEPARATE or program >= q_programs):
        first = program * K_ROWS if not SEPARATE else (program - q_programs) * K_ROWS
        rows = first + tl.arange(0, K_ROWS)
        chunks = _rows_of(
            k, k_stride, k_weight, rows, m, k_eps, K_N, K_CHUNK, EVICT, True, K_SPREAD
        )
        _store_rows(k_out, chunks, rows, m, K_N, K_CHUNK)
