"""AITER's Triton norm-and-quantise kernels, which also normalise kv: one adapter for both.

``fused_rms_mxfp4_quant`` returned k as its second item up to v0.1.7.post2 and as its third since:
unpacking the newer shape on an older build makes k None. The signature tells which one is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial

import torch

from mlakit.context import Context
from mlakit.errors import RefusedError
from mlakit.paths import aiter_api, quantised
from mlakit.paths.checks import as_rows, check, current
from mlakit.paths.quantised import DEFAULT, QuantisedQ
from mlakit.rounding import oracle

_NAMES = {
    "fp8_group128": ("fused_rms_fp8_group_quant", "fused_fp8_quant"),
    "mxfp4": ("fused_rms_mxfp4_quant", "fused_mxfp4_quant"),
}
_FOLDERS = ("aiter.ops.triton.quant", "aiter.ops.triton")
"""From v0.1.10 the files lie in ``quant``; the older place is an alias."""


def supports(context: Context, quant: str) -> str | None:
    """None if AITER's kernel for ``quant`` can run in ``context``, else one line."""
    return aiter_api.refusal(context) or quantised.refusal_in(context, quant)


def call(quant: str, q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """Returns (QuantisedQ, k_out); scales row-major. AITER allocates, so ``out`` costs copies.

    Raises:
        MisuseError: arguments that no path takes.
        RefusedError: AITER does not import, lacks the kernel, or failed its known answer.
    """
    check(q, q_weight, q_eps, k, k_weight, k_eps)
    q_rows, k_rows = as_rows(q, "q"), as_rows(k, "k")
    if why := quantised.refusal(quant, q.shape[-1]):
        raise RefusedError(f"aiter_{quant}: {why}")
    if q_rows.shape[0] == 0:
        return out or (quantised.empty(quant, q, DEFAULT), k.new_empty(k.shape))
    with current(q.device):
        kernel = _trusted(quant, q.device)
        values, scale, k_out = kernel(q_rows, q_weight, q_eps, k_rows, k_weight, k_eps)
    got = QuantisedQ(values.view(*q.shape[:-1], values.shape[-1]), scale), k_out.view(k.shape)
    if out is None:
        return got
    out[0].values.copy_(got[0].values)
    out[0].scale.copy_(got[0].scale)
    out[1].copy_(got[1])
    return out


def load(quant: str, device: torch.device) -> Callable:
    """AITER's kernel as ``kernel(q, q_weight, q_eps, k, k_weight, k_eps) -> values, scale, k``.

    Raises:
        ImportError: AITER does not import or lacks the kernel, or its signature is unknown.
    """
    name, module = _NAMES[quant]
    found = [getattr(aiter_api.import_or_none(f"{f}.{module}"), name, None) for f in _FOLDERS]
    function = next((f for f in found if f is not None), None)
    if function is None:
        raise ImportError(f"this AITER has no {name}")
    names = tuple(inspect.signature(function).parameters)
    stem = next((s for s in ("inp", "x") if names[:6] == _arguments(s)), None)
    if stem is None:
        raise ImportError(f"AITER's {name} has an unknown signature: {', '.join(names)}")
    fixed: dict = {"res1": None}
    if quant == "fp8_group128":
        fixed |= {
            "group_size": 128,
            "dtype_quant": quantised.native_encoding(device).dtype,
            "transpose_scale": False,
        }
    fixed |= {"output_unquantized_inp1": False, "shuffle": False, "scale_shuffle_padding": False}
    fixed = {n: v for n, v in fixed.items() if n in names}
    k_index = 2 if "output_unquantized_inp1" in names else 1

    def kernel(*arguments):
        result = function(**dict(zip(_arguments(stem), arguments, strict=True)), **fixed)
        values, scale = result[0]
        return values, scale, result[k_index]

    return kernel


def _arguments(stem: str) -> tuple[str, ...]:
    return tuple(f"{stem}{i}{part}" for i in (1, 2) for part in ("", "_weight", "_epsilon"))


@cache
def _trusted(quant: str, device: torch.device) -> Callable:
    """AITER's kernel after a known answer that every scale rule and encoding gives exactly."""

    def answers(kernel):
        columns = torch.arange(140)
        signs = torch.stack([1 - 2 * (columns % 2), 1 - 2 * (columns // 2 % 2)]) * 3.0
        signs[:, 128:] = columns[128:] - 120
        buffer = signs.to(torch.bfloat16).to(device)
        q, k = buffer[:, :128], buffer[:, 128:132]
        # 1.5 and 0.75 are exact in E2M1 and in FP8 whichever way the scale of amax 1.5 is rounded.
        q_weight = torch.where(columns[:128] % 32 < 8, 1.5, 0.75)
        k_weight = torch.ones(4, dtype=torch.float32)
        values, scale, k_out = kernel(q, q_weight.to(q), 1e-6, k, k_weight.to(q), 1e-6)
        q_out = quantised.dequantise(quant, QuantisedQ(values, scale)).cpu()
        want = oracle(k.cpu(), k_weight, 1e-6).float()
        return ("q", q_out, signs[:, :128].sign() * q_weight), ("k", k_out.float().cpu(), want)

    return aiter_api.proven(f"aiter_{quant}", device, partial(load, quant, device), answers)
