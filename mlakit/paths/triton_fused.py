"""triton_fused: one Triton launch that normalises q and kv from their split views.

A plain eager call is one test and a launch: what a call may be served by is decided once for each
set of shapes, strides, dtypes and alignments (``_Ready``), and found again by them, or at once
where the call before was of the same kind.
Calls that are traced or want a gradient go through the operator ``mlakit::qk_rmsnorm``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib.util import find_spec

import torch

from mlakit import archs
from mlakit.context import Context
from mlakit.errors import MisuseError, RefusedError
from mlakit.inputs import DTYPE_NAMES
from mlakit.paths import checks, custom_op, interpreter, triton_config
from mlakit.paths.registry import Path
from mlakit.paths.triton_config import Config
from mlakit.paths.triton_launch import Launch, empty, prepare, start

KERNEL = "mlakit.paths.triton_kernels:qk_rmsnorm_kernel"
MOST_READY = 4096
"""Calls remembered: a serving engine sees some hundred row counts, an entry takes about 1 KiB."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """All that a call still needs once its facts are known."""

    launch: Launch
    strides: tuple[int, ...]
    """of q, k, q_out, k_out, and the rows: the kernel's integers"""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dense: tuple[tuple[int, ...], tuple[int, ...]]
    """shapes of the two outputs, and their strides when contiguous"""


_READY: dict[tuple, _Ready] = {}
_latest: tuple[Callable[..., bool], _Ready] | None = None
"""of the latest plain call: whether another is of its kind, and what it needs"""


def call(
    q: torch.Tensor,
    q_weight: torch.Tensor,
    q_eps: float,
    k: torch.Tensor,
    k_weight: torch.Tensor,
    k_eps: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
    batch_invariant: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise q (M, q_lora_rank) and k (M, kv_lora_rank); see ``registry.Path``.

    ``config``: these knobs rather than the heuristic's. ``batch_invariant=False`` gives a
    row's sum the tree of the warps that hold it, which follow M: its last bits then do too. That
    gains 0.1 to 0.3 % on an H200 at M = 2048, 1536 + 512; at other M these are the same trees.

    Raises:
        MisuseError: arguments the kernel cannot serve; nothing was launched.
    """
    usual = out is None and config is None and batch_invariant
    if not torch.compiler.is_compiling():
        latest = _latest
        if usual and latest is not None:
            same, ready = latest
            if same(q, q_weight, k, k_weight) and checks.unwatched():
                done = _launch(ready, q, q_weight, q_eps, k, k_weight, k_eps)
                if done is not None:
                    return done
        if checks.plain(q, q_weight, k, k_weight):
            return run(q, q_weight, q_eps, k, k_weight, k_eps, out, config, batch_invariant)
    if not usual:
        raise MisuseError(
            "out, config and batch_invariant are for plain calls: leave them out where a "
            "gradient is wanted or the call is traced"
        )
    return custom_op.qk_rmsnorm(q, q_weight, q_eps, k, k_weight, k_eps)


def run(q, q_weight, q_eps, k, k_weight, k_eps, out=None, config=None, batch_invariant=True):
    """``call`` below the operator layer: real tensors, no gradient."""
    global _latest
    if out is not None:
        return _first_call(
            None, q, q_weight, q_eps, k, k_weight, k_eps, out, config, batch_invariant
        )
    aligned = tuple(
        (x.data_ptr() | w.data_ptr()) & 15 == 0 for x, w in ((q, q_weight), (k, k_weight))
    )
    facts = (checks.facts(q, q_weight, k, k_weight), aligned, config, batch_invariant)
    ready = _READY.get(facts)
    if ready is None or not q_eps >= 0 <= k_eps:
        return _first_call(
            facts, q, q_weight, q_eps, k, k_weight, k_eps, None, config, batch_invariant
        )
    if all(aligned) and config is None and batch_invariant:
        _latest = checks.same_as(q, q_weight, k, k_weight), ready
    return _launch(ready, q, q_weight, q_eps, k, k_weight, k_eps, all(aligned))


def again(q, q_weight, k, k_weight) -> Callable | None:
    """See ``registry.Path.again``."""
    latest = _latest  # once: other threads set it
    if latest is None or not latest[0](q, q_weight, k, k_weight):
        return None
    return partial(_launch, latest[1])


def _launch(ready, q, q_weight, q_eps, k, k_weight, k_eps, aligned=True):
    """The outputs of a call that ``ready`` is of; None where it turns out to be of no such kind."""
    launch = ready.launch
    if launch.device != torch._C._cuda_getDevice():
        with torch.cuda.device(launch.device):
            return _launch(ready, q, q_weight, q_eps, k, k_weight, k_eps, aligned)
    q_at, qw_at, k_at, kw_at = q.data_ptr(), q_weight.data_ptr(), k.data_ptr(), k_weight.data_ptr()
    if not q_eps >= 0 <= k_eps or (aligned and (q_at | qw_at | k_at | kw_at) & 15):
        return None
    q_out = empty(ready.shapes[0], ready.dense[0], q.dtype)
    k_out = empty(ready.shapes[1], ready.dense[1], k.dtype)
    start(
        launch, q_at, qw_at, q_out.data_ptr(), k_at, kw_at, k_out.data_ptr(),
        *ready.strides, q_eps, k_eps,
    )  # fmt: skip
    return q_out, k_out


def _first_call(facts, q, q_weight, q_eps, k, k_weight, k_eps, out, config, batch_invariant):
    """Check everything, launch, and remember under ``facts`` what the next such call needs."""
    if find_spec("triton") is None:
        raise RefusedError("triton_fused needs triton: pip install 'mlakit[triton]', not on ROCm")
    q_rows, k_rows, q_out, k_out, given = checks.prepare(
        q, q_weight, q_eps, k, k_weight, k_eps, out
    )
    m, q_width = q_rows.shape
    k_width, dtype = k_rows.shape[1], DTYPE_NAMES[q.dtype]
    if max(q_width, k_width) > triton_config.MAX_WIDTH or not k_width:
        raise MisuseError(
            f"widths {q_width} and {k_width}: triton_fused takes 0 to {triton_config.MAX_WIDTH} "
            f"of q and 1 to {triton_config.MAX_WIDTH} of k; use torch_rms_norm"
        )
    if not m:
        return given
    pointers = [x.data_ptr() for x in (q, q_weight, q_out, k, k_weight, k_out)]
    strides = tuple(x.stride(0) for x in (q_rows, k_rows, q_out, k_out))
    starts = [
        a | b | c | s * q.element_size() | o * q.element_size()
        for a, b, c, s, o in ((*pointers[:3], *strides[::2]), (*pointers[3:], *strides[1::2]))
    ]
    aligned = tuple(start % 16 == 0 for start in starts)
    arch = archs.of(q.device)
    if config is None:
        config = triton_config.heuristic(
            arch, m, q_width, k_width, dtype, batch_invariant=batch_invariant
        )
    problem = triton_config.check(config, arch, q_width, k_width, dtype)
    if problem:
        raise MisuseError(f"config cannot run: {problem}")
    if arch == "cpu":
        _interpret(
            config, m, q_rows, q_weight, q_eps, q_out, k_rows, k_weight, k_eps, k_out, aligned
        )
        return given
    ready = _prepare(
        config, q.get_device(), m, q_width, k_width, dtype,
        (DTYPE_NAMES[q_weight.dtype], DTYPE_NAMES[k_weight.dtype]), aligned, strides,
        tuple((tuple(y.shape), y.stride()) for y in given),
    )  # fmt: skip
    if facts is not None:
        if len(_READY) >= MOST_READY:
            _READY.clear()
        _READY[facts] = ready
    with torch.cuda.device(ready.launch.device):
        start(ready.launch, *pointers, *ready.strides, q_eps, k_eps)
    return given


@lru_cache(maxsize=1024)
def _prepare(
    config, device, m, q_width, k_width, dtype, weight_dtypes, aligned, strides, outputs
) -> _Ready:
    """Compile, load and lay out a launch for one set of facts."""
    card = archs.devices()[device]
    resident = triton_config.resident(config, card.compute_units)
    return _Ready(
        launch=prepare(
            device, triton_config.programs(config, m, q_width, resident), _signature,
            config, card.arch, q_width, k_width, dtype, weight_dtypes,
            aligned=aligned, strides_of_16=all(s % 16 == 0 for s in strides),
        ),
        strides=(*strides, m),
        shapes=tuple(shape for shape, _ in outputs),
        dense=tuple(stride for _, stride in outputs),
    )  # fmt: skip


def _signature(*facts, **named_facts):
    from mlakit.paths.triton_kernels import kernel_signature

    return kernel_signature(*facts, **named_facts)


def _interpret(config, m, q, q_weight, q_eps, q_out, k, k_weight, k_eps, k_out, aligned) -> None:
    """The same kernel on CPU tensors, in the interpreter's process: correctness only."""
    widths = q.shape[1], k.shape[1]
    arguments = {
        "q": q,
        "q_weight": q_weight,
        "q_out": q_out,
        "k": k,
        "k_weight": k_weight,
        "k_out": k_out,
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "q_out_stride": q_out.stride(0),
        "k_out_stride": k_out.stride(0),
        "m": m,
        "q_eps": q_eps,
        "k_eps": k_eps,
        **triton_config.constants(
            config, "cpu", *widths, DTYPE_NAMES[q.dtype], q_aligned=aligned[0], k_aligned=aligned[1]
        ),
    }
    programs = triton_config.programs(config, m, widths[0], 1)
    interpreter.launch(KERNEL, programs, arguments, {"q_out", "k_out"})


def knobs(context: Context) -> dict:
    """The config that a plain call takes in ``context``."""
    widths = context.q_lora_rank, context.kv_lora_rank
    return asdict(triton_config.heuristic(context.arch, context.m, *widths, context.dtype))


def launched(early: bool) -> Callable:
    """``call`` with early launches, or with none."""

    def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
        m, widths = k.numel() // k.shape[-1], (q.shape[-1], k.shape[-1])
        config = triton_config.heuristic(archs.of(k.device), m, *widths, DTYPE_NAMES[k.dtype])
        config = triton_config.launched(config, early)
        return run(q, q_weight, q_eps, k, k_weight, k_eps, out, config)

    return call


def supports(context: Context) -> str | None:
    """None if the kernel can serve ``context``, else one line that says why not."""
    if "triton" not in context.packages:
        return "triton is not installed"
    if context.quant != "none":
        return f"delivers q unquantised, not as {context.quant}"
    if context.layout == "inner_strided":
        return "inner stride is not 1"
    if context.widest > triton_config.MAX_WIDTH:
        return f"width {context.widest} is over {triton_config.MAX_WIDTH}"
    return None


PATH = Path(
    name="triton_fused",
    text="one Triton launch over q and kv, from their split views",
    call=call,
    again=again,
    supports=supports,
    rounding="round_once",
    launches=1,
    fused=True,
    timed=False,
    knobs=knobs,
    launched=launched,
)
