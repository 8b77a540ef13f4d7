"""What the quantised paths share: the record they deliver, its options, and the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from mlakit import archs
from mlakit.context import Context
from mlakit.errors import MisuseError, unknown
from mlakit.formats import fp8, mxfp4
from mlakit.paths.checks import (
    check,
    current,
    derivative_wanted,
    refuse_overlap,
    refuse_unwritable,
    written,
)
from mlakit.rounding import oracle, round_to


class QuantisedQ(NamedTuple):
    """q as its consumer reads it.

    values: (..., N) FP8 or (..., N/2) uint8 (MXFP4); scale: (M, groups) float32 or E8M0 bytes, in
    the layout asked for; unquantised: q in the input's dtype, for a sparse indexer, or None.
    """

    values: torch.Tensor
    scale: torch.Tensor
    unquantised: torch.Tensor | None = None


@dataclass(frozen=True)
class Options:
    """How q is delivered beyond its quant; what a quant has no use for is ignored.

    Raises:
        MisuseError: a name outside its set.
    """

    encoding: str | None = None
    """``fp8_ocp`` or ``fp8_fnuz``; None takes the device's own"""
    scale_layout: str | None = None
    """of ``formats.fp8.SCALE_LAYOUTS`` or ``formats.mxfp4.SCALE_LAYOUTS``; None is the first"""
    rule: str = mxfp4.DEFAULT_RULE
    """E8M0 scale rule, of ``formats.mxfp4.RULES``"""
    unquantised: bool = False
    """deliver the norm in the input's dtype too"""

    def __post_init__(self) -> None:
        if self.encoding is not None:
            fp8.encoding(self.encoding)
        if self.rule not in mxfp4.RULES:
            raise unknown("E8M0 scale rule", self.rule, mxfp4.RULES)


DEFAULT = Options()


def refusal(quant: str, q_width: int) -> str | None:
    """Why q of that width cannot be delivered as ``quant``, or None."""
    if q_width == 0:
        return "no q latent: there is nothing to quantise"
    if quant == "mxfp4":
        return mxfp4.refusal(q_width)
    return fp8.refusal(q_width) if quant == "fp8_group128" else None


def refusal_in(context: Context, quant: str) -> str | None:
    """Why no path can deliver ``quant`` in ``context``, or None."""
    if context.quant != quant:
        return f"delivers q as {quant}, {context.quant} was asked for"
    if quant != "mxfp4" and archs.fp8_format(context.arch) is None:
        return f"{context.arch} has no FP8"
    if context.requires_grad:
        return "no backward: inputs require gradients"
    return refusal(quant, context.q_lora_rank)


@cache
def native_encoding(device: torch.device) -> fp8.Encoding:
    """The encoding of a device's own FP8, read from the device; a CPU's is OCP.

    Raises:
        MisuseError: the device has no FP8.
    """
    arch = archs.of(device)
    name = archs.fp8_format(arch)
    if name is None:
        raise MisuseError(f"{arch} has no FP8: name an encoding, fp8_ocp or fp8_fnuz")
    return fp8.encoding(name)


def encoding_of(quant: str, device: torch.device, options: Options) -> fp8.Encoding | None:
    """The FP8 encoding of a call, None for MXFP4."""
    if quant == "mxfp4":
        return None
    return fp8.encoding(options.encoding) if options.encoding else native_encoding(device)


def _shapes(quant: str, q: torch.Tensor, options: Options) -> tuple:
    """(shape, dtype) of the values and of the scale that ``quant`` makes of q.

    Raises:
        MisuseError: a width or layout that ``quant`` does not have.
    """
    m, n = math.prod(q.shape[:-1]), q.shape[-1]
    reason = refusal(quant, n)
    if reason:
        raise MisuseError(reason)
    layouts = mxfp4.SCALE_LAYOUTS if quant == "mxfp4" else fp8.SCALE_LAYOUTS
    if options.scale_layout not in (None, *layouts):
        raise unknown("scale layout", options.scale_layout, layouts)
    if quant == "mxfp4":
        scale = m, n // mxfp4.GROUP
        if options.scale_layout == "shuffled":
            scale = mxfp4.shuffled_shape(*scale)
        return ((*q.shape[:-1], n // 2), torch.uint8), (scale, torch.uint8)
    groups = n // fp8.GROUP if quant == "fp8_group128" else 1
    dtype = encoding_of(quant, q.device, options).dtype
    return (tuple(q.shape), dtype), ((m, groups), torch.float32)


def empty(quant: str, q: torch.Tensor, options: Options = DEFAULT) -> QuantisedQ:
    """Unwritten output for q, in the shapes and strides of ``options``.

    Raises:
        MisuseError: a width or layout that ``quant`` does not have.
    """
    (shape, dtype), (scale_shape, scale_dtype) = _shapes(quant, q, options)
    if quant == "mxfp4":
        scale = q.new_empty(scale_shape, dtype=scale_dtype)
    else:
        scale = fp8.empty_scale(*scale_shape, options.scale_layout or "row_major", q.device)
    unquantised = q.new_empty(q.shape) if options.unquantised else None
    return QuantisedQ(q.new_empty(shape, dtype=dtype), scale, unquantised)


def outputs(quant, arguments, out, options) -> tuple[QuantisedQ, torch.Tensor]:
    """Check a call's six ``arguments``; give ``out``, or new tensors where it is None.

    Raises:
        MisuseError: as ``checks.check``; a gradient is wanted; or one of ``out``'s tensors differs
            from what ``empty`` makes in shape, dtype, strides or device, or overlaps another.
    """
    check(*arguments)
    q, q_weight, _, k, k_weight, _ = arguments
    if derivative_wanted(q, q_weight, k, k_weight):
        raise MisuseError("a gradient is wanted and quantising has none: use torch.no_grad()")
    if out is None:
        return empty(quant, q, options), k.new_empty(k.shape)
    try:
        of_q, k_out = out
        quantised = QuantisedQ(*of_q) if isinstance(of_q, tuple) else None
    except (TypeError, ValueError):
        quantised = None
    if quantised is None:
        raise MisuseError("out must be a pair: what quantised.empty makes of q, and one like k")
    (shape, dtype), scale = _shapes(quant, q, options)
    wanted = [("values", quantised.values, shape, dtype), ("scale", quantised.scale, *scale)]
    wanted.append(("k", k_out, tuple(k.shape), k.dtype))
    if options.unquantised:
        wanted.append(("unquantised", quantised.unquantised, tuple(q.shape), q.dtype))
    for name, tensor, shape, dtype in wanted:
        strided = name == "scale" and options.scale_layout == "strided"
        if (
            not isinstance(tensor, torch.Tensor)
            or (tuple(tensor.shape), tensor.dtype, tensor.device) != (shape, dtype, q.device)
            or not (tensor.t() if strided else tensor).is_contiguous()
        ):
            raise MisuseError(
                f"out's {name} must be {shape} {dtype} on {q.device}, as quantised.empty makes it"
            )
    given = {f"out's {name}": tensor for name, tensor, *_ in wanted}
    refuse_unwritable(given)
    refuse_overlap(given, q, q_weight, k, k_weight)
    written(*given.values())
    return out


def fill(quant: str, y: torch.Tensor, out: QuantisedQ, options: Options = DEFAULT) -> QuantisedQ:
    """Quantise float32 ``y`` into ``out`` with torch's operators; returns ``out``."""
    rows = y.reshape(-1, y.shape[-1])
    if quant == "mxfp4":
        values, scale = mxfp4.quantise(rows, options.rule)
        if options.scale_layout == "shuffled":
            scale = mxfp4.shuffle_scale(scale)
        out.scale.copy_(scale)
    else:
        encoding = fp8.BY_DTYPE[out.values.dtype]
        group = fp8.GROUP if quant == "fp8_group128" else None
        values, scale = fp8.quantise(rows, encoding, group)
        fp8.by_row(out.scale, options.scale_layout or "row_major").copy_(scale)
    out.values.copy_(values.view(out.values.shape))
    if out.unquantised is not None:
        out.unquantised.copy_(y)
    return out


def reference(
    quant: str, q: torch.Tensor, weight: torch.Tensor, eps: float, options: Options = DEFAULT
) -> QuantisedQ:
    """q's float64 norm, rounded once to float32 and quantised; what every path is held against."""
    exact = oracle(q, weight, eps)
    out = fill(quant, exact.float(), empty(quant, q, options), options)
    if out.unquantised is not None:
        out.unquantised.copy_(round_to(exact, q.dtype))
    return out


def plain_scale(quant: str, quantised: QuantisedQ, options: Options = DEFAULT) -> torch.Tensor:
    """(M, groups) scales indexed by [row, group], whatever layout they lie in."""
    if quant != "mxfp4":
        return fp8.by_row(quantised.scale, options.scale_layout or "row_major")
    if options.scale_layout != "shuffled":
        return quantised.scale
    packed = quantised.values
    m, groups = math.prod(packed.shape[:-1]), packed.shape[-1] * 2 // mxfp4.GROUP
    return mxfp4.unshuffle_scale(quantised.scale, m, groups)


def dequantise(quant: str, quantised: QuantisedQ, options: Options = DEFAULT) -> torch.Tensor:
    """(M, N) float32 that the consumer of ``quantised`` computes with."""
    values = quantised.values.reshape(-1, quantised.values.shape[-1])
    module = mxfp4 if quant == "mxfp4" else fp8
    return module.dequantise(values, plain_scale(quant, quantised, options))


def eager(quant, q, q_weight, q_eps, k, k_weight, k_eps, *, out=None, options=DEFAULT):
    """The step in torch's own operators: float32 norm, then quantise."""
    quantised, k_out = outputs(quant, (q, q_weight, q_eps, k, k_weight, k_eps), out, options)
    with current(q.device):  # torch.ldexp (2.11) launches on whichever device that is
        fill(quant, _norm32(q, q_weight, q_eps), quantised, options)
        k_out.copy_(_norm32(k, k_weight, k_eps))
    return quantised, k_out


def _norm32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
