"""What every path asks of its arguments: one cheap condition when they are right."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from mlakit.context import Context
from mlakit.errors import MisuseError

_transform = torch._C._functorch.peek_interpreter_stack
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_GUARDS = getattr(torch._C._dynamo.guards, "TensorGuards", None)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def unquantised(context: Context) -> str | None:
    """The ``supports`` of a path whose one limit is that it delivers q as it came."""
    if context.quant != "none":
        return f"delivers q unquantised, and {context.quant} is wanted"
    return None


def kernel_limits(context: Context) -> str | None:
    """What ``prepare`` will refuse: an inner stride, a gradient, a quantised q."""
    if context.layout == "inner_strided":
        return "inner stride is not 1, this kernel wants 1: give contiguous()"
    if context.requires_grad:
        return "a gradient is wanted and this kernel has no backward: torch.no_grad() does without"
    return unquantised(context)


def check(q, q_weight, q_eps, k, k_weight, k_eps, out=None) -> None:
    """Refuse arguments that no path can serve; any strides and any rank pass.

    eps of 0 is allowed: a row of zeros is then NaN.

    Raises:
        MisuseError: rows, shapes, dtypes, devices or eps that do not fit, or an ``out`` that does
            not fit or overlaps another argument.
    """
    try:
        dtype, device = q.dtype, q.device
        fits = (
            q.shape
            and k.shape
            and q.shape[:-1] == k.shape[:-1]
            and q_weight.shape == q.shape[-1:]
            and k_weight.shape == k.shape[-1:]
            and k.dtype is dtype
            and dtype in FLOATS
            and q_weight.dtype in FLOATS
            and k_weight.dtype in FLOATS
            and device == k.device == q_weight.device == k_weight.device
            and type(q_eps) is float
            and type(k_eps) is float
            and q_eps >= 0 <= k_eps
        )
    except AttributeError:
        fits = False  # no tensor: explained below, so that a good call pays no test for it
    if not fits:
        _explain(q, q_weight, q_eps, k, k_weight, k_eps)
    if out is not None:
        _check_out(q, q_weight, k, k_weight, out)


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Make the GPU of the tensors the current one: others' kernels launch on whichever that is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def facts(q, q_weight, k, k_weight) -> tuple:
    """What a choice or a compiled kernel is remembered by: shapes, strides, dtypes, devices."""
    return (
        q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        q_weight.shape, q_weight.stride(), q_weight.dtype, q_weight.get_device(),
        k_weight.shape, k_weight.stride(), k_weight.dtype, k_weight.get_device(),
    )  # fmt: skip


def same_as(q, q_weight, k, k_weight) -> Callable[..., bool]:
    """Whether four other tensors are of the kind of these: their ``facts``, class and gradients.

    By the test that torch.compile's own graphs are guarded with: 0.25 us where ``facts`` take 1.
    """
    if _GUARDS is None:
        kept = facts(q, q_weight, k, k_weight), plain(q, q_weight, k, k_weight)
        return lambda *tensors: (facts(*tensors), plain(*tensors)) == kept
    shapes = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    return _GUARDS(q, q_weight, k, k_weight, **shapes).check


def unwatched() -> bool:
    """Whether no mode or transform of torch looks on, which would have to see an operator."""
    return (
        forward_ad._current_level < 0
        and _transform() is None
        and not torch._C._len_torch_dispatch_stack()
    )


def plain(q, q_weight, k, k_weight) -> bool:
    """Whether a kernel may simply run: tensors with memory, ``unwatched``, no gradient."""
    return (
        type(q) is torch.Tensor
        and type(k) is torch.Tensor
        and type(q_weight).__torch_dispatch__ is _NO_DISPATCH
        and type(k_weight).__torch_dispatch__ is _NO_DISPATCH
        and not lazy(q, q_weight, k, k_weight)
        and unwatched()
        and not _backward_wanted(q, q_weight, k, k_weight)
    )


def lazy(q, q_weight, k, k_weight) -> bool:
    """Whether one of them is more than its memory says: a view whose signs torch turns when it
    reads it, or zeros that have no memory."""
    return (
        q.is_neg() or k.is_neg() or q_weight.is_neg() or k_weight.is_neg()
        or q._is_zerotensor() or k._is_zerotensor()
        or q_weight._is_zerotensor() or k_weight._is_zerotensor()
    )  # fmt: skip


def need_memory(*tensors) -> None:
    """Refuse what stands for a tensor (fake, sharded, on ``meta``, zero without memory): it starts
    at 0, where a read ends a process; and one whose memory holds other signs than it has.

    Raises:
        MisuseError: one of them is such, or of a class that torch's operators dispatch on.
    """
    for x in tensors:
        dispatches = type(x).__torch_dispatch__ is not _NO_DISPATCH
        if dispatches or (not x.data_ptr() and x.numel()):
            what = type(x).__name__ if dispatches else "meta tensor" if x.is_meta else "zero tensor"
            raise MisuseError(
                f"a {what} has no memory that a kernel could compute on, and this path cannot be "
                "traced: use torch_native"
            )
        if x.is_neg():
            raise MisuseError(
                "a tensor is a negated view, whose memory holds the other signs: give its "
                "resolve_neg(), or use torch_native"
            )


def derivative_wanted(q, q_weight, k, k_weight) -> bool:
    """Whether a kernel of ours would lose what torch wants of the call: a gradient (backward, or
    forward mode is on), or a transform of ``torch.func``."""
    return (
        forward_ad._current_level >= 0
        or _transform() is not None
        or _backward_wanted(q, q_weight, k, k_weight)
    )


def _backward_wanted(q, q_weight, k, k_weight) -> bool:
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or q_weight.requires_grad or k_weight.requires_grad
    )


def prepare(q, q_weight, q_eps, k, k_weight, k_eps, out=None) -> tuple:
    """Check a kernel's arguments and lay them out as rows.

    Returns:
        q, k, q_out, k_out as 2-D tensors of unit inner stride (new ones without ``out``), and the
        pair that the caller gets: the outputs in the shape of the inputs.

    Raises:
        MisuseError: as ``check``, or a layout that is no single (rows, stride) pair, or a gradient
            wanted of a kernel that has no backward.
    """
    check(q, q_weight, q_eps, k, k_weight, k_eps, out)
    if derivative_wanted(q, q_weight, k, k_weight):  # first: a transform's tensors have no address
        raise MisuseError(
            "a gradient is wanted but this path has no backward: "
            "call it under torch.no_grad(), or use torch_native"
        )
    need_memory(q, q_weight, k, k_weight, *(out or ()))
    written(*(out or ()))
    if not (q_weight.is_contiguous() and k_weight.is_contiguous()):
        raise MisuseError("a weight is not contiguous: give weight.contiguous(), once, at load")
    q_rows, k_rows = as_rows(q, "q"), as_rows(k, "k")
    if out is not None:
        return q_rows, k_rows, as_rows(out[0], "out[0]"), as_rows(out[1], "out[1]"), out
    q_out = torch.empty(q_rows.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k_rows.shape, dtype=k.dtype, device=k.device)
    if q_rows is q and k_rows is k:
        return q, k, q_out, k_out, (q_out, k_out)
    return q_rows, k_rows, q_out, k_out, (q_out.view(q.shape), k_out.view(k.shape))


def delivered(results: tuple, out: tuple | None) -> tuple:
    """``results`` of kernels that take no output; with ``out``, that filled with them."""
    if out is None:
        return results
    for y, result in zip(out, results, strict=True):
        y.copy_(result)
    return out


def as_rows(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x`` as (rows, width) with unit inner stride, by view.

    Raises:
        MisuseError: no view does it; the message names the stride.
    """
    if x.ndim == 2 and x.stride(1) == 1:
        return x
    if x.ndim != 2:
        try:
            x = x.view(math.prod(x.shape[:-1]), x.shape[-1])
        except RuntimeError:
            raise MisuseError(
                f"{name} of shape {tuple(x.shape)} has strides {x.stride()}, which is no single "
                f"row stride: give {name}.contiguous(), or use torch_native"
            ) from None
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise MisuseError(
            f"{name} has inner stride {x.stride(-1)}, this path wants 1: "
            f"give {name}.contiguous(), or use torch_native"
        )
    return x


def _explain(q, q_weight, q_eps, k, k_weight, k_eps) -> None:
    """Raise for the first thing wrong; return where the quick test was merely too strict."""
    for x in (q, q_weight, k, k_weight):
        if not isinstance(x, torch.Tensor):
            raise MisuseError(f"q, k and their weights must be tensors, not {type(x).__name__}")
    if not (q.shape and k.shape):
        raise MisuseError("q or k is a single number: give (..., width) tensors")
    if q.shape[:-1] != k.shape[:-1]:
        raise MisuseError(
            f"q has rows {tuple(q.shape[:-1])} and k {tuple(k.shape[:-1])}: "
            "give both the same tokens"
        )
    if k.dtype != q.dtype:
        raise MisuseError(f"q is {q.dtype} and k {k.dtype}: give both one dtype")
    for name, x, weight, eps in (("q", q, q_weight, q_eps), ("k", k, k_weight, k_eps)):
        if weight.shape != x.shape[-1:]:
            raise MisuseError(
                f"{name}'s weight has shape {tuple(weight.shape)}: "
                f"give one of shape {tuple(x.shape[-1:])}"
            )
        for what, tensor in ((name, x), (f"{name}'s weight", weight)):
            if tensor.dtype not in FLOATS:
                raise MisuseError(f"{what} is {tensor.dtype}: give bfloat16, float16 or float32")
            if tensor.device != q.device:
                raise MisuseError(
                    f"{what} is on {tensor.device} and q on {q.device}: give all on one device"
                )
        try:
            fits = bool(eps >= 0) and not isinstance(eps, bool)
        except (TypeError, ValueError, RuntimeError):  # of many numbers, none that holds for all
            fits = False
        if not fits:
            raise MisuseError(
                f"{name}'s eps is {eps!r}: give the model's number, for example 1e-6 (never None: "
                "its meaning changes with dtype and torch version)"
            )


def _check_out(q, q_weight, k, k_weight, out) -> None:
    if not isinstance(out, tuple) or len(out) != 2:
        raise MisuseError("out must be a tuple of two tensors, one shaped like q, one like k")
    for i, like in enumerate((q, k)):
        y = out[i]
        if not isinstance(y, torch.Tensor):
            raise MisuseError(f"out[{i}] must be a tensor, not {type(y).__name__}")
        if y.shape != like.shape or y.dtype != like.dtype or y.device != like.device:
            raise MisuseError(
                f"out[{i}] is {tuple(y.shape)} {y.dtype} on {y.device}: "
                f"give {tuple(like.shape)} {like.dtype} on {like.device}"
            )
    refuse_unwritable({"out[0]": out[0], "out[1]": out[1]})
    refuse_overlap({"out[0]": out[0], "out[1]": out[1]}, q, q_weight, k, k_weight)


def refuse_unwritable(outputs: dict[str, torch.Tensor]) -> None:
    """Refuse an output that torch would not write into either.

    Raises:
        MisuseError: one of them wants a gradient, was made in inference mode and is given outside,
            or has several elements in one place.
    """
    for name, y in outputs.items():
        if y.requires_grad and torch.is_grad_enabled():
            raise MisuseError(f"{name} wants a gradient: give its detach(), or use torch.no_grad()")
        if y.is_inference() and not torch.is_inference_mode_enabled():
            raise MisuseError(f"{name} was made in inference mode: give one made outside")
        if any(n > 1 and not s for n, s in zip(y.shape, y.stride(), strict=True)):
            raise MisuseError(f"{name} is an expanded view, rows in one place: give clone()")


def written(*outputs: torch.Tensor) -> None:
    """Tell autograd that a kernel writes into them, as torch's own operators do."""
    for y in outputs:
        if not y.is_inference():
            torch.autograd.graph.increment_version(y)


def refuse_overlap(outputs: dict[str, torch.Tensor], q, q_weight, k, k_weight) -> None:
    """Refuse an output that shares a byte with an input or with another output.

    Raises:
        MisuseError: it names the two.
    """
    # Storages that start apart may still be one memory: arrays of others, shared with torch.
    held = [_storage_span(x) for x in (q, q_weight, k, k_weight)]
    for y in outputs.values():
        own = _storage_span(y)
        if any(own[0] < end and start < own[1] for start, end in held):
            break
        held.append(own)
    else:
        return
    others = {"q": q, "k": k, "q's weight": q_weight, "k's weight": k_weight}
    for name, y in outputs.items():
        for other, x in others.items():
            if _overlap(y, x):
                raise MisuseError(f"{name} overlaps {other} in memory: give it memory of its own")
        others[name] = y


def _storage_span(x: torch.Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First byte of ``x`` and the one after its last."""
    start = x.data_ptr()
    if not x.numel():
        return start, start
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share a byte; column blocks of one buffer are told apart."""
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    with contextlib.suppress(MisuseError):
        a, b = as_rows(a, "a"), as_rows(b, "b")
    item = a.element_size()
    if (
        a.ndim == b.ndim == 2
        and a.stride() == b.stride()
        and a.stride(1) == 1
        and (item == b.element_size())
    ):
        pitch = a.stride(0) * item
        gap = (b_start - a_start) % pitch if pitch else 0
        return not a.shape[1] * item <= gap <= pitch - b.shape[1] * item
    return True
