"""Compile-time arguments and launch of the quantised Triton kernel, fused or second of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec

import torch

from mlakit import archs
from mlakit.context import Context
from mlakit.errors import MisuseError, RefusedError
from mlakit.formats import fp8, mxfp4
from mlakit.inputs import DTYPE_NAMES
from mlakit.paths import checks, interpreter, quantised, triton_fused, triton_launch
from mlakit.paths.quantised import DEFAULT, Options, QuantisedQ
from mlakit.paths.triton_config import Config, lanes_of, vector_width
from mlakit.paths.triton_quant_config import check, heuristic, norms, trees_of

GROUPS = {"fp8_group128": fp8.GROUP, "fp8_token": 0, "mxfp4": mxfp4.GROUP}
"""elements that share a scale; 0 is the whole row"""
KERNEL = "mlakit.paths.triton_quant_kernels:norm_and_quantise"
ARGUMENTS = (
    *"q q_weight values scales unquantised k k_weight k_out".split(),
    *"q_stride k_stride scale_row_stride scale_group_stride m scale_rows q_eps k_eps".split(),
)


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a call needs that is of the kind of the one before: nothing is checked again."""

    same: Callable[..., bool]
    options: Options
    launch: triton_launch.Launch
    numbers: tuple[int, ...]
    """the kernel's integers"""
    outputs: tuple[tuple, ...]
    """shape, strides and dtype of values, scale, k_out and, if wanted, the unquantised q"""


_latest: dict[str, _Ready] = {}
"""by quant, of its latest plain call"""
CASTS = {"fp8_ocp": "fp8e4nv", "fp8_fnuz": "fp8e4b8"}
"""Triton's names of the two encodings"""


def constants(
    quant: str,
    config: Config,
    arch: str,
    q_width: int,
    k_width: int,
    dtype: str,
    *,
    encoding: fp8.Encoding | None,
    options: Options = DEFAULT,
    normalise: bool = True,
    words: bool = True,
) -> dict[str, object]:
    """The kernel's compile-time arguments, in its order."""
    lanes, vec = lanes_of(arch), vector_width(dtype)
    q_tree, k_tree = trees_of(arch, q_width, k_width, dtype)
    q_side = min(config.q_rows, config.num_warps // config.q_warps)
    k_side = min(config.k_rows, config.num_warps // config.k_warps)
    shuffled = quant == "mxfp4" and options.scale_layout == "shuffled"
    groups = q_width // mxfp4.GROUP
    return {
        "Q_N": q_width,
        "K_N": k_width,
        "Q_SIDE": q_side,
        "K_SIDE": k_side,
        "Q_TURNS": config.q_rows // q_side,
        "K_TURNS": config.k_rows // k_side,
        "Q_TREE": q_tree,
        "K_TREE": k_tree,
        "Q_PIECE": config.q_warps * lanes * vec,
        "K_PIECE": config.k_warps * lanes * vec,
        "Q_SPREAD": q_side,
        "K_SPREAD": k_side,
        "LANES": lanes,
        "VEC": vec,
        "SEPARATE": config.separate,
        "EVICT": "evict_first" if config.evict_first else "",
        "QUANT": quant,
        "GROUP": GROUPS[quant] or q_width,
        "NORMALISE": normalise,
        "UNQUANTISED": options.unquantised and normalise,
        "MAXIMUM": encoding.maximum if encoding else 6.0,
        "BIAS": encoding.bias if encoding else 1,
        "RULE_BITS": mxfp4.RULES[options.rule],
        "SHUFFLED": mxfp4.shuffled_shape(1, groups)[1] if shuffled else 0,
        # Told as much of MXFP4's bytes, Triton moves them through shared memory first.
        "PACKED": quant == "fp8_group128" and options.scale_layout in (None, "row_major"),
        "WORDS": words,
        "NVIDIA": archs.vendor_of(arch) == "nvidia",
        "PDL": ("before" if config.release_first else "after") if config.pdl else "",
    }


def casts(arch: str, encoding: fp8.Encoding | None) -> bool:
    """Whether the target's own FP8 cast is used; elsewhere the kernel computes the bytes.

    Triton's interpreter (arch ``cpu``) has no cast to FNUZ, and its OCP cast gets float32
    subnormals wrong.
    """
    return encoding is not None and arch != "cpu" and archs.fp8_format(arch) == encoding.name


def programs(config: Config, m: int, scale_rows: int, normalise: bool) -> int:
    """Programs of the grid: over rows of q, and of kv beside them or after them."""
    q_programs = -(-scale_rows // config.q_rows)
    k_programs = -(-m // config.k_rows)
    if not normalise:
        return q_programs
    return q_programs + k_programs if config.separate else max(q_programs, k_programs)


def kernel_signature(
    quant: str,
    config: Config,
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
    words: bool = True,
) -> tuple[object, dict[str, str], dict[str, object], dict[tuple[int], list], dict[str, object]]:
    """What ``triton.compile`` needs, as ``triton_kernels.kernel_signature`` returns it.

    ``aligned``: all pointers start on 16 bytes, and row strides are multiples of 16 elements.
    ``words``: MXFP4's values start on 4 bytes.
    """
    from mlakit.paths.triton_kernels import options as options_of
    from mlakit.paths.triton_quant_kernels import norm_and_quantise

    if encoding is None and quant != "mxfp4":
        encoding = fp8.encoding(archs.fp8_format(arch) or "fp8_ocp")
    chosen = constants(
        quant, config, arch, q_width, k_width, dtype,
        encoding=encoding, options=options, normalise=normalise, words=words,
    )  # fmt: skip
    q_weight, k_weight = weight_dtypes or (dtype, dtype)
    eps = "fp64" if dtype == "fp32" else "fp32"
    signature = {
        "q": f"*{dtype}",
        "q_weight": f"*{q_weight}",
        "values": f"*{CASTS[encoding.name]}" if encoding and casts(arch, encoding) else "*u8",
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
        "q_eps": eps,
        "k_eps": eps,
        **dict.fromkeys(chosen, "constexpr"),
    }
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(10)} if aligned else {}
    return (
        norm_and_quantise,
        signature,
        chosen,
        attrs,
        _registers(quant, config, options_of(config)),
    )


def _registers(quant: str, config: Config, asked: dict[str, object]) -> dict[str, object]:
    """The compiler's options. MXFP4 goes without ``triton_fused``'s cap on registers.

    With it ptxas takes more than twice the registers and M = 4096 takes 8.57 us instead of 8.13;
    but a few rows want what it brings, weights asked for early: 1.46 us instead of 1.57 at 64.
    """
    if quant == "mxfp4" and not config.evict_first:
        return {name: value for name, value in asked.items() if name != "maxnreg"}
    return asked


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
    usual = out is None and config is None
    ready = _latest.get(quant)
    if (
        usual
        and ready is not None
        and ready.options == options
        and ready.same(q, q_weight, k, k_weight)
        and checks.unwatched()
    ):
        done = _again(ready, q, q_weight, q_eps, k, k_weight, k_eps)
        if done is not None:
            return done
    result = quantised.outputs(quant, (q, q_weight, q_eps, k, k_weight, k_eps), out, options)
    if not (q_weight.is_contiguous() and k_weight.is_contiguous()):
        raise MisuseError("a weight is not contiguous: give weight.contiguous(), once, at load")
    launched = _launch(
        quant, checks.as_rows(q, "q"), q_weight, q_eps, checks.as_rows(k, "k"), k_weight, k_eps,
        result[0], result[1], options, config, normalise=True,
    )  # fmt: skip
    if usual and launched is not None and checks.plain(q, q_weight, k, k_weight):
        launch, numbers = launched
        made = (result[0].values, result[0].scale, result[1], result[0].unquantised)
        _latest[quant] = _Ready(
            checks.same_as(q, q_weight, k, k_weight), options, launch, numbers,
            tuple((tuple(t.shape), t.stride(), t.dtype) for t in made if t is not None),
        )  # fmt: skip
    return result


def again(quant: str, q, q_weight, k, k_weight) -> Callable | None:
    """See ``registry.Path.again``."""
    ready = _latest.get(quant)
    if ready is None or ready.options != DEFAULT or not ready.same(q, q_weight, k, k_weight):
        return None
    return partial(_again, ready)


def _again(ready: _Ready, q, q_weight, q_eps, k, k_weight, k_eps):
    """A call of the kind that ``ready`` is of; None where it turns out to be of no such kind."""
    launch = ready.launch
    if launch.device != torch._C._cuda_getDevice():
        with torch.cuda.device(launch.device):
            return _again(ready, q, q_weight, q_eps, k, k_weight, k_eps)
    q_at, qw_at, k_at, kw_at = q.data_ptr(), q_weight.data_ptr(), k.data_ptr(), k_weight.data_ptr()
    if not q_eps >= 0 <= k_eps or (q_at | qw_at | k_at | kw_at) & 15:
        return None
    values, scale, k_out, *rest = [triton_launch.empty(*like) for like in ready.outputs]
    unquantised = rest[0] if rest else None
    triton_launch.start(
        launch, q_at, qw_at, values.data_ptr(), scale.data_ptr(),
        unquantised.data_ptr() if rest else q_at, k_at, kw_at, k_out.data_ptr(),
        *ready.numbers, q_eps, k_eps,
    )  # fmt: skip
    return QuantisedQ(values, scale, unquantised), k_out


def unfused(
    quant, q, q_weight, q_eps, k, k_weight, k_eps, *, out=None, options=DEFAULT, early=True
) -> tuple[QuantisedQ, torch.Tensor]:
    """Two launches: ``triton_fused`` writes q in its own dtype, which is then read and quantised.

    So q is rounded before its scale is taken, unlike in ``fused``. ``early``: each may start before
    the one ahead has ended, where the card can. Raises as ``fused`` does.
    """
    quantised_q, k_out = quantised.outputs(
        quant, (q, q_weight, q_eps, k, k_weight, k_eps), out, options
    )
    checks.need_memory(q, k)
    normed = quantised_q.unquantised if options.unquantised else None
    if normed is None:
        normed = q.new_empty(q.shape)
    arch, dtype = archs.of(q.device), DTYPE_NAMES[q.dtype]
    m, width = q.numel() // q.shape[-1], q.shape[-1]
    first = norms(arch, m, width, k.shape[-1], dtype, early=early)
    second = heuristic(quant, arch, m, width, width, dtype, normalise=False, early=early)
    triton_fused.call(q, q_weight, q_eps, k, k_weight, k_eps, out=(normed, k_out), config=first)
    return quantise(quant, normed, quantised_q, options, second), k_out


def fused_launched(quant: str, early: bool) -> Callable:
    """``fused`` with the config for early launches, or for others."""

    def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
        m, widths = q.numel() // q.shape[-1], (q.shape[-1], k.shape[-1])
        config = heuristic(quant, archs.of(q.device), m, *widths, DTYPE_NAMES[q.dtype], early=early)
        return fused(quant, q, q_weight, q_eps, k, k_weight, k_eps, out=out, config=config)

    return call


def unfused_launched(quant: str, early: bool) -> Callable:
    """``unfused`` with early launches, or with none."""
    return partial(unfused, quant, early=early)


def quantise(quant, y, out: QuantisedQ, options=DEFAULT, config=None) -> QuantisedQ:
    """One launch: ``y`` quantised as it is into ``out``."""
    y = checks.as_rows(y, "y")
    _launch(quant, y, y, 0.0, y, y, 0.0, out, y, options, config, normalise=False)
    return out


def _launch(
    quant, q, q_weight, q_eps, k, k_weight, k_eps, out, k_out, options, config, normalise
) -> tuple[triton_launch.Launch, tuple[int, ...]] | None:
    """Launch; what did, and its integers, where a like call could go the same way unchecked."""
    if find_spec("triton") is None:
        raise RefusedError("a Triton path needs triton: pip install 'mlakit[triton]', not on ROCm")
    m = q.shape[0]
    if m == 0:
        return None
    arch = archs.of(q.device)
    widths, dtype = (q.shape[1], k.shape[1]), DTYPE_NAMES[q.dtype]
    config = config or heuristic(quant, arch, m, *widths, dtype, normalise=normalise)
    shuffled = quant == "mxfp4" and options.scale_layout == "shuffled"
    scale = out.scale if shuffled else quantised.plain_scale(quant, out, options)
    unquantised = out.unquantised if options.unquantised and normalise else q
    tensors = (q, q_weight, out.values, out.scale, unquantised, k, k_weight, k_out)
    checks.need_memory(*tensors)
    numbers = (q.stride(0), k.stride(0), *scale.stride(), m, out.scale.shape[0])
    encoding = fp8.BY_DTYPE.get(out.values.dtype)
    if arch == "cpu":
        _interpret(quant, config, tensors, (*numbers, q_eps, k_eps), encoding, options, normalise)
        return None
    pointers = [t.data_ptr() for t in tensors]
    weights = DTYPE_NAMES[q_weight.dtype], DTYPE_NAMES[k_weight.dtype]
    starts_of_16 = aligned(tensors)
    launch = _prepare(
        quant, config, q.get_device(), m, out.scale.shape[0], *widths, dtype, weights,
        encoding, options, normalise, starts_of_16, pointers[2] % 4 == 0,
    )  # fmt: skip
    with torch.cuda.device(launch.device):
        triton_launch.start(launch, *pointers, *numbers, q_eps, k_eps)
    return (launch, numbers) if starts_of_16 else None


def aligned(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the kernel's eight tensors all start on 16 bytes, and so do the rows of q and k.

    What it writes lies contiguous, its scales are written one by one: only these two have strides.
    """
    q, k = tensors[0], tensors[5]
    starts = [t.data_ptr() for t in tensors]
    return not any(x & 15 for x in (*starts, q.stride(0), k.stride(0)))


@lru_cache(maxsize=1024)
def _prepare(
    quant, config, device, m, scale_rows, q_width, k_width, dtype, weights, encoding, options,
    normalise, aligned, words,
) -> triton_launch.Launch:  # fmt: skip
    return triton_launch.prepare(
        device, programs(config, m, scale_rows, normalise), kernel_signature,
        quant, config, archs.devices()[device].arch, q_width, k_width, dtype, weights,
        encoding=encoding, options=options, normalise=normalise, aligned=aligned, words=words,
    )  # fmt: skip


def _interpret(quant, config, tensors, numbers, encoding, options, normalise) -> None:
    """The same kernel on CPU tensors, in the interpreter's process: correctness only."""
    q, k = tensors[0], tensors[5]
    chosen = constants(
        quant, config, "cpu", q.shape[1], k.shape[1], DTYPE_NAMES[q.dtype],
        encoding=encoding, options=options, normalise=normalise,
        words=tensors[2].data_ptr() % 4 == 0,
    )  # fmt: skip
    arguments = dict(zip(ARGUMENTS, (*tensors, *numbers), strict=True))
    arguments["values"] = arguments["values"].view(torch.uint8)
    written = {"values", "scales"} | ({"k_out"} if normalise else set())
    written |= {"unquantised"} if chosen["UNQUANTISED"] else set()
    grid = programs(config, q.shape[0], numbers[5], normalise)
    interpreter.launch(KERNEL, grid, {**arguments, **chosen}, written)
