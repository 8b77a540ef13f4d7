"""inductor: ``torch.compile`` of the pair, compiled once for all M above 1."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch

from mlakit.context import Context
from mlakit.errors import RefusedError
from mlakit.paths.checks import check, unquantised
from mlakit.paths.registry import Path
from mlakit.paths.torch_native import norm32


def _pair(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out = norm32(q, q_weight, q_eps).to(q.dtype)
    return q_out.contiguous(), norm32(k, k_weight, k_eps).to(k.dtype).contiguous()


def _pair_into(q, q_weight, q_eps, k, k_weight, k_eps, q_out, k_out):
    q_out.copy_(norm32(q, q_weight, q_eps))
    k_out.copy_(norm32(k, k_weight, k_eps))


_compiled: dict[tuple, Callable] = {}


def _compile(args: tuple, out: tuple) -> Callable:
    """A compiled pair of its own for the kind of ``args``, with M left open when above 1.

    Raises:
        RefusedError: no working C++ compiler on a CPU.
    """
    if args[0].device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise RefusedError(f"inductor found no C++ compiler: install g++ ({error})") from None
    source = _pair_into if out else _pair
    # dynamo counts recompilations and widens sizes per code object, by name: one for each kind
    # keeps the widths exact and is never out of its limit of eight.
    name = f"{source.__name__}_{len(_compiled)}"
    own = FunctionType(source.__code__.replace(co_name=name), source.__globals__, name)
    # fullgraph: dynamo must fail aloud rather than run eagerly under this path's name.
    compiled = torch.compile(own, fullgraph=True)
    # Fresh views, so that the marks are not left on the caller's tensors.
    views = [x.detach() if isinstance(x, torch.Tensor) else x for x in (*args, *out)]
    for x in (views[0], views[3], *views[6:]):
        if x.ndim > 1 and x.shape[0] > 1:
            torch._dynamo.mark_dynamic(x, 0)
    compiled(*views)
    return compiled


def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """The compiled pair; see ``mlakit.paths.registry.Path`` for the arguments. Any strides.

    A kind of arguments (dtype, widths, strides, M of 1 or above) compiles at its first call, which
    takes seconds; a further M of that kind does not compile. All is float32 until the one cast,
    so inductor's ``emulate_precision_casts`` (off by default) has nothing to restore.

    Raises:
        MisuseError: arguments that do not fit (``mlakit.paths.checks``).
        RefusedError: no C++ compiler on a CPU.
    """
    args = q, q_weight, q_eps, k, k_weight, k_eps
    check(*args, out)
    out = out or ()
    if not q.numel() and not k.numel():
        return out or (q.new_empty(q.shape), k.new_empty(k.shape))
    kind = (
        min(q.shape[0], 2) if q.ndim == 2 else q.shape, q.stride(), q.dtype, q.device,
        k.stride(), q_weight.shape, q_weight.dtype, k_weight.shape, k_weight.dtype,
        q_eps, k_eps, len(out),
    )  # fmt: skip
    run = _compiled.get(kind)
    if run is None:
        run = _compiled[kind] = _compile(args, out)
    return run(*args, *out) or out


def supports(context: Context) -> str | None:
    """None where inductor has a compiler for the device."""
    if context.vendor == "cpu" and "cxx" not in context.packages:
        return "no C++ compiler found: install g++, which inductor needs on a CPU"
    if context.vendor != "cpu" and "triton" not in context.packages:
        return "triton is not installed, which inductor needs on a GPU"
    return unquantised(context)


PATH = Path(
    name="inductor",
    text="torch.compile of the pair (inductor)",
    call=call,
    supports=supports,
    rounding="round_once",
    launches=2,
)
