"""The knobs of triton_fused: pure functions, no GPU and no triton."""

import dataclasses
import sys

import pytest

from mlakit import archs, shapes
from mlakit.paths import triton_config
from mlakit.paths.triton_config import Config, check, heuristic, search_space

ARCHES = archs.known()
WIDTHS = [
    *sorted({(m.q_lora_rank, m.kv_lora_rank) for m in shapes.models()}),
    (1, 1), (769, 33), (0, 511), (8192, 8193), (16384, 16383), (24, 16384),
]  # fmt: skip
ROWS = (1, 2, 127, 128, 129, 1024, 1025, 2048, 2049, 4096, 65535, 65536, 65537, 1_000_000)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("invariant", [True, False])
def test_the_heuristic_is_always_a_config_that_can_run(arch, dtype, invariant):
    for (q, k), m in ((w, m) for w in WIDTHS for m in ROWS):
        config = heuristic(arch, m, q, k, dtype, batch_invariant=invariant)
        assert check(config, arch, q, k, dtype) is None, (config, q, k, m)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_widths_tree_depends_on_nothing_but_the_width_by_default(arch):
    for dtype in ("bf16", "fp32"):
        trees = {}
        for (q, k), m in ((w, m) for w in WIDTHS for m in ROWS):
            config = heuristic(arch, m, q, k, dtype)
            made = triton_config.constants(config, arch, q, k, dtype)
            trees.setdefault(k, set()).add(made["K_TREE"])
            if q:
                trees.setdefault(q, set()).add(made["Q_TREE"])
        assert {len(t) for t in trees.values()} == {1}


def test_the_tree_follows_the_warps_only_when_asked_to():
    two = dataclasses.replace(heuristic("sm_90", 2048, 1536, 512), q_rows=1, q_warps=2)
    own = dataclasses.replace(two, own_tree=True)
    assert [triton_config.trees_of(c, "sm_90", 1536, 512, "bf16")[0] for c in (two, own)] == [4, 2]
    assert heuristic("sm_90", 2048, 1536, 512, batch_invariant=False).own_tree


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx1201"])
@pytest.mark.parametrize("invariant", [True, False])
def test_the_search_space_is_valid_distinct_and_holds_the_heuristic(arch, invariant):
    for q, k in ((1536, 512), (0, 512)):
        for m in (1, 64, 1024):
            space = search_space(arch, m, q, k, batch_invariant=invariant)
            assert all(check(c, arch, q, k) is None for c in space)
            assert len(set(space)) == len(space) > 20
            assert heuristic(arch, m, q, k, batch_invariant=invariant) in space
            tree = triton_config.warps_per_row(arch, q or k, "bf16")
            assert max(c.q_warps for c in space) == (tree if invariant else 8)
            assert {c.own_tree for c in space} == {not invariant}


@pytest.mark.parametrize(
    ("change", "arch", "reason"),
    [
        ({"num_warps": 64, "q_rows": 16, "k_rows": 64}, "sm_90", "over 1024 threads"),
        ({"persistent": True}, "sm_90", "separate must be False"),
        ({"separate": False, "k_rows": 8}, "sm_90", "equal rows"),
        ({"pdl": True}, "sm_80", "programmatic dependent launch"),
        ({"pdl": True}, "gfx942", "programmatic dependent launch"),
        ({"q_rows": 3}, "sm_90", "powers of two"),
        ({"q_warps": 8}, "sm_90", "the tree of 1536 elements has 4"),
        ({"q_warps": 8, "own_tree": True}, "sm_90", "do not fill"),
        ({"q_rows": 64}, "sm_90", "elements a thread"),
    ],
)
def test_a_config_that_cannot_run_is_refused_with_the_reason(change, arch, reason):
    config = dataclasses.replace(Config(1, 4, 4, 1, 4), **change)
    assert reason in check(config, arch, 1536, 512)


def test_the_grid_covers_every_row_once():
    for m in ROWS:
        config = heuristic("sm_90", m, 1536, 512)
        q_programs = -(-m // config.q_rows)
        k_programs = triton_config.programs(config, m, 1536, 1) - q_programs
        assert q_programs * config.q_rows >= m > (q_programs - 1) * config.q_rows
        assert k_programs * config.k_rows >= m > (k_programs - 1) * config.k_rows
        assert triton_config.programs(config, m, 0, 1) == k_programs
    walking = Config(4, 4, 4, 1, 4, separate=False, persistent=True)
    room = triton_config.resident(walking, 132)
    assert triton_config.programs(walking, 100_000, 1536, room) == room == 132 * 8
    assert triton_config.programs(walking, 5, 1536, room) == 2


def test_the_module_needs_no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "mlakit.paths.triton_config")
    import mlakit.paths.triton_config as fresh

    assert fresh.heuristic("sm_90", 1, 1536, 512).separate
