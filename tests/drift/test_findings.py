"""The field's findings come out with the field's sizes."""

import pytest

from mlakit.drift.findings import COLUMNS, field_findings


@pytest.fixture(scope="module")
def rows():
    return field_findings().set_index("finding")


def test_rows_are_complete(rows):
    assert list(rows.reset_index().columns) == COLUMNS
    assert set(rows["property_of"]) == {"card", "compiler", "convention"}
    assert set(rows["evidence"]) == {"emulated"}
    assert (rows["source"].str.len() > 5).all()


def test_truncation_is_a_bias_and_the_order_is_not(rows):
    cut = rows.loc["AITER stores bf16: gfx950 against gfx942"]
    assert cut["bias_b"] == pytest.approx(-2.8e-3, rel=0.03)
    assert abs(cut["bias_a"]) < 2e-5
    assert cut["share_differ"] == pytest.approx(0.50, abs=0.01)
    assert cut["max_ulp"] == 1
    order = rows.loc["Hugging Face order against one rounding"]
    assert order["share_differ"] == pytest.approx(0.26, abs=0.01)
    assert order["max_ulp"] == 1
    assert abs(order["bias_b"]) < 1e-4


def test_eps_matters_for_small_latents_only(rows):
    large, small = (rows[rows.index.str.contains(s)].iloc[0] for s in ("RMS 0.7", "RMS 0.011"))
    assert large["share_differ"] < 0.02
    assert small["share_differ"] > 0.9
    for model in ("Kimi-K2", "LongCat", "MiniCPM3"):
        assert model in small["text"]


def test_reduction_order_and_fusion_move_next_to_nothing(rows):
    for finding in ("wave size as reduction order", "FP fusion in mean + eps"):
        assert rows.loc[finding, "share_differ"] < 1e-4
        assert rows.loc[finding, "max_ulp"] <= 1


def test_quantising_is_far_coarser_than_rounding(rows):
    eight = rows.loc["FP8 of gfx950 and NVIDIA against gfx942"]
    assert 0.01 < eight["rel_l2_a"] < 0.05
    assert eight["rel_l2_b"] == pytest.approx(eight["rel_l2_a"], rel=0.2)
    four = rows[rows.index.str.startswith("MXFP4")]
    assert ((four["rel_l2_a"] > 0.05) & (four["rel_l2_a"] < 0.2)).all()
