"""FP8 and MXFP4 as Triton functions: scales, codes, and where a shuffled scale lies.

Import this only where triton is.
"""

# Triton compiles these functions: it knows no tuple unpacking.
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def largest_of(a, b):
    """The larger of two, NaN where either is."""
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
def inverse_of(peak, MAXIMUM: tl.constexpr, NVIDIA: tl.constexpr):
    """What scales ``peak``, a largest magnitude, to MAXIMUM; finite, of NaN too.

    On NVIDIA a quotient is a product with the reciprocal, and six instructions more for what is
    out of its range, which a quarter of ``peak`` never is: the same bits without them.
    """
    peak = tl.maximum(peak, 1e-35)
    if NVIDIA:
        reciprocal = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [peak * 0.25],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        return reciprocal * (MAXIMUM * 0.25)
    else:
        return MAXIMUM / peak


@triton.jit
def fp8_scale(peak, inverse, rstd, MAXIMUM: tl.constexpr):
    """(max(peak * rstd, 1e-10) / MAXIMUM, what p is multiplied by).

    That factor, rstd over the scale, is ``inverse`` but where 1e-10 is the larger: so all but its
    last steps needs no sum of the row.
    """
    amax = tl.maximum(peak * rstd, 1e-10, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.minimum(inverse, rstd * (MAXIMUM * 1e10))
    # Where amax is NaN, as of a group with an infinity in it, all of the group is. (Triton takes
    # -amax as 0 - amax, an instruction more.)
    return amax / MAXIMUM, largest_of(factor, amax * -1.0)


@triton.jit
def fp8(scaled, BIAS: tl.constexpr, OUT: tl.constexpr):
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
def peaks_of(p, GROUP: tl.constexpr, VEC: tl.constexpr):
    """Largest magnitudes of VEC neighbours: (R, C) -> (R, C / GROUP, GROUP / VEC)."""
    p = tl.reshape(tl.abs(p), (p.shape[0], p.shape[1] // GROUP, GROUP // VEC, VEC))
    return tl.reduce(p, 3, largest_of)


@triton.jit
def shared_peaks(parts):
    """Largest of the last axis, the T lanes of a group, of each of n parts, (R, G, T).

    Returns tensors of that shape: of part i it is in tensor i // T at lane i % T. A butterfly at
    whose steps a lane gives half of its parts away: fewer exchanges, and what follows is done for
    one part a lane.
    """
    lane = tl.arange(0, parts[0].shape[2])[None, None, :] + tl.zeros(parts[0].shape, tl.int32)
    for step in tl.static_range(5):
        if (1 << step) < parts[0].shape[2]:
            halved = ()
            for i in tl.static_range(0, len(parts), 2):
                kept = parts[i]
                given = kept
                if i + 1 < len(parts):
                    first = (lane & (1 << step)) == 0
                    given = tl.where(first, parts[i + 1], kept)
                    kept = tl.where(first, kept, parts[i + 1])
                halved = halved + (largest_of(kept, tl.gather(given, lane ^ (1 << step), 2)),)
            parts = halved
    return parts


@triton.jit
def mxfp4_scale(peak, rstd, RULE_BITS: tl.constexpr):
    """(E8M0 of groups whose largest magnitude is peak * rstd, what p is multiplied by).

    Where a whole group is under 1e-34 the factor is capped, for float32's range.
    """
    # The absolute value again: on some targets 0 * inf is a negative NaN.
    amax = tl.abs(peak * rstd).to(tl.int32, bitcast=True)
    scale = tl.maximum(((amax + RULE_BITS) >> 23) - 2, 0)
    scale = tl.where(amax >= 0x7F800000, 255, scale)
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.uint8), tl.minimum(factor * rstd, 1.7014118e38)


@triton.jit
def mxfp4(p, factor, RULE_BITS: tl.constexpr):
    """Codes of p * factor, 8 neighbours a word: (R, C), (R, C / 32, 4) -> (R, C / 8) int32.

    A code is min(2v, v + 2, v/2 + 4) of its scaled magnitude v, whose pieces meet at representable
    values. Beside 2^22 a float32's last bit is worth a half, so a fused multiply-add rounds half
    of a piece to a whole code, ties to even, and the least of the rounded pieces is the rounded
    least.
    """
    p = _eight(p)
    word = tl.zeros(p[0].shape, tl.int32)
    signs = tl.zeros(p[0].shape, tl.uint32)
    for i in tl.static_range(8):
        v = tl.abs(p[7 - i])
        fine = tl.fma(v, factor, 4194304.0).to(tl.int32, bitcast=True)
        middle = tl.fma(v, factor * 0.5, 4194305.0).to(tl.int32, bitcast=True)
        coarse = tl.fma(v, factor * 0.25, 4194306.0).to(tl.int32, bitcast=True)
        # As integers, in the same order: the least of three is one instruction on sm_90.
        code = tl.minimum(tl.minimum(fine, middle), coarse)
        if RULE_BITS == 0:
            # The other rules leave every magnitude below 7, which rounds to 6 without a clamp.
            code = tl.minimum(code, 0x4A800007)
        word = (word << 4) + code
        signs = (signs << 4) | (p[7 - i].to(tl.uint32, bitcast=True) >> 28)
    # What is left of eight times the bits of 2^22; then the sign bit of each nibble.
    word = (word - 0x72800000) | (signs & 0x88888888).to(tl.int32, bitcast=True)
    return tl.reshape(word, (word.shape[0], word.shape[1] * 4))


@triton.jit
def shuffled_at(row, column, COLUMNS: tl.constexpr):
    """Where ``formats.mxfp4.shuffle_scale`` puts byte [row, column] of ``COLUMNS`` padded ones."""
    tile = (row // 32) * (COLUMNS // 8) + column // 8
    r, c = row % 32, column % 8
    return tile * 256 + (c % 4) * 64 + (r % 16) * 4 + (c // 4) * 2 + r // 16
