"""AITER's dual RMSNorm: one launch on AMD cards, two from M = 16384.

AITER's kernel checks neither the inner stride, nor that q and k have equal rows, nor M = 0; here
all are checked before any launch. It trusts an AITER only after one known answer came out right.
"""

from __future__ import annotations

from functools import cache

import torch

from mlakit.context import Context
from mlakit.errors import RefusedError
from mlakit.paths import aiter_api
from mlakit.paths.checks import current, delivered, prepare
from mlakit.paths.registry import Path

MAX_WIDTH = 8192
"""Widest row of the kernel's launch table (csrc/kernels/fused_qk_norm.cu)."""
_DTYPES = (torch.bfloat16, torch.float16)

# Rows 1..8 and 9..16, q = columns 0-3, k = columns 4-5, unit weights, eps 1e-6, in float64.
_KNOWN_Q = ((0.365148, 0.730297, 1.095445, 1.460593), (0.852325, 0.947027, 1.041730, 1.136433))
_KNOWN_K = ((0.905357, 1.086429), (0.962303, 1.036326))


def supports(context: Context) -> str | None:
    """None if AITER's dual norm can run in ``context``, else one line that says why not."""
    if why := aiter_api.refusal(context):
        return why
    if context.aiter_api == "none":
        return f"this AITER has no dual norm; wanted: {aiter_api.WANTED}"
    if context.quant != "none":
        return f"delivers q unquantised, {context.quant} was asked for"
    if context.norm_weight_dtype != context.dtype:
        return f"{context.norm_weight_dtype} norm weights with {context.dtype} input: must be equal"
    if context.q_lora_rank == 0:
        return "no q latent: there is no pair to fuse"
    if context.widest > MAX_WIDTH:
        return f"width {context.widest} > {MAX_WIDTH}"
    return "no backward: inputs require gradients" if context.requires_grad else None


def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """q: (M, N1), k: (M, N2), bf16 or fp16, inner stride 1. Returns (q_out, k_out), contiguous.

    The generation that returns a pair allocates it, so a given ``out`` costs two copies there.

    Raises:
        MisuseError: arguments that no path takes, or a layout that is no (rows, stride) pair.
        RefusedError: AITER does not import, has an unknown signature, failed its known answer, or
            its kernel would take these dtypes or widths unchecked and get them wrong.
    """
    q, k, q_out, k_out, result = prepare(q, q_weight, q_eps, k, k_weight, k_eps, out)
    if why := _unchecked(q, q_weight, k, k_weight):
        raise RefusedError(f"aiter_fused: {why}")
    if q.shape[0] == 0:
        return result
    with current(q.device):
        api = _trusted(q.device)
        got = api.call(q, q_weight, q_eps, k, k_weight, k_eps, q_out, k_out)
    if got[0] is q_out:
        return result
    return delivered(tuple(y.view(x.shape) for y, x in zip(got, result, strict=True)), out)


def _unchecked(q, q_weight, k, k_weight) -> str | None:
    """What AITER's kernel would take without a word and get wrong, in one line."""
    if q.dtype not in _DTYPES:
        return f"q is {q.dtype}; the kernel takes bf16 and fp16"
    if q_weight.dtype != q.dtype or k_weight.dtype != q.dtype:
        return f"weights are {q_weight.dtype} and {k_weight.dtype}, q is {q.dtype}: must be equal"
    widths = q.shape[1], k.shape[1]
    if not 0 < min(widths) <= max(widths) <= MAX_WIDTH:
        return f"widths {widths[0]} and {widths[1]}: the kernel takes 1 to {MAX_WIDTH}"
    return None


@cache
def _trusted(device: torch.device) -> aiter_api.Api:
    """AITER's dual norm, after it gave the known answer on ``device``; failures are not kept."""

    def answers(api):
        buffer = torch.arange(1, 17, device=device, dtype=torch.bfloat16).view(2, 8)
        q, k = buffer[:, :4], buffer[:, 4:6]
        weights = [torch.ones(n, device=device, dtype=torch.bfloat16) for n in (4, 2)]
        outs = [torch.full_like(t, float("nan")).contiguous() for t in (q, k)]
        got = api.call(q, weights[0], 1e-6, k, weights[1], 1e-6, *outs)
        known = zip("qk", got, (_KNOWN_Q, _KNOWN_K), strict=True)
        return [
            (name, y.float().cpu(), torch.tensor(want, dtype=torch.float32))
            for name, y, want in known
        ]

    return aiter_api.proven("aiter_fused", device, aiter_api.load, answers)


PATH = Path(
    name="aiter_fused",
    text="AITER's dual RMSNorm for ROCm, any generation; two launches from M = 16384",
    call=call,
    supports=supports,
    rounding="round_once",
    launches=1,
    fused=True,
    splits_from_m=aiter_api.SPLITS_FROM_M,
    truncates=True,
)
