"""Whether timed outputs are right: fresh inputs, poisoned outputs, float64."""

from __future__ import annotations

import torch

from mlakit.formats import fp8, mxfp4
from mlakit.paths.registry import Path
from mlakit.rounding import oracle, order, round_to
from mlakit.timing.buffers import Ring, Slot

_MAX_ULP = {2: 2, 4: 16}
"""By element size. The roundings that have names stay within 2 ulp of float64 in 16 bits; float32
outputs also carry the error of their own sums and of an approximate rsqrt."""
_MAX_ROWS_ON_CPU = 4096
"""rows held against float64 on a CPU, evenly spaced, the last one included; all are on a GPU"""


def wrong_output(lane, path: Path, ring: Ring) -> str | None:
    """None if what ``lane`` computes is right, else one line.

    The ring was just filled anew; the lane's own timed function (its graph, its loop) runs once
    more on it, its outputs poisoned with NaN before.
    """
    lane.poison()
    lane.take()
    for slot, out in lane.seen:
        if not ring.intact(slot):
            return "the inputs (or the rope part behind them) were changed"
        why = _wrong_slot(slot, out, path)
        if why:
            return why
    return None


def _wrong_slot(slot: Slot, out, path: Path) -> str | None:
    q, q_weight, q_eps, k, k_weight, k_eps = slot.args
    q_out, k_out = out
    parts = [("k", k, k_weight, k_eps, k_out)]
    if path.output == "none":
        parts.insert(0, ("q", q, q_weight, q_eps, q_out))
    elif why := _wrong_quantised(oracle(q, q_weight, q_eps), q_out, path.output):
        return why
    for name, x, weight, eps, got in parts:
        if x.shape[-1] == 0:
            continue
        if got.shape != x.shape or got.dtype != x.dtype:
            return f"{name}: {tuple(got.shape)} {got.dtype}, wanted {tuple(x.shape)} {x.dtype}"
        if not bool(got.isfinite().all()):
            return f"{name}: {int((~got.isfinite()).sum())} elements not finite (or not written)"
        worst = _max_ulp(x, weight, eps, got)
        if worst > _MAX_ULP[got.element_size()]:
            return f"{name}: {worst} ulp from float64 (limit {_MAX_ULP[got.element_size()]})"
    return None


def _wrong_quantised(want: torch.Tensor, got, kind: str) -> str | None:
    """A coarse check of a quantised q (``values``, ``scale``): its exact codes are audited apart.

    E4M3 keeps 3 bits below the leading one (half a step is 1/16 of the value), E2M1 keeps one, and
    a group's largest value may be clipped by a quarter.
    """
    module = mxfp4 if kind == "mxfp4" else fp8
    found = module.dequantise(got.values, got.scale).double()
    share, floor = (0.27, 0.1) if kind == "mxfp4" else (0.07, 2e-3)
    largest = want.abs().amax(-1, keepdim=True)
    far = ~((found - want).abs() <= share * want.abs() + floor * largest)
    return f"q: {int(far.sum())} elements off by more than {kind} can round" if far.any() else None


def _max_ulp(x: torch.Tensor, weight: torch.Tensor, eps: float, got: torch.Tensor) -> int:
    worst, last = 0, x.shape[0] - 1
    count = last + 1 if x.is_cuda else min(last + 1, _MAX_ROWS_ON_CPU)
    looked_at = torch.linspace(0, last, count, dtype=torch.float64, device=x.device).round().long()
    for rows in looked_at.split(4096):
        want = round_to(oracle(x[rows], weight, eps), got.dtype)
        worst = max(worst, int((order(got[rows]) - order(want)).abs().max()))
    return worst
