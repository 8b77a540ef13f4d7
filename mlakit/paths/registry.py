"""The registry: every path by name, what it can do, and why it cannot run where it cannot."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from mlakit import archs
from mlakit.context import Context
from mlakit.errors import unknown

MODULES = tuple(
    (
        "torch_native torch_rms_norm torch_rms_norm_copied inductor dual_stream cpu_fused "
        "triton_fused aiter_fused liger_rms_norm quack_rms_norm flashinfer_rms_norm "
        "torch_fp8_group128 unfused_fp8_group128 triton_fp8_group128 aiter_fp8_group128 "
        "torch_fp8_token unfused_fp8_token triton_fp8_token "
        "torch_mxfp4 unfused_mxfp4 triton_mxfp4 aiter_mxfp4"
    ).split()
)
"""One module of ``mlakit.paths`` a path; the order is the order of tables."""


@dataclass(frozen=True)
class Path:
    """One named way to run the step.

    ``call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None) -> (q_out, k_out)``;
    q: (M, q_lora_rank), k: (M, kv_lora_rank), same rows, unit inner stride, any row stride;
    outputs contiguous, or ``out``'s two tensors. ``q`` may have width 0 (no q latent).
    """

    name: str
    text: str
    """one line for a person"""
    call: Callable
    supports: Callable[[Context], str | None]
    """None if it can run in a context and deliver its quant, else one line that says why not; pure,
    imports nothing"""
    rounding: str
    """a name of ``mlakit.rounding.ROUNDINGS``; see ``rounding_on``"""
    launches: int
    """kernel launches a call takes on a GPU; 1 is what fusing means"""
    again: Callable | None = None
    """``again(q, q_weight, k, k_weight)``: a function of ``call``'s six arguments that serves
    further calls of that kind (``checks.same_as``) unchecked, and gives None for one that it finds
    to be of another; or None, where the latest call was of another kind"""
    output: str = "none"
    """what q is delivered as: a quant of ``mlakit.context.QUANTS``"""
    fused: bool = False
    makes_outputs: bool = False
    """its kernels take no output: they return tensors of their own, and ``out`` costs a copy"""
    copies: bool = False
    """the path copies its inputs first, and the copy is part of its time"""
    timed: bool = True
    """False: correctness only on a CPU (interpreter); may never enter a timing table there"""
    knobs: Callable[[Context], dict] | None = None
    """what a call chooses in a context, for the record; ``pdl``: launches overlap"""
    launched: Callable[[bool], Callable] | None = None
    """``call`` with early (overlapping) launches or without, whatever ``knobs`` say"""
    splits_from_m: int | None = None
    """rows from which the path launches two kernels; such rows are no fused figures"""
    truncates: bool = False
    """bf16 results are cut toward zero on cards without a convert of their own (gfx942, older)"""

    def rounding_on(self, arch: str, dtype: str) -> str:
        """How results are rounded on an arch: a name of ``mlakit.rounding.ROUNDINGS``."""
        cuts = self.truncates and archs.vendor_of(arch) == "amd"
        software = cuts and archs.arch(arch).bf16_convert == "software"
        return "truncate" if software and dtype == "bf16" else self.rounding


def quantising(name: str, text: str, call: Callable, supports: Callable, **more) -> Path:
    """A path that delivers q quantised, of functions that serve several quants.

    Args:
        name: ``<kind>_<quant>``: what stands behind the first ``_`` is the quant.
        text: one line for a person.
        call: as ``Path.call``, with the quant before its arguments.
        supports: as ``Path.supports``, with a keyword ``quant``.
        **more: other fields of ``Path``.
    """
    quant = name.partition("_")[2]
    given = partial(call, quant), partial(supports, quant=quant)
    return Path(name, text, *given, "round_once", output=quant, **more)


@cache
def get(name: str) -> Path:
    """The path called ``name``.

    Raises:
        MisuseError: no such path, with the nearest match.
    """
    if name not in MODULES:
        raise unknown("path", name, MODULES)
    return importlib.import_module(f"mlakit.paths.{name}").PATH


def names() -> tuple[str, ...]:
    """Every path's name."""
    return MODULES


def all_paths() -> tuple[Path, ...]:
    """Every path; importing their modules loads no optional package."""
    return tuple(get(n) for n in MODULES)
