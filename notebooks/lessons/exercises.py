"""The exercises' judges: ``check("1.1", answer)`` says right, not yet (with a hint) or unanswered.

A judge computes what is right with mlakit; none holds a stored answer where one can be computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import mlakit
from mlakit.context import Context
from mlakit.dispatch import policies
from mlakit.inputs import make
from mlakit.models import amdahl
from mlakit.paths import registry
from mlakit.records import Cell
from mlakit.rounding import ROUNDINGS, oracle, truncate_to
from mlakit.shapes import Widths, parse_hidden
from mlakit.timing import buffers, stats

WIDTHS = parse_hidden("DeepSeek-V3")
results: dict[str, bool | None] = {}
"""What the last check of each exercise said; None while it is unanswered."""


def check(name: str, answer: object) -> None:
    """Print whether ``answer`` is right; an answer that raises is not right yet."""
    if answer is None:
        results[name] = None
        print(f"{name}: not answered yet")
        return
    try:
        hint = JUDGES[name](answer)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        hint = f"{type(error).__name__}: {error}"
    results[name] = hint is None
    print(f"{name}: right" if hint is None else f"{name}: not yet: {hint}")


def _number(want: float, hint: str, share: float = 0.01) -> Callable[[float], str | None]:
    return lambda got: None if abs(got - want) <= share * abs(want) else hint


def _norm(answer: Callable) -> str | None:
    for family in ("normal", "large", "zero_rows"):
        given = make(7, Widths(96, 32), "fp32", family=family)
        got = answer(given.q, given.q_weight, 1e-6)
        if got.shape != given.q.shape:
            return f"the result has shape {tuple(got.shape)}, wanted {tuple(given.q.shape)}"
        want = oracle(given.q, given.q_weight, 1e-6)
        if not torch.allclose(got.double(), want, rtol=1e-5, atol=1e-12):
            return f"on {family} inputs it is not the oracle: is eps inside the root, w applied?"
    return None


def _both(answer: Callable) -> str | None:
    given = mlakit.make_inputs(9, WIDTHS)
    q, k = answer(*given.args)
    want = registry.get("torch_rms_norm").call(*given.args)
    for name, got, right in (("q", q, want[0]), ("kv", k, want[1])):
        if got.shape != right.shape or not torch.equal(got, right):
            return f"{name} differs from F.rms_norm of its own part with its own weight"
        if not got.is_contiguous():
            return f"{name} is not contiguous: the next matrix product wants it so"
    return None


def _differs(answer: Context) -> str | None:
    paths = [policies.choose(answer, r).path for r in ("sglang_before_fix", "sglang_after_fix")]
    same = f"both rules take {paths[0]}: the old one refused one arch"
    return None if paths[0] != paths[1] else same


def _rule(answer: Callable[[str, bool], str]) -> str | None:
    for arch in ("gfx942", "gfx950"):
        for aiter in (False, True):
            call = Context(arch=arch, use_aiter=aiter, aiter_api="pair" if aiter else "")
            want, got = policies.choose(call, "sglang_after_fix").path, answer(arch, aiter)
            if got != want:
                return f"on {arch} with aiter={aiter} the fixed rule takes {want}, yours {got}"
    return None


def _splits(answer: int) -> str | None:
    def launches(m: int) -> int:
        call = Context(arch="gfx950", m=m, use_aiter=True, aiter_api="pair")
        return policies.choose(call, "sglang_after_fix").launches

    right = launches(answer) == 2 and launches(answer - 1) == 1
    return None if right else f"at M = {answer} it launches {launches(answer)}, one row below not 1"


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Two ways timed in turn: the second takes a tenth less, and the machine drifts and spikes."""
    rng = np.random.default_rng(7)
    machine = np.linspace(1, 1.6, 200) * (1 + (rng.random(200) < 0.05) * rng.exponential(8, 200))
    return tuple(us * machine * (1 + 0.01 * rng.standard_normal(200)) for us in (11.0, 10.0))


def _paired(answer: Callable) -> str | None:
    base, this = samples()
    want, got = stats.paired_ratio(base, this).value, float(answer(base, this))
    return (
        None if abs(got - want) < 1e-9 else f"wanted {want:.4f}, got {got:.4f}: divide, then median"
    )


def _ring(answer: int) -> str | None:
    one = buffers.slot_bytes(Cell("cpu", 64, 1536, 512, ()))
    enough, tight = answer * one > 32 << 20, (answer - 1) * one <= 32 << 20
    return None if enough and tight else f"{answer} sets are {answer * one / 2**20:.1f} MiB"


def _cut(answer: Callable) -> str | None:
    x = torch.randn(4096) * torch.logspace(-20, 20, 4096)
    same = torch.equal(answer(x), truncate_to(x, torch.bfloat16))
    return None if same else "some element differs: keep the top 16 bits, drop the rest"


def mystery() -> Callable:
    """A norm whose order of roundings is to be found: ``mystery()(x, weight, eps)``."""
    return ROUNDINGS["cast_then_weight"]


def _real(answer: bool) -> str | None:
    said = mlakit.significance(0.928, 0.935, 1319)
    return None if answer == (said.verdict == "real") else said.text


_STEP = Cell("cpu", 64, 1536, 512, ())
_SAVED = amdahl.saving(amdahl.rounded("90.12"), amdahl.rounded("90.84"), 61)
JUDGES: dict[str, Callable[..., str | None]] = {
    "1.1": _number(WIDTHS.row_stride - WIDTHS.hidden, "what lies behind q and kv in a row?", 0),
    "1.2": _norm,
    "1.3": _number(buffers.bytes_moved(_STEP), "read x and the weights once, write y once", 0),
    "2.1": _both,
    "2.2": _number(registry.get("torch_native").launches, "look at the table's launches", 0),
    "3.1": _differs,
    "3.2": _rule,
    "3.3": _splits,
    "4.1": _paired,
    "4.2": _number(stats.paired_ratio(*samples()).value, "use your function of 4.1"),
    "4.3": _ring,
    "5.1": _cut,
    "5.2": _number(-1, "cutting makes every magnitude smaller or leaves it", 0),
    "5.3": lambda got: None if ROUNDINGS[got] is mystery() else "another one fits better",
    "6.1": _number(
        amdahl.tokens(3.0, 61, 20_000, 64).after.value, "61 layers save 3 us each", 1e-4
    ),
    "6.2": _number(
        _SAVED.layer_us.value, "1e6 / tokens a second is a step; 61 layers share it", 0.05
    ),
    "6.3": _real,
}
