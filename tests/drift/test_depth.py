"""Divergence over depth: laws that were put in are found, and roundings do what they must."""

import numpy as np
import pytest
import torch

from mlakit.drift import depth
from mlakit.errors import MisuseError

LAYERS = np.arange(1, 62)


@pytest.mark.parametrize(
    ("values", "law", "rate"),
    [
        (2e-3 * np.sqrt(LAYERS), "square root", 0.0),
        (1e-3 * LAYERS, "linear", 0.0),
        (1e-3 * np.exp(0.05 * LAYERS), "exponential", 0.05),
    ],
)
def test_a_law_that_was_put_in_is_found(values, law, rate):
    noisy = values * np.exp(np.random.default_rng(0).normal(0, 0.03, 61))
    best = depth.fit(noisy)[0]
    assert best.name == law
    assert best.error == pytest.approx(0.03, rel=0.3)
    assert best.rate == pytest.approx(rate, rel=0.05)
    assert {found.name for found in depth.fit(noisy)} == set(depth.LAWS)


def test_no_divergence_fits_no_law():
    assert depth.fit(np.zeros(61))[0].error == float("inf")


def test_the_same_step_is_bit_equal_and_another_order_is_not():
    found = depth.divergence("round_once", "round_once", layers=6, tokens=16)
    assert not found.rel_l2.any()
    assert (found.top1_flips, found.kl) == (0.0, 0.0)
    assert "bit-equal after each of 6 layers" in found.text
    assert (found.floor > 0).all()
    assert found.floor[0] < 0.01


def test_a_second_rounding_is_near_the_floor_and_truncation_shrinks():
    twice = depth.divergence("round_once", "cast_then_weight")
    cut = depth.divergence("round_once", "truncate")
    for found in (twice, cut):
        assert len(found.rows()) == 61
        assert found.laws[0].name == "square root"
        assert found.rel_l2[-1] < 3 * found.floor[-1]
    # A cut loses half a step on average, nearest rounding nothing.
    assert cut.size[-1] < -5 * cut.size_floor[-1]
    assert abs(twice.size[-1]) < 3 * twice.size_floor[-1]
    assert "size -0." in cut.text


def test_reordering_changes_sums_only():
    """In float64 the floor is at float64's own precision: the permutation changes no meaning."""
    exact = depth.divergence(_exact, _exact, layers=4, tokens=8, dtype=torch.float64)
    assert 0 < exact.floor.max() < 1e-13
    assert exact.top1_floor == 0


def _exact(q, q_weight, q_eps, k, k_weight, k_eps):
    from mlakit.rounding import oracle

    return oracle(q, q_weight, q_eps), oracle(k, k_weight, k_eps)


def test_a_wrong_step_is_far_above_the_floor():
    def swapped(q, q_weight, q_eps, k, k_weight, k_eps):
        q, k = _exact(q, q_weight, q_eps, k, k_weight, k_eps)
        return 1.1 * q.bfloat16(), k.bfloat16()

    found = depth.divergence("round_once", swapped, layers=8, tokens=16)
    assert found.rel_l2[-1] > 5 * found.floor[-1]
    assert found.kl > found.kl_floor


def test_the_ends_are_top1_and_kl_as_defined():
    generator = torch.Generator().manual_seed(0)
    a, b, head = (torch.randn(n, 32, generator=generator) for n in (5, 5, 11))
    flips, kl = depth._ends(a, b, head)
    total, changed = 0.0, 0
    for x, y in zip(a.double(), b.double(), strict=True):
        p, q = (
            torch.softmax(4 * 32**-0.5 * (head.double() @ (z / z.square().mean().sqrt())), 0)
            for z in (x, y)
        )
        total += float((p * (p / q).log()).sum())
        changed += int(p.argmax() != q.argmax())
    assert kl == pytest.approx(total / 5, rel=1e-9)
    assert flips == changed / 5


def test_misuse():
    with pytest.raises(MisuseError, match="unknown path or rounding 'round_twice'"):
        depth.divergence("round_once", "round_twice")
    with pytest.raises(MisuseError, match="at least"):
        depth.divergence("round_once", "truncate", orders=0)
