"""The operator ``mlakit::qk_rmsnorm``: what torch.compile, export and autograd see of the step."""

from __future__ import annotations

import torch
from torch import Tensor


# Evaluated annotations: torch reads the operator's schema from them.
def _qk_rmsnorm(q, q_weight, q_eps, k, k_weight, k_eps):
    from mlakit.paths.triton_fused import run

    with torch.no_grad():
        return run(q, q_weight, q_eps, k, k_weight, k_eps)


qk_rmsnorm = torch.library.custom_op(
    "mlakit::qk_rmsnorm",
    _qk_rmsnorm,
    mutates_args=(),
    schema="(Tensor q, Tensor q_weight, float q_eps, Tensor k, Tensor k_weight, float k_eps)"
    " -> (Tensor, Tensor)",
)
"""``(q, q_weight, q_eps, k, k_weight, k_eps) -> (q_out, k_out)``; differentiable once."""


@qk_rmsnorm.register_fake
def _fake(q, q_weight, q_eps, k, k_weight, k_eps):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """d loss / d x and d loss / d weight of RMSNorm, given d loss / d output.

    grad, x: (..., N); weight: (N,). Computed in float32 (float64 for float64 x) and returned in
    the dtypes of x and weight.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide, grad_wide = x.to(wide), grad.to(wide)
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    normalised = x_wide * rstd
    scaled = grad_wide * weight.to(wide)
    along = (scaled * normalised).mean(-1, keepdim=True)
    grad_weight = (grad_wide * normalised).sum_to_size(weight.shape)
    return ((scaled - normalised * along) * rstd).to(x.dtype), grad_weight.to(weight.dtype)


def _setup_context(ctx, inputs, output):
    q, q_weight, ctx.q_eps, k, k_weight, ctx.k_eps = inputs
    ctx.save_for_backward(q, q_weight, k, k_weight)


def _backward(ctx, q_grad, k_grad):
    q, q_weight, k, k_weight = ctx.saved_tensors
    grad_q, grad_q_weight = gradient(q_grad, q, q_weight, ctx.q_eps)
    grad_k, grad_k_weight = gradient(k_grad, k, k_weight, ctx.k_eps)
    return grad_q, grad_q_weight, None, grad_k, grad_k_weight, None


qk_rmsnorm.register_autograd(_backward, setup_context=_setup_context)
