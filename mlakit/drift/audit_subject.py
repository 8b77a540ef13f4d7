"""The callable under audit, and what the audit's cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mlakit.drift.ulp import ulps
from mlakit.inputs import TORCH_DTYPES, Inputs, make
from mlakit.rounding import oracle
from mlakit.shapes import Widths

PASS, FAIL, CONVENTION, REFUSED, NOT_APPLICABLE = (
    "pass",
    "fail",
    "convention difference",
    "refused",
    "not applicable",
)
Verdict = tuple[str, str]
"""(one of the five, detail)"""

_LIMIT_ULPS = {"bf16": 8, "fp16": 8, "fp32": 1024}
"""Ulps from float64 beyond which an element is wrong, not rounded otherwise: every named rounding
but those that round a sum stays within 4."""

ROWS = (1, 2, 255, 256, 257, 4095, 4096, 4097, 16383, 16384, 16385, 65535, 65536, 65537)
"""Batches around the edges of known launch tables: AITER's 4096 and 16384, a grid's 65535."""

ODD_WIDTHS = (1, 2, 511, 512, 513, 769, 1535, 1536, 8192, 8193, 16384)

REAL, SMALL, TINY = Widths(1536, 512, 64), Widths(96, 32, 16), Widths(4, 2, 2)


class Failed(Exception):
    """A broken promise: what is wrong, and the smallest input found that shows it."""

    def __init__(self, detail: str, smallest: str = "") -> None:
        super().__init__(detail)
        self.smallest = smallest


@dataclass(frozen=True)
class Subject:
    """The callable under audit: ``call(q, q_weight, q_eps, k, k_weight, k_eps)`` -> a pair."""

    call: Callable
    device: str = "cpu"
    dtype: str = "bf16"
    takes_out: bool = False
    max_m: int | None = None
    """largest batch to try, for what is too slow for more (an interpreter)"""

    def inputs(self, m: int, widths: Widths = REAL, **more: Any) -> Inputs:
        """Seeded split views with non-unit weights on the subject's device."""
        more.setdefault("seed", m)
        more.setdefault("eps", (1e-6, 1e-5))
        return make(m, widths, dtype=self.dtype, device=self.device, **more)

    def rows(self, limit: int | None = None) -> list[int]:
        """Batches of ``ROWS`` within the subject's limit."""
        limits = [v for v in (limit, self.max_m) if v is not None]
        return [m for m in ROWS if not limits or m <= min(limits)]

    def widths(self, m: int) -> Widths:
        """Real widths; small ones on a CPU from 4095 rows on, to stay cheap."""
        return REAL if self.device != "cpu" or m < 4095 else SMALL

    def check(self, given: Inputs, got: tuple | None = None) -> tuple:
        """The outputs for ``given``, if both are right.

        Raises:
            Failed: with the first wrong element and the smallest input that shows one.
        """
        got = self.call(*given.args) if got is None else got
        problem = wrong(given, got, self.dtype)
        if problem:
            raise Failed(*(self._shrink(given) or (problem, describe(given))))
        return got

    def _shrink(self, given: Inputs) -> tuple[str, str] | None:
        """The first smaller input of the same kind that is wrong too: (problem, description)."""
        size = given.q.shape[0] * given.q.shape[1]
        for widths in (TINY, SMALL, REAL):
            for m in (1, 2, 3, 64, 256, 4096):
                if m * widths.q_lora_rank >= size or m > (self.max_m or m):
                    continue
                tried = self.inputs(m, widths, eps=(given.q_eps, given.k_eps))
                try:
                    problem = wrong(tried, self.call(*tried.args), self.dtype)
                except Exception:
                    # a smaller input may be refused; then it is not the one to print
                    continue
                if problem:
                    return problem, describe(tried)
        return None


def describe(given: Inputs) -> str:
    """One line that names an input well enough to make it again."""
    return (
        f"M={given.q.shape[0]}, q {given.q.shape[-1]} + k {given.k.shape[-1]}, strides "
        f"{given.q.stride()} and {given.k.stride()}, eps {given.q_eps:g} and {given.k_eps:g}"
    )


def wrong(given: Inputs, got: object, dtype: str) -> str | None:
    """None if both outputs are right within ``_LIMIT_ULPS``, else the first thing that isn't."""
    if not isinstance(got, tuple | list) or len(got) < 2:
        return f"returned {type(got).__name__}, wanted a pair"
    parts = (("q", got[0], given.q, given.q_weight, given.q_eps),) * bool(given.q.shape[-1])
    parts += (("k", got[1], given.k, given.k_weight, given.k_eps),)
    for name, y, x, weight, eps in parts:
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            return f"{name}: returned {getattr(y, 'shape', type(y))}, wanted {tuple(x.shape)}"
        if y.dtype != TORCH_DTYPES[dtype]:
            return f"{name}: returned {y.dtype}, wanted {TORCH_DTYPES[dtype]}"
        want = oracle(x, weight, eps)
        bad = ulps(y, want).abs() > _LIMIT_ULPS[dtype]
        if bool(bad.any()):
            at = tuple(int(i) for i in bad.nonzero()[0])
            return (
                f"{name}: row {at[0]} column {at[-1]} is {float(y[at]):.6g}, "
                f"float64 says {float(want[at]):.6g}; {int(bad.sum())} of {bad.numel()} are wrong"
            )
    return None


def same(a: tuple, b: tuple) -> bool:
    """Bit equality of two pairs."""
    return all(bits(x, y) for x, y in zip(a, b, strict=True))


def bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are the same bits, NaN included."""
    kind = torch.int32 if x.element_size() == 4 else torch.int16
    return x.shape == y.shape and torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))


def require(condition: bool, detail: str, given: Inputs) -> None:
    """Fail the case with ``detail`` and its input unless ``condition`` holds."""
    if not condition:
        raise Failed(detail, describe(given))
