"""Known findings of the field about this step, each reproduced by formula as a row."""

from __future__ import annotations

import itertools

import pandas as pd
import torch

from mlakit.drift.ulp import compare, ulps
from mlakit.formats import fp8, mxfp4
from mlakit.rounding import ROUNDINGS, oracle
from mlakit.shapes import models

COLUMNS = (
    "finding property_of a b elements share_differ max_ulp bias_a bias_b rel_l2_a rel_l2_b "
    "evidence source text"
).split()
"""``share_differ`` and ``max_ulp`` are b against a; bias and rel_l2 are each against float64."""

_VLLM_ORDERS = (
    ("up to v0.19.1", "cast_then_weight"),
    ("v0.20.0 to v0.20.2 (#40860)", "round_once"),
    ("after #42379", "weight_dtype"),
    ("later, libtorch_stable", "round_once"),
)
"""vLLM's own CUDA/ROCm kernel over its releases (#42325, #49616, #49639)."""

_UPSTREAM = "github.com/ROCm/aiter csrc/kernels/fused_qk_norm.cu, issue 5151"
_HF_EPS = "transformers 5.24.0 builds both latent norms without the config's eps"


def field_findings() -> pd.DataFrame:
    """One row a finding, on (256, 1536) bf16 inputs of RMS 0.7 and weights 1 +- 0.25.

    ``property_of`` is card, compiler or convention: whose choice makes a and b differ. Evidence is
    ``emulated`` throughout, by a rounding formula: neither the cards nor the engines were run.
    About 1 s on one core.
    """
    generator = torch.Generator().manual_seed(0)
    x = (0.7 * torch.randn(256, 1536, generator=generator, dtype=torch.float32)).bfloat16()
    w = (1 + 0.25 * torch.randn(1536, generator=generator, dtype=torch.float32)).bfloat16()
    kinds = (_orders, _eps, _longcat, _reductions, _formats)
    return pd.DataFrame([row for rows in kinds for row in rows(x, w)], columns=COLUMNS)


def _row(finding, whose, pair, want, source, text="") -> dict:
    """pair: a and b, each (name, tensor); ``want``: float64. float32 is quantised: no ulps."""
    (a_name, a_out), (b_name, b_out) = pair
    a_drift, b_drift = compare(a_out, want), compare(b_out, want)
    between = ulps(b_out, a_out.double()).abs()
    return dict(
        finding=finding, property_of=whose, a=a_name, b=b_name, elements=a_out.numel(),
        share_differ=float((between > 0).double().mean()),
        max_ulp=int(between.max()) if a_out.dtype == torch.bfloat16 else None,
        bias_a=a_drift.signed_bias, bias_b=b_drift.signed_bias,
        rel_l2_a=a_drift.rel_l2, rel_l2_b=b_drift.rel_l2,
        evidence="emulated", source=source, text=text,
    )  # fmt: skip


def _orders(x, w) -> list[dict]:
    want = oracle(x, w, 1e-6)
    vllm = "github.com/vllm-project/vllm"
    found = [
        ("AITER stores bf16: gfx950 against gfx942", "card", "round_once", "truncate", _UPSTREAM,
         "hardware convert against cutting toward zero, fused and split kernels alike"),
        ("Hugging Face order against one rounding", "convention", "round_once", "cast_then_weight",
         f"{vllm}/pull/49639", "both legitimate; with unit weights the two are the same bits"),
    ]  # fmt: skip
    for (old, a), (new, b) in itertools.pairwise(_VLLM_ORDERS):
        title = f"vLLM's order: {old}, then {new}"
        found.append((title, "convention", a, b, f"{vllm} issues 42325, 49616", ""))
    return [
        _row(title, whose, [(n, ROUNDINGS[n](x, w, 1e-6)) for n in (a, b)], want, source, text)
        for title, whose, a, b, source, text in found
    ]


def _eps(x, w) -> list[dict]:
    """Hugging Face's 1e-6 against the engines' 1e-5, at two sizes of latent."""
    apart = (1e-6, 1e-5)
    names = [m.name for m in models() if (m.hf_latent_norm_eps, m.serving_latent_norm_eps) == apart]
    once, rows = ROUNDINGS["round_once"], []
    for size, label in ((1.0, "RMS 0.7"), (2.0**-6, "RMS 0.011")):
        small = (x.float() * size).bfloat16()
        a, b = ("eps 1e-6", once(small, w, 1e-6)), ("eps 1e-5", once(small, w, 1e-5))
        want = oracle(small, w, 1e-5)
        title = f"latent norm eps 1e-6 (Hugging Face) or 1e-5 (engines), latents of {label}"
        text = f"models: {', '.join(names)}"
        rows.append(_row(title, "convention", (a, b), want, _HF_EPS, text))
    return rows


def _longcat(x, w) -> list[dict]:
    """LongCat's sqrt(12) for kv: on the activations after the norm, or folded into bf16 weights."""
    factor = 12**0.5
    once = ROUNDINGS["round_once"]
    after = (once(x, w, 1e-5).float() * factor).bfloat16()
    folded = once(x, (w.float() * factor).bfloat16(), 1e-5)
    want = oracle(x, w, 1e-5) * factor
    a, b = ("scale the activations", after), ("fold into bf16 weights", folded)
    source = "LongCat config: scale_kv 3.4641 (data/models.csv)"
    text = "two roundings of an element against one rounded weight for a whole channel"
    return [_row("LongCat's sqrt(12)", "convention", (a, b), want, source, text)]


def _reductions(x, w) -> list[dict]:
    """Wave size as reduction order, and FP fusion in mean + eps; float32 sums, one rounding."""
    want, n = oracle(x, w, 1e-6), x.shape[-1]
    eps, inverse = (torch.tensor(x, dtype=torch.float32) for x in (1e-6, 1 / n))

    def finish(variance):
        return (x.float() * variance.double().rsqrt().float() * w.float()).bfloat16()

    def total(lanes):
        partial = torch.zeros(len(x), lanes, dtype=torch.float32)
        for part in x.float().square().split(lanes, -1):
            partial[:, : part.shape[1]] += part
        while partial.shape[1] > 1:
            half = partial.shape[1] // 2
            partial = partial[:, :half] + partial[:, half:]
        return partial

    plain = total(64) * inverse + eps
    fused = (total(64).double() * inverse.double() + eps.double()).float()
    narrow = total(32) * inverse + eps
    source = "AMD gfx9 waves have 64 lanes; NVIDIA's and gfx1250's have 32 (data/archs.csv)"
    waves = ("64 lanes", finish(plain)), ("32 lanes", finish(narrow))
    fusion = ("rounded between", finish(plain)), ("fma(sum, 1/N, eps)", finish(fused))
    return [
        _row("wave size as reduction order", "card", waves, want, source,
             "lanes stride the row, then a tree"),
        _row("FP fusion in mean + eps", "compiler", fusion, want,
             "triton's enable_fp_fusion, on by default; clang's -ffp-contract",
             "in the sum of bf16 squares fusion leaves no trace: they are exact in float32"),
    ]  # fmt: skip


def _formats(x, w) -> list[dict]:
    want = oracle(x, w, 1e-6)
    y = want.float()
    eights = [(n, fp8.dequantise(*fp8.quantise(y, e))) for n, e in fp8.ENCODINGS.items()]
    first, *others = ((r, mxfp4.dequantise(*mxfp4.quantise(y, r))) for r in mxfp4.RULES)
    rows = [_row("FP8 of gfx950 and NVIDIA against gfx942", "card", eights, want, "data/archs.csv",
                 "groups of 128; maximum 448 against 240")]  # fmt: skip
    source = "OCP MX specification 1.0 leaves the rule to the implementation"
    for other in others:
        title = f"MXFP4 scale rule: {first[0]} against {other[0]}"
        pair = [(f"mxfp4 {rule}", values) for rule, values in (first, other)]
        rows.append(_row(title, "convention", pair, want, source))
    return rows
