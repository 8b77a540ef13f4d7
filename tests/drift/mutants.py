"""Seeded mutants: norms whose rounding is known, and kernels that are known to be wrong.

Written in plain torch, apart from ``mlakit.rounding``, so that what names or catches them is held
against something else than itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _mean(x: torch.Tensor) -> torch.Tensor:
    return x.float().pow(2).mean(-1, keepdim=True)


def _s(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(_mean(x) + eps)


def _scaled(x, s, w):
    return (x.float() * s * w.float()).to(x.dtype)


def _round_once(x, w, eps):
    return _scaled(x, _s(x, eps), w)


def _cut(values):
    return (values.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _running_sum(x, w, eps):
    total = torch.zeros_like(x[..., :1])
    for column in x.split(1, -1):
        total = total + column * column
    return _scaled(x, torch.rsqrt(total.float() / x.shape[-1] + eps), w)


def _approx_rsqrt(x, w, eps):
    variance = _mean(x) + eps
    # the famous bit trick with two Newton steps: about 2**-17.7 off
    guess = (0x5F3759DF - (variance.view(torch.int32) >> 1)).view(torch.float32)
    for _ in range(2):
        guess = guess * (1.5 - 0.5 * variance * guess * guess)
    return _scaled(x, guess, w)


ROUNDING_MUTANTS: dict[str, tuple[Callable, str]] = {
    "float32 throughout": (_round_once, "round_once"),
    "Hugging Face order": (
        lambda x, w, eps: ((x.float() * _s(x, eps)).to(x.dtype) * w).to(x.dtype),
        "cast_then_weight",
    ),
    "weight in its own dtype": (
        lambda x, w, eps: ((x.float() * _s(x, eps)).to(w.dtype) * w).to(x.dtype),
        "weight_dtype",
    ),
    "truncation": (lambda x, w, eps: _cut(x.float() * _s(x, eps) * w.float()), "truncate"),
    "truncation, twice": (
        lambda x, w, eps: _cut(_cut(x.float() * _s(x, eps)).float() * w.float()),
        "truncate_twice",
    ),
    "reciprocal RMS rounded": (
        lambda x, w, eps: _scaled(x, _s(x, eps).to(x.dtype).float(), w),
        "bf16_rstd",
    ),
    "scale times weight rounded": (
        lambda x, w, eps: x * (_s(x, eps) * w.float()).to(x.dtype),
        "bf16_scale",
    ),
    "squares rounded": (
        lambda x, w, eps: _scaled(x, torch.rsqrt((x * x).float().mean(-1, keepdim=True) + eps), w),
        "bf16_squares",
    ),
    "sum rounded": (
        lambda x, w, eps: _scaled(x, torch.rsqrt((x * x).mean(-1, keepdim=True).float() + eps), w),
        "bf16_sum",
    ),
    "running bf16 sum": (_running_sum, "running_sum"),
    "all in bf16": (
        lambda x, w, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w,
        "bf16_variance+bf16_rstd+cast_then_weight",
    ),
    "eps outside the root": (
        lambda x, w, eps: (x.float() / (_mean(x).sqrt() + eps) * w.float()).to(x.dtype),
        "eps_outside",
    ),
    "eps ignored": (lambda x, w, eps: _round_once(x, w, 0.0), "eps_ignored"),
    "eps fixed at 1e-6": (lambda x, w, eps: _round_once(x, w, 1e-6), "eps_fixed_1e-06"),
    "eps as a floor": (
        lambda x, w, eps: _scaled(x, torch.rsqrt(_mean(x).clamp_min(eps)), w),
        "eps_clamped",
    ),
    "gemma": (lambda x, w, eps: _scaled(x, _s(x, eps), 1 + w.float()), "gemma"),
    "gemma, Hugging Face order": (
        lambda x, w, eps: _scaled((x.float() * _s(x, eps)).to(x.dtype), 1, 1 + w.float()),
        "cast_then_weight+gemma",
    ),
    "approximate rsqrt": (_approx_rsqrt, "approx_rsqrt"),
}
"""By what is wrong or odd: fn(x, weight, eps) on bf16, and the name its fingerprint must have."""


def _pair(norm: Callable) -> Callable:
    def call(q, q_weight, q_eps, k, k_weight, k_eps):
        return norm(q, q_weight, q_eps), norm(k, k_weight, k_eps)

    return call


_right = _pair(_round_once)


def _spoiled(spoil: Callable) -> Callable:
    """The right outputs, then ``spoil(q, q_out, k_out)``, which changes or replaces them."""

    def call(*args):
        outputs = _right(*args)
        return spoil(args[0], *outputs) or outputs

    return call


def _last_row_missing(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    for x, w, eps, out in ((q, q_weight, q_eps, q_out), (k, k_weight, k_eps, k_out)):
        rows = x.shape[0] - 1 if x.shape[0] > 1 else x.shape[0]
        out[:rows] = _round_once(x[:rows], w, eps)
    return q_out, k_out


def _q_statistics_for_k(q, q_weight, q_eps, k, k_weight, k_eps):
    return _round_once(q, q_weight, q_eps), _scaled(k, _s(q, q_eps), k_weight)


def _as_if_packed(x):
    """x read with a row stride of its width, as a kernel that ignores the stride would."""
    if x.ndim != 2 or x.shape[0] < 2 or x.stride(0) < x.shape[1]:
        return x
    return x.as_strided(x.shape, (x.shape[1], 1))


def _stride_ignored(q, q_weight, q_eps, k, k_weight, k_eps):
    return _right(_as_if_packed(q), q_weight, q_eps, _as_if_packed(k), k_weight, k_eps)


def _rope_included(q, q_weight, q_eps, k, k_weight, k_eps):
    wide = k
    if k.ndim == 2 and k.shape[0] > 1 and k.stride(0) > q.shape[1] + k.shape[1]:
        rope = k.stride(0) - q.shape[1] - k.shape[1]
        wide = k.as_strided((k.shape[0], k.shape[1] + rope), k.stride())
    return _round_once(q, q_weight, q_eps), _scaled(k, _s(wide, k_eps), k_weight)


def _one_eps(q, q_weight, q_eps, k, k_weight, k_eps):
    return _right(q, q_weight, q_eps, k, k_weight, q_eps)


def _grid_limit(q, q_out, k_out):
    q_out[65535:], k_out[65535:] = 0, 0


def _odd_width_spill(q, q_out, k_out):
    if q.shape[-1] % 2 and q.numel():
        q_out[1:, 0] = q_out[:-1, -1]


_memory: list[torch.Tensor] = []


def _stale_buffer(q, q_out, k_out):
    _memory[:] = [b for b in _memory if b.shape == q_out.shape and b.dtype == q_out.dtype]
    if not _memory:
        _memory.append(torch.empty_like(q_out))
    return _memory[0].copy_(q_out), k_out


KNOWN_BAD: dict[str, Callable] = {
    "zeros": lambda q, qw, qe, k, kw, ke: (torch.zeros_like(q), torch.zeros_like(k)),
    "copies": lambda q, qw, qe, k, kw, ke: (q.clone(), k.clone()),
    "inputs returned": lambda q, qw, qe, k, kw, ke: (q, k),
    "row 0 repeated": _spoiled(lambda q, *out: tuple(y[:1].expand_as(y).contiguous() for y in out)),
    "last row missing": _last_row_missing,
    "q's statistics used for k": _q_statistics_for_k,
    "stride ignored": _stride_ignored,
    "rope included in k": _rope_included,
    "truncation": _pair(ROUNDING_MUTANTS["truncation"][0]),
    "one eps for both": _one_eps,
    "eps outside the root": _pair(ROUNDING_MUTANTS["eps outside the root"][0]),
    "written over its input": _spoiled(lambda q, q_out, k_out: (q.copy_(q_out).clone(), k_out)),
    "NaN hidden": _spoiled(lambda q, *out: tuple(y.nan_to_num(0) for y in out)),
    "rows above 65535 lost": _spoiled(_grid_limit),
    "odd width spills into the next row": _spoiled(_odd_width_spill),
    "one output buffer for all calls": _spoiled(_stale_buffer),
}
"""By fault: fn(q, q_weight, q_eps, k, k_weight, k_eps) -> (q_out, k_out), wrong."""
