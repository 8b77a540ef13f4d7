"""AITER's dual-norm calls, served by mlakit: for cards on which AITER cannot build its kernel.

Three entries with AITER's own signatures (see ``docs/engines.md`` for the lines that SGLang and
vLLM need). Unquantised q goes through ``mlakit.qk_rmsnorm``, whose ``last_call`` says which path
ran; quantised q goes through mlakit's Triton launch on a GPU and its eager reference on a CPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mlakit.dispatch.call import qk_rmsnorm
from mlakit.errors import MisuseError, RefusedError, unknown
from mlakit.formats import fp8, mxfp4
from mlakit.paths import aiter_api, registry
from mlakit.paths.quantised import Options, QuantisedQ

QUANTS = {
    "No": "none",
    "per_1x128": "fp8_group128",
    "per_Token": "fp8_token",
    "per_1x32": "mxfp4",
}
"""AITER's ``QuantType``, by name -> mlakit's quant"""
NO_QUANT = SimpleNamespace(name="No")
"""stands for ``aiter.QuantType.No``, which cannot be imported where AITER is not"""


def fused_qk_rmsnorm_pair(q, q_weight, q_eps, k, k_weight, k_eps):
    """``aiter.ops.fused_qk_norm_rope_cache_quant.fused_qk_rmsnorm``, v0.1.12 to v0.1.13.post1.

    Args:
        q: (M, N1) bf16 or fp16, any row stride.
        q_weight: (N1,).
        q_eps: of q.
        k: (M, N2), the same rows.
        k_weight: (N2,).
        k_eps: of k.

    Returns:
        (q_out, k_out), new and contiguous.
    """
    return qk_rmsnorm(q, q_weight, float(q_eps), k, k_weight, float(k_eps))


def fused_qk_rmsnorm_private(q_out, q, q_weight, q_eps, k_out, k, k_weight, k_eps):
    """``_fused_qk_rmsnorm`` of the same module from v0.1.14 on, which vLLM calls.

    Returns:
        (q_out, k_out): those given, or new ones where both are None.

    Raises:
        MisuseError: one output without the other.
    """
    if (q_out is None) != (k_out is None):
        raise MisuseError("one of q_out and k_out is missing: give both, or neither")
    out = None if q_out is None else (q_out, k_out)
    return qk_rmsnorm(q, q_weight, float(q_eps), k, k_weight, float(k_eps), out=out)


def fused_qk_rmsnorm_unified(
    q_out_quantized: torch.Tensor | None = None,
    q_out_scale: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    q_epsilon: float = 1e-6,
    q_out_unquantized: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    q_res_out: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    k_epsilon: float | None = None,
    q_residual: torch.Tensor | None = None,
    gemma_norm: bool = False,
    quant_type=NO_QUANT,
    group_size: int | None = None,
    transpose_scale: bool = False,
) -> None:
    """``aiter.ops.fused_qk_rmsnorm_group_quant.fused_qk_rmsnorm``, v0.1.14 on; fills the buffers.

    As in AITER, the unquantised result of quant type ``No`` goes into ``q_out_quantized``. What
    AITER ignores there (a residual, gemma's weight) is refused here instead.

    Raises:
        RefusedError: a residual, ``gemma_norm``, no k, or another group size than the format's.
        MisuseError: a missing buffer, or an unknown quant type.
    """
    name = getattr(quant_type, "name", None) or str(quant_type).rsplit(".", 1)[-1]
    if name not in QUANTS:
        raise unknown("quant type", name, QUANTS)
    quant = QUANTS[name]
    if q_residual is not None or q_res_out is not None or gemma_norm:
        raise RefusedError("a residual or gemma_norm is not served: add it before, or call AITER")
    if k is None or k_out is None or q is None or q_out_quantized is None:
        raise MisuseError("q, k, q_out_quantized and k_out are all needed: this is the dual norm")
    if k_epsilon is None:
        raise MisuseError("k_epsilon is None: give the model's number, for example 1e-6")
    args: tuple = (q, q_weight, float(q_epsilon), k, k_weight, float(k_epsilon))
    if quant == "none":
        qk_rmsnorm(*args, out=(q_out_quantized, k_out))
        return
    _quantised(quant, args, q_out_quantized, q_out_scale, q_out_unquantized, k_out, group_size,
               transpose_scale)  # fmt: skip


BATCHED = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"


def aiter_batched_a8w8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group: int = fp8.GROUP
) -> torch.Tensor:
    """AITER's Triton kernel for the absorbed product, with the arguments of ``mla.batched_a8w8``.

    Raises:
        RefusedError: AITER does not import, or has no such kernel under either of its addresses.
    """
    for folder in ("aiter.ops.triton.gemm.batched", "aiter.ops.triton"):
        try:
            kernel = getattr(aiter_api.import_or_none(f"{folder}.{BATCHED}"), BATCHED, None)
        except ImportError as error:
            raise RefusedError(f"the batched a8w8 product: {error}") from error
        if kernel is not None:
            return kernel(x, weight, scale, group_size=group, dtype=x.dtype)
    raise RefusedError(f"this AITER has no {BATCHED}; mla.batched_a8w8 is the reference")


def _quantised(quant, args, values, scale, unquantised, k_out, group_size, transpose) -> None:
    if scale is None:
        raise MisuseError("q_out_scale is None: a quantised q has scales")
    want = {"fp8_group128": fp8.GROUP, "mxfp4": mxfp4.GROUP}.get(quant)
    if want and group_size not in (None, want):
        raise RefusedError(f"group_size {group_size}: {quant} has groups of {want}")
    if quant == "mxfp4":
        # Views: torch's own FP4 and E8M0 types hold the same bytes.
        values, scale = values.view(torch.uint8), scale.view(torch.uint8)
        options = Options(unquantised=unquantised is not None, rule="round_up")
    else:
        encoding = fp8.BY_DTYPE.get(values.dtype)
        if encoding is None:
            raise MisuseError(f"q_out_quantized is {values.dtype}: give an FP8 E4M3 tensor")
        options = Options(
            encoding.name, "transposed" if transpose else None, unquantised=unquantised is not None
        )
    path = registry.get(f"{'triton' if values.is_cuda else 'torch'}_{quant}")
    path.call(*args, out=(QuantisedQ(values, scale, unquantised), k_out), options=options)


# Under the names of AITER's own module, so that this one can be imported in its stead.
fused_qk_rmsnorm, _fused_qk_rmsnorm = fused_qk_rmsnorm_pair, fused_qk_rmsnorm_private
