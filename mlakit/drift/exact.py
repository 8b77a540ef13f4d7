"""The judge's exact tests, for answers too few for a normal variable; scipy is loaded on use."""

from __future__ import annotations

import math

NEEDED = 6
"""the fewest one-sided changes that are real: 2 / 2**6 is under 0.05, 2 / 2**5 is not"""


def least_shown(n: float) -> float:
    """The rate that gives ``NEEDED`` changes in n questions in 80 % of tries: about 7.9 / n.

    No smaller difference can be shown, however few the other changes are. Exact for pairs; for two
    runs of under 20 questions, where Fisher's test takes fewer changes, on the safe side.
    """
    if n < NEEDED:
        return 1.0
    from scipy.stats import beta

    # the rate at which a binomial of n reaches k in 80 % of tries is a quantile of a beta
    return float(beta.ppf(0.8, NEEDED, n - NEEDED + 1))


def too_few(n_a: int, n_b: int) -> bool:
    """Whether not even all wrong against all right is real: Fisher's p of it is 2 in so many."""
    return n_a + n_b <= 40 and 2 / math.comb(n_a + n_b, n_a) > 0.05


def fisher(right_a: int, n_a: int, right_b: int, n_b: int) -> float:
    """Fisher's exact two-sided p of two counts of right answers."""
    from scipy.stats import fisher_exact

    table = [[right_a, n_a - right_a], [right_b, n_b - right_b]]
    return min(float(fisher_exact(table)[1]), 1.0)


def mcnemar(lost: int, won: int, n: int) -> tuple[float, tuple[float, float]]:
    """Exact two-sided p, and the interval of the difference, which leaves out 0 where p < 0.05.

    Clopper and Pearson's interval of the share won, by the share of questions that flipped.
    """
    from scipy.stats import binomtest

    flips = lost + won
    # at least as many as none in n leaves possible (97.5 %): no flips do not rule out a few
    share = max(flips / n, 1 - 0.025 ** (1 / n))
    if not flips:
        return 1.0, (-share, share)
    result = binomtest(won, flips, 0.5)
    low, high = result.proportion_ci(0.95, method="exact")
    return float(result.pvalue), (float(2 * low - 1) * share, float(2 * high - 1) * share)
