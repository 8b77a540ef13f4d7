"""Each instruction alone, on edge values, against an independent truth."""

import itertools
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mlakit.codegen.execute import find_handler
from mlakit.codegen.isa import numbers
from mlakit.codegen.isa.lanes import dpp_sources
from mlakit.codegen.isa.memory import Lds, Memory
from mlakit.codegen.isa.parse import EmulationError, parse_instruction
from mlakit.codegen.isa.state import Waves

F32_EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, 3.4028235e38, -3.4028235e38, 1.1754944e-38, 1e-45, -1e-40,
     np.inf, -np.inf, np.nan, 65504.0, 65520.0, 5.96e-8, 2.98e-8, 1.00390625, 1.01171875, 448.0,
     464.0, 465.0, 240.0, 248.0, 249.0, 0.0009765625, 0.25, 0.75, 5.0, 7.0, 1e30, 3.0],
    np.float32,
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def waves(lanes=64, gfx=942, count=1, sgprs=128):
    w = Waves(np.arange(count), np.zeros(count, int), lanes, 64, gfx)
    w.s_set[:sgprs] = True
    w.v_set[:] = True
    return w


def execute(w, text, memory=None, lds=None):
    i = parse_instruction(text)
    handler = find_handler(i, memory or Memory(), lds or Lds(len(w.group), 256))
    assert handler is not None, f"unknown: {text}"
    handler(w, i)
    return w


def put(w, register, values):
    values = np.asarray(values)
    bits = np.resize(values, w.lanes).view(f"u{values.dtype.itemsize}").astype(np.uint32)
    w.v[register] = bits


def f32(w, register):
    return w.v[register, 0].view(np.float32)


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(
        np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)])
    )


PAIRS = np.array(list(itertools.product(F32_EDGES, F32_EDGES)), np.float32)


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
    units = x / step
    whole = units.numerator // units.denominator
    rest = units - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    value = whole * step
    return np.float32(sign * (np.inf if value >= Fraction(2) ** 128 else float(value)))


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (4000, 3), np.uint32)
    bits[:2000, 2] = (bits[:2000, 0] & 0x807FFFFF) | (bits[:2000, 1] & 0x7F800000)
    a, b, c = bits.view(np.float32).T
    got = numbers.fma(a, b, c)
    with np.errstate(all="ignore"):
        for x, y, z, result in zip(a, b, c, got, strict=True):
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


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_float_arithmetic_over_edge_pairs(name):
    f = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    for block in np.array_split(PAIRS, 16):
        w = waves()
        put(w, 1, block[:, 0].copy())
        put(w, 2, block[:, 1].copy())
        execute(w, f"v_{name}_f32_e32 v0, v1, v2")
        assert same(f32(w, 0)[: len(block)], f(block[:, 0], block[:, 1]))


def test_max_min_lose_nan_and_order_zeros():
    w = waves()
    put(w, 1, np.float32([np.nan, 1, np.nan, -0.0, 0.0, -1]))
    put(w, 2, np.float32([2, np.nan, np.nan, 0.0, -0.0, 1]))
    execute(w, "v_max_f32_e32 v0, v1, v2")
    assert same(f32(w, 0)[:6], np.float32([2, 1, np.nan, 0.0, 0.0, 1]))
    execute(w, "v_min_f32_e32 v0, v1, v2")
    assert same(f32(w, 0)[:6], np.float32([2, 1, np.nan, -0.0, -0.0, -1]))
    execute(w, "v_max_f32_e64 v0, |v1|, -v2")
    assert same(f32(w, 0)[:6], np.float32([-2, 1, np.nan, 0.0, 0.0, 1]))


def test_med3_is_the_middle():
    for a, b, c in itertools.permutations(np.float32([1, 2, 3])):
        w = waves()
        for k, x in enumerate((a, b, c)):
            put(w, 1 + k, np.float32([x]))
        assert f32(execute(w, "v_med3_f32 v0, v1, v2, v3"), 0)[0] == 2


def test_division_chain_is_ieee_division():
    """scale, rcp, fma steps, fmas, fixup: the chain that compilers emit for a / b."""
    pairs = PAIRS[np.abs(PAIRS[:, 1]) > 0]
    for block in np.array_split(pairs, 16):
        w = waves()
        put(w, 0, block[:, 0].copy())
        put(w, 1, block[:, 1].copy())
        for text in (
            "v_div_scale_f32 v2, s[4:5], v1, v1, v0", "v_rcp_f32_e32 v3, v2",
            "v_div_scale_f32 v4, vcc, v0, v1, v0", "v_fma_f32 v5, -v2, v3, 1.0",
            "v_fmac_f32_e32 v3, v5, v3", "v_mul_f32_e32 v5, v4, v3",
            "v_fma_f32 v6, -v2, v5, v4", "v_fmac_f32_e32 v5, v6, v3", "v_fma_f32 v2, -v2, v5, v4",
            "v_div_fmas_f32 v2, v2, v3, v5", "v_div_fixup_f32 v0, v2, v1, v0",
        ):  # fmt: skip
            execute(w, text)
        assert same(f32(w, 0)[: len(block)], block[:, 0] / block[:, 1])


def test_bf16_conversion_in_hardware_and_in_software_agree():
    bits = np.r_[np.random.default_rng(2).integers(0, 2**32, 2000), 0x3F808000, 0x3F818000]
    values = np.r_[bits.astype(np.uint32).view(np.float32), F32_EDGES]
    want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    finite = ~np.isnan(values)
    assert np.array_equal(numbers.to_bf16(values)[finite], want[finite])
    assert ((numbers.to_bf16(values)[~finite] & 0x7FFF) > 0x7F80).all()
    for k in range(0, len(values), 64):
        w, block = waves(), values[k : k + 64]
        put(w, 1, block)
        for text in ("v_bfe_u32 v2, v1, 16, 1", "v_add3_u32 v2, v1, v2, 0x7fff",
                     "v_cmp_o_f32_e32 vcc, v1, v1", "v_mov_b32_e32 v3, 0x7fff",
                     "v_cndmask_b32_sdwa v2, v3, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD "
                     "src0_sel:DWORD src1_sel:WORD_1",
                     "v_cvt_pk_bf16_f32 v4, v1, v1"):  # fmt: skip
            execute(w, text)
        ok = ~np.isnan(block)
        assert np.array_equal(w.v[2, 0, : len(block)][ok], w.v[4, 0, : len(block)][ok] & 0xFFFF)


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
    codes = np.arange(1 << form.bits, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float32)
    finite = np.sort(values[np.isfinite(values)])
    ties = (finite[1:] + finite[:-1]) / 2
    probes = np.r_[
        finite, ties, np.nextafter(ties, np.float32(9e9)), np.nextafter(ties, 0), F32_EDGES
    ]
    probes = probes.astype(np.float32)
    if form.nan is None:
        probes = probes[~np.isnan(probes)]
    want = probes.astype(dtype).view(np.uint8)
    got = numbers.to_minifloat(probes, form)
    nan = np.isnan(probes.astype(dtype).astype(np.float32))
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan(got[nan].astype(np.uint8).view(dtype).astype(np.float32)).all()


def test_saturation_keeps_true_infinity_apart():
    got = numbers.to_minifloat(np.float32([1e9, -1e9, np.inf]), numbers.E5M2, saturate=True)
    assert got.tolist() == [0x7B, 0xFB, 0x7C]


def test_fp8_pair_uses_the_encoding_of_the_arch_and_keeps_the_other_half():
    for gfx, dtype in ((942, ml_dtypes.float8_e4m3fnuz), (950, ml_dtypes.float8_e4m3fn)):
        w = waves(gfx=gfx)
        put(w, 0, np.uint32([0x11112222]))
        put(w, 1, np.float32([1.0625, -0.0, 100.0]))
        put(w, 2, np.float32([-3.3, 0.007, 1e-4]))
        execute(w, "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]")
        low, high = w.v[0, 0, :3] & 0xFFFF, w.v[0, 0, :3] >> 16
        assert (low == 0x2222).all()
        want = [np.float32(x).astype(dtype).view(np.uint8) for x in (1.0625, -0.0, 100.0)]
        assert (high & 0xFF).tolist() == [int(x) for x in want]


def test_scaled_fp4_and_fp8_conversions_of_gfx950():
    w = waves(gfx=950)
    values = np.float32([0.25, 0.75, 2.5, 5.0, 6.9, -1.25, np.inf, -0.1])
    put(w, 1, values)
    put(w, 2, -values)
    put(w, 3, np.float32([2.0]))
    for byte in range(4):
        execute(w, f"v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3 op_sel:[0,0,{byte & 1},{byte >> 1}]")
    low = (values / 2).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    high = (-values / 2).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    want = (low & 15) | (high & 15) << 4
    for byte in range(4):
        assert np.array_equal((w.v[0, 0, :8] >> (8 * byte)) & 0xFF, want)
    execute(w, "v_cvt_scalef32_pk_fp8_f32 v4, v1, v2, v3")
    got = (w.v[4, 0, :6] & 0xFF).astype(np.uint8)
    assert np.array_equal(got, (values[:6] / 2).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_f16_conversions_round_and_zero_or_keep_the_high_half():
    for gfx, high in ((942, 0), (1100, 0xABCD)):
        w = waves(gfx=gfx)
        put(w, 0, np.uint32([0xABCD0000]))
        put(w, 1, F32_EDGES)
        execute(w, "v_cvt_f16_f32_e32 v0, v1")
        got = w.v[0, 0, : len(F32_EDGES)]
        assert (got >> 16 == high).all()
        half = (got & 0xFFFF).astype(np.uint16).view(np.float16)
        assert same(half, F32_EDGES.astype(np.float16))


def test_fma_mix_reads_halves_and_writes_one():
    w = waves()
    put(w, 1, np.uint32([0x3C004000]))  # high 1.0, low 2.0
    put(w, 2, np.float32([3.0]))
    execute(w, "v_fma_mix_f32 v0, v1, v1, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]")
    assert f32(w, 0)[0] == 1.0 * 2.0 + 3.0
    put(w, 3, np.uint32([0xFFFF1234]))
    execute(w, "v_fma_mixhi_f16 v3, v2, v1, 0 op_sel:[0,1,0] op_sel_hi:[0,1,0]")
    assert w.v[3, 0, 0] == 0x42001234


def test_packed_float_selects_halves():
    w = waves()
    for k, x in enumerate((1.0, 2.0, 3.0, 5.0)):
        put(w, 2 + k, np.float32([x]))
    execute(w, "v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel_hi:[0,1]")
    assert (f32(w, 0)[0], f32(w, 1)[0]) == (3.0, 5.0)
    execute(w, "v_pk_add_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] neg_lo:[0,1]")
    assert (f32(w, 0)[0], f32(w, 1)[0]) == (2.0 - 3.0, 2.0 + 5.0)


def slow_dpp(pattern, n, lane, lanes):
    row, at = lane // 16 * 16, lane % 16
    return {
        "row_shl": row + at + n if at + n < 16 else -1,
        "row_shr": row + at - n if at >= n else -1,
        "row_ror": row + (at - n) % 16,
        "row_mirror": row + 15 - at,
        "row_half_mirror": lane // 8 * 8 + 7 - lane % 8,
        "row_bcast": (row - 1 if lane >= 16 else -1) if n == 15 else (31 if lane >= 32 else -1),
        "row_newbcast": row + n,
        "row_share": row + n,
        "row_xmask": row + (at ^ n),
        "wave_shl": lane + 1 if lane + 1 < lanes else -1,
        "wave_shr": lane - 1,
        "wave_rol": (lane + 1) % lanes,
        "wave_ror": (lane - 1) % lanes,
    }[pattern]


@pytest.mark.parametrize("lanes", [32, 64])
def test_every_dpp_pattern(lanes):
    patterns = [(p, n) for p in ("row_shl", "row_shr", "row_ror") for n in range(1, 16)]
    patterns += [("row_mirror", 1), ("row_half_mirror", 1), ("row_bcast", 15), ("row_bcast", 31)]
    patterns += [(p, n) for p in ("row_newbcast", "row_share", "row_xmask") for n in range(16)]
    patterns += [(p, 1) for p in ("wave_shl", "wave_shr", "wave_rol", "wave_ror")]
    for pattern, n in patterns:
        got = dpp_sources(pattern, str(n), lanes)
        assert got.tolist() == [slow_dpp(pattern, n, k, lanes) for k in range(lanes)], (pattern, n)
    for quad in itertools.product(range(4), repeat=4):
        got = dpp_sources("quad_perm", str(list(quad)), lanes)
        assert got.tolist() == [k // 4 * 4 + quad[k % 4] for k in range(lanes)]


def test_dpp_write_rules():
    lane = np.arange(64, dtype=np.uint32)
    w = waves()
    put(w, 1, lane + 100)
    put(w, 0, np.uint32([7]))
    execute(w, "v_mov_b32_dpp v0, v1 row_shr:1 row_mask:0xa bank_mask:0x3")
    written = np.isin(lane // 16, [1, 3]) & np.isin(lane % 16 // 4, [0, 1]) & (lane % 16 > 0)
    assert np.array_equal(w.v[0, 0], np.where(written, lane + 99, 7))
    put(w, 0, np.uint32([7]))
    execute(w, "v_mov_b32_dpp v0, v1 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1")
    assert np.array_equal(w.v[0, 0], np.where(lane % 16 == 0, 0, lane + 99))
    w.set_exec((lane % 2 == 1)[None])
    put(w, 0, np.uint32([7]))
    execute(w, "v_mov_b32_dpp v0, v1 quad_perm:[0,0,2,2] row_mask:0xf bank_mask:0xf")
    assert (w.v[0, 0] == 7).all()
    execute(w, "v_mov_b32_dpp v0, v1 quad_perm:[0,0,2,2] row_mask:0xf bank_mask:0xf fi:1")
    assert np.array_equal(w.v[0, 0], np.where(lane % 2 == 1, lane + 99, 7))


def test_exec_masks_writes_and_comparisons():
    lane = np.arange(64, dtype=np.uint32)
    w = waves()
    put(w, 1, lane)
    w.set_exec((lane < 40)[None])
    execute(w, "v_mov_b32_e32 v0, 5")
    assert np.array_equal(w.v[0, 0], np.where(lane < 40, 5, 0))
    execute(w, "v_cmp_gt_u32_e32 vcc, 50, v1")
    assert w.s[106, 0] == 0xFFFFFFFF
    assert w.s[107, 0] == 0xFF
    execute(w, "s_and_saveexec_b64 s[2:3], vcc")
    assert w.scc.all()
    execute(w, "s_mov_b64 exec, s[2:3]")
    assert w.exec.sum() == 40


def test_compares_with_nan():
    w = waves()
    put(w, 1, np.float32([1, np.nan, 2, np.inf]))
    put(w, 2, np.float32([1, 1, np.nan, -np.inf]))
    expected = {"eq": 0b0001, "lt": 0, "gt": 0b1000, "lg": 0b1000, "o": 0b1001, "u": 0b0110}
    expected |= {"neq": 0b1110, "nlt": 0b1111, "nge": 0b0110, "ngt": 0b0111, "nle": 0b1110}
    for name, bits in expected.items():
        execute(w, f"v_cmp_{name}_f32_e64 s[8:9], v1, v2")
        assert w.s[8, 0] & 15 == bits, name


def test_class_compare():
    values = np.float32([np.nan, -np.inf, -1, -1e-40, -0.0, 0.0, 1e-40, 1, np.inf])
    w = waves()
    put(w, 1, values)
    for bit, at in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6), (8, 7), (9, 8)):
        execute(w, f"v_cmp_class_f32_e64 s[8:9], v1, {hex(1 << bit)}")
        assert w.s[8, 0] & 0x1FF == 1 << at


def test_integer_and_bit_instructions():
    rng = np.random.default_rng(3)
    a, b, c = rng.integers(0, 2**32, (3, 64), np.uint32)
    cases = {
        "v_add3_u32": lambda x, y, z: x + y + z,
        "v_bfi_b32": lambda x, y, z: (x & y) | (~x & z),
        "v_lshl_add_u32": lambda x, y, z: (x << (y % 32)) + z,
        "v_lshl_or_b32": lambda x, y, z: (x << (y % 32)) | z,
        "v_and_or_b32": lambda x, y, z: (x & y) | z,
        "v_bfe_u32": lambda x, y, z: (x >> (y % 32)) & ((1 << (z % 32)) - 1),
        "v_alignbit_b32": lambda x, y, z: (x << 32 | y) >> (z % 32),
        "v_mad_u32_u24": lambda x, y, z: (x % 2**24) * (y % 2**24) + z,
        "v_perm_b32": slow_perm,
    }
    for name, f in cases.items():
        w = waves()
        for k, x in enumerate((a, b, c % 14 if name == "v_perm_b32" else c)):
            put(w, 1 + k, x)
        execute(w, f"{name} v0, v1, v2, v3")
        for k in range(64):
            want = f(*(int(w.v[r, 0, k]) for r in (1, 2, 3))) % 2**32
            assert int(w.v[0, 0, k]) == want, name


def slow_perm(x, y, select):
    both = struct.pack("<II", y, x)
    out = 0
    for k in range(4):
        pick = select >> (8 * k) & 0xFF
        if pick < 8:
            byte = both[pick]
        elif pick < 12:
            byte = 0xFF if both[(pick - 8) * 2 + 1] & 0x80 else 0
        else:
            byte = 0 if pick == 12 else 0xFF
        out |= byte << (8 * k)
    return out


def test_perm_selects_signs_and_constants():
    w = waves()
    put(w, 1, np.uint32([0x80FF7F01]))
    put(w, 2, np.uint32([0x7F8000FF]))
    for select in (0x0D0C0B0A, 0x09080706, 0x05040302, 0x0FFF0C00):
        put(w, 3, np.uint32([select]))
        execute(w, "v_perm_b32 v0, v1, v2, v3")
        assert int(w.v[0, 0, 0]) == slow_perm(0x80FF7F01, 0x7F8000FF, select)


def test_bitop3_is_its_truth_table():
    w = waves(gfx=950)
    for k in range(3):
        put(w, 1 + k, np.uint32([0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA])[k : k + 1])
    for table in (0x00, 0x40, 0x96, 0xE8, 0xCA, 0xFF):
        execute(w, f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{hex(table)}")
        assert int(w.v[0, 0, 0]) & 0xFF == table


def test_dual_issue_reads_before_it_writes():
    w = waves(lanes=32, gfx=1100)
    put(w, 1, np.uint32([11]))
    put(w, 2, np.uint32([22]))
    execute(w, "v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1")
    assert (w.v[1, 0, 0], w.v[2, 0, 0]) == (22, 11)


def test_carries():
    w = waves()
    put(w, 1, np.uint32([0xFFFFFFFF, 1]))
    execute(w, "v_add_co_u32_e32 v0, vcc, 1, v1")
    assert (w.v[0, 0, 0], w.v[0, 0, 1], w.s[106, 0] & 3) == (0, 2, 1)
    execute(w, "v_addc_co_u32_e32 v0, vcc, 0, v1, vcc")
    assert (w.v[0, 0, 0], w.s[106, 0] & 3) == (0, 1)
    w.s[1], w.s[2] = 0x7FFFFFFF, 1
    execute(w, "s_add_i32 s0, s1, s2")
    assert w.scc.all()
    execute(w, "s_add_u32 s0, s1, s2")
    assert not w.scc.any()
    w.s[1] = 0xFFFFFFFF
    execute(w, "s_add_u32 s0, s1, s2")
    execute(w, "s_addc_u32 s0, 0, 0")
    assert w.s[0, 0] == 1


def test_scalar_instructions():
    w = waves()
    w.s[2], w.s[3] = 0xFFFFFFFE, 0x00000003
    for text, want in (
        ("s_mul_hi_i32 s0, s2, s3", 0xFFFFFFFF), ("s_mul_hi_u32 s0, s2, s3", 2),
        ("s_ashr_i32 s0, s2, 1", 0xFFFFFFFF), ("s_lshr_b32 s0, s2, 31", 1),
        ("s_bfe_u32 s0, s2, 0x40004", 0xF), ("s_bfe_i32 s0, s2, 0x40001", 0xFFFFFFFF),
        ("s_min_i32 s0, s2, s3", 0xFFFFFFFE), ("s_max_u32 s0, s2, s3", 0xFFFFFFFE),
        ("s_pack_ll_b32_b16 s0, s2, s3", 0x0003FFFE), ("s_xor_b32 s0, s2, s3", 0xFFFFFFFD),
        ("s_lshl2_add_u32 s0, s3, 5", 17), ("s_brev_b32 s0, 1", 0x80000000),
        ("s_movk_i32 s0, 0x7fff", 0x7FFF), ("s_sext_i32_i16 s0, s2", 0xFFFFFFFE),
        ("s_sext_i32_i8 s0, s2", 0xFFFFFFFE),
    ):  # fmt: skip
        execute(w, text)
        assert w.s[0, 0] == want, text
    w.s[4], w.s[5] = 0x000F0000, 0xFFFFFFFF
    execute(w, "s_bfe_i64 s[0:1], s[4:5], 0x40010")
    assert (w.s[0, 0], w.s[1, 0]) == (0xFFFFFFFF, 0xFFFFFFFF)
    execute(w, "s_bfe_i64 s[0:1], s[4:5], 0x50010")
    assert (w.s[0, 0], w.s[1, 0]) == (15, 0)
    execute(w, "s_cmp_lt_i32 s2, s3")
    assert w.scc.all()
    execute(w, "s_cmp_lt_u32 s2, s3")
    assert not w.scc.any()
    execute(w, "s_cselect_b64 vcc, -1, 0")
    assert w.s[106, 0] == w.s[107, 0] == 0


def test_lane_instructions():
    lane = np.arange(64, dtype=np.uint32)
    w = waves(gfx=950)
    put(w, 1, lane)
    put(w, 2, lane + 100)
    w.set_exec((lane >= 5)[None])
    execute(w, "v_readfirstlane_b32 s0, v1")
    execute(w, "v_readlane_b32 s1, v1, 3")
    assert (w.s[0, 0], w.s[1, 0]) == (5, 3)
    w.set_exec(np.ones((1, 64), bool))
    execute(w, "v_permlane32_swap_b32_e32 v1, v2")
    assert w.v[1, 0].tolist() == [*range(32), *range(100, 132)]
    assert w.v[2, 0].tolist() == [*range(32, 64), *range(132, 164)]
    put(w, 1, lane)
    put(w, 2, lane + 100)
    execute(w, "v_permlane16_swap_b32_e32 v1, v2")
    rows = lambda r: w.v[r, 0].reshape(4, 16)[:, 0].tolist()  # noqa: E731
    assert (rows(1), rows(2)) == ([0, 100, 32, 132], [16, 116, 48, 148])
    put(w, 3, (63 - lane) * 4)
    put(w, 1, lane)
    execute(w, "ds_bpermute_b32 v4, v3, v1")
    assert w.v[4, 0].tolist() == list(range(63, -1, -1))
    execute(w, "ds_permute_b32 v4, v3, v1")
    assert w.v[4, 0].tolist() == list(range(63, -1, -1))
    execute(w, "ds_swizzle_b32 v4, v1 offset:swizzle(SWAP,16)")
    assert w.v[4, 0].tolist() == [k ^ 16 for k in range(64)]
    execute(w, 'ds_swizzle_b32 v4, v1 offset:swizzle(BITMASK_PERM,"01pip")')
    assert w.v[4, 0].tolist() == [(k & 32) | ((((k & 31) & 7) | 8) ^ 2) for k in range(64)]


def test_permlanex16_reads_the_other_row():
    w = waves(lanes=32, gfx=1100)
    put(w, 1, np.arange(32, dtype=np.uint32))
    execute(w, "v_permlanex16_b32 v0, v1, -1, -1 op_sel:[1,0]")
    assert w.v[0, 0].tolist() == [31] * 16 + [15] * 16
    w.s[2], w.s[3] = 0x76543210, 0xFEDCBA98
    execute(w, "v_permlanex16_b32 v0, v1, s2, s3 op_sel:[1,0]")
    assert w.v[0, 0].tolist() == [*range(16, 32), *range(16)]


def test_sdwa_places_and_extends():
    w = waves()
    put(w, 1, np.uint32([0x80FF1234]))
    put(w, 2, np.uint32([0x1]))
    put(w, 0, np.uint32([0xAAAAAAAA]))
    tail = "src0_sel:BYTE_2 src1_sel:DWORD"
    for mode, want in (("UNUSED_PAD", 0x00FE0000), ("UNUSED_PRESERVE", 0xAAFEAAAA)):
        execute(w, f"v_xor_b32_sdwa v0, v1, v2 dst_sel:BYTE_2 dst_unused:{mode} {tail}")
        assert w.v[0, 0, 0] == want
        put(w, 0, np.uint32([0xAAAAAAAA]))
    execute(w, f"v_mov_b32_sdwa v0, sext(v1) dst_sel:DWORD dst_unused:UNUSED_PAD {tail[:16]}")
    assert w.v[0, 0, 0] == 0xFFFFFFFF


def test_shifts_and_true16():
    w = waves(lanes=32, gfx=1201)
    put(w, 1, np.uint32([0x80014000]))
    execute(w, "v_lshrrev_b16 v0.h, 1, v1.h")
    assert w.v[0, 0, 0] >> 16 == 0x4000
    execute(w, "v_add_f16_e32 v0.l, v1.l, v1.l")
    assert w.v[0, 0, 0] & 0xFFFF == 0x4400
    execute(w, "v_ashrrev_i32_e32 v2, 31, v1")
    assert w.v[2, 0, 0] == 0xFFFFFFFF


def test_reciprocals_are_rounded_correctly():
    values = np.float32([0.3, 2, 1e-30, 0, -0.0, np.inf, np.nan, -1])
    w = waves()
    put(w, 1, values)
    execute(w, "v_rsq_f32_e32 v0, v1")
    with np.errstate(all="ignore"):
        want = (1 / np.sqrt(values.astype(np.longdouble))).astype(np.float32)
    assert same(f32(w, 0)[:8], want)


def test_a_float64_literal_is_the_high_half():
    w = waves()
    one = struct.unpack("<II", struct.pack("<d", 3.0))
    put(w, 2, np.uint32([one[0]]))
    put(w, 3, np.uint32([one[1]]))
    execute(w, "v_mul_f64 v[0:1], v[2:3], 0x40080000")
    got = struct.unpack("<d", struct.pack("<II", *(int(w.v[k, 0, 0]) for k in (0, 1))))[0]
    assert got == 9.0


def test_memory_instructions_check_what_they_touch():
    memory, lds = Memory(), Lds(1, 64)
    array = np.arange(16, dtype=np.uint32).reshape(2, 8)[:, :4]
    base = memory.add(array, "x")
    w = waves(lanes=32, gfx=1100)
    w.s[2], w.s[3] = base & 0xFFFFFFFF, base >> 32
    w.set_exec((np.arange(32) < 2)[None])
    put(w, 1, np.uint32([0, 32]))
    execute(w, "global_load_b128 v[4:7], v1, s[2:3]", memory)
    assert w.v[4:8, 0, :2].T.tolist() == array.tolist()
    for offset, complaint in ((16, "byte 48 of argument x was"), (-16, "outside every buffer")):
        with pytest.raises(EmulationError, match=complaint):
            execute(w, f"global_load_b32 v4, v1, s[2:3] offset:{offset}", memory)
    put(w, 1, np.uint32([0, 0]))
    with pytest.raises(EmulationError, match="byte 16 of argument x was not given"):
        execute(w, "global_load_b32 v4, v1, s[2:3] offset:16", memory)
    put(w, 1, np.uint32([0, 32]))
    with pytest.raises(EmulationError, match="LDS byte"):
        execute(w, "ds_load_b32 v4, v1 offset:64", memory, lds)
    execute(w, "ds_store_b32 v1, v4 offset:4", memory, lds)
    execute(w, "ds_load_u16 v9, v1 offset:4", memory, lds)
    assert np.array_equal(w.v[9, 0, :2], w.v[4, 0, :2])
    w.s[4:8, 0] = [base & 0xFFFFFFFF, base >> 32, 32, 0x27000]
    execute(w, "buffer_load_b32 v8, v1, s[4:7], 0 offen", memory)
    assert w.v[8, 0, :2].tolist() == [0, 0]
    memory_before = array.copy()
    execute(w, "buffer_store_b32 v5, v1, s[4:7], 0 offen", memory)
    assert array[1].tolist() == memory_before[1].tolist()
    assert array[0, 0] == w.v[5, 0, 0]


def test_unknown_things_stop():
    assert find_handler(parse_instruction("v_dot2_f32_f16 v0, v1, v2, v3"), Memory(), None) is None
    text = "global_load_b32 v0, v1, s[2:3] some_new_modifier"
    assert find_handler(parse_instruction(text), Memory(), None) is None
    w = waves()
    w.v_set[1] = False
    with pytest.raises(EmulationError, match="v1 is read but was never written"):
        execute(w, "v_add_f32_e32 v0, v1, v1")
    w.set_exec(np.zeros((1, 64), bool))
    execute(w, "v_add_f32_e32 v0, v1, v1")
    w.s_set[9] = False
    with pytest.raises(EmulationError, match="never written"):
        execute(w, "s_add_u32 s0, s9, s9")
