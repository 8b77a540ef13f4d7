"""Microseconds to tokens and back, against arithmetic by hand and Monte Carlo."""

import numpy as np
import pytest

from mlakit.errors import MisuseError
from mlakit.models import amdahl
from mlakit.timing.stats import Interval


def test_the_storys_figures_mean_88_us_a_token():
    found = amdahl.saving(amdahl.rounded("90.12"), amdahl.rounded("90.84"), 61)
    assert found.step_us.value == pytest.approx(1e6 / 90.12 - 1e6 / 90.84)
    assert round(found.step_us.value) == 88
    assert round(found.layer_us.value, 2) == 1.44
    # The last digit alone leaves 0.6 us on either figure.
    assert found.step_us.hi - found.step_us.lo == pytest.approx(2 * 0.61 * 2**0.5, rel=0.02)
    assert "1.44 us a layer" in found.text
    assert "over 61 layers" in found.text


def test_there_and_back():
    saved = Interval(1.44, 1.3, 1.6)
    gain = amdahl.tokens(saved, 61, 1e6 / 90.12)
    back = amdahl.saving(gain.before.value, gain.after.value, 61)
    assert back.layer_us.value == pytest.approx(1.44)
    assert gain.ratio.value == pytest.approx(gain.after.value / gain.before.value)
    assert gain.share.value == pytest.approx(1.44 * 61 * 90.12 / 1e6)
    batched = amdahl.tokens(saved, 61, 20_000.0, batch=64)
    assert batched.before.value == pytest.approx(64 * 50)
    assert amdahl.tokens(saved, 61, 20_000.0).ratio == batched.ratio


def test_intervals_are_those_of_monte_carlo():
    rng = np.random.default_rng(0)
    saved, step = rng.normal(2, 0.2, 200_000), rng.normal(10_000, 100, 200_000)
    drawn = 1e6 / (step - 61 * saved)
    gain = amdahl.tokens(
        Interval(2, 2 - 1.96 * 0.2, 2 + 1.96 * 0.2),
        61,
        Interval(10_000, 10_000 - 196, 10_000 + 196),
    )
    low, high = np.percentile(drawn, (2.5, 97.5))
    width = high - low
    assert gain.after.lo == pytest.approx(low, abs=0.03 * width)
    assert gain.after.hi == pytest.approx(high, abs=0.03 * width)


def test_a_cost_is_a_loss():
    gain = amdahl.tokens(-1.0, 61, 10_000.0)
    assert gain.ratio.value < 1
    assert gain.after.value < gain.before.value


def test_the_share_that_is_saved():
    assert amdahl.tokens(1.44, 61, 61 * 144.0).share.value == pytest.approx(0.01)


@pytest.mark.parametrize("given", [(1.0, 61, 0.0), (200.0, 61, 10_000.0), (1.0, 0, 100.0)])
def test_impossible_savings_are_refused(given):
    with pytest.raises(MisuseError):
        amdahl.tokens(*given)
    with pytest.raises(MisuseError, match="above 0"):
        amdahl.saving(0.0, 90.0, 61)
