"""Sampling: all lanes of a cell in turn, in a new random order each round, until it suffices."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mlakit.timing import stats

_TARGET = 0.01
"""half-width of the 95 % interval of a ratio at which sampling stops"""
MIN_ROUNDS, MAX_ROUNDS = 30, 3000


class Lane(Protocol):
    """Anything with a ``take`` that returns one sample in microseconds."""

    def take(self) -> float:
        """One sample, in microseconds."""


@dataclass
class Sampled:
    """Samples of each lane in the order taken; lanes that raised are in ``errors`` too."""

    samples_us: dict[str, list[float]]
    errors: dict[str, Exception] = field(default_factory=dict)
    recompiles: dict[str, int] = field(default_factory=dict)
    converged: bool = False

    def alive(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that were sampled to the end."""
        return [n for n in names if self.samples_us.get(n) and n not in self.errors]

    def fastest(self, names: Sequence[str]) -> str | None:
        """The lane with the lowest median of those alive."""
        alive = self.alive(names)
        return min(alive, key=lambda n: float(np.median(self.samples_us[n])), default=None)


_triton_compilations = 0


def _count_triton(**_: object) -> None:
    global _triton_compilations
    _triton_compilations += 1


def _watch_triton() -> None:
    """Count Triton's compilations from now on, unless something else listens already."""
    if "triton" not in sys.modules:
        return
    runtime = sys.modules["triton"].knobs.runtime
    if runtime.jit_post_compile_hook is None:
        runtime.jit_post_compile_hook = _count_triton


def _compilations() -> int:
    """Graphs that dynamo, and kernels that Triton (if watched), compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
    return graphs + _triton_compilations


def sample(
    lanes: Mapping[str, Lane],
    *,
    budget_s: float,
    seed: int = 0,
    peers: Sequence[str] = (),
    baselines: Sequence[str] = (),
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
) -> Sampled:
    """Take one sample of every lane a round, until ratios are known or the budget ends.

    Known: for every lane of ``peers``, the 95 % interval of the paired median ratio to the
    fastest of ``baselines`` is within 1 %. Three rounds are taken even beyond the budget. A lane
    that raises is dropped from later rounds and kept in ``errors``; the others go on. Nothing
    taken is thrown away. Python's garbage collector rests meanwhile.
    """
    order = random.Random(seed)
    result = Sampled({name: [] for name in lanes}, recompiles=dict.fromkeys(lanes, 0))
    names, rounds, check_at = list(lanes), 0, min_rounds
    _watch_triton()
    was_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    try:
        while names and rounds < max_rounds:
            order.shuffle(names)
            before = _compilations()
            for name in tuple(names):
                try:
                    result.samples_us[name].append(lanes[name].take())
                except Exception as error:
                    result.errors[name] = error
                    names.remove(name)
                after = _compilations()
                result.recompiles[name] += after - before
                before = after
            rounds += 1
            if rounds >= 3 and time.perf_counter() - start > budget_s:
                break
            if rounds >= check_at:
                check_at = int(rounds * 1.25) + 1
                if _known(result, peers, baselines):
                    result.converged = True
                    break
    finally:
        if was_collecting:
            gc.enable()
    return result


def _known(result: Sampled, peers: Sequence[str], baselines: Sequence[str]) -> bool:
    base = result.fastest(baselines) or result.fastest(peers)
    others = [n for n in result.alive(peers) if n != base]
    if base is None:
        return True
    if not others:
        only = stats.median_interval(np.array(result.samples_us[base]), resamples=300)
        return only.half_width <= _TARGET
    base_us = result.samples_us[base]
    return all(
        stats.paired_ratio(base_us, result.samples_us[n], resamples=300).half_width <= _TARGET
        for n in others
    )
