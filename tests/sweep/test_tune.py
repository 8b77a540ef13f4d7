"""The table holds thresholds where the fastest path changes; regret is counted by hand."""

import pandas as pd
import pytest
from timing_rows import row

from mlakit.context import Context
from mlakit.dispatch import policies, table
from mlakit.errors import MisuseError
from mlakit.sweep import regret, tune


def rows(times: dict[int, dict[str, float]], **more) -> pd.DataFrame:
    exact = dict.fromkeys(("ratio", "ratio_lo", "ratio_hi"), 1.0)
    return pd.DataFrame(
        row(p, us, **exact | {"m": m} | more)
        for m, paths in times.items()
        for p, us in paths.items()
    )


TIMES = {
    1: {"cpu_fused": 5.0, "torch_rms_norm": 9.0, "copy_limit": 1.0},
    64: {"cpu_fused": 20.0, "torch_rms_norm": 30.0},
    1024: {"cpu_fused": 300.0, "torch_rms_norm": 200.0},
    4096: {"cpu_fused": 999.0, "torch_rms_norm": 995.0},
}


def test_thresholds_lie_in_the_geometric_middle_and_controls_are_never_chosen():
    steps = tune.ladder_steps(tune.candidates(rows(TIMES)))
    assert steps == [(1, "cpu_fused"), (256, "torch_rms_norm")]


def test_a_path_level_with_the_fastest_keeps_its_place():
    level = {1: {"a": 1.0, "b": 2.0}, 8: {"a": 1.005, "b": 1.0}, 64: {"a": 2.0, "b": 1.0}}
    frame = rows(level)
    assert tune.ladder_steps(frame) == [(1, "a"), (23, "b")]


def test_fallbacks_hot_caches_and_failed_rows_are_no_candidates():
    frame = rows(TIMES)
    frame.loc[0, "path_ran"] = "cpu_fused (split)"
    frame.loc[3, "status"] = "implausible"
    frame.loc[4, "cache"] = "hot"
    kept = tune.candidates(frame)
    assert not {0, 2, 3, 4} & set(kept.index)


def test_mixed_archs_and_empty_frames_are_refused():
    with pytest.raises(MisuseError, match="several archs"):
        tune.build(pd.concat([rows(TIMES), rows(TIMES, arch="sm_90")]), "x")
    with pytest.raises(MisuseError, match="no timing row"):
        tune.build(rows(TIMES, status="failed"), "x")


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    tune.write("cpu", tune.build(rows(TIMES), "a run"), tmp_path / "dispatch")
    monkeypatch.setattr(table, "data_dir", lambda: tmp_path)
    table.ladders.cache_clear()
    yield
    table.ladders.cache_clear()


@pytest.mark.parametrize(
    ("m", "path"),
    [(1, "cpu_fused"), (255, "cpu_fused"), (256, "torch_rms_norm"), (10**6, "torch_rms_norm")],
)
def test_the_policy_follows_the_table(tuned, m, path):
    choice = policies.choose(Context(m=m))
    assert choice.path == path
    assert "a run (measured at 1536+512 bf16, cpu clock)" in choice.reason


def test_other_widths_take_the_nearest_ladder_and_say_so(tuned):
    choice = policies.choose(Context(m=1, q_lora_rank=768, kv_lora_rank=256))
    assert choice.path == "cpu_fused"
    assert "nearest measured: 1536+512 bf16" in choice.reason


def test_without_a_table_the_reason_says_that_nothing_was_measured(tuned):
    assert "nothing was measured on gfx950" in policies.choose(Context(arch="gfx950")).reason
    # kv alone is another kind of call
    assert "nothing was measured" in policies.choose(Context(q_lora_rank=0)).reason


def test_a_measured_path_that_cannot_run_is_replaced_and_said(tuned):
    choice = policies.choose(Context(m=1, packages=frozenset({"cxx"})))
    assert choice.path != "cpu_fused"
    assert "cpu_fused was measured faster, but" in choice.reason


def test_regret_by_hand(tuned):
    found = regret.regret(rows(TIMES), "torch_only")
    # 9/5 - 1, 30/20 - 1, 0, 0
    assert found.mean == pytest.approx((0.8 + 0.5) / 4)
    assert found.worst == pytest.approx(0.8)
    assert found.cells == 4
    ours = regret.regret(rows(TIMES), "mlakit")
    assert ours.worst == 0
    decode = regret.regret(rows(TIMES), "torch_only", "decode-heavy")
    weights = [1, 1 / 64, 1 / 1024, 1 / 4096]
    assert decode.weighted == pytest.approx((0.8 + 0.5 / 64) / sum(weights))


def test_a_loss_inside_the_interval_counts_as_none():
    frame = rows({1: {"cpu_fused": 1.0, "torch_rms_norm": 1.03}})
    frame["ratio_lo"], frame["ratio_hi"] = 0.96, 1.04
    assert regret.regret(frame, "torch_only").worst == 0


def test_unknown_names_are_refused():
    with pytest.raises(MisuseError, match="traffic"):
        regret.regret(rows(TIMES), "mlakit", "rush-hour")
    with pytest.raises(MisuseError, match="policy"):
        regret.regret(rows(TIMES), "nobody")
