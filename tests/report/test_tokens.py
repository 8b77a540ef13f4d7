"""The sentences and frames of 05_tokens: only what was measured, and the story judged."""

import json

import numpy as np
import pytest

from mlakit.models import stack
from mlakit.report import tokens
from mlakit.timing.stats import Interval


def result(saved_alone: float, arch: str = "sm_90") -> dict:
    """61 layers in which triton_fused saves 2 us a layer, as a recorded file has it."""
    base = 7000 + np.arange(40.0)
    alone = {"torch_rms_norm": 5.0, "triton_fused": 5 - saved_alone}
    us = {
        "torch_rms_norm": base + 61 * 5,
        "triton_fused": base + 61 * 3,
        "no_step": base,
    }
    return {
        "schema": 1, "evidence": "measured", "started_at": "2026-01-01T00:00:00+00:00",
        "device": "a card", "arch": arch, "layers": 61, "refused": {"1": {}},
        "samples_us": {"1": {k: list(v) for k, v in us.items()}},
        "micro_us": {"1": {stack.PREDICTOR: alone}},
    }  # fmt: skip


def test_the_prediction_is_held_against_the_measurement():
    near, far = (tokens.frame(result(s)) for s in (2.2, 4.0))
    row = near[near["lane"] == "triton_fused"].iloc[0]
    assert row[f"off_{stack.PREDICTOR}"] == pytest.approx(0.1)
    assert np.isnan(row["off_given"])
    assert row["gain_predicted"] == pytest.approx(1 + 61 * 2.2 / (7019.5 + 305), rel=2e-3)
    said = tokens.verdict(result(2.2), near, "sm_90")
    assert "triton_fused makes" in said[0]
    assert "measured on a card, 61 attention layers" in said[0]
    assert "1 of 1 savings predicted within 20%" in said[1]
    assert "0 of 1 savings predicted within 20%" in tokens.verdict(result(4.0), far, "sm_90")[1]


def test_shares_and_gains_are_those_of_the_samples():
    rows = tokens.frame(result(2.0))
    text = tokens.verdict(result(2.0), rows, "sm_90")[0]
    median = np.median(7000 + np.arange(40.0))
    assert f"the step is {183 / (median + 183):.1%} of it" in text
    assert f"{(median + 305) / (median + 183) - 1:+.2%}" in text


def test_a_saving_that_is_not_told_from_none_is_not_compared():
    made = result(2.0)
    noise = np.random.default_rng(0).normal(0, 300, 40)
    made["samples_us"]["1"]["triton_fused"] = list(7305 + noise)
    rows = tokens.frame(made)
    assert rows[rows["lane"] == "triton_fused"][f"off_{stack.PREDICTOR}"].isna().all()
    assert "triton_fused" not in tokens.savings(rows)


def test_the_story_is_worked_out_and_not_judged_real():
    said = " ".join(tokens.story(tokens.frame(result(2.0)), "sm_90"))
    assert "88 us a step" in said
    assert "1.44 us a layer" in said
    assert "whether it is chance can't be said" in said
    assert "triton_fused against torch_rms_norm at batch 1 on sm_90" in said
    assert tokens.implied().layer_us.value == pytest.approx(1.442, abs=0.002)


def test_where_nothing_ran_nothing_is_stated():
    made = tokens.stack_result("gfx950", [1], 0)
    rows = tokens.frame(made)
    assert made is None
    assert rows.empty
    assert tokens.verdict(made, rows, "gfx950") == [
        "No token rate is stated for gfx950: no decode stack was measured there."
    ]
    assert len(tokens.story(rows, "gfx950")) == 2
    assert tokens.savings(rows) == {}


def test_recorded_stacks_are_found_and_called_recorded(tmp_path, monkeypatch):
    (tmp_path / "recorded" / "card").mkdir(parents=True)
    for day, arch, weights in (
        (1, "sm_90", "float"), (2, "sm_90", "float"), (3, "gfx942", "float"), (4, "sm_90", "mxfp4"),
    ):  # fmt: skip
        made = result(2.0, arch) | {"started_at": f"2026-01-0{day}T00:00:00+00:00"}
        made["weights"] = weights
        (tmp_path / "recorded" / "card" / f"{day}-stack.json").write_text(json.dumps(made))
    monkeypatch.setattr(tokens, "data_dir", lambda: tmp_path)
    assert [r["started_at"][9] for r in tokens.recorded("sm_90")] == ["2", "1", "4"]
    rows = tokens.frame(tokens.stack_result("sm_90", [1], 0))
    assert set(rows["evidence"]) == {"recorded"}


def test_what_a_launch_costs_is_read_off_the_experiment(tmp_path, monkeypatch):
    (tmp_path / "recorded" / "card").mkdir(parents=True)
    (tmp_path / "recorded" / "card" / "1-stack-forks.csv").write_text(
        "arch,device,experiment,batch,layers,forks,step_us,step_lo,step_hi\n"
        "sm_90,a card,forks,1,10,0,112,111,113\n"
        "sm_90,a card,forks,1,10,10,150,149,151\n"
        "sm_90,a card,torch_rms_norm,1,10,0,100,99,102\n"
        "sm_90,a card,torch_rms_norm,1,2,0,20,20,20\n"
    )
    monkeypatch.setattr(tokens, "data_dir", lambda: tmp_path)
    (said,) = tokens.launches()
    assert "costs 1.20 us (0.90 to 1.40) a layer at batch 1 (recorded on a card)" in said


def test_what_a_saving_is_worth():
    frame = tokens.gains(Interval(1.44, 1.4, 1.5), 61, (20.0, 90.12))
    assert frame["after"].iloc[1] == pytest.approx(90.84, abs=0.01)
    assert (frame["gain_lo"] < frame["gain"]).all()
    assert set(frame["evidence"]) == {"modelled"}


def test_the_figures_draw_every_lane():
    from mlakit import plots

    rows = tokens.frame(result(2.0))
    axes = plots.token_gain(rows).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert set(labels) == {"torch_rms_norm", "triton_fused", "no step at all (control)"}
    frame = tokens.gains(Interval(1.44, 1.4, 1.5), 61, (20.0, 90.12))
    drawn = plots.amdahl({"a": frame, "b": frame}).axes[0]
    assert drawn.get_legend_handles_labels()[1] == ["a", "b"]


def test_the_small_stack_is_measured_here():
    made = tokens.stack_result("cpu", [1], 0)
    assert made["evidence"] == "measured"
    assert stack.DELETED in made["samples_us"]["1"]
    assert made["samples_us"]["1"]["torch_native"]


def test_the_slider_says_both_directions():
    from mlakit import widgets

    text = widgets.tokens_view(1.44, 61, 90.12, 90.84)
    assert "90.12 to 90.84 token/s (+0.80%)" in text
    assert "+1.44 us a layer, +88 us a token" in text
    assert "whether it is chance can&#x27;t be said" in text
    box = widgets.tokens()
    saved = next(c for c in box.children[1].children if "us a layer" in c.description)
    saved.value = 0.0
    assert "90.12 to 90.12" in box.children[2].value
    saved.value = 10.0
    box.children[1].children[2].value = 500.0
    saved.max = 40.0
    saved.value = 40.0
    assert "the whole step" in box.children[2].value
