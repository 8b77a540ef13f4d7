"""The metrics against counts made another way."""

import math

import numpy as np
import pytest
import torch

from mlakit.drift.ulp import compare, ulps
from mlakit.rounding import ROUNDINGS, oracle, order, round_to


def _case(dtype=torch.bfloat16, m=64, n=256):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, n, generator=generator).to(dtype)
    w = (1 + 0.25 * torch.randn(n, generator=generator)).to(dtype)
    return x, w, oracle(x, w, 1e-6)


def test_from_a_zero_every_error_is_away():
    got = torch.tensor([-1e-45, 1e-45, -0.0, 1e-45, -1.0], dtype=torch.float32)
    want = torch.tensor([0.0, -0.0, 0.0, -1e-60, -1.0], dtype=torch.float64)
    assert ulps(got, want).tolist() == [1, 1, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_order_counts_every_representable_value(dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    by_size = values[values.double().argsort(stable=True)]
    steps = order(by_size).diff()
    # -0 and +0 are the one pair that does not step
    assert sorted(set(steps.tolist())) == [0, 1]
    assert int((steps == 0).sum()) == 1


def test_ulps_agree_with_numpy_spacing():
    *_, want = _case(torch.float32)
    got = (want * (1 + 3e-7)).float()
    spacing = np.spacing(want.float().abs().numpy()).astype(np.float64)
    nearest = want.float().double().numpy()
    by_numpy = np.abs(got.double().numpy() - nearest) / spacing
    away = ulps(got, want)
    assert np.abs(np.abs(away.numpy()) - by_numpy).max() <= 2
    assert float((away > 0).double().mean()) > 0.99


def test_a_correct_output_is_all_correct():
    *_, want = _case()
    drift = compare(round_to(want, torch.bfloat16), want)
    assert drift.share_correct == 1
    assert drift.max_ulp == 0
    assert drift.histogram == (0, 0, 0, want.numel(), 0, 0, 0)
    assert not drift.biased


def test_truncation_is_biased_and_one_sided_and_rounding_is_not():
    x, w, want = _case(m=512)
    cut = compare(ROUNDINGS["truncate"](x, w, 1e-6), want)
    assert cut.biased
    assert cut.signed_bias == pytest.approx(-2.8e-3, rel=0.03)
    assert cut.max_ulp == 1
    assert sum(cut.histogram[4:]) < 10
    for name in ("round_once", "cast_then_weight"):
        assert not compare(ROUNDINGS[name](x, w, 1e-6), want).biased


def test_bias_and_its_error_by_hand():
    want = torch.full((4, 8), 2.0, dtype=torch.float64)
    got = want.clone()
    got[0] *= 1.5
    drift = compare(got.float(), want)
    assert drift.signed_bias == pytest.approx(0.125)
    # rows move as one: the error of a mean of 4 rows, not of 32 elements
    rows = np.array([0.5, 0, 0, 0])
    assert drift.bias_se == pytest.approx(np.sqrt(((rows - 0.125) ** 2).sum()) / 4)


def test_worst_row_and_channel_are_found():
    x, w, want = _case()
    got = ROUNDINGS["round_once"](x, w, 1e-6)
    got[17] *= 1.1
    assert compare(got, want).worst_row == 17
    got = ROUNDINGS["round_once"](x, w, 1e-6)
    got[:, 33] *= 1.1
    assert compare(got, want).worst_channel == 33


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_nonfinite_element_is_never_averaged_away(poison):
    x, w, want = _case()
    got = ROUNDINGS["round_once"](x, w, 1e-6)
    got[5, 9] = poison
    drift = compare(got, want)
    assert drift.nonfinite_mismatch == 1
    assert math.isinf(drift.rel_l2)
    assert math.isnan(drift.signed_bias)
    assert math.isnan(drift.cosine)
    assert drift.max_ulp == 2**16
    assert (drift.worst_row, drift.worst_channel) == (5, 9)


def test_the_right_nan_is_right():
    x, w, _ = _case()
    x[3, 3] = math.nan
    drift = compare(ROUNDINGS["round_once"](x, w, 1e-6), oracle(x, w, 1e-6))
    assert drift.nonfinite_mismatch == 0
    assert drift.max_ulp <= 1


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="equal, non-empty"):
        compare(torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="equal, non-empty"):
        compare(torch.ones(0, 3), torch.ones(0, 3, dtype=torch.float64))
