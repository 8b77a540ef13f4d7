"""Integer, lane, scalar and memory instructions alone, on edge values; what stops a run."""

import itertools
import struct

import numpy as np
import pytest
from one_instruction import execute, put, v, waves

from mlakit.codegen.execute import find_handler
from mlakit.codegen.isa.lanes import dpp_sources
from mlakit.codegen.isa.parse import EmulationError, parse_instruction

LANE = np.arange(64, dtype=np.uint32)


def test_integer_and_bit_instructions():
    a, b, c = np.random.default_rng(3).integers(0, 2**32, (3, 64), np.uint32)
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
        w = waves(v1=a, v2=b, v3=c % 14 if name == "v_perm_b32" else c)
        want = [f(*map(int, given)) % 2**32 for given in w.v[1:4, 0].T]
        assert v(execute(w, f"{name} v0, v1, v2, v3"), 0).tolist() == want, name


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
    selects = np.uint32([0x0D0C0B0A, 0x09080706, 0x05040302, 0x0FFF0C00])
    w = waves(v1=np.uint32(0x80FF7F01), v2=np.uint32(0x7F8000FF), v3=selects)
    want = [slow_perm(0x80FF7F01, 0x7F8000FF, int(s)) for s in selects]
    assert v(execute(w, "v_perm_b32 v0, v1, v2, v3"), 0, 4).tolist() == want


def test_bitop3_is_its_truth_table():
    w = waves(950, v1=np.uint32(0xF0), v2=np.uint32(0xCC), v3=np.uint32(0xAA))
    for table in (0x00, 0x40, 0x96, 0xE8, 0xCA, 0xFF):
        execute(w, f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{hex(table)}")
        assert v(w, 0)[0] & 0xFF == table


def test_dual_issue_reads_before_it_writes():
    w = waves(1100, v1=np.uint32(11), v2=np.uint32(22))
    execute(w, "v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1")
    assert (v(w, 1)[0], v(w, 2)[0]) == (22, 11)


def test_carries():
    w = waves(v1=np.uint32([0xFFFFFFFF, 1]), s1=0x7FFFFFFF, s2=1)
    execute(w, "v_add_co_u32_e32 v0, vcc, 1, v1")
    assert (*v(w, 0, 2), w.s[106, 0] & 3) == (0, 2, 1)
    execute(w, "v_addc_co_u32_e32 v0, vcc, 0, v1, vcc")
    assert (v(w, 0)[0], w.s[106, 0] & 3) == (0, 1)
    assert execute(w, "s_add_i32 s0, s1, s2").scc.all()
    assert not execute(w, "s_add_u32 s0, s1, s2").scc.any()
    put(w, s1=0xFFFFFFFF)
    assert execute(w, "s_add_u32 s0, s1, s2", "s_addc_u32 s0, 0, 0").s[0, 0] == 1


def test_scalar_instructions():
    w = waves(s2=0xFFFFFFFE, s3=3, s4=0x000F0000, s5=0xFFFFFFFF)
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
        assert execute(w, text).s[0, 0] == want, text
    execute(w, "s_bfe_i64 s[0:1], s[4:5], 0x40010")
    assert w.s[:2, 0].tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    execute(w, "s_bfe_i64 s[0:1], s[4:5], 0x50010")
    assert w.s[:2, 0].tolist() == [15, 0]
    assert execute(w, "s_cmp_lt_i32 s2, s3").scc.all()
    assert not execute(w, "s_cmp_lt_u32 s2, s3").scc.any()
    assert not execute(w, "s_cselect_b64 vcc, -1, 0").s[106:108].any()


def test_shifts_and_true16():
    w = waves(1201, v1=np.uint32(0x80014000))
    execute(w, "v_lshrrev_b16 v0.h, 1, v1.h", "v_add_f16_e32 v0.l, v1.l, v1.l")
    assert v(w, 0)[0] == 0x40004400
    assert v(execute(w, "v_ashrrev_i32_e32 v2, 31, v1"), 2)[0] == 0xFFFFFFFF


# ---- masks


def test_exec_masks_writes_and_comparisons():
    w = waves(v1=LANE)
    w.set_exec((LANE < 40)[None])
    execute(w, "v_mov_b32_e32 v0, 5", "v_cmp_gt_u32_e32 vcc, 50, v1")
    assert np.array_equal(v(w, 0), np.where(LANE < 40, 5, 0))
    assert w.s[106:108, 0].tolist() == [0xFFFFFFFF, 0xFF]
    assert execute(w, "s_and_saveexec_b64 s[2:3], vcc").scc.all()
    assert execute(w, "s_mov_b64 exec, s[2:3]").exec.sum() == 40


def test_compares_with_nan():
    w = waves(v1=np.float32([1, np.nan, 2, np.inf]), v2=np.float32([1, 1, np.nan, -np.inf]))
    expected = {"eq": 0b0001, "lt": 0, "gt": 0b1000, "lg": 0b1000, "o": 0b1001, "u": 0b0110}
    expected |= {"neq": 0b1110, "nlt": 0b1111, "nge": 0b0110, "ngt": 0b0111, "nle": 0b1110}
    for name, bits in expected.items():
        w = execute(w, f"v_cmp_{name}_f32_e64 s[8:9], v1, v2")
        assert w.s[8, 0] & 15 == bits, name


def test_class_compare():
    values = np.float32([np.nan, -np.inf, -1, -1e-40, -0.0, 0.0, 1e-40, 1, np.inf])
    for bit in range(1, 10):
        w = execute(waves(v1=values), f"v_cmp_class_f32_e64 s[8:9], v1, {hex(1 << bit)}")
        assert w.s[8, 0] & 0x1FF == 1 << bit - 1


# ---- lanes


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
    w, odd = waves(v1=LANE + 100), LANE % 2 == 1

    def moved(how):
        put(w, v0=np.uint32(7))
        return v(execute(w, f"v_mov_b32_dpp v0, v1 {how}"), 0)

    written = np.isin(LANE // 16, [1, 3]) & np.isin(LANE % 16 // 4, [0, 1]) & (LANE % 16 > 0)
    got = moved("row_shr:1 row_mask:0xa bank_mask:0x3")
    assert np.array_equal(got, np.where(written, LANE + 99, 7))
    got = moved("row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1")
    assert np.array_equal(got, np.where(LANE % 16 == 0, 0, LANE + 99))
    w.set_exec(odd[None])
    assert (moved("quad_perm:[0,0,2,2] row_mask:0xf bank_mask:0xf") == 7).all()
    got = moved("quad_perm:[0,0,2,2] row_mask:0xf bank_mask:0xf fi:1")
    assert np.array_equal(got, np.where(odd, LANE + 99, 7))


def test_a_sign_of_a_moved_half_is_its_own():
    w = waves(1100, v1=np.float16([1, -2]), v2=np.uint32(0))
    execute(w, "v_add_f16_dpp v0, -v1, v2 quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf")
    assert (v(w, 0, 2) & 0xFFFF).astype(np.uint16).view(np.float16).tolist() == [-1, 2]


def test_lane_instructions():
    w = waves(950, v1=LANE, v2=LANE + 100, v3=(63 - LANE) * 4)
    w.set_exec((LANE >= 5)[None])
    execute(w, "v_readfirstlane_b32 s0, v1", "v_readlane_b32 s1, v1, 3")
    assert w.s[:2, 0].tolist() == [5, 3]
    w.set_exec(np.ones((1, 64), bool))
    execute(w, "v_permlane32_swap_b32_e32 v1, v2")
    assert v(w, 1).tolist() == [*range(32), *range(100, 132)]
    assert v(w, 2).tolist() == [*range(32, 64), *range(132, 164)]
    put(w, v1=LANE, v2=LANE + 100)
    execute(w, "v_permlane16_swap_b32_e32 v1, v2")
    assert [v(w, r)[::16].tolist() for r in (1, 2)] == [[0, 100, 32, 132], [16, 116, 48, 148]]
    put(w, v1=LANE)
    for text, want in (
        ("ds_bpermute_b32 v4, v3, v1", 63 - LANE),
        ("ds_permute_b32 v4, v3, v1", 63 - LANE),
        ("ds_swizzle_b32 v4, v1 offset:swizzle(SWAP,16)", LANE ^ 16),
        ('ds_swizzle_b32 v4, v1 offset:swizzle(BITMASK_PERM,"01pip")',
         (LANE & 32) | (((LANE & 7) | 8) ^ 2)),
    ):  # fmt: skip
        assert np.array_equal(v(execute(w, text), 4), want), text


def test_permlanex16_reads_the_other_row():
    w = waves(1100, v1=LANE[:32], s2=0x76543210, s3=0xFEDCBA98)
    execute(w, "v_permlanex16_b32 v0, v1, -1, -1 op_sel:[1,0]")
    assert v(w, 0).tolist() == [31] * 16 + [15] * 16
    execute(w, "v_permlanex16_b32 v0, v1, s2, s3 op_sel:[1,0]")
    assert v(w, 0).tolist() == [*range(16, 32), *range(16)]


def test_sdwa_places_and_extends():
    w = waves(v1=np.uint32(0x80FF1234), v2=np.uint32(1))
    for mode, want in (("UNUSED_PAD", 0x00FE0000), ("UNUSED_PRESERVE", 0xAAFEAAAA)):
        put(w, v0=np.uint32(0xAAAAAAAA))
        execute(w, f"v_xor_b32_sdwa v0, v1, v2 dst_sel:BYTE_2 dst_unused:{mode} "
                   "src0_sel:BYTE_2 src1_sel:DWORD")  # fmt: skip
        assert v(w, 0)[0] == want
    execute(w, "v_mov_b32_sdwa v0, sext(v1) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2")
    assert v(w, 0)[0] == 0xFFFFFFFF


# ---- memory, and what stops a run


def test_memory_instructions_check_what_they_touch():
    array = np.arange(16, dtype=np.uint32).reshape(2, 8)[:, :4]
    w = waves(1100, v1=np.uint32([0, 32]))
    base = w.memory.add(array, "x")
    put(w, s2=base & 0xFFFFFFFF, s3=base >> 32)
    w.set_exec((np.arange(32) < 2)[None])
    execute(w, "global_load_b128 v[4:7], v1, s[2:3]")
    assert w.v[4:8, 0, :2].T.tolist() == array.tolist()
    for offset, complaint in ((16, "byte 48 of argument x was"), (-16, "outside every buffer")):
        with pytest.raises(EmulationError, match=complaint):
            execute(w, f"global_load_b32 v4, v1, s[2:3] offset:{offset}")
    put(w, v1=np.uint32(0))
    with pytest.raises(EmulationError, match="byte 16 of argument x was not given"):
        execute(w, "global_load_b32 v4, v1, s[2:3] offset:16")
    put(w, v1=np.uint32([0, 32]))
    with pytest.raises(EmulationError, match="LDS byte"):
        execute(w, "ds_load_b32 v4, v1 offset:64")
    execute(w, "ds_store_b32 v1, v4 offset:4", "ds_load_u16 v9, v1 offset:4")
    assert np.array_equal(v(w, 9, 2), v(w, 4, 2))
    w.s[4:8, 0] = [base & 0xFFFFFFFF, base >> 32, 32, 0x27000]
    execute(w, "buffer_load_b32 v8, v1, s[4:7], 0 offen")
    assert v(w, 8, 2).tolist() == [0, 0]
    before = array.copy()
    execute(w, "buffer_store_b32 v5, v1, s[4:7], 0 offen")
    assert array[1].tolist() == before[1].tolist()
    assert array[0, 0] == v(w, 5)[0]


@pytest.mark.parametrize(
    "text",
    [
        "v_dot2_f32_f16 v0, v1, v2, v3",
        "global_load_b32 v0, v1, s[2:3] some_new_modifier",
        "global_load_b7 v0, v1, s[2:3]",
    ],
)
def test_what_is_unknown_has_no_handler(text):
    assert find_handler(parse_instruction(text)) is None


def test_what_was_never_written_stops():
    w = waves()
    w.v_set[1] = w.s_set[9] = False
    with pytest.raises(EmulationError, match="v1 is read but was never written"):
        execute(w, "v_add_f32_e32 v0, v1, v1")
    w.set_exec(np.zeros((1, 64), bool))
    execute(w, "v_add_f32_e32 v0, v1, v1")
    with pytest.raises(EmulationError, match="never written"):
        execute(w, "s_add_u32 s0, s9, s9")
