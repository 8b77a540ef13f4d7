"""Config, compile-time arguments and launch of the quantised Triton kernel, fused or second of two.

The knobs are ``triton_config.Config``'s; pure functions choose and check them, and need no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import product

import torch

from mlakit import archs
from mlakit.context import Context
from mlakit.errors import MisuseError, RefusedError
from mlakit.formats import fp8, mxfp4
from mlakit.paths import checks, interpreter, quantised, triton_config, triton_fused
from mlakit.paths.quantised import DEFAULT, Options, QuantisedQ
from mlakit.paths.triton_config import Config, lanes_of, vector_width
from mlakit.paths.triton_fused import DTYPE_NAMES, _Ready, _start

GROUPS = {"fp8_group128": fp8.GROUP, "fp8_token": 0, "mxfp4": mxfp4.GROUP}
"""elements that share a scale; 0 is the whole row"""
FEW_ROWS = 512
"""rows up to which a row's latency counts, not throughput"""
KERNEL = "mlakit.paths.triton_quant_kernels:norm_and_quantise"
ARGUMENTS = (
    *"q q_weight values scales unquantised k k_weight k_out".split(),
    *"q_stride k_stride scale_row_stride scale_group_stride m scale_rows q_eps k_eps".split(),
)
CASTS = {"fp8_ocp": "fp8e4nv", "fp8_fnuz": "fp8e4b8"}
"""Triton's names of the two encodings"""


@dataclass(frozen=True)
class QuantConfig(Config):
    """``triton_config.Config`` and one knob more; ``persistent`` and ``pdl`` stay False."""

    looped: bool = False
    """chunks in a loop that loads the row again, from the L1: an eighth of the code"""


def heuristic(
    quant: str, arch: str, m: int, q_width: int, k_width: int, dtype: str = "bf16"
) -> QuantConfig:
    """The config for ``m`` rows on ``arch``.

    Few rows: a row is spread over warps, 8 elements a thread, for its latency (on an H200 at
    M = 64 the fastest of 15 shapes by 4 to 16 %). Many rows: as few warps a row as hold it, since
    one warp needs no barrier and no shared memory (fastest from M = 4096 on).
    """
    lanes, many = lanes_of(arch), m > FEW_ROWS
    q_warps = _warps(q_width, lanes * (64 if many else 8))
    k_warps = _warps(k_width, lanes * (64 if many else 4))
    while q_warps * lanes * vector_width(dtype) % _whole(quant):
        q_warps *= 2
    num_warps = max(q_warps, k_warps)
    # The interpreter runs a program at a time, so it is given many rows in each.
    rows = 64 if arch == "cpu" else 1
    return QuantConfig(
        q_rows=rows * num_warps // q_warps,
        k_rows=rows * num_warps // k_warps * (2 if many else 1),
        q_warps=q_warps,
        k_warps=k_warps,
        num_warps=num_warps,
        evict_first=m <= 4096,
    )


def _warps(width: int, elements: int) -> int:
    """Warps, a power of two up to 16, that hold ``width`` at ``elements`` a warp."""
    return next((w for w in (1, 2, 4, 8) if width <= w * elements), 16)


def _whole(quant: str) -> int:
    """Elements that a chunk may not split: a group; 8 MXFP4 groups, a tile of shuffled scales."""
    return 8 * mxfp4.GROUP if quant == "mxfp4" else max(1, GROUPS[quant])


def check(
    quant: str, config: QuantConfig, arch: str, q_width: int, k_width: int, dtype: str = "bf16"
) -> str | None:
    """None if the kernel can run with ``config``, else one line that says why not."""
    if config.persistent or config.pdl:
        return "the quantised kernel is neither persistent nor launched early"
    if config.looped and quant == "fp8_token":
        return "one scale a row needs the whole row at once: looped must be False"
    chunk = config.q_warps * lanes_of(arch) * vector_width(dtype)
    if chunk % _whole(quant):
        return f"chunks of {chunk} elements do not hold whole blocks of {_whole(quant)}"
    return triton_config.check(config, arch, q_width, k_width, dtype)


def search_space(
    quant: str, arch: str, m: int, q_width: int, k_width: int, dtype: str = "bf16"
) -> list[QuantConfig]:
    """Every valid config worth timing for ``m`` rows."""
    found = {}
    for q_warps, k_warps, rows, separate, evict, looped in product(
        (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (True, False), (False, True), (False, True)
    ):
        num_warps = max(q_warps, k_warps)
        q_rows, k_rows = (rows * num_warps // w for w in (q_warps, k_warps))
        if not separate:
            q_rows = k_rows = max(q_rows, k_rows)
        config = QuantConfig(
            q_rows, k_rows, q_warps, k_warps, num_warps, separate,
            evict_first=evict, looped=looped,
        )  # fmt: skip
        if rows <= m and check(quant, config, arch, q_width, k_width, dtype) is None:
            found[config] = None
    return list(found)


def constants(
    quant: str,
    config: QuantConfig,
    arch: str,
    q_width: int,
    k_width: int,
    dtype: str,
    *,
    encoding: fp8.Encoding | None,
    options: Options = DEFAULT,
    normalise: bool = True,
) -> dict[str, object]:
    """The kernel's compile-time arguments, in its order."""
    shuffled = quant == "mxfp4" and options.scale_layout == "shuffled"
    groups = q_width // mxfp4.GROUP
    return {
        "Q_N": q_width,
        "K_N": k_width,
        "Q_ROWS": config.q_rows,
        "K_ROWS": config.k_rows,
        "Q_CHUNK": config.q_warps * lanes_of(arch) * vector_width(dtype),
        "K_CHUNK": config.k_warps * lanes_of(arch) * vector_width(dtype),
        "Q_SPREAD": 1 if config.num_warps == config.q_warps else config.q_rows,
        "K_SPREAD": 1 if config.num_warps == config.k_warps else config.k_rows,
        "SEPARATE": config.separate,
        "LOOPED": config.looped,
        "EVICT": "evict_first" if config.evict_first else "",
        "QUANT": quant,
        "GROUP": GROUPS[quant] or q_width,
        "NORMALISE": normalise,
        "UNQUANTISED": options.unquantised and normalise,
        "MAXIMUM": encoding.maximum if encoding else 6.0,
        "BIAS": encoding.bias if encoding else 1,
        "RULE_BITS": mxfp4.RULES[options.rule],
        "SHUFFLED": mxfp4.shuffled_shape(1, groups)[1] if shuffled else 0,
    }


def casts(arch: str, encoding: fp8.Encoding | None) -> bool:
    """Whether the target's own FP8 cast is used; elsewhere the kernel computes the bytes.

    Triton's interpreter (arch ``cpu``) has no cast to FNUZ, and its OCP cast gets float32
    subnormals wrong.
    """
    return encoding is not None and arch != "cpu" and archs.fp8_format(arch) == encoding.name


def programs(config: QuantConfig, m: int, scale_rows: int, normalise: bool) -> int:
    """Programs of the grid: over rows of q, and of kv beside them or after them."""
    q_programs = -(-scale_rows // config.q_rows)
    k_programs = -(-m // config.k_rows)
    if not normalise:
        return q_programs
    return q_programs + k_programs if config.separate else max(q_programs, k_programs)


def kernel_signature(
    quant: str,
    config: QuantConfig,
    arch: str,
    q_width: int,
    k_width: int,
    dtype: str = "bf16",
    weight_dtypes: tuple[str, str] | None = None,
    *,
    encoding: fp8.Encoding | None = None,
    options: Options = DEFAULT,
    normalise: bool = True,
    aligned: bool = True,
) -> tuple[object, dict[str, str], dict[str, object], dict[tuple[int], list], dict[str, object]]:
    """What ``triton.compile`` needs, as ``triton_kernels.kernel_signature`` returns it.

    ``aligned``: all pointers start on 16 bytes, and row strides are multiples of 16 elements.
    """
    from mlakit.paths.triton_quant_kernels import norm_and_quantise

    if encoding is None and quant != "mxfp4":
        encoding = fp8.encoding(archs.fp8_format(arch) or "fp8_ocp")
    chosen = constants(
        quant, config, arch, q_width, k_width, dtype,
        encoding=encoding, options=options, normalise=normalise,
    )  # fmt: skip
    q_weight, k_weight = weight_dtypes or (dtype, dtype)
    signature = {
        "q": f"*{dtype}",
        "q_weight": f"*{q_weight}",
        "values": f"*{CASTS[encoding.name]}" if casts(arch, encoding) else "*u8",
        "scales": "*u8" if quant == "mxfp4" else "*fp32",
        "unquantised": f"*{dtype}",
        "k": f"*{dtype}",
        "k_weight": f"*{k_weight}",
        "k_out": f"*{dtype}",
        "q_stride": "i64",
        "k_stride": "i64",
        "scale_row_stride": "i64",
        "scale_group_stride": "i64",
        "m": "i32",
        "scale_rows": "i32",
        "q_eps": "fp64",
        "k_eps": "fp64",
        **dict.fromkeys(chosen, "constexpr"),
    }
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(10)} if aligned else {}
    return norm_and_quantise, signature, chosen, attrs, {"num_warps": config.num_warps}


def refusal_in(context: Context, quant: str) -> str | None:
    """Why the Triton paths cannot deliver ``quant`` in ``context``, or None."""
    if "triton" not in context.packages:
        return "triton is not installed"
    if context.layout == "inner_strided":
        return "inner stride is not 1"
    reason = quantised.refusal_in(context, quant)
    if reason:
        return reason
    widths = context.q_lora_rank, context.kv_lora_rank
    config = heuristic(quant, context.arch, context.m, *widths, context.dtype)
    return check(quant, config, context.arch, *widths, context.dtype)


def fused(
    quant, q, q_weight, q_eps, k, k_weight, k_eps, *, out=None, options=DEFAULT, config=None
) -> tuple[QuantisedQ, torch.Tensor]:
    """One launch: q normalised in float32 and quantised unrounded, kv normalised.

    Raises:
        MisuseError: arguments that no path takes, a layout that is no (rows, stride) pair, or a
            width, encoding or scale layout that ``quant`` does not have.
    """
    result = quantised.outputs(quant, (q, q_weight, q_eps, k, k_weight, k_eps), out, options)
    if not (q_weight.is_contiguous() and k_weight.is_contiguous()):
        raise MisuseError("a weight is not contiguous: give weight.contiguous(), once, at load")
    _launch(
        quant, checks.as_rows(q, "q"), q_weight, q_eps, checks.as_rows(k, "k"), k_weight, k_eps,
        result[0], result[1], options, config, normalise=True,
    )  # fmt: skip
    return result


def unfused(
    quant, q, q_weight, q_eps, k, k_weight, k_eps, *, out=None, options=DEFAULT
) -> tuple[QuantisedQ, torch.Tensor]:
    """Two launches: ``triton_fused`` writes q in its own dtype, which is then read and quantised.

    So q is rounded before its scale is taken, unlike in ``fused``. Raises as ``fused`` does.
    """
    quantised_q, k_out = quantised.outputs(
        quant, (q, q_weight, q_eps, k, k_weight, k_eps), out, options
    )
    normed = quantised_q.unquantised if options.unquantised else q.new_empty(q.shape)
    triton_fused.call(q, q_weight, q_eps, k, k_weight, k_eps, out=(normed, k_out))
    return quantise(quant, normed, quantised_q, options), k_out


def quantise(quant, y, out: QuantisedQ, options=DEFAULT, config=None) -> QuantisedQ:
    """One launch: ``y`` quantised as it is into ``out``."""
    y = checks.as_rows(y, "y")
    _launch(quant, y, y, 0.0, y, y, 0.0, out, y, options, config, normalise=False)
    return out


def _launch(
    quant, q, q_weight, q_eps, k, k_weight, k_eps, out, k_out, options, config, normalise
) -> None:
    if find_spec("triton") is None:
        raise RefusedError("a Triton path needs triton: pip install 'mlakit[triton]', not on ROCm")
    m = q.shape[0]
    if m == 0:
        return
    arch = "cpu" if q.device.type == "cpu" else archs.devices()[q.get_device()].arch
    widths, dtype = (q.shape[1], k.shape[1]), DTYPE_NAMES[q.dtype]
    config = config or heuristic(quant, arch, m, *widths, dtype)
    shuffled = quant == "mxfp4" and options.scale_layout == "shuffled"
    scale = out.scale if shuffled else quantised.plain_scale(quant, out, options)
    unquantised = out.unquantised if options.unquantised and normalise else q
    tensors = (q, q_weight, out.values, out.scale, unquantised, k, k_weight, k_out)
    numbers = (q.stride(0), k.stride(0), *scale.stride(), m, out.scale.shape[0], q_eps, k_eps)
    encoding = _ENCODING_OF.get(out.values.dtype)
    if arch == "cpu":
        _interpret(quant, config, tensors, numbers, encoding, options, normalise)
        return
    pointers = [t.data_ptr() for t in tensors]
    aligned = not any(x & 15 for x in (*pointers, q.stride(0), k.stride(0)))
    weights = DTYPE_NAMES[q_weight.dtype], DTYPE_NAMES[k_weight.dtype]
    ready = _prepare(
        quant, config, q.get_device(), m, out.scale.shape[0], *widths, dtype, weights,
        encoding, options, normalise, aligned and not any(s & 15 for s in scale.stride()),
    )  # fmt: skip
    _start(ready, *pointers, *numbers)


_ENCODING_OF = {e.dtype: e for e in fp8.ENCODINGS.values()}


@lru_cache(maxsize=1024)
def _prepare(
    quant, config, device, m, scale_rows, q_width, k_width, dtype, weights, encoding, options,
    normalise, aligned,
) -> _Ready:  # fmt: skip
    from triton import knobs

    with torch.cuda.device(device):
        kernel = _compile(
            quant, config, device, q_width, k_width, dtype, weights, encoding, options, normalise,
            aligned,
        )  # fmt: skip
        return _Ready(
            device=device,
            grid=programs(config, m, scale_rows, normalise),
            run=kernel.run,
            kernel=kernel,
            function=kernel.function,
            packed=kernel.packed_metadata,
            hooks=knobs.runtime,
            strides=(),
            constants=tuple(kernel.src.constants.values()),
        )


@cache
def _compile(
    quant, config, device, q_width, k_width, dtype, weights, encoding, options, normalise, aligned
):
    """The kernel compiled for, and loaded on, the current device."""
    import triton
    from triton.compiler import ASTSource

    function, signature, constexprs, attrs, knobs = kernel_signature(
        quant, config, archs.devices()[device].arch, q_width, k_width, dtype, weights,
        encoding=encoding, options=options, normalise=normalise, aligned=aligned,
    )  # fmt: skip
    return triton.compile(
        ASTSource(function, signature, constexprs, attrs),
        target=triton.runtime.driver.active.get_current_target(),
        options=knobs,
    )


def _interpret(quant, config, tensors, numbers, encoding, options, normalise) -> None:
    """The same kernel on CPU tensors, in the interpreter's process: correctness only."""
    q, k = tensors[0], tensors[5]
    chosen = constants(
        quant, config, "cpu", q.shape[1], k.shape[1], DTYPE_NAMES[q.dtype],
        encoding=encoding, options=options, normalise=normalise,
    )  # fmt: skip
    arguments = dict(zip(ARGUMENTS, (*tensors, *numbers), strict=True))
    arguments["values"] = arguments["values"].view(torch.uint8)
    written = {"values", "scales"} | ({"k_out"} if normalise else set())
    written |= {"unquantised"} if chosen["UNQUANTISED"] else set()
    grid = programs(config, q.shape[0], numbers[5], normalise)
    interpreter.launch(KERNEL, grid, {**arguments, **chosen}, written)
