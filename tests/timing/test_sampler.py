"""The sampler on lanes whose times are scripted."""

import gc

import numpy as np
import pytest

from mlakit.timing import sampler


class Scripted:
    def __init__(self, us, noise=0.0, seed=0, log=None, fail_at=None):
        self.us, self.noise, self.rng = us, noise, np.random.default_rng(seed)
        self.log, self.fail_at, self.taken = log, fail_at, 0

    def take(self):
        assert not gc.isenabled()
        self.taken += 1
        if self.log is not None:
            self.log.append(self.us)
        if self.taken == self.fail_at:
            raise RuntimeError("device gone")
        return self.us * (1 + self.noise * self.rng.standard_normal())


def test_stops_when_the_ratio_is_known_and_not_before():
    quiet = {"a": Scripted(5, 0.005, 1), "b": Scripted(4, 0.005, 2)}
    loud = {"a": Scripted(5, 0.06, 1), "b": Scripted(4, 0.06, 2)}
    kept = dict(budget_s=60, peers=["a", "b"], baselines=["a"])
    few, many = (sampler.sample(lanes, **kept) for lanes in (quiet, loud))
    assert few.converged
    assert many.converged
    assert len(few.samples_us["a"]) == sampler.MIN_ROUNDS
    assert len(many.samples_us["a"]) > 3 * sampler.MIN_ROUNDS


def test_a_spent_budget_ends_it_with_everything_kept():
    lanes = {"a": Scripted(5, 5.0, 1), "b": Scripted(4, 5.0, 2)}
    result = sampler.sample(lanes, budget_s=0.0, peers=["a", "b"], baselines=["a"])
    assert not result.converged
    assert [len(v) for v in result.samples_us.values()] == [3, 3]
    assert gc.isenabled()


def test_order_is_random_seeded_and_every_lane_runs_each_round():
    def order(seed):
        log = []
        lanes = {str(u): Scripted(u, log=log) for u in (1, 2, 3)}
        sampler.sample(lanes, budget_s=60, seed=seed, max_rounds=40, min_rounds=100)
        return [tuple(log[i : i + 3]) for i in range(0, len(log), 3)]

    rounds = order(7)
    assert len(rounds) == 40
    assert all(sorted(r) == [1, 2, 3] for r in rounds)
    assert len(set(rounds)) == 6
    assert rounds == order(7)
    assert rounds != order(8)


def test_a_failing_lane_is_kept_apart_and_the_others_go_on():
    lanes = {"a": Scripted(5), "b": Scripted(4, fail_at=10)}
    result = sampler.sample(lanes, budget_s=60, max_rounds=30, min_rounds=100)
    assert str(result.errors["b"]) == "device gone"
    assert len(result.samples_us["b"]) == 9
    assert len(result.samples_us["a"]) == 30
    assert result.fastest(["a", "b"]) == "a"


def test_recompiles_inside_the_loop_are_counted_for_their_lane():
    torch = pytest.importorskip("torch")
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

    class Recompiling:
        n = 0

        def take(self):
            self.n += 1
            compiled(torch.zeros(1 + self.n // 3))
            return 1.0

    result = sampler.sample(
        {"steady": Scripted(1), "compiled": Recompiling()}, budget_s=60, max_rounds=7
    )
    assert result.recompiles == {"steady": 0, "compiled": 3}
