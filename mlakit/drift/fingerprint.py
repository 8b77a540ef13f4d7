"""Which rounding is this? Bit-level experiments that name the order of roundings of a callable.

Inputs are small integers times powers of two, so that every sum of squares is exact in float32 in
any order, contracted or not: what then differs is rounding, never reduction order.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from mlakit.drift.arithmetic import EPS, Norm, arithmetic, ask, contraction, probe
from mlakit.drift.ulp import ulps
from mlakit.rounding import EPS_RULES, STATISTICS, Recipe

_ROW_SLACK = 0.01
_ROWS_WANTED = 0.95
"""A candidate fits when 95 % of rows differ in at most 1 % of elements: one ulp of float32 in s
moves 1 element in 2**14, and a rounded s next to a tie moves a whole row."""

_FIXED_EPS = (1e-5, 1e-6, torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps)
"""Constants that implementations are known to put in place of the eps they were given."""


@dataclass(frozen=True)
class Fingerprint:
    """What the experiments say. ``names`` is empty for none of the known orders.

    Several names mean that they can't be told apart on this callable; ``text`` says why.
    """

    names: frozenset[str]
    text: str
    details: dict[str, str] = field(default_factory=dict)
    """finding by factor: weight, mean, root, association, contraction"""
    evidence: tuple[str, ...] = ()
    """one line an experiment, with its counts"""
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """The names joined by `` | ``, or ``none of these``."""
        return " | ".join(sorted(self.names)) or "none of these"


def first_of_pair(call: Callable) -> Norm:
    """A path's q norm as fn(x, weight, eps); the k it is given is a constant."""
    return _part(call, 0)


def second_of_pair(call: Callable) -> Norm:
    """A path's k norm as fn(x, weight, eps); the q it is given is a constant."""
    return _part(call, 1)


def _part(call: Callable, index: int) -> Norm:
    def norm(x, weight, eps):
        own, rest = (x, weight, eps), (x.new_ones(x.shape[0], 64), weight.new_ones(64), 1e-6)
        return call(*own, *rest)[0] if index == 0 else call(*rest, *own)[1]

    return norm


def _is_pair(fn: Callable) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    # a norm's options (casting_mode, in_place) have defaults; a pair's six inputs have none
    needed = [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return len(needed) >= 6


@torch.no_grad()
def fingerprint(fn: Callable, *, device: str = "cpu", dtype: str = "bf16") -> Fingerprint:
    """Name the rounding order of ``fn(x, weight, eps)``, an RMSNorm over the last dimension.

    A callable of six arguments without defaults is a pair (q, q_weight, q_eps, k, k_weight, k_eps):
    its q is taken; ``second_of_pair`` makes a norm of its k. Experiments: the order
    (statistic, eps, reciprocal RMS, products, gemma's 1 + w); weights in float32; the arithmetic
    of s (mean, root, association) on 8e5 elements; contraction, by cancellation against eps.

    Never raises for what ``fn`` does: a refusal or a wrong shape is in ``text``; where only a later
    experiment is refused (its width, its rows), in ``evidence``, and the others go on.
    """
    fn = first_of_pair(fn) if _is_pair(fn) else fn
    x, weight = probe(48, 128, dtype, device)
    got = ask(fn, x, weight, EPS)
    if isinstance(got, str):
        why = got if got.startswith("it returned") else f"it raised {got}"
        return Fingerprint(frozenset(), f"none of these: {why}", dtype=dtype)
    rough = {r: _share_of_rows(got, r(x, weight, EPS)) for r in _candidates(dtype)}
    best = max(rough, key=lambda r: rough[r])
    evidence = [f"order, 48 rows: best of {len(rough)} is {best.name}, {rough[best]:.0%} of rows"]
    if rough[best] < _ROWS_WANTED:
        return _not_exact(fn, x, weight, got, best, rough[best], evidence, dtype)
    fits, line = _refine(fn, {r: v for r, v in rough.items() if v >= 0.9}, dtype, device)
    best = fits[0]
    evidence.append(line)
    details, names = {}, {r.name for r in fits}
    details["weight"], owners, line = _mixed_weight(fn, best, dtype, device)
    evidence.append(line)
    if owners and best.product == "cast_then_weight":
        own = {n.replace("cast_then_weight", "weight_dtype") for n in names}
        names = own if owners == "proven" else names | own
    if best.statistic == "float32" and best.eps == "inside":
        found, line = arithmetic(fn, best, dtype, device)
        details |= found
        if found.get("root", "").startswith("approximate, "):
            names = {replace(r, rstd="approx_rsqrt").name for r in fits}
        evidence.append(line)
        details["contraction"] = contraction(fn, best, dtype, device)
    return Fingerprint(
        frozenset(names), _text(names, details, dtype), details, tuple(evidence), dtype
    )


def _refine(
    fn: Norm, near: dict[Recipe, float], dtype: str, device: str
) -> tuple[list[Recipe], str]:
    """Those of ``near`` that fit 1024 rows best; evidence, with the best of the others.

    Where 1024 rows are refused: those that fit the 48 of the first probe best (the shares given).
    """
    x, weight = probe(1024, 128, dtype, device, seed=4)
    got = ask(fn, x, weight, EPS)
    if isinstance(got, str):
        top = max(near.values())
        return [r for r in near if near[r] == top], f"order, 1024 rows: refused ({got})"
    shares = {r: _share_of_rows(got, r(x, weight, EPS)) for r in near}
    top = max(shares.values())
    fits = [r for r in near if shares[r] == top]
    others = {r: v for r, v in shares.items() if v < top}
    line = f"order, 1024 rows: {fits[0].name} fits {top:.1%}"
    if others:
        second = max(others, key=lambda r: others[r])
        line += f", next {second.name} {others[second]:.1%}"
    return fits, line


def _text(names: set[str], details: dict[str, str], dtype: str) -> str:
    head = " | ".join(sorted(names))
    if len(names) > 1:
        why = "rounding to float32 changes nothing" if dtype == "fp32" else "equal on every probe"
        if any("weight_dtype" in n for n in names):
            why = "they differ for a float32 weight only, and it is refused"
        head += f" (can't be told apart here: {why})"
    return "; ".join([head, *(f"{k}: {v}" for k, v in details.items())])


@cache
def _candidates(dtype: str) -> tuple[Recipe, ...]:
    products = ("round_once", "cast_then_weight", "truncate", "truncate_twice", "bf16_scale")
    rstds: tuple[str, ...] = ("float32", "bf16_rstd")
    plain = [("float32", e) for e in (*EPS_RULES, *(f"eps_fixed_{v:.3g}" for v in _FIXED_EPS))]
    statistics = plain + [(s, "inside") for s in STATISTICS[1:]]
    if dtype == "fp32":
        statistics, rstds = plain, rstds[:1]
    return tuple(
        _FixedEps(s, e, r, p, o) if e.startswith("eps_fixed") else Recipe(s, e, r, p, o)
        for (s, e), r, p, o in itertools.product(statistics, rstds, products, (0, 1))
    )


class _FixedEps(Recipe):
    """A recipe that puts a constant of its own in place of the eps it is given."""

    def scale(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        fixed = next(v for v in _FIXED_EPS if self.eps == f"eps_fixed_{v:.3g}")
        return Recipe(self.statistic, rstd=self.rstd).scale(x, fixed)


def _share_of_rows(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of rows that agree within ``_ROW_SLACK`` (float32: within 8 ulp everywhere)."""
    if got.dtype == torch.float32:
        differ = ulps(got, want.double()).abs() > 8
    else:
        differ = (got != want) & ~(got.isnan() & want.isnan())
    return float((differ.double().mean(-1) <= _ROW_SLACK).double().mean())


# ---- no candidate fits: any scale at all, one a row


def _not_exact(fn, x, weight, got, best: Recipe, share: float, evidence, dtype) -> Fingerprint:
    """Look for a scale a row, of whatever value, that explains the outputs under some product."""
    half = _permuted(x)
    again = ask(fn, half, weight, EPS)
    text = f"none of these: nearest is {best.name}, which fits {share:.0%} of rows"
    if isinstance(again, str):
        evidence.append(f"free scale: sorted rows are refused ({again})")
        return Fingerprint(frozenset(), text, {}, tuple(evidence), dtype)
    for product, offset in itertools.product(
        ("round_once", "cast_then_weight", "truncate"), (0, 1)
    ):
        recipe = Recipe(product=product, offset=offset)
        found = _free_scale(recipe, x, weight, got)
        moved = _free_scale(recipe, half, weight, again)
        if found is None or moved is None:
            continue
        exact = recipe.scale(x, EPS).double()
        error = float((found.mean(-1, keepdim=True) / exact - 1).abs().nan_to_num(0).max())
        ordered = bool(((found[:, 0] > moved[:, 1]) | (moved[:, 0] > found[:, 1])).any())
        off = f"s up to 2**{torch.tensor(error, dtype=torch.float32).log2().item():.1f} off"
        evidence.append(
            f"free scale: {recipe.name} fits every row; {off}; "
            f"permuting a row {'moves' if ordered else 'does not move'} s"
        )
        if ordered:
            names = {Recipe("running_sum", product=product, offset=offset).name}
            text = f"{next(iter(names))}: the sum is low-precision, its order shows; {off}"
        elif error <= 2**-9:
            names = {Recipe(rstd="approx_rsqrt", product=product, offset=offset).name}
            text = f"{next(iter(names))}: s depends on the mean alone; {off}"
        else:
            names = set()
            text = f"none of these: one scale a row under {recipe.name}, but {off}"
        return Fingerprint(frozenset(names), text, {"root": off}, tuple(evidence), dtype)
    return Fingerprint(frozenset(), text, {}, tuple(evidence), dtype)


def _permuted(x: torch.Tensor) -> torch.Tensor:
    """x with each row's elements sorted by size: the same mean, summed in another order."""
    return x.gather(-1, x.abs().float().argsort(-1))


def _free_scale(
    recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, got: torch.Tensor
) -> torch.Tensor | None:
    """(rows, 2): least and largest scale that give each row's exact bits; None if a row has none.

    Scales are tried around the median of y / (x w), in steps of 2**-20. 32 elements leave an
    interval of about 2**-13 in bf16, 2**-16 in fp16; a row in ten may have too small a one.
    """
    x, weight, got = x[:, :32], weight[:32], got[:, :32]
    w = weight.double() + recipe.offset
    centre = (got.double() / (x.double() * w)).median(-1, keepdim=True).values
    if not bool(centre.isfinite().all()):
        return None
    offsets = torch.arange(-4096, 4097, dtype=torch.float64, device=x.device) * 2.0**-20
    found = []
    for row, middle, want in zip(x, centre, got, strict=True):
        scales = (middle * (1 + offsets)).float()[:, None]
        fits = (recipe.apply(row.expand(len(scales), -1), scales, weight) == want).all(-1)
        none = not bool(fits.any())
        found.append([float("nan")] * 2 if none else [v.item() for v in scales[fits].aminmax()])
    scales = torch.tensor(found, dtype=torch.float64, device=x.device)
    return scales if float(scales.isnan().any(-1).double().mean()) <= 0.1 else None


# ---- a weight in float32 beside 16-bit inputs


def _mixed_weight(fn: Norm, recipe: Recipe, dtype: str, device: str) -> tuple[str, str, str]:
    """How a float32 weight is taken; whether ``weight_dtype`` is proven, possible or out ("")."""
    x, _ = probe(48, 128, dtype, device, seed=1)
    if dtype == "fp32":
        return "float32 like the input", "", "weight: one dtype only"
    generator = torch.Generator().manual_seed(2)
    weight = (1 + 0.25 * torch.randn(x.shape[-1], generator=generator, dtype=torch.float32)).to(
        device
    )
    got = ask(fn, x, weight, EPS)
    if isinstance(got, str):
        # a refusal, of whatever type, leaves the two orders indistinguishable
        why = f"a float32 weight is refused ({got})"
        return why, "possible", f"weight: {why}"
    scale = recipe.scale(x, EPS)
    rounded = recipe.apply(x, scale, weight.to(x.dtype))
    own = recipe.apply(x, scale, weight)
    once = Recipe(product="weight_dtype", offset=recipe.offset).apply(x, scale, weight)
    if got.dtype == torch.float32:
        normalised = x.float() * scale
        if recipe.product == "cast_then_weight":
            normalised = normalised.to(x.dtype).float()
        close = ulps(got, (normalised * (weight + recipe.offset)).double()).abs() <= 8
        share = float(close.double().mean())
        what = "kept in float32, and so is the output" if share > 0.99 else "unlike any candidate"
        return what, "", f"weight: output is float32, {share:.1%} as x*s*w"
    tried = {
        "in its own dtype (float32)": own,
        "rounded to the input's dtype": rounded,
        "in its own dtype, one rounding": once,
    }
    shares = {k: _share_of_rows(got, v) for k, v in tried.items()}
    what = max(shares, key=lambda k: shares[k])
    line = ", ".join(f"{k}: {v:.0%} of rows" for k, v in shares.items())
    if shares[what] < _ROWS_WANTED:
        return "unlike any candidate", "", f"weight: {line}"
    one = what == "in its own dtype, one rounding"
    return what, "proven" if one else "", f"weight: {line}"
