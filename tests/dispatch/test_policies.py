"""Truth tables as literals, the story's bug and fix, and what a diff calls a surprise."""

import pytest

from mlakit import latency, launches
from mlakit.context import Context
from mlakit.dispatch import diff, policies
from mlakit.dispatch.choice import OUTSIDE, check_switches
from mlakit.errors import MisuseError, RefusedError
from mlakit.paths import registry
from mlakit.shapes import Widths

R, S, F, D = "raises", "aiter_split", "aiter_fused", "dual_stream"
ENGINES = (
    "sglang_0_5_10_post1", "sglang_pr23186_before", "sglang_0_5_11", "sglang_0_5_12",
    "sglang_0_5_23", "vllm_compile", "vllm_eager", "atom",
)  # fmt: skip
TABLE = {
    "gfx950, AITER, BF16 weights": (S, "torch_native", F, F, F, F, S, F),
    "gfx942, AITER, BF16 weights": (S, F, F, F, F, F, S, F),
    "gfx950, AITER, MXFP4 weights": (*["aiter_mxfp4"] * 5, F, S, "aiter_mxfp4"),
    "gfx950, AITER, FP8 weights, block scales": (
        *["aiter_fp8_group128"] * 6, S, "aiter_fp8_group128",
    ),
    "gfx950, AITER, FP8 weights, per-channel scales": (
        *["aiter_fp8_group128"] * 4, F, "aiter_fp8_token", S, "aiter_fp8_token",
    ),
    "gfx942, AITER, FP8 weights": (S, F, F, F, F, "aiter_fp8_group128", S, "aiter_fp8_group128"),
    "gfx950, AITER, int8 weights": (S, "torch_native", F, F, F, F, S, R),
    "gfx950, AITER, BF16, no q latent": (S, S, S, S, S, S, S, S),
    "gfx950, AITER, BF16, prefill": (S, S, S, S, S, F, S, F),
    "gfx950, AITER, BF16, M = 16384": (S, "torch_native", F, F, F, F, S, F),
    "gfx950, AITER, BF16, captured, second-stream switch": (
        S, "torch_native", F, D, D, F, S, F,
    ),
    "gfx950, AITER of the unified generation, BF16": (S, R, R, F, F, F, S, F),
    "gfx950, AITER without the dual norm, BF16": (S, R, R, R, R, R, S, R),
    "gfx1250, AITER unified, A8W4 workaround": (S, R, R, F, "triton_split", F, S, F),
    "gfx950, no AITER, BF16": (*["engine_split"] * 7, F),
    "sm_90, eager, BF16": (*["engine_split"] * 7, R),
    "sm_90, captured, BF16": (D, D, D, D, D, "engine_split", "engine_split", R),
    "cpu, BF16": (*["engine_split"] * 7, R),
}  # fmt: skip


def test_the_table_has_a_row_for_each_branch():
    assert set(TABLE) == set(diff.ROWS)


@pytest.mark.parametrize("row", TABLE)
def test_truth_table(row):
    got = tuple(policies.choose(diff.ROWS[row], name).path for name in ENGINES)
    assert got == TABLE[row]


def test_the_bug_of_the_story_and_its_fix():
    c = Context(arch="gfx950", use_aiter=True, weight_dtype="bf16")
    before = policies.choose(c, "sglang_before_fix")
    after = policies.choose(c, "sglang_after_fix")
    assert before.path == "torch_native"
    assert not before.fused
    assert "AITER" in before.reason  # what a build of it would have run is said
    assert (after.path, after.fused, after.launches) == ("aiter_fused", True, 1)


@pytest.mark.parametrize(
    ("row", "policy", "launches"),
    [
        ("gfx950, AITER, BF16 weights", "sglang_0_5_10_post1", 2),
        ("gfx950, AITER, BF16, prefill", "sglang_0_5_11", 4),  # two copies, two norms
        ("gfx950, AITER, BF16, captured, second-stream switch", "sglang_0_5_23", 4),
        ("gfx950, AITER, BF16, M = 16384", "sglang_0_5_23", 2),
        ("gfx950, AITER, BF16, M = 16384", "vllm_compile", 2),
        ("gfx950, AITER, BF16, no q latent", "sglang_0_5_10_post1", 1),
        ("gfx1250, AITER unified, A8W4 workaround", "sglang_0_5_23", 4),
        ("sm_90, captured, BF16", "sglang_0_5_23", 2),
    ],
)
def test_launches(row, policy, launches):
    choice = policies.choose(diff.ROWS[row], policy)
    assert choice.launches == launches
    assert choice.fused == (launches == 1 and choice.path == "aiter_fused")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"q_eps": 1e-5, "k_eps": 1e-5}, F),
        ({"q_eps": 1e-6, "k_eps": 1e-5}, S),
        ({"q_eps": 1e-8, "k_eps": 1e-8}, S),
        ({"dtype": "fp16", "norm_weight_dtype": "fp16"}, S),
        ({"arch": "gfx1100"}, S),
        ({"arch": "gfx90a"}, S),
        ({"arch": "gfx1250"}, F),
        ({"aiter_api": "pair"}, R),
        ({"aiter_api": "pair", "weight_dtype": "fp8_ocp"}, "aiter_fp8_group128"),
    ],
)
def test_vllm_pattern_wants_equal_known_eps_and_bf16(change, path):
    c = Context(**({"arch": "gfx950", "use_aiter": True} | change))
    assert policies.choose(c, "vllm_compile").path == path


def test_the_fix_changes_only_what_it_says():
    changes = diff.diff("sglang_before_fix", "sglang_after_fix")
    assert changes
    assert not any(c.surprise for c in changes)
    assert {(c.before.path, c.after.path) for c in changes} == {("torch_native", "aiter_fused")}
    assert {c.context.arch for c in changes} == {"gfx950"}
    assert all(c.context.use_aiter and not c.context.prefill for c in changes)


def test_a_second_stream_switch_is_a_surprise():
    changes = diff.diff("sglang_0_5_11", "sglang_0_5_12")
    lost = [c for c in changes if c.surprise]
    assert {c.after.path for c in lost} == {"dual_stream"}
    assert {c.before.path for c in lost} == {"aiter_fused", "aiter_fp8_group128", "aiter_mxfp4"}
    assert all(c.context.capture for c in lost)
    assert all("SGLANG_ROCM_USE_MULTI_STREAM" in c.context.switches for c in lost)


def test_a_newer_aiter_is_a_surprise_for_0_5_11():
    changes = diff.diff("sglang_0_5_10_post1", "sglang_0_5_11")
    broken = [c for c in changes if c.surprise]
    assert {c.after.path for c in broken} == {"raises"}
    assert {c.context.aiter_api for c in broken} == {"none", "unified"}


def test_per_channel_fp8_moves_to_bf16_in_0_5_23():
    changes = diff.diff("sglang_0_5_12", "sglang_0_5_23")
    moved = [c for c in changes if c.before.path == "aiter_fp8_group128"]
    assert moved
    assert not any(c.context.block_scale for c in moved)
    plain = [c for c in moved if "AITER_FORCE_A8W4" not in c.context.switches]
    assert {c.after.path for c in plain} == {"aiter_fused"}


def test_a_policy_does_not_differ_from_itself():
    assert diff.diff("vllm_compile", "vllm_compile") == ()


def test_summary_counts_every_change_once_and_puts_surprises_first():
    changes = diff.diff("sglang_0_5_12", "sglang_0_5_23")
    rows = diff.summary(changes)
    assert sum(r["contexts"] for r in rows) == len(changes)
    flags = [r["surprise"] for r in rows]
    assert flags == sorted(flags, reverse=True)
    assert any("block_scale=False" in r["where"] for r in rows)


def test_every_choice_over_all_contexts_is_a_known_path():
    known = {*registry.names(), *OUTSIDE}
    for name in policies.POLICIES:
        for c in diff.contexts()[::37]:
            choice = policies.choose(c, name)
            assert choice.path in known
            assert choice.reason
            assert "\n" not in choice.reason
            assert not (choice.fused and choice.launches != 1)


def test_names():
    assert policies.get("sglang_today") is policies.get("sglang_0_5_23")
    assert policies.get("sglang_before_fix") is policies.get("sglang_pr23186_before")
    assert all(p.source and p.text for p in policies.POLICIES.values())
    with pytest.raises(MisuseError, match="did you mean 'sglang_0_5_11'"):
        policies.get("sglang_0_5_111")


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ("SGLANG_ROCM_MULTI_STREAM", "did you mean 'SGLANG_ROCM_USE_MULTI_STREAM'"),
        ("SGLANG_ROCM_USE_MULTI_STREAM=2", "or SGLANG_ROCM_USE_MULTI_STREAM=0"),
        ("SGLANG_ROCM_USE_MULTI_STREAM=", "or SGLANG_ROCM_USE_MULTI_STREAM=0"),
    ],
)
def test_an_odd_switch_is_an_error(switch, message):
    c = Context(arch="gfx950", switches=frozenset({switch}))
    with pytest.raises(MisuseError, match=message):
        policies.choose(c)
    with pytest.raises(MisuseError):
        check_switches(c)


def test_ours_takes_a_fused_path_and_says_when_none_can_run():
    assert policies.choose(Context()).path == "cpu_fused"
    assert policies.choose(Context(arch="sm_90")).path == "triton_fused"
    bare = policies.choose(Context(packages=frozenset()))
    assert (bare.path, bare.fallback) == ("torch_rms_norm", True)
    assert "numba" in bare.reason
    strided = policies.choose(Context(layout="inner_strided"))
    assert strided.fallback
    assert "stride" in strided.reason


def test_a_request_is_obeyed_or_refused():
    assert policies.choose(Context(requested="torch_native")).path == "torch_native"
    with pytest.raises(RefusedError, match="aiter_fused was asked for and cannot run"):
        policies.choose(Context(requested="aiter_fused"))
    with pytest.raises(MisuseError, match="did you mean 'cpu_fused'"):
        policies.choose(Context(requested="cpu_fuse"))


def test_impossible_contexts_are_refused_in_one_line():
    with pytest.raises(MisuseError, match="no MXFP4"):
        Context(arch="gfx942", weight_dtype="mxfp4")
    with pytest.raises(MisuseError, match="AMD cards only"):
        Context(arch="sm_90", use_aiter=True)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1250", "sm_100"])
@pytest.mark.parametrize("m", [1, 4096, 65536])
def test_an_absent_card_gets_the_models_choice(arch, m):
    c = Context(arch=arch, m=m)
    choice = policies.choose(c)
    names = [p.name for p in policies.able(c) if p.name in launches.MODELLED]
    us = {n: latency.estimate(n, arch, Widths(1536, 512), m).us for n in names}
    assert len(us) > 1
    assert us[choice.path] == min(us.values())
    assert "fastest by the latency model" in choice.reason
    assert f"nothing was measured on {arch}" in choice.reason
    assert not choice.fallback


def test_what_the_model_does_not_know_goes_by_the_safe_order():
    quantised = policies.choose(Context(arch="gfx950", quant="mxfp4", weight_dtype="mxfp4"))
    assert "one launch for both norms" in quantised.reason
    alone = policies.choose(Context(arch="gfx950", packages=frozenset()))
    assert alone.fallback
    assert "no fused path can run here" in alone.reason
