"""torch_native: the sequential eager operations that serving engines fall back to."""

from __future__ import annotations

import torch

from mlakit.paths.checks import check, unquantised
from mlakit.paths.registry import Path


def normalised32(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` over its RMS, in float32, before any weight; transformers and SGLang begin so."""
    x32 = x.to(torch.float32)
    return x32 * torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)


def norm32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float32, not yet rounded; operation for operation SGLang's ``forward_native``."""
    return normalised32(x, eps) * weight


def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """q, then k, eagerly; see ``mlakit.paths.registry.Path`` for the arguments. Any strides.

    Raises:
        MisuseError: arguments that do not fit (``mlakit.paths.checks``).
    """
    check(q, q_weight, q_eps, k, k_weight, k_eps, out)
    if out is None:
        q_out = norm32(q, q_weight, q_eps).to(q.dtype)
        return q_out.contiguous(), norm32(k, k_weight, k_eps).to(k.dtype).contiguous()
    # The copy is the one cast, so a given output costs no further pass.
    out[0].copy_(norm32(q, q_weight, q_eps))
    out[1].copy_(norm32(k, k_weight, k_eps))
    return out


PATH = Path(
    name="torch_native",
    text="sequential eager PyTorch in float32, what engines fall back to",
    call=call,
    supports=unquantised,
    rounding="round_once",
    launches=16,
)
