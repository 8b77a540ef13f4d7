"""What 03_drift shows beside its rows: every frame has what its table and figure need."""

import pandas as pd
import pytest

from mlakit.report import drifts


def test_ulp_bars_are_whole_and_say_their_evidence():
    bars = drifts.ulp_bars("1536+512", "bf16", m=4)
    assert set(bars["way"]) == {*drifts.PATHS, *drifts.FORMULAS}
    assert bars.groupby("way")["share"].sum().to_list() == pytest.approx([1.0] * 6)
    cut = bars[(bars["way"] == "truncate") & (bars["share"] > 0)]
    assert set(cut["bin"]) == {"-1", "0"}
    evidence = bars.groupby("way")["evidence"].first()
    assert (evidence[list(drifts.PATHS)] == "measured").all()
    assert (evidence[list(drifts.FORMULAS)] == "emulated").all()


def test_growth_has_a_row_a_layer_and_a_sentence_a_pair():
    rows, words = drifts.growth(layers=6)
    assert rows.groupby("way")["layer"].max().to_list() == [6, 6, 6]
    assert len(words) == len(drifts.PAIRS)
    assert all("floor" in w for w in words)


def test_the_storys_figures_are_judged():
    verdicts = drifts.story()["verdict"].to_list()
    assert verdicts == ["no evidence", "no samples, no verdict", "no baseline, no verdict"]


def test_recorded_fingerprints_agree_with_their_sources():
    found = drifts.recorded("fingerprints")
    ran = found[(found["status"] == "ok") & (found["reads_as"] != "")]
    assert len(ran) >= 20
    assert set(ran["agrees"]) == {"True"}
    assert drifts.recorded("no such kind").empty


def test_known_findings_say_whose_they_are():
    assert set(drifts.known()["property_of"]) == {"card", "compiler", "convention"}


def test_recorded_audits_hold_no_failure_and_list_what_is_no_pass():
    counts, odd = drifts.audits()
    assert "fail" not in counts
    assert set(counts["target"]) >= {"triton_fused", "torch_native", "liger_rms_norm"}
    assert set(odd["verdict"]) == {"convention difference", "refused"}


def test_what_no_arch_changes_is_made_once_a_report(tmp_path, monkeypatch):
    made = []

    def flips(device: str, n: int) -> pd.DataFrame:
        made.append(n)
        return pd.DataFrame(
            {"side": ["truncate", "gemma"], "p": [0.5, None], "agrees": [True, None]}
        )

    monkeypatch.setattr(drifts.flips, "flips", flips)
    first, again = (drifts.answers(str(tmp_path), 7) for _ in range(2))
    pd.testing.assert_frame_equal(first, again)
    assert made == [7]
    assert drifts.answers("", 7)["side"][:2].to_list() == ["truncate", "gemma"]
    assert made == [7, 7]


def test_ulp_bars_without_a_q_latent_are_of_kv():
    bars = drifts.ulp_bars("0+512", "bf16", m=4)
    assert bars.groupby("way")["share"].sum().round(9).eq(1).all()


def test_a_path_that_cannot_run_has_no_bars(monkeypatch):
    monkeypatch.setattr(drifts.probe, "packages", lambda: frozenset())
    ways = set(drifts.ulp_bars("96+32", "bf16", m=4)["way"])
    assert "cpu_fused" not in ways
    assert {"torch_native", "truncate"} <= ways
