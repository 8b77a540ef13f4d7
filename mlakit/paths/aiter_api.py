"""AITER's dual norm in all its generations: find it without importing, choose by signature.

Generations of ``fused_qk_rmsnorm`` (read in AITER's git tags):

* ``none``: up to v0.1.11.post1, PyPI's 0.1.7 wheel included.
* ``pair``: v0.1.12 to v0.1.13.post1, ``aiter.ops.fused_qk_norm_rope_cache_quant``; returns a pair.
* ``unified``: v0.1.14 on, ``aiter.ops.fused_qk_rmsnorm_group_quant``; writes into buffers, returns
  nothing. With quant type ``No`` the BF16 result goes into ``q_out_quantized``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from mlakit.context import Context
from mlakit.errors import RefusedError, one_line

WANTED = "amd-aiter v0.1.12 or newer, installed as https://github.com/ROCm/aiter says"
NAME = "fused_qk_rmsnorm"
UNIFIED_MODULE = "aiter.ops.fused_qk_rmsnorm_group_quant"
SPLITS_FROM_M = 16384
"""Rows from which AITER's Python entry launches two kernels (every generation, and HEAD)."""
PAIR_MODULE = "aiter.ops.fused_qk_norm_rope_cache_quant"

_PAIR = ("q", "q_weight", "q_eps", "k", "k_weight", "k_eps")
_UNIFIED = frozenset(
    "q_out_quantized q q_weight q_epsilon k_out k k_weight k_epsilon quant_type".split()
)


@dataclass(frozen=True)
class Found:
    """What of AITER is here: ``generation`` none, pair or unified; ``error`` None or one line."""

    generation: str
    version: str | None
    file: str | None
    signature: str | None
    error: str | None


def generation_of(parameters: Iterable[str]) -> str | None:
    """``pair`` or ``unified`` for the parameter names of a dual norm; None for any others."""
    names = tuple(parameters)
    if names == _PAIR:
        return "pair"
    return "unified" if set(names) >= _UNIFIED else None


def find() -> Found:
    """Look for AITER's distribution and symbols, reading its source; imports nothing of it.

    ``aiter`` on PyPI is an unrelated package, so the distribution's name decides, not the module's.
    Never raises.
    """
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError, AttributeError):
        spec = None
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    file = str(folders[0]) if folders else None
    try:
        version = importlib.metadata.version("amd-aiter")
    except importlib.metadata.PackageNotFoundError:
        return Found("none", None, file, None, _not_amd(file))
    if not folders:
        return Found(
            "none", version, None, None, f"amd-aiter {version} has no aiter folder; reinstall"
        )
    for module in (UNIFIED_MODULE, PAIR_MODULE):
        names = _parameters(folders, module)
        if names is None:
            continue
        signature = f"{NAME}({', '.join(names)})"
        generation = generation_of(names)
        if generation is None:
            why = f"amd-aiter {version} has an unknown signature: {signature}"
            return Found("none", version, file, signature, why)
        return Found(generation, version, file, signature, None)
    why = f"amd-aiter {version} has no {NAME}; wanted: {WANTED}"
    return Found("none", version, file, None, why)


def _not_amd(file: str | None) -> str:
    if file is None:
        return f"no AITER here; wanted: {WANTED}"
    try:
        version = importlib.metadata.version("aiter")
        what = f"the package aiter {version}, an unrelated iterator helper,"
    except importlib.metadata.PackageNotFoundError:
        what = "a folder called aiter"
    return f"{what} at {file} is not AMD's AITER; wanted: {WANTED}"


def _parameters(folders: list[Path], module: str) -> tuple[str, ...] | None:
    """Parameter names of the dual norm in ``module``'s source; None where it has none."""
    parts = module.split(".")[1:]
    for folder in folders:
        file = folder.joinpath(*parts).with_suffix(".py")
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == NAME:
                a = node.args
                return tuple(p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs))
    return None


def refusal(context: Context) -> str | None:
    """Why none of AITER's norm kernels can run in ``context``, in one line, or None."""
    if context.vendor != "amd":
        return f"AITER runs on AMD cards only, not on {context.arch}"
    if "aiter" not in context.packages:
        return f"no usable AITER; wanted: {WANTED}"
    if context.dtype == "fp32":
        return "fp32 input: the kernel takes bf16 and fp16"
    if context.layout == "inner_strided":
        return "inner stride is not 1: the kernel assumes 1 and does not check"
    return None


def proven(path: str, device: torch.device, load: Callable, answers: Callable):
    """What ``load()`` gives, after its known answers came out right on ``device``.

    ``answers(loaded)``: (name, got, want) of each, float32 on the CPU. One percent is allowed:
    bf16 cut toward zero is off by at most 2**-7, a wrong row or width by over 0.1.

    Raises:
        RefusedError: AITER does not import, or failed; or a graph is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RefusedError(f"AITER is not proven yet: call {path} once before capturing")
    try:
        loaded = load()
    except ImportError as error:
        raise RefusedError(f"{path}: {error}") from error
    called = f"{path}: {getattr(loaded, 'signature', 'this kernel of AITER')}"
    try:
        found = answers(loaded)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RefusedError(f"{called} failed its test call: {one_line(error)}") from error
    for name, got, want in found:
        if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-2, atol=0):
            raise RefusedError(f"{called} gave a wrong known answer for {name}; not trusted")
    return loaded


@dataclass(frozen=True)
class Api:
    """An imported dual norm: call it through ``call``, never by position."""

    generation: str
    signature: str
    call: Callable
    """call(q, q_weight, q_eps, k, k_weight, k_eps, q_out, k_out): fills the two outputs"""


def load() -> Api:
    """Import AITER and adapt its dual norm by signature.

    Raises:
        ImportError: one line. AITER's import may raise anything (RuntimeError without ROCm,
            KeyError or OSError on odd machines); every such failure arrives as this.
    """
    seen = []
    for module in (UNIFIED_MODULE, PAIR_MODULE):
        function = getattr(import_or_none(module), NAME, None)
        if function is None:
            continue
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise ImportError(f"{module}.{NAME} has no readable signature: {error}") from error
        signature = f"{NAME}({', '.join(parameters)})"
        generation = generation_of(parameters)
        if generation == "pair":
            return Api(generation, signature, _pair(function))
        if generation == "unified":
            quant_type = getattr(import_or_none("aiter.ops.enum"), "QuantType", None)
            if quant_type is None:
                raise ImportError("aiter.ops.enum has no QuantType")
            return Api(generation, signature, _unified(function, quant_type.No))
        seen.append(signature)
    if seen:
        raise ImportError(f"AITER's dual norm has an unknown signature: {'; '.join(seen)}")
    raise ImportError(f"this AITER has no {NAME}; wanted: {WANTED}")


def import_or_none(name: str):
    """The module of AITER, or None where AITER lacks just that file.

    Raises:
        ImportError: AITER itself does not import.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != "aiter" and f"{name}.".startswith(f"{missing}."):
            return None
        raise ImportError(f"aiter does not import: {one_line(error)}") from error
    except MemoryError:
        raise
    except Exception as error:
        raise ImportError(f"aiter does not import: {one_line(error)}") from error


def _pair(function: Callable) -> Callable:
    def call(q, q_weight, q_eps, k, k_weight, k_eps, q_out, k_out):
        q_new, k_new = function(
            q=q, q_weight=q_weight, q_eps=q_eps, k=k, k_weight=k_weight, k_eps=k_eps
        )
        return q_new, k_new

    return call


def _unified(function: Callable, no_quant: object) -> Callable:
    def call(q, q_weight, q_eps, k, k_weight, k_eps, q_out, k_out):
        function(
            q_out_quantized=q_out, q_out_scale=None, q_out_unquantized=None, k_out=k_out,
            q_res_out=None, q_residual=None, quant_type=no_quant,
            q=q, q_weight=q_weight, q_epsilon=q_eps, k=k, k_weight=k_weight, k_epsilon=k_eps,
        )  # fmt: skip
        return q_out, k_out

    return call
