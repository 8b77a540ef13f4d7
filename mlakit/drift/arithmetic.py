"""The arithmetic of s: mean, root, association and contraction, told apart bit by bit.

Part of the fingerprint. Inputs are small integers times powers of two, so that every sum of
squares is exact in float32 in any order: what differs is rounding, never reduction order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import torch

from mlakit.errors import one_line
from mlakit.inputs import TORCH_DTYPES
from mlakit.rounding import Recipe, truncate_to

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""fn(x, weight, eps) -> y; x (M, N), weight (N,)"""

EPS = 2.0**-13
"""Large enough that 16-bit outputs tell apart every rule for eps on rows of RMS 1e-2 and 1e-3, and
the same number in every dtype: torch rounds a scalar to bf16 before adding it to a bf16 tensor."""

_SCALES = (2.0**-6, 2.0**-13, 2.0**-16)
"""Row scales of the probe: RMS about 1, 1e-2 (where mean = eps) and 1e-3."""


def probe(
    m: int, n: int, dtype: str, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (m, n): integers of -127 to 127 times a power of two by row; non-unit weight (n,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 128, (m, n), generator=generator).float()
    x *= torch.randint(0, 2, (m, n), generator=generator) * 2 - 1
    x *= torch.tensor(_SCALES, dtype=torch.float32).repeat(-(-m // len(_SCALES)))[:m, None]
    weight = 1 + 0.25 * torch.randn(n, generator=generator, dtype=torch.float32)
    kind = TORCH_DTYPES[dtype]
    return x.to(kind).to(device), weight.to(kind).to(device)


def ask(fn: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | str:
    """What ``fn`` gives, or one line that says why it is nothing to work with: never raises."""
    try:
        got = fn(x, weight, eps)
    except Exception as error:
        # anyone's callable may raise anything, and that is the finding
        return one_line(error)
    if isinstance(got, torch.Tensor):
        if got.shape == x.shape and got.dtype in (x.dtype, weight.dtype):
            return got
        what = f"{tuple(got.shape)} {got.dtype}"
    else:
        what = str(type(got))
    return f"it returned {what} for {tuple(x.shape)} {x.dtype}"


# ---- the arithmetic of s


_MEANS = {
    # by a tensor: torch on a GPU divides by a Python number by multiplying with its reciprocal
    "sum / N": lambda total, n, eps: total / total.new_tensor(float(n)) + eps,
    "sum * (1/N)": lambda total, n, eps: total * (1 / total.new_tensor(float(n))) + eps,
    "fma(sum, 1/N, eps)": lambda total, n, eps: (
        total.double() * (1 / total.new_tensor(float(n))).double() + float(total.new_tensor(eps))
    ).float(),
}
_ROOTS = {
    "correctly rounded rsqrt": lambda v: v.double().rsqrt().float(),
    "1 / sqrt": lambda v: 1 / v.double().sqrt().float(),
    "x / sqrt": lambda v: v.double().sqrt().float(),
}
_ASSOCIATIONS = {
    "(x*s)*w": lambda x, s, w: (x * s) * w,
    "x*(s*w)": lambda x, s, w: x * (s * w),
    "(x*w)*s": lambda x, s, w: (x * w) * s,
}


def _finish(recipe: Recipe, x, weight, s, root: str, association: str) -> torch.Tensor:
    """Outputs from s with one association; ``x / sqrt`` divides where the others multiply."""
    x32, w = x.float(), weight.float() + recipe.offset
    inverse = root == "x / sqrt"
    if recipe.product in ("cast_then_weight", "truncate_twice"):
        normalised = x32 / s if inverse else x32 * s
        cut = recipe.product == "truncate_twice"
        half = truncate_to(normalised, x.dtype) if cut else normalised.to(x.dtype)
        product = half.float() * w
    elif inverse:
        product = (x32 / s) * w if association == "(x*s)*w" else (x32 * w) / s
    else:
        product = _ASSOCIATIONS[association](x32, s, w)
    if recipe.product in ("truncate", "truncate_twice"):
        return truncate_to(product, x.dtype)
    return product.to(x.dtype)


def _associations(recipe: Recipe, root: str) -> tuple[str, ...]:
    if recipe.product in ("cast_then_weight", "truncate_twice"):
        return ("(x*s)*w",)
    return ("(x*s)*w", "(x*w)*s") if root == "x / sqrt" else tuple(_ASSOCIATIONS)


def arithmetic(fn: Norm, recipe: Recipe, dtype: str, device: str) -> tuple[dict[str, str], str]:
    """Mean, root and association, by equality of every bit; else how far s is from exact."""
    if recipe.rstd != "float32" or recipe.product == "bf16_scale":
        return {}, "arithmetic: hidden behind a rounded scale"
    # 384 is no power of two, so that dividing and multiplying by 1/N differ
    x, weight = probe(6144, 384, dtype, device, seed=3)
    got = ask(fn, x, weight, EPS)
    if isinstance(got, str):
        return {}, f"arithmetic: {len(x)} rows of {x.shape[-1]} are refused ({got})"
    total = x.double().square().sum(-1, keepdim=True).float()
    alive = []
    for mean, root in itertools.product(_MEANS, _ROOTS):
        s = _ROOTS[root](_MEANS[mean](total, x.shape[-1], EPS))
        for association in _associations(recipe, root):
            if torch.equal(_finish(recipe, x, weight, s, root, association), got):
                alive.append((mean, root, association))
    if alive:
        keys = ("mean", "root", "association")
        found = {k: " or ".join(dict.fromkeys(a[i] for a in alive)) for i, k in enumerate(keys)}
        return found, f"arithmetic: {len(alive)} of 24 candidates give all {got.numel()} bits"
    return _near(recipe, x, weight, got, total)


def _near(recipe: Recipe, x, weight, got, total) -> tuple[dict[str, str], str]:
    """Whether every row has an s within 4 ulp of float32 that gives its exact bits."""
    exact = (total.double() / x.shape[-1] + EPS).rsqrt().float()
    off = torch.full((len(x),), 99, device=x.device)
    for shift in sorted(range(-4, 5), key=abs, reverse=True):
        s = (exact.view(torch.int32) + shift).view(torch.float32)
        for association in _associations(recipe, ""):
            same = (_finish(recipe, x, weight, s, "", association) == got).all(-1)
            off = torch.where(same, abs(shift), off)
    worst, rows = int(off.max()), len(x)
    if worst <= 4:
        away = int((off > 0).sum())
        if worst == 0:
            found = {"root": "from float64, rounded once"}
            return found, f"arithmetic: s rounded once from float64 gives all {got.numel()} bits"
        found = {"root": f"approximate rsqrt: within {worst} ulp of float32"}
        return found, f"arithmetic: s is off exact in at least {away} of {rows} rows"
    far = (off == 99).nonzero().flatten()[:32]
    shifts = torch.arange(-1024, 1025, dtype=torch.int32, device=x.device)[:, None]
    reached = 0
    for row, middle, want in zip(x[far], exact[far], got[far], strict=True):
        scales = (middle.view(torch.int32) + shifts).view(torch.float32)
        same = (recipe.apply(row.expand(len(scales), -1), scales, weight) == want).all(-1)
        if not bool(same.any()):
            found = {"root": "none of these"}
            return found, "arithmetic: rows have no s within 1024 ulp, though the order fits"
        reached = max(reached, int(shifts[same].abs().min()))
    found = {"root": f"approximate, {reached} ulp of float32 off at least"}
    return found, f"arithmetic: {int((off == 99).sum())} of {rows} rows need s over 4 ulp off"


# ---- contraction


@cache
def squares_are_exact(dtype: str) -> bool:
    """Whether x*x is exact in float32 for every x of a 16-bit dtype whose square is a normal one.

    Checked over all 2**16 bit patterns. Where it holds, fma(x, x, sum) and x*x + sum are the same
    number: contracting the sum leaves no trace.
    """
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = patterns.view(TORCH_DTYPES[dtype])
    x = x[x.isfinite()].double()
    limits = torch.finfo(torch.float32)
    square = x.square()
    normal = (square >= limits.smallest_normal) & (square <= limits.max)
    return bool((square.float().double() == square)[normal].all())


def contraction(fn: Norm, recipe: Recipe, dtype: str, device: str) -> str:
    """Where FMA contraction shows. An eps of minus the mean, less 8 ulp, magnifies one rounding."""
    lines = []
    if dtype != "fp32" and squares_are_exact(dtype):
        lines.append(f"in the sum no trace is possible (squares of {dtype} are exact in float32)")
    for label, kind, trial in (
        ("mean + eps", dtype, _mean_trial),
        ("sum in float32", "fp32", _sum_trial),
    ):
        lines.append(f"{label}: {_cancelled(fn, recipe, trial, kind, device)}")
    return "; ".join(lines)


def _mean_trial(seed: int) -> tuple[torch.Tensor, dict[str, float], float]:
    """Integers, N = 96: divided, multiplied by 1/N, or fma(sum, 1/N, eps)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 128, (1, 96), generator=generator).float()
    total = x.square().sum()
    third = torch.tensor(1 / 96, dtype=torch.float32)
    plain = total * third
    ulp = float(torch.nextafter(plain, plain * 2) - plain)
    eps = -(float(plain) - 8 * ulp)
    return (
        x,
        {
            "divided": float(total / 96) + eps,
            "multiplied by 1/N": float(plain) + eps,
            "contracted": float(total.double() * third.double()) + eps,
        },
        eps,
    )


def _sum_trial(seed: int) -> tuple[torch.Tensor, dict[str, float], float]:
    """Two float32 elements: both squares rounded, one kept whole by an fma, or Welford's sums.

    torch's CUDA norm, where it does not vectorise, has no sum of squares: it takes Welford's
    variance and adds the mean's square.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 1 + torch.rand(1, 2, generator=generator, dtype=torch.float32)
    whole = x.double().square()[0]
    a, b = (float(v) for v in whole)
    fa, fb = (float(v) for v in whole.float())

    def total(value: float) -> float:
        return float(torch.tensor(value, dtype=torch.float64).float()) / 2

    plain = total(fa + fb)
    eps = -(plain - 8 * 2.0**-23)
    half = (x[0, 1] - x[0, 0]) * 0.5
    mean, variance = x[0, 0] + half, half * half
    squared = float((variance.double() + mean.double().square()).float())
    return (
        x,
        {
            "Welford's variance + mean * mean": float(variance + mean * mean) + eps,
            "fma(mean, mean, Welford's variance)": squared + eps,
            "not contracted": plain + eps,
            "contracted": total(fa + b) + eps,
            "contracted, other way round": total(a + fb) + eps,
            "sum in float64": (a + b) / 2 + eps,
        },
        eps,
    )


def _cancelled(fn: Norm, recipe: Recipe, trial: Callable, kind: str, device: str) -> str:
    """Which of a trial's variants gives the observed size of y, over 16 seeds.

    Refusing float32 or an eps below 0 is the callable's right: then the line says so.
    """
    alive = None
    for seed in range(16):
        x, variants, eps = trial(seed)
        # two equal rows: compilers treat one row as a case of its own
        x = x.to(TORCH_DTYPES[kind]).to(device).repeat(2, 1)
        weight = torch.ones(x.shape[-1], dtype=x.dtype, device=device) - recipe.offset
        got = ask(fn, x, weight, eps)
        if isinstance(got, str):
            why = "an eps below 0 is refused" if "eps is -" in got else got[:60]
            return f"not observable ({why})"
        seen = float((x.double() / got.double()).square().mean())
        fits = {k for k, v in variants.items() if v > 0 and abs(seen / v - 1) < 0.02}
        alive = fits if alive is None else alive & fits
    return " or ".join(sorted(alive)) if alive else "none of these"
