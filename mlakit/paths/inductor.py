"""inductor: ``torch.compile`` of the pair, compiled once for all M above 1."""

from __future__ import annotations

from functools import cache

import torch

from mlakit.context import Context
from mlakit.errors import RefusedError
from mlakit.paths.checks import check, unquantised
from mlakit.paths.registry import Path
from mlakit.paths.torch_native import norm32


def _pair(q, q_weight, q_eps, k, k_weight, k_eps):
    return norm32(q, q_weight, q_eps).to(q.dtype), norm32(k, k_weight, k_eps).to(k.dtype)


def _pair_into(q, q_weight, q_eps, k, k_weight, k_eps, q_out, k_out):
    q_out.copy_(norm32(q, q_weight, q_eps))
    k_out.copy_(norm32(k, k_weight, k_eps))


@cache
def _compiled(into: bool):
    # fullgraph: dynamo must fail aloud rather than run eagerly under this path's name.
    return torch.compile(_pair_into if into else _pair, fullgraph=True)


_seen: set[tuple] = set()


def _key(q, q_weight, q_eps, k, k_weight, k_eps, out) -> tuple:
    """What one compilation serves; M only as none, one or more, as dynamo itself tells them."""
    m = min(q.shape[0], 2) if q.ndim else 0
    tensors = (q, k, q_weight, k_weight, *(out or ()))
    return (
        m,
        q_eps,
        k_eps,
        torch.is_grad_enabled(),
        q.is_inference(),
        *((x.dtype, x.shape[1:], x.stride(), x.device) for x in tensors),
    )


def _compile(args: tuple, out) -> None:
    """Compile for the kind of ``args``, with M left open when above 1.

    Raises:
        RefusedError: no working C++ compiler on a CPU.
    """
    from torch._dynamo import config, mark_dynamic

    if args[0].device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # inductor's own type moved between torch versions
            raise RefusedError(f"inductor found no C++ compiler: install g++ ({error})") from None
    # Fresh views, so that the marks are not left on the caller's tensors.
    views = [x.detach() if isinstance(x, torch.Tensor) else x for x in (*args, *(out or ()))]
    for i in (0, 3, 6, 7):
        if i < len(views) and views[i].shape[0] > 1:
            mark_dynamic(views[i], 0)
    # Widths stay exact however many are tried, and no count of them ends in eager execution.
    with config.patch(automatic_dynamic_shapes=False, recompile_limit=1024):
        _compiled(out is not None)(*views)


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
    key = _key(*args, out)
    if key not in _seen:
        _compile(args, out)
        _seen.add(key)
    if out is None:
        return _compiled(False)(*args)
    _compiled(True)(*args, *out)
    return out


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
