"""The kernels mlakit ships, compiled for any arch and, for AMD, emulated on this machine's CPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from mlakit import archs
from mlakit.codegen.compile import Compiled, Request, compile_one
from mlakit.codegen.execute import Run, run
from mlakit.formats import fp8
from mlakit.inputs import DTYPE_NAMES, Inputs
from mlakit.paths import quantised, triton_config, triton_quant
from mlakit.paths.quantised import Options, QuantisedQ
from mlakit.paths.triton_config import Config
from mlakit.shapes import Widths

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_RESIDENT_PER_UNIT = 4


def build(config: dict, quant: str = "none", options: dict | None = None, **arguments) -> tuple:
    """What ``triton.compile`` needs for a shipped kernel; called in the compiler's process."""
    if quant == "none":
        from mlakit.paths.triton_kernels import kernel_signature

        return kernel_signature(Config(**config), **arguments)
    encoding = (options or {}).get("encoding")
    return triton_quant.kernel_signature(
        quant,
        triton_quant.Config(**config),
        encoding=fp8.encoding(encoding) if encoding else None,
        options=Options(**(options or {})),
        **arguments,
    )


def request(
    arch: str,
    widths: Widths,
    dtype: str = "bf16",
    *,
    config: Config | None = None,
    m: int = 64,
    quant: str = "none",
    options: Options | None = None,
    **more,
) -> Request:
    """The request that compiles the fused kernel for one arch; ``config`` None: the heuristic's.

    ``more``: ``weight_dtype`` and ``aligned``, for the kernel that does not quantise.
    """
    arch = archs.base_name(arch)
    q, k = widths.q_lora_rank, widths.kv_lora_rank
    if config is None and quant == "none":
        config = triton_config.heuristic(arch, m, q, k, dtype)
    elif config is None:
        config = triton_quant.heuristic(quant, arch, m, q, k, dtype)
    arguments = dict(config=asdict(config), arch=arch, q_width=q, k_width=k, dtype=dtype, **more)
    if quant != "none":
        arguments |= dict(quant=quant, options=asdict(options or Options()))
    return Request("mlakit.codegen.shipped:build", arch, arguments)


@dataclass(frozen=True)
class Emulated:
    """Outputs of one emulated call. q: (M, q_lora_rank), or ``QuantisedQ``; k: (M, kv_lora_rank).

    Evidence is ``emulated``: the arch's own instructions, executed on numpy.
    """

    q: torch.Tensor | QuantisedQ
    k: torch.Tensor
    run: Run
    compiled: Compiled


def _array(tensor: torch.Tensor):
    return tensor.detach().view(_BITS[tensor.element_size()]).numpy()


def _inputs(i: Inputs, k_out: torch.Tensor) -> dict:
    """The arguments that every kernel takes, by name."""
    return dict(
        q=_array(i.q), q_weight=_array(i.q_weight), k=_array(i.k), k_weight=_array(i.k_weight),
        k_out=_array(k_out), q_stride=i.q.stride(0), k_stride=i.k.stride(0),
        m=len(i.k), q_eps=i.q_eps, k_eps=i.k_eps,
    )  # fmt: skip


def emulate_qk_rmsnorm(
    arch: str,
    inputs: Inputs,
    config: Config | None = None,
    compiled: Compiled | None = None,
    **trace,
) -> Emulated:
    """Run ``arch``'s binary of the fused norm on CPU ``inputs``.

    Args:
        config: the kernel's knobs; None: the heuristic's for this arch, M and widths.
        compiled: what ``compile_many`` made of the same arguments, to compile only once.
        trace: ``trace`` and ``trace_wave`` of ``execute.run``.

    Raises:
        MisuseError: not an AMD arch, or no Triton here.
        EmulationError: the run stopped, and why.
    """
    i, arch = inputs, archs.base_name(arch)
    m, widths = len(i.k), Widths(i.q.shape[1], i.k.shape[1])
    dtype = DTYPE_NAMES[i.k.dtype]
    config = config or triton_config.heuristic(arch, m, *_pair(widths), dtype)
    if compiled is None:
        aligned = all(t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0 for t in (i.q, i.k))
        more: dict[str, Any] = dict(weight_dtype=DTYPE_NAMES[i.k_weight.dtype], aligned=aligned)
        compiled = compile_one(request(arch, widths, dtype, config=config, **more))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype) for x in (i.q, i.k))
    resident = (archs.arch(arch).compute_units or 1) * _RESIDENT_PER_UNIT
    grid = (triton_config.programs(config, m, widths.q_lora_rank, resident),)
    own = dict(q_out=_array(q_out), q_out_stride=i.q.shape[1], k_out_stride=i.k.shape[1])
    done = run(compiled, grid, _inputs(i, k_out) | own, **trace)
    return Emulated(q_out, k_out, done, compiled)


def _pair(widths: Widths) -> tuple[int, int]:
    return widths.q_lora_rank, widths.kv_lora_rank


def emulate_quantised(
    quant: str,
    arch: str,
    inputs: Inputs,
    options: Options | None = None,
    compiled: Compiled | None = None,
    **trace,
) -> Emulated:
    """Run ``arch``'s binary of the fused norm that delivers q as ``quant``; as above."""
    i, arch = inputs, archs.base_name(arch)
    m, widths = len(i.k), Widths(i.q.shape[1], i.k.shape[1])
    dtype = DTYPE_NAMES[i.k.dtype]
    native = archs.fp8_format(arch) or "fp8_ocp"
    options = options or Options(encoding=None if quant == "mxfp4" else native)
    config = triton_quant.heuristic(quant, arch, m, *_pair(widths), dtype)
    if compiled is None:
        wanted = request(arch, widths, dtype, config=config, quant=quant, options=options)
        compiled = compile_one(wanted)
    out = quantised.empty(quant, i.q, options)
    k_out = torch.empty(i.k.shape, dtype=i.k.dtype)
    shuffled = quant == "mxfp4" and options.scale_layout == "shuffled"
    scale = out.scale if shuffled else quantised.plain_scale(quant, out, options)
    scale_rows = out.scale.shape[0]
    own = dict(
        values=_array(out.values),
        scales=_array(scale),
        unquantised=_array(i.q if out.unquantised is None else out.unquantised),
        scale_row_stride=scale.stride(0),
        scale_group_stride=scale.stride(1),
        scale_rows=scale_rows,
    )
    grid = (triton_quant.programs(config, m, scale_rows, True),)
    done = run(compiled, grid, _inputs(i, k_out) | own, **trace)
    return Emulated(out, k_out, done, compiled)
