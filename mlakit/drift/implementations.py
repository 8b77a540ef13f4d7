"""Every RMSNorm that is installed, and the fingerprint that its source says it should have."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch

from mlakit.dispatch import probe
from mlakit.drift.fingerprint import Norm, fingerprint, first_of_pair, second_of_pair
from mlakit.errors import one_line
from mlakit.inputs import TORCH_DTYPES
from mlakit.models.hf import hf_norm
from mlakit.paths import registry


@dataclass(frozen=True)
class Implementation:
    """One norm: how to get it, and the rounding its source code reads as (``published``)."""

    name: str
    load: Callable[[], Norm]
    """imports what it needs; raises where it is not installed"""
    reads_as: str
    source: str
    gpu_only: bool = False
    compiler: bool = False
    """torch.compile builds it at its first call, which takes seconds"""


def _torch() -> Norm:
    return lambda x, w, eps: torch.nn.functional.rms_norm(x, w.shape, w, eps)


def _transformers(module: str, name: str) -> Callable[[], Norm]:
    def load() -> Norm:
        path = f"transformers.models.{module}.modeling_{module}"
        kind = getattr(importlib.import_module(path), name)

        def norm(x, weight, eps):
            layer = kind(x.shape[-1], eps=eps)
            layer.weight.data = weight
            return layer(x)

        return norm

    return load


def _liger(mode: str, offset: float = 0.0) -> Norm:
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return lambda x, w, eps: function.apply(x, w, eps, offset, mode, False)


def _quack() -> Norm:
    rmsnorm = importlib.import_module("quack").rmsnorm
    return lambda x, w, eps: rmsnorm(x, w, eps=eps)


def _flashinfer() -> Norm:
    rmsnorm = importlib.import_module("flashinfer.norm").rmsnorm
    return lambda x, w, eps: rmsnorm(x, w, eps)


def _inductor(emulate: bool) -> Norm:
    options: Any = {"emulate_precision_casts": emulate}
    compiled = torch.compile(hf_norm, options=options, dynamic=True, fullgraph=True)

    def norm(x, weight, eps):
        # past its limit dynamo runs eagerly and says so in a log only: that would be another norm
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            return compiled(x, weight, eps)

    return norm


def _triton(fusion: bool) -> Norm:
    return partial(importlib.import_module("mlakit.drift.norm_kernels").norm, fusion=fusion)


_HF = "github.com/huggingface/transformers 5.24.0"
_INDUCTOR = "torch._inductor.config.emulate_precision_casts"
_LIGER = "github.com/linkedin/Liger-Kernel src/liger_kernel/ops/rms_norm.py"
_CAST, _ONCE = "cast_then_weight", "round_once"
# Triton's tl.sum stays in bf16; a bf16 divided by an int is float32, and so is all that follows
_LIGER_NONE = "running_sum"

_ANYWHERE = (
    ("torch F.rms_norm", _torch, _ONCE, "ATen layer_norm.cpp"),
    ("transformers Llama", _transformers("llama", "LlamaRMSNorm"), _CAST, _HF),
    ("transformers DeepseekV3", _transformers("deepseek_v3", "DeepseekV3RMSNorm"), _CAST, _HF),
    ("transformers Gemma", _transformers("gemma", "GemmaRMSNorm"), "gemma", _HF),
)
_COMPILED = (
    ("inductor, Hugging Face order", partial(_inductor, False), "", _INDUCTOR),
    ("inductor, casts emulated", partial(_inductor, True), _CAST, _INDUCTOR),
)
_ON_A_GPU = (
    ("Triton, FP fusion", partial(_triton, True), _ONCE, ""),
    ("Triton, no FP fusion", partial(_triton, False), _ONCE, ""),
    ("Liger llama", partial(_liger, "llama"), _CAST, _LIGER),
    ("Liger gemma", partial(_liger, "gemma", 1.0), "gemma", _LIGER),
    ("Liger none", partial(_liger, "none"), _LIGER_NONE, _LIGER),
    ("QuACK", _quack, _ONCE, "github.com/Dao-AILab/quack quack/rmsnorm.py"),
    ("FlashInfer", _flashinfer, _ONCE, "github.com/flashinfer-ai/flashinfer norm.cuh"),
)
IMPLEMENTATIONS = (
    *(Implementation(*row) for row in _ANYWHERE),
    *(Implementation(*row, compiler=True) for row in _COMPILED),
    *(Implementation(*row, gpu_only=True) for row in _ON_A_GPU),
)
"""``reads_as`` is empty where the source leaves it to the compiler."""


def fingerprint_everything(
    device: str = "cpu", dtype: str = "bf16", *, compiler: bool = True
) -> pd.DataFrame:
    """Fingerprints of all of ``IMPLEMENTATIONS`` and of both outputs of every path, on ``device``.

    ``compiler=False`` leaves out what torch.compile builds: a minute on a CPU, of which the rest
    takes a few seconds.

    Columns: implementation, device, dtype, status (ok, skipped), names, reads_as, agrees (None
    where there is nothing to agree with), text, source. What is not installed, or cannot run on
    the device, is a skipped row with its reason in ``text``.
    """
    here = replace(probe.here(device), m=48, q_lora_rank=128, kv_lora_rank=64)
    context = replace(here, dtype=dtype, norm_weight_dtype=dtype)
    left_out = None if compiler else "left out: torch.compile takes seconds"
    rows = []
    for one in IMPLEMENTATIONS:
        why = "runs on a GPU only" if one.gpu_only and device == "cpu" else None
        why = why or (left_out if one.compiler else None)
        rows.append(_row(one.name, one.load, one.reads_as, one.source, device, dtype, why))
    for path in registry.all_paths():
        if path.output != "none":
            continue
        why = path.supports(context) or (left_out if path.name == "inductor" else None)
        reads_as = path.rounding_on(context.arch, dtype)
        for part, of in (("q", first_of_pair), ("k", second_of_pair)):
            load = partial(of, path.call)
            rows.append(_row(f"{path.name} {part}", load, reads_as, "mlakit", device, dtype, why))
    return pd.DataFrame(rows)


def _row(name, load, reads_as, source, device, dtype, why) -> dict:
    row = {"implementation": name, "device": device, "dtype": dtype, "status": "skipped"}
    row |= {"names": "", "reads_as": reads_as, "agrees": None, "text": why, "source": source}
    if why:
        return row
    try:
        norm = load()
        norm(
            torch.ones(2, 128, dtype=TORCH_DTYPES[dtype], device=device),
            torch.ones(128, dtype=TORCH_DTYPES[dtype], device=device),
            1e-5,
        )
    except Exception as error:
        # an optional package may fail to import or to run in any way; the row says how
        return row | {"text": one_line(error)}
    found = fingerprint(norm, device=device, dtype=dtype)
    agrees = reads_as in found.names if reads_as else None
    return row | {"status": "ok", "names": found.name, "agrees": agrees, "text": found.text}
