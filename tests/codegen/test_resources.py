"""Resources read off compiled code, against the compiler's own notes and hand counts."""

import re
import subprocess
from pathlib import Path

import pytest

from mlakit.codegen import resources as res
from mlakit.codegen.compile import ARCHS, compile_many
from mlakit.codegen.shipped import request
from mlakit.errors import MisuseError
from mlakit.paths import triton_config
from mlakit.paths.triton_config import Config
from mlakit.shapes import Widths

triton = pytest.importorskip("triton")
V3 = Widths(1536, 512)
AMD = ARCHS[:6]


@pytest.fixture(scope="module")
def made():
    asked = {
        (arch, n): request(
            arch, V3, config=Config(q_warps=n, k_warps=n, num_warps=n, own_tree=True)
        )
        for arch in ARCHS
        for n in (1, 2, 8)
    }
    wide = Config(q_rows=4, k_rows=4, q_warps=1, k_warps=1, num_warps=1)
    asked |= {(arch, "wide"): request(arch, V3, config=wide) for arch in AMD}
    return dict(zip(asked, compile_many(list(asked.values())), strict=True))


def test_register_occupancy_is_the_compiler_s(made):
    for (arch, what), compiled in made.items():
        if not compiled.amd:
            continue
        noted = int(re.search(r"; Occupancy: (\d+)", compiled.text).group(1))
        found = res.resources(compiled)
        # of one wave, as LLVM's note counts registers whatever the workgroup
        assert res.occupancy(arch, found.vgprs, 0, 1, found.sgprs)[0] == noted, (arch, what)


@pytest.mark.parametrize(
    ("arch", "vgprs", "lds", "warps", "waves", "limit"),
    [
        ("gfx942", 64, 0, 4, 8, "most a SIMD holds"),
        ("gfx942", 65, 0, 4, 7, "registers"),
        ("gfx942", 32, 65536, 4, 1, "LDS"),
        ("gfx950", 32, 65536, 4, 2, "LDS"),
        ("gfx1100", 97, 0, 4, 12, "registers"),
        ("sm_90", 64, 0, 4, 8, "registers"),
        ("sm_90", 32, 0, 1, 8, "workgroups"),
        ("sm_90", 32, 113 * 1024, 4, 2, "LDS"),
        # NVIDIA's rule: (65536 / 4) // (registers of a warp, up to 256) slots a quarter, four
        # quarters, whole blocks. 168: 3 x 4 // 8 = 1 block of 2 a quarter; 96: 5 x 4 // 16 = 1.
        ("sm_90", 168, 0, 8, 2, "registers"),
        ("sm_90", 96, 0, 16, 4, "registers"),
        ("sm_90", 255, 0, 8, 2, "registers"),
        ("sm_90", 255, 0, 32, 0, "registers"),
        ("gfx1100", 200, 0, 16, 4, "registers"),
        # 65536 // 30000 = 2 workgroups of one wave: two SIMDs hold one each.
        ("gfx942", 64, 30000, 1, 1, "LDS"),
        ("gfx942", 64, 40000, 2, 1, "LDS"),
    ],
)
def test_occupancy_by_hand(arch, vgprs, lds, warps, waves, limit):
    assert res.occupancy(arch, vgprs, lds, warps) == (waves, limit)


def test_loads_are_sixteen_bytes_and_add_up(made):
    for (_, what), compiled in made.items():
        found = res.resources(compiled)
        assert found.evidence == "compiled"
        assert set(found.loads) == {16} == set(found.stores)
        assert found.wide_share == 1
        if what == 1:
            lanes = triton_config.lanes_of(compiled.arch)
            # x and its weight are loaded, y is stored: 2 bytes of each of 2048 elements.
            assert found.stores[16] == 2048 * 2 // (16 * lanes)
            assert found.loads[16] == 2 * found.stores[16]


def test_bf16_conversion_and_reductions(made):
    of = {arch: res.resources(made[arch, 2]) for arch in ARCHS}
    assert of["gfx950"].bf16_convert.startswith("hardware")
    assert of["gfx942"].bf16_convert.startswith("software")
    assert of["sm_90"].bf16_convert.startswith("hardware")
    assert of["gfx942"].reductions["dpp"] > 0
    assert of["gfx1100"].reductions["permlane"] > 0
    assert of["sm_80"].reductions["shuffle"] > 0
    for found in of.values():
        assert sum(found.mix.values()) >= found.instructions
        assert found.code_bytes > 0


def test_spills_are_seen():
    config = Config(q_rows=16, k_rows=16, q_warps=1, k_warps=1, num_warps=1)
    found = res.resources(compile_many([request("gfx1100", Widths(2048, 512), config=config)])[0])
    assert found.spills
    assert found.scratch_bytes > 0
    assert not res.resources(compile_many([request("gfx1100", V3)])[0]).spills


def test_nvidia_registers_are_the_disassembler_s(made, tmp_path):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this triton ships no cuobjdump")
    for arch in ("sm_80", "sm_90", "sm_100"):
        file = tmp_path / f"{arch}.cubin"
        file.write_bytes(made[arch, 2].binary)
        told = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True).stdout
        assert int(re.search(r"REG:(\d+)", told).group(1)) == res.resources(made[arch, 2]).vgprs


def test_diff_shows_what_changes_between_two_cards(made):
    lines = res.diff(made["gfx942", 2], made["gfx950", 2])
    assert any(x.startswith("+") and "v_cvt_pk_bf16_f32" in x for x in lines)
    assert any(x.startswith("-") and "v_add3_u32" in x for x in lines)
    assert res.diff(made["gfx942", 2], made["gfx942", 2]) == []
    assert res.isa(made["gfx942", 2])[-1] == "s_endpgm"
    assert any(x.startswith("ld.global") or "ld.global" in x for x in res.isa(made["sm_90", 2]))


def test_table_has_a_row_for_each_arch_and_width():
    frame = res.table([V3, Widths(768, 512)])
    assert len(frame) == 2 * len(ARCHS)
    assert (frame.evidence == "compiled").all()
    assert (frame.vgprs > 0).all()


def test_idle_share_by_hand():
    one = Config(q_warps=1, k_warps=1, num_warps=1)
    eight = Config(q_warps=8, k_warps=8, num_warps=8)
    assert res.idle_share(one, "gfx942", V3) == 0
    assert res.idle_share(eight, "gfx942", V3) == 1 - 2048 / 8192
    assert res.idle_share(eight, "gfx1100", V3) == 0.5


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
def test_the_chosen_config_is_valid_and_keeps_its_rule(arch):
    chosen = res.choose_config(arch, V3)
    assert triton_config.check(chosen.config, arch, 1536, 512) is None
    assert not chosen.found.spills
    assert chosen.found.wide_share == 1
    assert chosen.idle_share == 0
    assert chosen.considered > 4
    with pytest.raises(MisuseError, match="AMD archs only"):
        res.choose_config("sm_90", V3)
