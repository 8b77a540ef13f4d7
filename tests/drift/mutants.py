"""Seeded mutants: norms whose rounding is known, and kernels that are known to be wrong.

Written in plain torch, apart from ``mlakit.rounding``, so that what names or catches them is held
against something else than itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _mean(x32: torch.Tensor) -> torch.Tensor:
    return x32.pow(2).mean(-1, keepdim=True)


def _round_once(x, w, eps):
    x32 = x.float()
    return (x32 * torch.rsqrt(_mean(x32) + eps) * w.float()).to(x.dtype)


def _cast_then_weight(x, w, eps):
    x32 = x.float()
    return ((x32 * torch.rsqrt(_mean(x32) + eps)).to(x.dtype) * w).to(x.dtype)


def _weight_dtype(x, w, eps):
    x32 = x.float()
    return ((x32 * torch.rsqrt(_mean(x32) + eps)).to(w.dtype) * w).to(x.dtype)


def _cut(values):
    return (values.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _truncate(x, w, eps):
    x32 = x.float()
    return _cut(x32 * torch.rsqrt(_mean(x32) + eps) * w.float())


def _truncate_twice(x, w, eps):
    x32 = x.float()
    return _cut(_cut(x32 * torch.rsqrt(_mean(x32) + eps)).float() * w.float())


def _bf16_rstd(x, w, eps):
    x32 = x.float()
    rstd = torch.rsqrt(_mean(x32) + eps).to(x.dtype).float()
    return (x32 * rstd * w.float()).to(x.dtype)


def _bf16_scale(x, w, eps):
    x32 = x.float()
    scale = (torch.rsqrt(_mean(x32) + eps) * w.float()).to(x.dtype)
    return x * scale


def _bf16_squares(x, w, eps):
    mean = (x * x).float().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean + eps) * w.float()).to(x.dtype)


def _bf16_sum(x, w, eps):
    mean = (x * x).mean(-1, keepdim=True).float()
    return (x.float() * torch.rsqrt(mean + eps) * w.float()).to(x.dtype)


def _running_sum(x, w, eps):
    total = torch.zeros_like(x[..., :1])
    for column in x.split(1, -1):
        total = total + column * column
    mean = total.float() / x.shape[-1]
    return (x.float() * torch.rsqrt(mean + eps) * w.float()).to(x.dtype)


def _all_bf16(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def _eps_outside(x, w, eps):
    x32 = x.float()
    return (x32 / (_mean(x32).sqrt() + eps) * w.float()).to(x.dtype)


def _eps_ignored(x, w, eps):
    return _round_once(x, w, 0.0)


def _eps_fixed(x, w, eps):
    return _round_once(x, w, 1e-6)


def _eps_clamped(x, w, eps):
    x32 = x.float()
    return (x32 * torch.rsqrt(_mean(x32).clamp_min(eps)) * w.float()).to(x.dtype)


def _gemma(x, w, eps):
    x32 = x.float()
    return (x32 * torch.rsqrt(_mean(x32) + eps) * (1 + w.float())).to(x.dtype)


def _gemma_cast(x, w, eps):
    x32 = x.float()
    normalised = (x32 * torch.rsqrt(_mean(x32) + eps)).to(x.dtype)
    return (normalised.float() * (1 + w.float())).to(x.dtype)


def _approx_rsqrt(x, w, eps):
    x32 = x.float()
    variance = _mean(x32) + eps
    # the famous bit trick with two Newton steps: about 2**-17.7 off
    guess = (0x5F3759DF - (variance.view(torch.int32) >> 1)).view(torch.float32)
    for _ in range(2):
        guess = guess * (1.5 - 0.5 * variance * guess * guess)
    return (x32 * guess * w.float()).to(x.dtype)


ROUNDING_MUTANTS: dict[str, tuple[Callable, str]] = {
    "float32 throughout": (_round_once, "round_once"),
    "Hugging Face order": (_cast_then_weight, "cast_then_weight"),
    "weight in its own dtype": (_weight_dtype, "weight_dtype"),
    "truncation": (_truncate, "truncate"),
    "truncation, twice": (_truncate_twice, "truncate_twice"),
    "reciprocal RMS rounded": (_bf16_rstd, "bf16_rstd"),
    "scale times weight rounded": (_bf16_scale, "bf16_scale"),
    "squares rounded": (_bf16_squares, "bf16_squares"),
    "sum rounded": (_bf16_sum, "bf16_sum"),
    "running bf16 sum": (_running_sum, "running_sum"),
    "all in bf16": (_all_bf16, "bf16_variance+bf16_rstd+cast_then_weight"),
    "eps outside the root": (_eps_outside, "eps_outside"),
    "eps ignored": (_eps_ignored, "eps_ignored"),
    "eps fixed at 1e-6": (_eps_fixed, "eps_fixed_1e-06"),
    "eps as a floor": (_eps_clamped, "eps_clamped"),
    "gemma": (_gemma, "gemma"),
    "gemma, Hugging Face order": (_gemma_cast, "cast_then_weight+gemma"),
    "approximate rsqrt": (_approx_rsqrt, "approx_rsqrt"),
}
"""By what is wrong or odd: fn(x, weight, eps) on bf16, and the name its fingerprint must have."""


def _pair(norm: Callable) -> Callable:
    def call(q, q_weight, q_eps, k, k_weight, k_eps):
        return norm(q, q_weight, q_eps), norm(k, k_weight, k_eps)

    return call


def _zeros(q, q_weight, q_eps, k, k_weight, k_eps):
    return torch.zeros_like(q), torch.zeros_like(k)


def _copies(q, q_weight, q_eps, k, k_weight, k_eps):
    return q.clone(), k.clone()


def _inputs_returned(q, q_weight, q_eps, k, k_weight, k_eps):
    return q, k


def _row_0_repeated(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = _pair(_round_once)(q, q_weight, q_eps, k, k_weight, k_eps)
    return q_out[:1].expand_as(q_out).contiguous(), k_out[:1].expand_as(k_out).contiguous()


def _last_row_missing(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    for x, w, eps, out in ((q, q_weight, q_eps, q_out), (k, k_weight, k_eps, k_out)):
        rows = x.shape[0] - 1 if x.shape[0] > 1 else x.shape[0]
        out[:rows] = _round_once(x[:rows], w, eps)
    return q_out, k_out


def _q_statistics_for_k(q, q_weight, q_eps, k, k_weight, k_eps):
    scale = torch.rsqrt(_mean(q.float()) + q_eps)
    k_out = (k.float() * scale * k_weight.float()).to(k.dtype)
    return _round_once(q, q_weight, q_eps), k_out


def _as_if_packed(x):
    """x read with a row stride of its width, as a kernel that ignores the stride would."""
    if x.ndim != 2 or x.shape[0] < 2 or x.stride(0) < x.shape[1]:
        return x
    return x.as_strided(x.shape, (x.shape[1], 1))


def _stride_ignored(q, q_weight, q_eps, k, k_weight, k_eps):
    q, k = _as_if_packed(q), _as_if_packed(k)
    return _pair(_round_once)(q, q_weight, q_eps, k, k_weight, k_eps)


def _rope_included(q, q_weight, q_eps, k, k_weight, k_eps):
    wide = k
    if k.ndim == 2 and k.shape[0] > 1 and k.stride(0) > q.shape[1] + k.shape[1]:
        rope = k.stride(0) - q.shape[1] - k.shape[1]
        wide = k.as_strided((k.shape[0], k.shape[1] + rope), k.stride())
    scale = torch.rsqrt(_mean(wide.float()) + k_eps)
    k_out = (k.float() * scale * k_weight.float()).to(k.dtype)
    return _round_once(q, q_weight, q_eps), k_out


def _one_eps(q, q_weight, q_eps, k, k_weight, k_eps):
    return _pair(_round_once)(q, q_weight, q_eps, k, k_weight, q_eps)


def _in_place(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = _pair(_round_once)(q, q_weight, q_eps, k, k_weight, k_eps)
    q.copy_(q_out)
    return q_out, k_out


def _nan_hidden(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = _pair(_round_once)(q, q_weight, q_eps, k, k_weight, k_eps)
    return q_out.nan_to_num(0), k_out.nan_to_num(0)


def _grid_limit(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = _pair(_round_once)(q, q_weight, q_eps, k, k_weight, k_eps)
    q_out[65535:], k_out[65535:] = 0, 0
    return q_out, k_out


def _odd_width_spill(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = _pair(_round_once)(q, q_weight, q_eps, k, k_weight, k_eps)
    if q.shape[-1] % 2 and q.numel():
        q_out[1:, 0] = q_out[:-1, -1]
    return q_out, k_out


_memory: list[torch.Tensor] = []


def _stale_buffer(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = _pair(_round_once)(q, q_weight, q_eps, k, k_weight, k_eps)
    _memory[:] = [b for b in _memory if b.shape == q_out.shape and b.dtype == q_out.dtype]
    if not _memory:
        _memory.append(torch.empty_like(q_out))
    _memory[0].copy_(q_out)
    return _memory[0], k_out


KNOWN_BAD: dict[str, Callable] = {
    "zeros": _zeros,
    "copies": _copies,
    "inputs returned": _inputs_returned,
    "row 0 repeated": _row_0_repeated,
    "last row missing": _last_row_missing,
    "q's statistics used for k": _q_statistics_for_k,
    "stride ignored": _stride_ignored,
    "rope included in k": _rope_included,
    "truncation": _pair(_truncate),
    "one eps for both": _one_eps,
    "eps outside the root": _pair(_eps_outside),
    "written over its input": _in_place,
    "NaN hidden": _nan_hidden,
    "rows above 65535 lost": _grid_limit,
    "odd width spills into the next row": _odd_width_spill,
    "one output buffer for all calls": _stale_buffer,
}
"""By fault: fn(q, q_weight, q_eps, k, k_weight, k_eps) -> (q_out, k_out), wrong."""
