"""What is here and why not: packages, devices, overrides, and the context of this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mlakit import archs
from mlakit.context import PACKAGES, Context
from mlakit.dispatch import switches
from mlakit.errors import one_line
from mlakit.paths import aiter_api
from mlakit.records import Cell

_INSTALL = {
    "triton": "pip install 'mlakit[triton]' (on ROCm: the Triton that its torch brings)",
    "numba": "pip install 'mlakit[cpu]'",
    "liger_kernel": "pip install 'mlakit[peers]'",
    "quack": "pip install 'mlakit[peers]'",
    "flashinfer": "pip install flashinfer-python",
}


def vendor() -> str:
    """``amd``, ``nvidia`` or ``cpu``: the devices that torch's own build sees now. Never raises."""
    found = archs.devices()
    return found[0].vendor if found else "cpu"


@cache
def package_reason(name: str) -> str | None:
    """None if the optional package ``name`` can be used here, else one line that says why not.

    Cheap: reads metadata and source, imports no optional package. Remembered for the process.
    """
    if name == "cxx":
        return _cxx_reason()
    if name == "aiter":
        return _aiter_reason()
    return _module_reason(name)


def package_reasons() -> dict[str, str | None]:
    """``package_reason`` of every name of ``mlakit.context.PACKAGES``. Never raises."""
    return {name: package_reason(name) for name in PACKAGES}


def packages() -> frozenset[str]:
    """The optional packages that can be used here."""
    return frozenset(name for name, why in package_reasons().items() if why is None)


def refresh() -> None:
    """Forget what was found, after something was installed or an environment switch changed."""
    package_reason.cache_clear()


def _module_reason(name: str) -> str | None:
    if name in sys.modules:
        return None if sys.modules[name] is not None else f"{name} is blocked in this process"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError) as error:
        return f"{name} is broken here: {one_line(error)}"
    if spec is None:
        return f"{name} is not installed; {_INSTALL[name]}"
    if spec.origin is None:
        where = ", ".join(spec.submodule_search_locations or ())
        return f"{name} at {where} is a bare folder, not the package; {_INSTALL[name]}"
    return None


def _cxx_reason() -> str | None:
    """Whether the compiler that torch's inductor would take can compile what inductor writes."""
    # as inductor reads it: an empty CXX is taken, and no compiler
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        told = f"{name} is not on PATH" if name else "CXX is empty"
        return f"no C++ compiler: {told}; install g++ or set CXX"
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        return f"no Python.h in {include}; install this Python's development headers"
    try:
        done = subprocess.run(
            [compiler, "-x", "c++", "-std=c++17", "-fopenmp", "-fsyntax-only", "-"],
            input="#include <cmath>\n#include <omp.h>\nint main() { return 0; }",
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C++ compiler {name} does not run: {one_line(error)}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return f"the C++ compiler {name} fails: {lines[0][:120]}"
    return None


def _aiter_reason() -> str | None:
    if why := switches.aiter_forbidden():
        return why
    found = aiter_api.find()
    if found.version is None or found.file is None:
        return found.error
    return None if vendor() == "amd" else f"AITER {found.version} is here, but no AMD card is"


def aiter_in_use() -> bool:
    """Whether an engine started here would use AITER: an AMD card and a switch that is on."""
    named = [switches.read(name) for name in switches.AITER_SWITCHES]
    return vendor() == "amd" and any(s.on for s in named)


def device_arch(device: str) -> str:
    """The base arch of ``cpu``, ``cuda`` or ``cuda:1``; ``cpu`` where that device is not here."""
    kind, colon, index = device.partition(":")
    if kind == "cpu":
        return "cpu"
    found, index = archs.devices(), index if colon else "0"
    # isdecimal: -1 would count from the end, and "cuda:" and "cuda:x" name no device
    known = index.isdecimal() and int(index) < len(found)
    return found[int(index)].arch if known else "cpu"


def machine_fields() -> dict:
    """The fields of a context that an AMD machine decides: AITER and switches."""
    return {
        "use_aiter": aiter_in_use(),
        "aiter_api": aiter_api.find().generation if vendor() == "amd" else "none",
        "switches": frozenset(
            s.name if s.on else f"{s.name}=0"
            for s in switches.read_all()
            if s.origin == "env" and s.error is None and switches.KNOWN[s.name][0] == "bool"
        ),
    }


def here(device: str = "cpu") -> Context:
    """The context of this machine on ``device`` (``cpu``, ``cuda``, ``cuda:1``). Never raises.

    A device that is not here gives the CPU's context; ``doctor`` says why.
    """
    arch = device_arch(device)
    fields = machine_fields() if arch.startswith("gfx") else {}
    if arch not in archs.known():
        arch = "cpu"
    return Context(arch=arch, packages=packages(), **fields)


def weight_dtype_for(arch: str, dtype: str, quant: str) -> str:
    """The dtype of a q_b_proj that reads q as ``quant``."""
    if quant in ("none", "mxfp4"):
        return dtype if quant == "none" else quant
    return archs.fp8_format(arch) or dtype


def context_for(cell: Cell, device: str = "cpu") -> Context:
    """The context in which ``cell`` is run on ``device``.

    Where ``cell.arch`` is not the device's arch the context is hypothetical: every optional
    package is assumed, and the caller says that the arch is not here.

    Raises:
        MisuseError: the cell cannot exist on its arch (MXFP4 on gfx942).
    """
    is_here = cell.arch == device_arch(device)
    fields = machine_fields() if is_here and cell.arch.startswith("gfx") else {}
    return Context(
        arch=cell.arch,
        m=cell.m,
        q_lora_rank=cell.q_lora_rank,
        kv_lora_rank=cell.kv_lora_rank,
        dtype=cell.dtype,
        norm_weight_dtype=cell.norm_weight_dtype or cell.dtype,
        weight_dtype=weight_dtype_for(cell.arch, cell.dtype, cell.quant),
        block_scale=cell.quant != "fp8_token",
        quant=cell.quant,
        layout=cell.layout,
        q_eps=cell.eps,
        k_eps=cell.eps,
        capture=cell.clock == "graph",
        packages=packages() if is_here else frozenset(PACKAGES),
        **fields,
    )


class Conflict(NamedTuple):
    """Two facts about this machine that do not go together, in one line."""

    text: str
    todo: str


def conflicts() -> Iterator[Conflict]:
    """Mixed cards, overrides that lie about the card, kernels built for others. Never raises."""
    present = tuple(a for a in archs.here() if a != "cpu")
    if len(present) > 1:
        yield Conflict(
            f"mixed cards: {', '.join(present)}; engines test device 0 only",
            "show each process one kind with HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES",
        )
    if told := switches.overridden_arch():
        value = os.environ["HSA_OVERRIDE_GFX_VERSION"]
        yield Conflict(
            f"HSA_OVERRIDE_GFX_VERSION={value} makes every card call itself {told}",
            "unset it, unless the card is known to run that arch's code",
        )
    built = switches.built_archs()
    amd = [a for a in present if a.startswith("gfx")]
    missing = [a for a in amd if built and a not in built]
    if missing:
        yield Conflict(
            f"GPU_ARCHS={';'.join(built)}, but the card is {', '.join(missing)}",
            f"set GPU_ARCHS={';'.join(amd)} or unset it, then clear AITER's build cache",
        )
    elif built and not amd:
        yield Conflict(f"GPU_ARCHS={';'.join(built)}, but no AMD card is here", "unset GPU_ARCHS")
