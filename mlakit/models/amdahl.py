"""From microseconds a layer to tokens a second, and back, with intervals.

A decode step gives one token to each of ``batch`` sequences: ``tokens/s = batch * 1e6 / step_us``.
What a layer saves counts once a layer and step, however many sequences share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.errors import MisuseError
from mlakit.timing.stats import Interval


@dataclass(frozen=True)
class Gain:
    """What a saving makes of a step. Tokens/s are all sequences' together."""

    before: Interval
    after: Interval
    ratio: Interval
    share: Interval
    """of the step that is saved"""


@dataclass(frozen=True)
class Saving:
    """What two throughputs imply: microseconds saved a step and a layer."""

    step_us: Interval
    layer_us: Interval
    text: str


def tokens(
    saved_us: Interval | float, layers: int, step_us: Interval | float, batch: int = 1
) -> Gain:
    """The gain from ``saved_us`` a layer over ``layers`` of a step that takes ``step_us``.

    Args:
        saved_us: below 0 where it costs; a plain number has no spread.
        layers: that have the step (61 in DeepSeek-V3).
        step_us: of the whole model's decode step before the saving.
        batch: sequences that decode together.

    Raises:
        MisuseError: a step time of 0 or less, or a saving that is the whole step.
    """
    saved, step = _interval(saved_us), _interval(step_us)
    if step.lo <= 0 or layers < 1 or batch < 1:
        raise MisuseError(f"a step of {step.lo:g} us, {layers} layers, batch {batch}: all above 0")
    if saved.hi * layers >= step.lo:
        raise MisuseError(
            f"{saved.hi:g} us in each of {layers} layers is the whole step of {step.lo:g} us: "
            "give the time of the whole model's step"
        )
    work = 1e6 * batch

    def share(s: float, t: float) -> float:
        return s * layers / t

    part = _propagate(share, saved, step)
    return Gain(
        _propagate(lambda t: work / t, step),
        _propagate(lambda s, t: work / (t - s * layers), saved, step),
        _propagate(lambda s, t: 1 / (1 - share(s, t)), saved, step),
        part,
    )


def saving(before: Interval | float, after: Interval | float, layers: int) -> Saving:
    """What a layer must have saved for ``before`` tokens/s to become ``after``.

    Published figures have no samples: their interval here is only that of their last digit, which
    ``rounded`` makes. It says nothing of the spread between runs, which is usually far larger.

    Raises:
        MisuseError: a throughput of 0 or less.
    """
    old, new = _interval(before), _interval(after)
    if min(old.lo, new.lo) <= 0 or layers < 1:
        raise MisuseError("throughputs and layers must all be above 0")
    step = _propagate(lambda a, b: 1e6 / a - 1e6 / b, old, new)
    layer = Interval(*(v / layers for v in (step.value, step.lo, step.hi)))
    text = (
        f"{old.value:g} to {new.value:g} token/s is {step.value:.0f} us a step "
        f"({step.lo:.0f} to {step.hi:.0f}), {layer.value:.2f} us a layer "
        f"({layer.lo:.2f} to {layer.hi:.2f}) over {layers} layers"
    )
    return Saving(step, layer, text)


def rounded(text: str) -> Interval:
    """A figure as printed, with the interval of its last digit: ``"90.12"`` is 90.115 to 90.125."""
    _, _, decimals = text.partition(".")
    half = 0.5 * 10.0 ** -len(decimals)
    return Interval(float(text), float(text) - half, float(text) + half)


def _interval(value: Interval | float) -> Interval:
    return value if isinstance(value, Interval) else Interval(*(float(value),) * 3)


def _propagate(f, *inputs: Interval) -> Interval:
    """f of independent figures: each moved to its ends alone, and the moves added in quadrature."""
    middle = [i.value for i in inputs]
    at = f(*middle)
    below = above = 0.0
    for n, i in enumerate(inputs):
        ends = [f(*middle[:n], end, *middle[n + 1 :]) - at for end in (i.lo, i.hi)]
        below += min(*ends, 0.0) ** 2
        above += max(*ends, 0.0) ** 2
    return Interval(at, at - below**0.5, at + above**0.5)
