"""Statistics against scipy, closed forms and simulated samples whose truth is known."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from mlakit.timing import stats


def spiky(rng, n):
    return 5 * (1 + 0.01 * rng.standard_normal(n)) + (rng.random(n) < 0.02) * rng.exponential(50, n)


def test_summary_against_scipy():
    x = np.random.default_rng(0).lognormal(size=501)
    row = stats.summary(x)
    for p in (5, 20, 50, 80, 95):
        assert row[f"p{p:02d}_us"] == pytest.approx(scipy_stats.scoreatpercentile(x, p))
    assert row["mad_us"] == pytest.approx(scipy_stats.median_abs_deviation(x))


def test_paired_ratio_covers_the_truth_nineteen_times_in_twenty():
    inside = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        this = spiky(rng, 100)
        found = stats.paired_ratio(spiky(rng, 100) * 1.3, this, resamples=400, seed=seed)
        inside += found.lo <= 1.3 <= found.hi
    # 95 % of 200, less two standard errors
    assert inside >= 184


@pytest.mark.parametrize("n", [5, 12, 30, 100, 300])
def test_intervals_of_identical_lanes_hold_one_nineteen_times_in_twenty(n):
    inside = off = 0
    for seed in range(300):
        a, b = np.random.default_rng(seed).lognormal(1, 0.02, (2, n))
        found = stats.paired_ratio(a, b, resamples=300, seed=seed)
        inside += found.lo <= 1 <= found.hi
        change, error = stats.log_change(a, b, seed=seed)
        off += abs(change) > 1.96 * error
    assert inside >= 277
    assert off <= 23


def test_what_slows_a_whole_round_cancels():
    rng = np.random.default_rng(1)
    load = np.exp(rng.normal(0, 0.5, 100))
    found = stats.paired_ratio(2 * load, load)
    assert (found.value, found.lo, found.hi) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="equal lengths"):
        stats.paired_ratio([1, 2], [1])


def test_block_bootstrap_widens_with_drift_inside_a_run():
    rng = np.random.default_rng(2)
    steps = np.repeat(1 + 0.05 * rng.standard_normal(10), 20)
    x = steps + 0.001 * rng.standard_normal(200)
    blocks = np.std(stats.bootstrap_medians(x))
    singles = np.std(stats.bootstrap_medians(x, block=1))
    assert blocks > 1.3 * singles


def test_drift_is_last_tenth_over_first():
    assert stats.drift(np.linspace(1, 1.1, 200)) == pytest.approx(0.09, abs=0.01)
    assert stats.drift([1, 2, 3]) == 0
    assert abs(stats.drift(spiky(np.random.default_rng(3), 500))) < 0.01


def test_bimodal_is_two_clusters_not_spikes():
    rng = np.random.default_rng(4)
    recompiled = np.where(np.arange(200) % 10 == 9, 50.0, 1.0) * (1 + 0.01 * rng.normal(size=200))
    halves = np.repeat([1.0, 1.2], 100) * (1 + 0.01 * rng.normal(size=200))
    assert stats.is_bimodal(recompiled)
    assert stats.is_bimodal(halves)
    for share, spike in ((0.01, 50), (0.02, 20), (0.003, 30)):
        hit = rng.random(200) < share
        assert stats.is_bimodal(halves * 10 + hit * spike), (share, spike)
    single = [rng.normal(5, 0.05, 300), 1 + rng.exponential(1, 300), rng.uniform(1, 2, 300)]
    assert not any(stats.is_bimodal(x) for x in single)
    assert not any(stats.is_bimodal(spiky(np.random.default_rng(s), 200)) for s in range(50))


def test_log_change_and_its_error():
    changes = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        changes.append(stats.log_change(spiky(rng, 100), 1.05 * spiky(rng, 100), seed=seed))
    values, errors = np.array(changes).T
    assert values.mean() == pytest.approx(np.log(1.05), abs=0.001)
    assert 0.6 < np.median(errors) / values.std() < 1.6


def test_holm_against_a_worked_example():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, made monotone.
    got = stats.holm(np.array([0.01, 0.04, 0.03, 0.005]))
    assert got == pytest.approx([0.03, 0.06, 0.06, 0.02])
