"""The float64 oracle and the named roundings of RMSNorm: formulas, implemented once.

``y = x * rsqrt(mean(x^2) + eps) * w`` per row. A *rounding* is the order in which an
implementation rounds on the way. The statistics of every formula are taken in float64 and then
rounded to the format the formula names, so that no reduction order is baked in.

In names and texts ``bf16`` stands for the input's dtype, R rounds to it (nearest even), T cuts
toward zero, s is the reciprocal RMS in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float64, unrounded. x: (..., N) any float dtype; weight: (N,). Returns float64."""
    x64 = x.double()
    return x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps) * weight.double()


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 once, to nearest even, to ``dtype``; NaN and inf are kept.

    torch casts float64 to a 16-bit float through float32, which rounds twice. Here the step to
    float32 rounds to odd, and the second rounding is then the only one.
    """
    if dtype in (torch.float32, torch.float64):
        return values.to(dtype)
    f32 = values.to(torch.float32)
    bits = f32.view(torch.int32)
    bits = torch.where(f32.double().abs() > values.abs(), bits - 1, bits)
    inexact = bits.view(torch.float32).double() != values
    odd = torch.where(inexact & ~values.isnan(), bits | 1, bits)
    return odd.view(torch.float32).to(dtype)


def truncate_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 toward zero to ``dtype`` (bf16 keeps its top 16 bits); NaN and inf are kept."""
    if dtype in (torch.float32, torch.float64):
        return values.to(dtype)
    nearest = values.to(dtype)
    too_far = nearest.float().abs() > values.float().abs()
    bits = nearest.view(torch.int16)
    return torch.where(too_far, bits - 1, bits).view(dtype)


def order(values: torch.Tensor) -> torch.Tensor:
    """int64 that counts representable values: neighbours differ by 1, -0 and +0 are both 0."""
    kind = torch.int16 if values.element_size() == 2 else torch.int32
    bits = values.contiguous().view(kind).to(torch.int64)
    lowest = -(1 << (8 * values.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


STATISTICS = ("float32", "bf16_squares", "bf16_mean", "bf16_sum", "bf16_variance")
EPS_RULES = ("inside", "eps_outside", "eps_clamped", "eps_ignored")


@dataclass(frozen=True)
class Recipe:
    """One order of roundings, factor by factor; call it as ``recipe(x, weight, eps)``.

    statistic: ``bf16_squares`` rounds each square, ``bf16_mean`` the mean, ``bf16_sum`` both,
    ``bf16_variance`` also mean + eps. eps: inside the root, outside it (added to the RMS), as a
    floor of the mean, or ignored. rstd: ``bf16_rstd`` rounds s; ``approx_rsqrt`` keeps 12 of its
    bits, as x86's RSQRTPS promises (Intel SDM: relative error up to 1.5 * 2**-12). product:
    round_once, cast_then_weight, truncate, truncate_twice, weight_dtype or bf16_scale, see
    ``ROUNDINGS``. offset: 1 for gemma's 1 + w.
    """

    statistic: str = "float32"
    eps: str = "inside"
    rstd: str = "float32"
    product: str = "round_once"
    offset: int = 0
    text: str = field(default="", compare=False)
    """one line for a person"""

    @property
    def name(self) -> str:
        """The factors that are not the default, joined by ``+``; ``round_once`` if none."""
        factors = (self.statistic, self.eps, self.rstd, self.product)
        plain = ("float32", "inside", "round_once")
        named = [f for f in factors if f not in plain] + ["gemma"] * (self.offset == 1)
        return "+".join(named) or "round_once"

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x: (..., N); weight: (N,). Returns x's shape and dtype."""
        return self.apply(x, self.scale(x, eps), weight)

    def scale(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        """s of each row, float32, (..., 1)."""
        squares = x.double().square()
        if self.statistic in ("bf16_squares", "bf16_sum", "bf16_variance"):
            squares = round_to(squares, x.dtype).double()
        mean = squares.mean(-1, keepdim=True)
        if self.statistic in ("bf16_mean", "bf16_sum", "bf16_variance"):
            mean = round_to(mean, x.dtype).double()
        if self.eps == "eps_outside":
            scale = 1 / (mean.sqrt() + eps)
        elif self.eps == "eps_clamped":
            scale = mean.clamp_min(eps).rsqrt()
        elif self.eps == "eps_ignored":
            scale = mean.rsqrt()
        else:
            inside = mean + eps
            if self.statistic == "bf16_variance":
                inside = round_to(inside, x.dtype).double()
            scale = inside.rsqrt()
        scale = scale.float()
        if self.rstd == "bf16_rstd":
            scale = scale.to(x.dtype).float()
        elif self.rstd == "approx_rsqrt":
            scale = ((scale.view(torch.int32) + 0x800) & ~0xFFF).view(torch.float32)
        return scale

    def apply(self, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The products, from ``scale`` (..., 1) in float32; x's dtype."""
        dtype, w = x.dtype, weight.float() + self.offset
        if self.product == "bf16_scale":
            return (x.float() * (scale * w).to(dtype).float()).to(dtype)
        normalised = x.float() * scale
        if self.product == "cast_then_weight":
            normalised = normalised.to(dtype).float()
        elif self.product == "weight_dtype":
            normalised = normalised.to(weight.dtype).float()
        elif self.product == "truncate_twice":
            normalised = truncate_to(normalised, dtype).float()
        cut = self.product in ("truncate", "truncate_twice")
        return truncate_to(normalised * w, dtype) if cut else (normalised * w).to(dtype)


_ALL_BF16 = Recipe("bf16_variance", rstd="bf16_rstd", product="cast_then_weight")

ROUNDINGS: dict[str, Recipe] = {
    recipe.name: replace(recipe, text=text)
    for recipe, text in (
        (Recipe(), "R((x*s)*w): float32 throughout, one rounding"),
        (Recipe(product="cast_then_weight"), "R(R(x*s)*w): Hugging Face, two roundings"),
        (Recipe(product="truncate"), "T((x*s)*w): float32, then cut toward zero"),
        (Recipe(product="truncate_twice"), "T(T(x*s)*w): both casts cut (AITER OPUS, T5 mode)"),
        (Recipe(product="weight_dtype"), "R(W(x*s)*w), W to the weight's dtype (vLLM #42379)"),
        (Recipe(product="bf16_scale"), "R(x*R(s*w)): weight folded into a rounded scale"),
        (Recipe(rstd="bf16_rstd"), "R((x*R(s))*w): reciprocal RMS rounded"),
        (Recipe(rstd="approx_rsqrt"), "R((x*a)*w), a 12-bit approximation of s"),
        (Recipe("bf16_squares"), "each square rounded to bf16 before the sum"),
        (Recipe("bf16_sum"), "squares and mean rounded to bf16"),
        (Recipe(eps="eps_outside"), "s = 1/(sqrt(mean) + eps)"),
        (Recipe(eps="eps_clamped"), "s = rsqrt(max(mean, eps))"),
        (Recipe(eps="eps_ignored"), "s = rsqrt(mean): a row of zeros is NaN"),
        (Recipe(offset=1), "R((x*s)*(1+w)): gemma's weight"),
        (_ALL_BF16, "every step rounded to bf16"),
    )
}
"""By name; another combination of factors is ``Recipe(...)``, named by ``Recipe.name``."""
