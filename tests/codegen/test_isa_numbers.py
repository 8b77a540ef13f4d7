"""Arithmetic and conversions between number formats against an independent truth."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from one_instruction import F32_EDGES, PAIRS, execute, f32, put, same, v, waves

from mlakit.codegen.isa import numbers


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def exact(x):
    return Fraction(float(x))


def rounded(x: Fraction) -> np.float32:
    """A fraction to float32, nearest even, in integer arithmetic."""
    if x == 0:
        return np.float32(0)
    sign, x = (-1 if x < 0 else 1), abs(x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent += 1 if x >= Fraction(2) ** (exponent + 1) else 0
    exponent -= 1 if x < Fraction(2) ** exponent else 0
    step = Fraction(2) ** (max(exponent, -126) - 23)
    value = round(x / step) * step  # Python rounds a fraction to even
    return np.float32(sign * (np.inf if value >= Fraction(2) ** 128 else float(value)))


def test_fma_rounds_once():
    bits = np.random.default_rng(0).integers(0, 2**32, (4000, 3), np.uint32)
    bits[:2000, 2] = (bits[:2000, 0] & 0x807FFFFF) | (bits[:2000, 1] & 0x7F800000)
    a, b, c = bits.view(np.float32).T
    for x, y, z, result in zip(a, b, c, numbers.fma(a, b, c), strict=True):
        if np.isfinite([x, y, z]).all():
            want = rounded(exact(x) * exact(y) + exact(z))
            assert result == want, (x, y, z, result, want)


def test_fma_special_values():
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    cases = [(inf, 0, 1, nan), (inf, 1, -inf, nan), (inf, 1, 1, inf), (1e38, 1e38, -inf, -inf)]
    for a, b, c, want in cases:
        assert same(numbers.fma(*np.float32([[a], [b], [c]])), np.float32([want]))


def test_fma64_rounds_once():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 500))
    c = -a * b * (1 + rng.integers(-4, 5, 500) * 2.0**-52)
    for x, y, z, r in zip(a, b, c, numbers.fma64(a, b, c), strict=True):
        # int / int is rounded correctly by Python, for whatever size.
        whole = exact(x) * exact(y) + exact(z)
        assert r == whole.numerator / whole.denominator


@pytest.mark.parametrize(
    ("name", "f"), [("add", np.add), ("sub", np.subtract), ("mul", np.multiply)]
)
def test_float_arithmetic_over_edge_pairs(name, f):
    for a, b in (block.T.copy() for block in np.array_split(PAIRS, 16)):
        w = execute(waves(v1=a, v2=b), f"v_{name}_f32_e32 v0, v1, v2")
        assert same(f32(w, 0, len(a)), f(a, b))


def test_max_min_lose_nan_and_order_zeros():
    w = waves(
        v1=np.float32([np.nan, 1, np.nan, -0.0, 0.0, -1]),
        v2=np.float32([2, np.nan, np.nan, 0.0, -0.0, 1]),
    )
    for text, want in (
        ("v_max_f32_e32 v0, v1, v2", [2, 1, np.nan, 0.0, 0.0, 1]),
        ("v_min_f32_e32 v0, v1, v2", [2, 1, np.nan, -0.0, -0.0, -1]),
        ("v_max_f32_e64 v0, |v1|, -v2", [-2, 1, np.nan, 0.0, 0.0, 1]),
        ("v_maximum_f32 v0, v1, v2", [np.nan, np.nan, np.nan, 0.0, 0.0, 1]),
    ):
        assert same(f32(execute(w, text), 0, 6), np.float32(want)), text


def test_med3_is_the_middle():
    rows = np.float32([[1, 1, 2, 2, 3, 3], [2, 3, 1, 3, 1, 2], [3, 2, 3, 1, 2, 1]])
    w = execute(waves(v1=rows[0], v2=rows[1], v3=rows[2]), "v_med3_f32 v0, v1, v2, v3")
    assert (f32(w, 0, 6) == 2).all()


def test_division_chain_is_ieee_division():
    """scale, rcp, fma steps, fmas, fixup: the chain that compilers emit for a / b."""
    for block in np.array_split(PAIRS[np.abs(PAIRS[:, 1]) > 0], 16):
        a, b = block.T.copy()
        w = execute(
            waves(v0=a, v1=b),
            "v_div_scale_f32 v2, s[4:5], v1, v1, v0", "v_rcp_f32_e32 v3, v2",
            "v_div_scale_f32 v4, vcc, v0, v1, v0", "v_fma_f32 v5, -v2, v3, 1.0",
            "v_fmac_f32_e32 v3, v5, v3", "v_mul_f32_e32 v5, v4, v3",
            "v_fma_f32 v6, -v2, v5, v4", "v_fmac_f32_e32 v5, v6, v3", "v_fma_f32 v2, -v2, v5, v4",
            "v_div_fmas_f32 v2, v2, v3, v5", "v_div_fixup_f32 v0, v2, v1, v0",
        )  # fmt: skip
        assert same(f32(w, 0, len(a)), a / b)


def test_reciprocals_are_rounded_correctly():
    values = np.float32([0.3, 2, 1e-30, 0, -0.0, np.inf, np.nan, -1])
    w = execute(waves(v1=values), "v_rsq_f32_e32 v0, v1")
    assert same(f32(w, 0, 8), (1 / np.sqrt(values.astype(np.longdouble))).astype(np.float32))


def test_a_float64_literal_is_the_high_half():
    low, high = np.float64([3.0]).view(np.uint32)
    w = execute(waves(v2=low, v3=high), "v_mul_f64 v[0:1], v[2:3], 0x40080000")
    assert w.v[:2, 0, 0].copy().view(np.float64)[0] == 9.0


# ---- conversions


def test_bf16_conversion_in_hardware_and_in_software_agree():
    bits = np.r_[np.random.default_rng(2).integers(0, 2**32, 2000), 0x3F808000, 0x3F818000]
    values = np.r_[bits.astype(np.uint32).view(np.float32), F32_EDGES]
    want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    finite = ~np.isnan(values)
    assert np.array_equal(numbers.to_bf16(values)[finite], want[finite])
    assert ((numbers.to_bf16(values)[~finite] & 0x7FFF) > 0x7F80).all()
    for block in np.array_split(values, 32):
        w = execute(
            waves(v1=block), "v_bfe_u32 v2, v1, 16, 1", "v_add3_u32 v2, v1, v2, 0x7fff",
            "v_cmp_o_f32_e32 vcc, v1, v1", "v_mov_b32_e32 v3, 0x7fff",
            "v_cndmask_b32_sdwa v2, v3, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD "
            "src0_sel:DWORD src1_sel:WORD_1", "v_cvt_pk_bf16_f32 v4, v1, v1",
        )  # fmt: skip
        ok = ~np.isnan(block)
        assert np.array_equal(v(w, 2, len(block))[ok], v(w, 4, len(block))[ok] & 0xFFFF)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (numbers.E4M3, ml_dtypes.float8_e4m3fn),
        (numbers.E5M2, ml_dtypes.float8_e5m2),
        (numbers.E4M3_FNUZ, ml_dtypes.float8_e4m3fnuz),
        (numbers.E5M2_FNUZ, ml_dtypes.float8_e5m2fnuz),
        (numbers.E2M1, ml_dtypes.float4_e2m1fn),
    ],
)
def test_small_floats_match_another_implementation(form, dtype):
    values = np.arange(1 << form.bits, dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.sort(values[np.isfinite(values)])
    ties = (finite[1:] + finite[:-1]) / 2
    near = np.nextafter(ties, np.float32(9e9)), np.nextafter(ties, 0)
    probes = np.r_[finite, ties, *near, F32_EDGES].astype(np.float32)
    if form.nan is None:
        probes = probes[~np.isnan(probes)]
    want, got = probes.astype(dtype), numbers.to_minifloat(probes, form).astype(np.uint8)
    nan = np.isnan(want.astype(np.float32))
    assert np.array_equal(got[~nan], want.view(np.uint8)[~nan])
    assert np.isnan(got[nan].view(dtype).astype(np.float32)).all()


def test_saturation_keeps_true_infinity_apart():
    got = numbers.to_minifloat(np.float32([1e9, -1e9, np.inf]), numbers.E5M2, saturate=True)
    assert got.tolist() == [0x7B, 0xFB, 0x7C]


def test_fp8_pair_uses_the_encoding_of_the_arch_and_keeps_the_other_half():
    given = np.float32([1.0625, -0.0, 100.0])
    for gfx, dtype in ((942, ml_dtypes.float8_e4m3fnuz), (950, ml_dtypes.float8_e4m3fn)):
        w = waves(gfx, v0=np.uint32(0x11112222), v1=given, v2=np.float32([-3.3, 0.007, 1e-4]))
        execute(w, "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]")
        low, high = v(w, 0, 3) & 0xFFFF, v(w, 0, 3) >> 16
        assert (low == 0x2222).all()
        assert np.array_equal(high & 0xFF, given.astype(dtype).view(np.uint8))
        put(w, v3=np.float32(1.0), s1=np.float32(1.0).view(np.uint32))
        (want,) = set(v(execute(w, "v_cvt_pk_fp8_f32 v4, v3, v3"), 4) & 0xFFFF)
        for one in ("1.0", "s1", "v3"):
            for pair in (f"{one}, v3", f"v3, {one}", f"{one}, {one}"):
                execute(w, f"v_cvt_pk_fp8_f32 v4, {pair}")
                assert set(v(w, 4) & 0xFFFF) == {want}, pair


def test_scaled_fp4_and_fp8_conversions_of_gfx950():
    values = np.float32([0.25, 0.75, 2.5, 5.0, 6.9, -1.25, np.inf, -0.1])
    w = waves(950, v1=values, v2=-values, v3=np.float32(2.0))
    fours = [(x / 2).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn) for x in (values, -values)]
    low, high = (x.view(np.uint8) & 15 for x in fours)
    for byte in range(4):
        execute(w, f"v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3 op_sel:[0,0,{byte & 1},{byte >> 1}]")
    for byte in range(4):
        assert np.array_equal((v(w, 0, 8) >> (8 * byte)) & 0xFF, low | high << 4)
    execute(w, "v_cvt_scalef32_pk_fp8_f32 v4, v1, v2, v3")
    eights = (values[:6] / 2).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(v(w, 4, 6) & 0xFF, eights)


def test_f16_conversions_round_and_zero_or_keep_the_high_half():
    for gfx, high in ((942, 0), (1100, 0xABCD)):
        w = waves(gfx, v0=np.uint32(0xABCD0000), v1=F32_EDGES)
        got = v(execute(w, "v_cvt_f16_f32_e32 v0, v1"), 0, len(F32_EDGES))
        assert (got >> 16 == high).all()
        assert same(got.astype(np.uint16).view(np.float16), F32_EDGES.astype(np.float16))


def test_fma_mix_reads_halves_and_writes_one():
    w = waves(v1=np.uint32(0x3C004000), v2=np.float32(3.0), v3=np.uint32(0xFFFF1234))
    execute(w, "v_fma_mix_f32 v0, v1, v1, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]")
    assert f32(w, 0)[0] == 1.0 * 2.0 + 3.0
    execute(w, "v_fma_mixhi_f16 v3, v2, v1, 0 op_sel:[0,1,0] op_sel_hi:[0,1,0]")
    assert v(w, 3)[0] == 0x42001234


def test_packed_float_selects_halves():
    one, two, three, five = np.float32([1, 2, 3, 5])
    w = waves(v2=one, v3=two, v4=three, v5=five)
    execute(w, "v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel_hi:[0,1]")
    assert (f32(w, 0)[0], f32(w, 1)[0]) == (3.0, 5.0)
    execute(w, "v_pk_add_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] neg_lo:[0,1]")
    assert (f32(w, 0)[0], f32(w, 1)[0]) == (2.0 - 3.0, 2.0 + 5.0)


def test_a_pair_may_be_moved_into_its_own_registers():
    w = waves(v0=np.float32(1), v1=np.float32(2), v2=np.float32(3), v3=np.float32(4))
    execute(w, "v_pk_mov_b32 v[0:1], v[2:3], v[0:1] op_sel:[1,0]")
    assert (f32(w, 0)[0], f32(w, 1)[0]) == (4.0, 1.0)
