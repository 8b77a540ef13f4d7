"""Environment switches that change which kernel runs: value, origin, and odd values as errors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlakit.archs import base_name, is_device_arch
from mlakit.errors import MisuseError, unknown

_ON, _OFF = ("1", "true"), ("0", "false")

AITER_SWITCHES = ("SGLANG_USE_AITER", "VLLM_ROCM_USE_AITER")
"""Any of them at 0 keeps mlakit from importing AITER; with none of them on engines run without."""

KNOWN: dict[str, tuple[str, str, str]] = {
    "SGLANG_USE_AITER": ("bool", "0", "SGLang: AITER kernels on ROCm"),
    "SGLANG_ROCM_USE_MULTI_STREAM": ("bool", "0", "SGLang 0.5.12 on: second stream on ROCm"),
    "AITER_FORCE_A8W4": ("bool", "0", "SGLang 0.5.20 on: Triton norms in place of AITER's kernel"),
    "SGLANG_QK_RMSNORM_TORCH": ("bool", "0", "SGLang 0.5.20 on, with AITER_FORCE_A8W4: torch ops"),
    "VLLM_ROCM_USE_AITER": ("bool", "0", "vLLM: AITER kernels on ROCm"),
    "VLLM_ROCM_USE_AITER_RMSNORM": ("bool", "1", "vLLM: AITER's RMSNorm, when AITER is on"),
    "ATOM_ENABLE_DS_QKNORM_FUSION": ("bool", "1", "ATOM: the dual norm in one kernel"),
    "ATOM_ENABLE_DS_QKNORM_QUANT_FUSION": ("bool", "1", "ATOM: dual norm and quantise fused"),
    "ATOM_USE_TRITON_GEMM": ("bool", "0", "ATOM: Triton's FP4 GEMM"),
    "TRITON_INTERPRET": ("bool", "0", "Triton: interpreter (correctness only, never timed)"),
    "GPU_ARCHS": ("archs", "native", "AITER: the archs its kernels are built for"),
    "PYTORCH_ROCM_ARCH": ("archs", "", "torch extensions: the archs they are built for"),
    "HSA_OVERRIDE_GFX_VERSION": ("gfx", "", "ROCm: pretend that the card is another arch"),
}
"""name -> (kind, default, what it does). Defaults as the engines' sources have them."""


@dataclass(frozen=True)
class Switch:
    """One switch as found: ``origin`` is ``env`` or ``default``; ``error`` is None or one line."""

    name: str
    value: str
    origin: str
    text: str
    error: str | None = None

    @property
    def on(self) -> bool:
        """Whether a yes-or-no switch is on; an odd value is not on."""
        return self.error is None and self.value.strip().lower() in _ON


def _wrong(kind: str, name: str, value: str) -> str | None:
    text = value.strip().lower()
    if kind == "bool" and text not in (*_ON, *_OFF):
        return f"{name}={value!r}: a yes-or-no switch; set it to 1 or 0"
    if kind == "archs" and text not in ("", "native"):
        for part in re.split(r"[;,\s]+", text):
            if part and not is_device_arch(base_name(part)):
                return f"{name}={value!r}: {part!r} is no device arch; write e.g. gfx942;gfx950"
    if kind == "gfx" and text and not re.fullmatch(r"\d+\.\d+\.\d+", text):
        return f"{name}={value!r}: write major.minor.stepping, for example 9.4.2"
    return None


def read(name: str, environ: Mapping[str, str] | None = None) -> Switch:
    """The switch called ``name``. Never raises for its value: an odd one is in ``error``.

    Raises:
        MisuseError: no such switch.
    """
    if name not in KNOWN:
        raise unknown("switch", name, KNOWN)
    kind, default, text = KNOWN[name]
    found = (os.environ if environ is None else environ).get(name)
    value = default if found is None else found
    error = None if found is None else _wrong(kind, name, found)
    return Switch(name, value, "default" if found is None else "env", text, error)


def read_all() -> tuple[Switch, ...]:
    """Every known switch, set or not. Never raises."""
    return tuple(map(read, KNOWN))


def check(environ: Mapping[str, str] | None = None) -> None:
    """Refuse an environment in which a switch has a value that it does not have.

    Raises:
        MisuseError: one line, of the first such switch.
    """
    for switch in (read(name, environ) for name in KNOWN):
        if switch.error:
            raise MisuseError(switch.error)


def aiter_forbidden() -> str | None:
    """One line if an AITER switch is set to 0 or to nonsense: then AITER is never imported."""
    for name in AITER_SWITCHES:
        switch = read(name)
        if switch.error:
            return switch.error
        if switch.origin == "env" and not switch.on:
            return f"{name}={switch.value} turns AITER off; set it to 1 to use it"
    return None


def overridden_arch(environ: Mapping[str, str] | None = None) -> str | None:
    """The arch that HSA_OVERRIDE_GFX_VERSION names, or None: 9.4.2 is gfx942, 9.0.10 gfx90a."""
    switch = read("HSA_OVERRIDE_GFX_VERSION", environ)
    if switch.error or not switch.value.strip():
        return None
    major, minor, stepping = (int(n) for n in switch.value.strip().split("."))
    return f"gfx{major}{minor:x}{stepping:x}"


def built_archs() -> tuple[str, ...]:
    """The archs that GPU_ARCHS names; empty when unset, ``native`` or nonsense."""
    switch = read("GPU_ARCHS")
    if switch.error or switch.value.strip().lower() in ("", "native"):
        return ()
    parts = re.split(r"[;,\s]+", switch.value.strip())
    return tuple(dict.fromkeys(base_name(p) for p in parts if p))
