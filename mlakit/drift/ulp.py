"""How far an output is from float64: in ulps, in signed bias, in the worst row and channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlakit.rounding import order, round_to

BINS = ("<= -3", "-2", "-1", "0", "+1", "+2", ">= +3")
"""Bins of ``Drift.histogram``: ulps away from zero (+) or toward it (-), seen from the nearest."""

BIAS_FLAG = 1e-4
BIAS_MIN_ELEMENTS = 100_000
"""A signed bias is flagged above 1e-4 on at least 1e5 elements: fewer are too noisy to tell."""


@dataclass(frozen=True)
class Drift:
    """One output held against float64. Ulps are distances to the correctly rounded value.

    ``nonfinite_mismatch`` counts elements whose class (finite, NaN, +inf, -inf) is wrong. One is
    enough to make ``rel_l2`` infinite and bias and cosine NaN; each counts as the dtype's whole
    range in ulps. So a NaN is never averaged away.
    """

    elements: int
    share_correct: float
    max_ulp: int
    ulp_p999: float
    signed_bias: float
    """mean of got / float64 - 1: below 0 shrinks"""
    bias_se: float
    """standard error of ``signed_bias``; the larger of by-element and by-row"""
    rel_l2: float
    cosine: float
    nonfinite_mismatch: int
    worst_row: int
    worst_channel: int
    histogram: tuple[int, ...]
    """elements in each of ``BINS``"""

    @property
    def biased(self) -> bool:
        """Whether the signed bias is large, enough elements show it, and noise does not."""
        return self.elements >= BIAS_MIN_ELEMENTS and abs(self.signed_bias) > max(
            BIAS_FLAG, 3 * self.bias_se
        )

    def figures(self) -> dict:
        """The figures under the names of ``records.ACCURACY_COLUMNS``."""
        return {k: v for k, v in vars(self).items() if k != "histogram"}

    def bars(self, way: str, evidence: str) -> list[dict]:
        """The histogram as rows of ``plots.error_histogram``: way, bin, share, se, evidence."""
        shares = [count / self.elements for count in self.histogram]
        return [
            dict(
                way=way, bin=b, share=s, se=(s * (1 - s) / self.elements) ** 0.5, evidence=evidence
            )
            for b, s in zip(BINS, shares, strict=True)
        ]


def ulps(got: torch.Tensor, want64: torch.Tensor) -> torch.Tensor:
    """Signed ulps (int64) from ``want64`` correctly rounded to got's dtype; + is away from zero.

    Elements of the wrong class (NaN, inf, finite) get the dtype's whole range, 2**bits.
    """
    nearest = round_to(want64, got.dtype)
    distance = (order(got) - order(nearest)) * torch.where(nearest < 0, -1, 1)
    distance = torch.where(nearest == 0, distance.abs(), distance)
    both_nan = got.isnan() & nearest.isnan()
    wrong = _wrong_class(got, nearest)
    whole = torch.full_like(distance, 1 << (8 * got.element_size()))
    return torch.where(wrong, whole, torch.where(both_nan, 0, distance))


def _wrong_class(got: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    infinite = got.isinf() | nearest.isinf()
    return (got.isnan() != nearest.isnan()) | (infinite & ~got.isnan() & (got != nearest))


def compare(got: torch.Tensor, want64: torch.Tensor) -> Drift:
    """Hold ``got`` (..., N) in bf16, fp16 or fp32 against ``want64``, the same shape in float64.

    Raises:
        ValueError: shapes differ, or there is nothing to compare.
    """
    if got.shape != want64.shape or got.numel() == 0:
        raise ValueError(f"compare needs equal, non-empty shapes: {got.shape} and {want64.shape}")
    got, want64 = got.reshape(-1, got.shape[-1]), want64.reshape(-1, want64.shape[-1])
    nearest = round_to(want64, got.dtype)
    wrong = _wrong_class(got, nearest)
    mismatches = int(wrong.sum())
    signed = ulps(got, want64)
    size = signed.abs()
    usable = got.isfinite() & nearest.isfinite()
    got64 = torch.where(usable, got.double(), 0)
    want = torch.where(usable, want64, 0)
    squares = (got64 - want).square()
    bias, bias_se = _bias(got64, want, torch.finfo(got.dtype).smallest_normal)
    norm = want.square().sum().sqrt()
    error = float(squares.sum().sqrt())
    dot = (got64 * want).sum() / (got64.square().sum().sqrt() * norm)
    rank = squares + wrong * (squares.sum() + 1)
    return Drift(
        elements=got.numel(),
        share_correct=float((size == 0).double().mean()),
        max_ulp=int(size.max()),
        ulp_p999=_quantile(size, 0.999),
        signed_bias=float("nan") if mismatches else bias,
        bias_se=float("nan") if mismatches else bias_se,
        rel_l2=float("inf") if mismatches else (error / float(norm) if norm else error),
        cosine=float("nan") if mismatches else float(dot),
        nonfinite_mismatch=mismatches,
        worst_row=int((rank.sum(1) / want.square().sum(1).clamp_min(1e-300)).argmax()),
        worst_channel=int((rank.sum(0) / want.square().sum(0).clamp_min(1e-300)).argmax()),
        histogram=tuple(torch.bincount((signed.clamp(-3, 3) + 3).flatten(), minlength=7).tolist()),
    )


def _quantile(values: torch.Tensor, share: float) -> float:
    flat = values.flatten()
    return float(flat.kthvalue(max(1, -int(-share * flat.numel() // 1))).values)


def _bias(got: torch.Tensor, want: torch.Tensor, floor: float) -> tuple[float, float]:
    """Mean of got/want - 1 and its standard error; elements below ``floor`` have no ratio.

    A rounded reciprocal RMS moves a whole row at once, so rows, not elements, may be the
    independent draws: the larger of the two errors is kept.
    """
    counts = want.abs() >= floor
    n = int(counts.sum())
    if n == 0:
        return 0.0, 0.0
    ratio = torch.where(counts, got / torch.where(counts, want, 1) - 1, 0)
    mean = float(ratio.sum() / n)
    residual = torch.where(counts, ratio - mean, 0)
    by_element = float(residual.square().sum().sqrt()) / n
    by_row = float(residual.sum(1).square().sum().sqrt()) / n
    return mean, max(by_element, by_row if len(got) > 1 else 0.0)
