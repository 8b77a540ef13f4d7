"""Flips of the small model: what must show shows, what must not does not."""

import pandas as pd
import pytest
import torch

from mlakit.datafiles import data_dir
from mlakit.drift.flips import BASELINE, flips, sides
from mlakit.errors import MisuseError
from mlakit.models import small
from mlakit.rounding import ROUNDINGS

NAMES = [BASELINE, "truncate", "gemma", "torch_rms_norm", "torch_mxfp4", "torch_mxfp4, q_b too"]


@pytest.fixture(scope="module")
def rows():
    return flips(n=600, names=NAMES).set_index("side")


def test_every_kind_of_side_is_there():
    found = sides()
    assert set(found.values()) == {"rounding", "path", "q latent", "q latent and q_b"}
    assert set(ROUNDINGS) <= set(found)
    for name in ("torch_fp8_group128", "torch_fp8_token", "torch_mxfp4"):
        assert found[name] == "q latent"
        assert found[f"{name}, q_b too"] == "q latent and q_b"


def test_the_baseline_flips_nothing_against_itself(rows):
    assert rows.loc[BASELINE, "lost"] == rows.loc[BASELINE, "won"] == 0
    assert rows.loc[BASELINE, "verdict"] == "no evidence"


def test_a_path_that_rounds_as_the_baseline_flips_next_to_nothing(rows):
    assert rows.loc["torch_rms_norm", ["lost", "won"]].sum() <= 2


def test_another_function_is_seen_at_once(rows):
    gemma = rows.loc["gemma"]
    assert gemma["verdict"] == "real"
    assert gemma["p_holm"] < 1e-6
    assert gemma["high"] < -0.2


def test_four_bits_flip_more_than_a_rounding(rows):
    flipped = rows["lost"] + rows["won"]
    assert flipped["torch_mxfp4"] > flipped["truncate"]


def test_figures_agree_with_each_other_and_with_the_answers(rows):
    asked = small.questions(600)
    right = small.right(small.load(), asked, small.plain_step)
    assert rows.loc["torch_rms_norm", "accuracy"] == pytest.approx(float(right.double().mean()))
    base = rows.loc[BASELINE, "accuracy"]
    got = base + (rows["won"] - rows["lost"]) / 600
    assert torch.allclose(torch.tensor(got.values), torch.tensor(rows["accuracy"].values))
    assert (rows["p_holm"] >= rows["p"]).all()
    assert (rows["low"] <= rows["difference"]).all()
    assert (rows["difference"] <= rows["high"]).all()


def test_an_unknown_side_is_refused():
    with pytest.raises(MisuseError, match="side"):
        flips(n=10, names=["truncated"])


@pytest.mark.parametrize("n", [0, -5])
def test_no_questions_are_refused(n):
    with pytest.raises(MisuseError, match="from 1 on"):
        flips(n=n, names=[BASELINE])


def test_more_questions_than_there_are_count_as_many_as_there_are(monkeypatch):
    monkeypatch.setattr(small, "questions", lambda n, all=small.questions(8): all[:n])
    assert flips(n=20, names=[BASELINE])["n"].tolist() == [8]


def test_the_verdict_allows_for_the_number_of_sides(rows):
    recorded = pd.read_csv(data_dir() / "recorded/h200/2026-11-30-flips.csv")
    assert ((recorded["p"] < 0.05) & (recorded["p_holm"] > 0.5)).any()  # luck among 38 sides
    for table in (rows, recorded):
        likely = table["p_holm"] > 0.32  # |z| under 1
        assert set(table.loc[likely, "verdict"]) == {"no evidence"}
        assert (table.loc[table["p_holm"] < 0.05, "verdict"] == "real").all()
