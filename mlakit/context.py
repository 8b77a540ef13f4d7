"""The context: everything that a choice of path may depend on, in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlakit import archs
from mlakit.errors import MisuseError, one_of

DTYPES = ("bf16", "fp16", "fp32")
QUANTS = ("none", "fp8_group128", "fp8_token", "mxfp4")
WEIGHT_DTYPES = ("bf16", "fp16", "fp32", "int8", "fp8_ocp", "fp8_fnuz", "mxfp4")
LAYOUTS = ("split", "split_out", "contiguous", "inner_strided", "rank3")
"""``split_out``: split views as in ``split``, and outputs that the caller gives."""
_AITER_APIS = ("none", "pair", "unified")

PACKAGES = ("triton", "numba", "cxx", "aiter", "liger_kernel", "quack", "flashinfer")
"""Optional things a path may need; ``cxx`` is a working C++ compiler (inductor on a CPU)."""


@dataclass(frozen=True)
class Context:
    """What a decision may depend on. Widths in elements, ``m`` in rows.

    ``arch`` may be a card that is not here: then ``packages`` says what is assumed there. A
    context for this machine comes from ``mlakit.dispatch.probe``.

    Raises:
        MisuseError: a value outside its set, or a combination that cannot exist.
    """

    arch: str = "cpu"
    m: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    dtype: str = "bf16"
    norm_weight_dtype: str = "bf16"
    weight_dtype: str = "bf16"
    """dtype of the projection that consumes q (q_b_proj): what SGLang's branches test."""
    block_scale: bool = True
    """an FP8 projection has 2-D block scales (per-channel scales otherwise)"""
    quant: str = "none"
    """what the caller wants q delivered as"""
    layout: str = "split"
    q_eps: float = 1e-6
    k_eps: float = 1e-6
    use_aiter: bool = False
    aiter_api: str = ""
    """generation of AITER's dual norm; empty on AMD: the one that the engine was released with"""
    capture: bool = False
    prefill: bool = False
    requires_grad: bool = False
    switches: frozenset[str] = frozenset()
    """engine environment switches that are on, e.g. ``SGLANG_ROCM_USE_MULTI_STREAM``"""
    packages: frozenset[str] = field(default=frozenset(PACKAGES))
    requested: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", archs.check(self.arch))
        if not self.aiter_api and not (self.vendor == "amd" and "aiter" in self.packages):
            object.__setattr__(self, "aiter_api", "none")
        for name, value, allowed in (
            ("dtype", self.dtype, DTYPES),
            ("norm_weight_dtype", self.norm_weight_dtype, DTYPES),
            ("weight_dtype", self.weight_dtype, WEIGHT_DTYPES),
            ("quant", self.quant, QUANTS),
            ("layout", self.layout, LAYOUTS),
            ("aiter_api", self.aiter_api, ("", *_AITER_APIS)),
        ):
            one_of(name, allowed, value)
        if isinstance(self.m, bool) or not isinstance(self.m, int) or self.m < 0:
            raise MisuseError(f"m is {self.m!r}: give a whole number of rows, 0 or more")
        if self.use_aiter and self.vendor != "amd":
            raise MisuseError(
                f"AITER is in use on {self.arch}: AITER runs on AMD cards only; "
                "set use_aiter=False or name an AMD arch such as gfx950"
            )
        if self.vendor == "cpu":
            return
        what, native = self.weight_dtype, archs.fp8_format(self.arch)
        if what in ("fp8_ocp", "fp8_fnuz") and what != native:
            raise MisuseError(
                f"{what} on {self.arch}: that card's FP8 is {native or 'absent'}; "
                f"choose {native or 'bf16'} or another arch"
            )
        wants_mxfp4 = self.vendor == "amd" and "mxfp4" in (self.weight_dtype, self.quant)
        if wants_mxfp4 and not archs.arch(self.arch).mxfp4_native:
            raise MisuseError(
                f"MXFP4 on {self.arch}: that card has no MXFP4; use gfx950 or gfx1250"
            )

    @property
    def vendor(self) -> str:
        """``amd``, ``nvidia`` or ``cpu``."""
        return archs.vendor_of(self.arch)

    @property
    def widest(self) -> int:
        """The wider of the two normalised parts, in elements."""
        return max(self.q_lora_rank, self.kv_lora_rank)
