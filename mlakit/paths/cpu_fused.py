"""cpu_fused: one compiled pass over q and k on a CPU, by Numba, vectorised, threaded when it pays.

Tensors enter the kernel as addresses of their bits (uint16 or uint32): Numba knows no bfloat16,
and going through numpy would cost more than the step at M = 1. The functions below are plain
Python until the first call of a dtype compiles them (under a second, then cached on disk).
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache

import numpy as np
import torch

from mlakit.context import Context
from mlakit.errors import MisuseError
from mlakit.paths.checks import kernel_limits, need_memory, prepare
from mlakit.paths.registry import Path

_ELEMENTS_PER_THREAD = 1 << 18
"""Below this many elements a thread, waking another costs more than it saves (measured)."""

_OWNER = os.getpid()
"""A forked child has the team's memory without its threads, and would wait for them for ever."""

U32, F32 = np.uint32, np.float32


def _load_bf16(bits):
    return U32(U32(bits) << U32(16)).view(np.float32)


def _load_fp32(bits):
    return U32(bits).view(np.float32)


def _load_fp16(bits):
    # Scaling by 2^112 moves the exponent's bias and makes subnormals exact, with no branch.
    magnitude = U32(U32(bits & U32(0x7FFF)) << U32(13))
    wide = F32(U32(magnitude).view(np.float32) * F32(2.0**112)).view(np.uint32)
    if magnitude >= U32(0x0F800000):
        wide = U32(magnitude | U32(0x7F800000))
    return U32(wide | U32(U32(bits & U32(0x8000)) << U32(16))).view(np.float32)


def _store_fp32(value):
    return F32(value).view(np.uint32)


def _store_bf16(value):
    bits = F32(value).view(np.uint32)
    odd = U32(U32(bits >> U32(16)) & U32(1))
    rounded = U32(U32(bits + U32(U32(0x7FFF) + odd)) >> U32(16))
    # Rounding up would carry a NaN into the sign, and cutting may leave inf.
    return U32(0x7FC0) if value != value else rounded


def _store_fp16(value):
    bits = F32(value).view(np.uint32)
    magnitude = U32(bits & U32(0x7FFFFFFF))
    odd = U32(U32(magnitude >> U32(13)) & U32(1))
    rounded = U32(U32(U32(magnitude - U32(0x38000000)) + U32(U32(0xFFF) + odd)) >> U32(13))
    # Adding 0.5 lets the float adder round a subnormal to even at fp16's last place.
    subnormal = F32(U32(magnitude).view(np.float32) + F32(0.5)).view(np.uint32)
    if magnitude < U32(0x38800000):
        rounded = U32(subnormal - U32(0x3F000000))
    if magnitude >= U32(0x47800000):
        rounded = U32(0x7C00)
    if value != value:
        rounded = U32(0x7E00)
    return U32(rounded | U32(U32(bits >> U32(16)) & U32(0x8000)))


def _sum_squares(load, x, row, n):
    total = F32(0)
    for i in range(n):
        value = load(x[row, i])
        total += value * value
    return total


def _scale(load, x, row, n, eps):
    return F32(1.0 / np.sqrt(np.float64(_sum_squares(load, x, row, n)) / n + eps))


def _norm_elements(load, load_weight, store, x, weight, y, row, n, scale):
    for i in range(n):
        y[row, i] = store((load(x[row, i]) * scale) * load_weight(weight[i]))


def _norm_words(load, load_weight, store, x, weight, y, row, n, scale):
    """The same for two 16-bit elements a 32-bit word: a fifth faster, no lane ever moves.

    The weights are not widened beforehand: a float32 copy of them made rows that come from memory
    take half as long again (its addresses collide with pending stores in their low 12 bits).
    """
    low, shift = U32(0xFFFF), U32(16)
    for i in range(n // 2):
        word, weights = x[row, i], weight[i]
        first = store((load(U32(word & low)) * scale) * load_weight(U32(weights & low)))
        second = store((load(U32(word >> shift)) * scale) * load_weight(U32(weights >> shift)))
        y[row, i] = U32(U32(first) | U32(U32(second) << shift))


_BITS = {
    torch.bfloat16: (np.uint16, _load_bf16, _store_bf16),
    torch.float16: (np.uint16, _load_fp16, _store_fp16),
    torch.float32: (np.uint32, _load_fp32, _store_fp32),
}


def _pointer(address):
    """In a kernel: an integer as a ``void *``."""
    return address


def _thread():
    """In a kernel: this thread's number in torch's OpenMP team."""
    return 0


def _threads():
    """In a kernel: the size of that team; 1 outside a parallel region."""
    return 1


@cache
def _openmp() -> tuple:
    """(GOMP_parallel, omp_get_thread_num, omp_get_num_threads) of the runtime that torch uses.

    Its threads are the ones already awake: a pool of our own would share the cores with theirs,
    which spin for about a millisecond after every torch operation. Where torch has no such
    runtime the kernel runs on one thread.
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    number = ctypes.CFUNCTYPE(ctypes.c_int)
    try:
        parallel = library.GOMP_parallel
        queries = library.omp_get_thread_num, library.omp_get_num_threads
    except AttributeError:
        return None, number(_thread), number(_threads)
    parallel.restype = None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
    return parallel, *queries


@cache
def _teach_numba() -> None:
    """Register the plain functions above as things a kernel may call."""
    from llvmlite import binding, ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import lower_builtin, register_jitable, type_callable

    for _, load, store in _BITS.values():
        register_jitable(load)
        register_jitable(store)
    for function in (_scale, _norm_elements, _norm_words):
        register_jitable(function)
    # Only the sum may be reordered (to vectorise); NaN and inf keep their meaning.
    register_jitable(fastmath={"reassoc", "contract"})(_sum_squares)

    type_callable(_pointer)(lambda context: lambda address: types.voidptr)
    lower_builtin(_pointer, types.int64)(
        lambda context, builder, signature, args: builder.inttoptr(
            args[0], context.get_value_type(types.voidptr)
        )
    )
    for query, address in zip((_thread, _threads), _openmp()[1:], strict=True):
        symbol = f"mlakit_cpu_fused{query.__name__}"
        binding.add_symbol(symbol, ctypes.cast(address, ctypes.c_void_p).value)
        type_callable(query)(lambda context: lambda: types.int32)

        def lower(context, builder, signature, args, symbol=symbol):
            kind = ir.FunctionType(ir.IntType(32), [])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), [])

        lower_builtin(query)(lower)


_ARGUMENTS = struct.Struct("=13q2d")
"""A kernel's arguments: address, row stride, weight address, output address, output row stride and
width of q, then of k, in elements; rows; eps of q and of k."""


def _kernel_source(dtype: torch.dtype, weight_dtype: torch.dtype):
    """The Python function that becomes the kernel for inputs and weights of these dtypes."""
    from numba import carray

    bits, load, store = _BITS[dtype]
    weight_bits, load_weight, _ = _BITS[weight_dtype]
    halves = bits is weight_bits is np.uint16

    def kernel(block):
        m, nq, nk = block[12], block[5], block[11]
        q_eps, k_eps = np.int64(block[13]).view(np.float64), np.int64(block[14]).view(np.float64)
        q = carray(_pointer(block[0]), (m, block[1]), bits)
        k = carray(_pointer(block[6]), (m, block[7]), bits)
        addresses = block[0] | block[2] | block[3] | block[6] | block[8] | block[9]
        counts = block[1] | block[4] | nq | block[7] | block[10] | nk
        first, stop = m * _thread() // _threads(), m * (_thread() + 1) // _threads()
        if halves and addresses & 3 == 0 and counts & 1 == 0:
            q_in = carray(_pointer(block[0]), (m, block[1] // 2), np.uint32)
            qw = carray(_pointer(block[2]), nq // 2, np.uint32)
            q_out = carray(_pointer(block[3]), (m, block[4] // 2), np.uint32)
            k_in = carray(_pointer(block[6]), (m, block[7] // 2), np.uint32)
            kw = carray(_pointer(block[8]), nk // 2, np.uint32)
            k_out = carray(_pointer(block[9]), (m, block[10] // 2), np.uint32)
            for row in range(first, stop):
                scale = _scale(load, q, row, nq, q_eps)
                _norm_words(load, load_weight, store, q_in, qw, q_out, row, nq, scale)
                scale = _scale(load, k, row, nk, k_eps)
                _norm_words(load, load_weight, store, k_in, kw, k_out, row, nk, scale)
        else:
            qw = carray(_pointer(block[2]), nq, weight_bits)
            q_out = carray(_pointer(block[3]), (m, block[4]), bits)
            kw = carray(_pointer(block[8]), nk, weight_bits)
            k_out = carray(_pointer(block[9]), (m, block[10]), bits)
            for row in range(first, stop):
                scale = _scale(load, q, row, nq, q_eps)
                _norm_elements(load, load_weight, store, q, qw, q_out, row, nq, scale)
                scale = _scale(load, k, row, nk, k_eps)
                _norm_elements(load, load_weight, store, k, kw, k_out, row, nk, scale)

    return kernel


def build(dtype: torch.dtype, weight_dtype: torch.dtype, *, disk_cache: bool = True):
    """The kernel for inputs and weights of these dtypes: a ``numba`` C callback of one pointer."""
    import numba

    _teach_numba()
    kernel = _kernel_source(dtype, weight_dtype)
    signature = numba.void(numba.types.CPointer(numba.int64))
    if disk_cache:
        try:
            return numba.cfunc(signature, error_model="numpy", cache=True)(kernel)
        except (RuntimeError, OSError):  # no folder that can be written: compile in memory
            pass
    return numba.cfunc(signature, error_model="numpy")(kernel)


@cache
def _kernel(dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple:
    """The kernel as a ctypes function (which releases the GIL), its address, and its owner."""
    compiled = build(dtype, weight_dtype)
    run = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(compiled.address)
    return run, compiled.address, compiled


_TRACER = torch._C._TorchDispatchModeKey.PROXY
"""``make_fx`` sees torch's operators alone"""


def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
    """Both norms in one compiled pass; see ``mlakit.paths.registry.Path`` for the arguments.

    Raises:
        MisuseError: arguments that do not fit (``mlakit.paths.checks``), or not on a CPU.
    """
    q_rows, k_rows, q_out, k_out, result = prepare(q, q_weight, q_eps, k, k_weight, k_eps, out)
    if not q.is_cpu or q_weight.dtype is not k_weight.dtype:
        raise MisuseError(
            f"cpu_fused got q on {q.device}, weights {q_weight.dtype} and {k_weight.dtype}: "
            "it wants the CPU and both weights of one dtype; use torch_native"
        )
    need_memory(k_out)  # made under a mode of fake tensors
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_TRACER) is not None:
        raise MisuseError("cpu_fused cannot be traced, its graph would be empty; use torch_native")
    m, q_width = q_rows.shape
    k_width = k_rows.shape[1]
    if m == 0:
        return result
    block = _ARGUMENTS.pack(
        q_rows.data_ptr(), q_rows.stride(0), q_weight.data_ptr(),
        q_out.data_ptr(), q_out.stride(0), q_width,
        k_rows.data_ptr(), k_rows.stride(0), k_weight.data_ptr(),
        k_out.data_ptr(), k_out.stride(0), k_width,
        m, q_eps, k_eps,
    )  # fmt: skip
    run, address, _ = _kernel(q.dtype, q_weight.dtype)
    threads = min(m * (q_width + k_width) // _ELEMENTS_PER_THREAD, m)
    if threads > 1 and (threads := min(threads, torch.get_num_threads())) > 1:
        parallel = _openmp()[0]
        if parallel and os.getpid() == _OWNER:
            parallel(address, block, threads, 0)
            return result
    run(block)
    return result


def supports(context: Context) -> str | None:
    """None on a CPU with Numba."""
    if context.vendor != "cpu":
        return f"runs on a CPU only, not on {context.arch}"
    if "numba" not in context.packages:
        return "numba is not installed: pip install 'mlakit[cpu]'"
    return kernel_limits(context)


PATH = Path(
    name="cpu_fused",
    text="one compiled pass over q and k on a CPU (Numba), vectorised and threaded",
    call=call,
    supports=supports,
    rounding="round_once",
    launches=1,
    fused=True,
)
