"""Seeded inputs for the step: split views, non-unit weights, and families that hide nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlakit.errors import MisuseError, one_of
from mlakit.shapes import Widths

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
FAMILIES = ("normal", "outlier", "tiny", "large", "heavy", "sparse", "zero_rows", "nonfinite")


@dataclass(frozen=True)
class Inputs:
    """One call's arguments. q: (M, q_lora_rank), k: (M, kv_lora_rank), row stride of ``buffer``."""

    buffer: torch.Tensor
    q: torch.Tensor
    q_weight: torch.Tensor
    q_eps: float
    k: torch.Tensor
    k_weight: torch.Tensor
    k_eps: float

    @property
    def args(self) -> tuple:
        """In the order of a path's call."""
        return self.q, self.q_weight, self.q_eps, self.k, self.k_weight, self.k_eps


def make(
    m: int,
    widths: Widths,
    dtype: str = "bf16",
    *,
    weight_dtype: str | None = None,
    family: str = "normal",
    layout: str = "split",
    eps: float | tuple[float, float] = 1e-6,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Inputs:
    """Inputs for one cell, the same bits on every device for the same arguments.

    layout ``split``: q and k are views of one (M, row_stride) buffer, as after the qkv_a
    projection; ``contiguous``: each has memory of its own.

    Raises:
        MisuseError: unknown dtype, family or layout; widths that are none; no number of rows.
    """
    if not isinstance(widths, Widths):
        raise MisuseError(
            f"widths is {widths!r}: give Widths, for example parse_hidden('1536+512')"
        )
    if not hasattr(m, "__index__") or m < 0:
        raise MisuseError(f"m is {m!r}: give a whole number of rows, 0 or more")
    one_of("dtype", TORCH_DTYPES, dtype)
    one_of("layout", ("split", "contiguous"), layout)
    generator = torch.Generator().manual_seed(seed)
    values = _rows(m, widths.row_stride, family, generator)
    buffer = values.to(TORCH_DTYPES[dtype]).to(device)
    q, k, _ = buffer.split([widths.q_lora_rank, widths.kv_lora_rank, widths.qk_rope_head_dim], -1)
    if layout == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    w_dtype = TORCH_DTYPES[weight_dtype or dtype]
    q_weight, k_weight = (
        (1 + 0.25 * torch.randn(n, generator=generator, dtype=torch.float32)).to(w_dtype).to(device)
        for n in (widths.q_lora_rank, widths.kv_lora_rank)
    )
    q_eps, k_eps = eps if isinstance(eps, tuple) else (eps, eps)
    return Inputs(buffer, q, q_weight, q_eps, k, k_weight, k_eps)


def _rows(m: int, n: int, family: str, generator: torch.Generator) -> torch.Tensor:
    """(M, N) float32 of the named family."""
    one_of("input family", FAMILIES, family)
    x = 0.7 * torch.randn(m, n, generator=generator, dtype=torch.float32)
    if family == "outlier":
        x[:, torch.randperm(n, generator=generator)[: max(1, n // 128)]] *= 1e4
    elif family == "tiny":
        x *= 1e-3
    elif family == "large":
        x *= 1e3
    elif family == "heavy":
        x /= torch.rand(m, n, generator=generator, dtype=torch.float32).clamp_min(1e-3).sqrt()
    elif family == "sparse":
        x *= torch.rand(m, n, generator=generator, dtype=torch.float32) < 0.05
    elif family == "zero_rows":
        x[::2] = 0
    elif family == "nonfinite" and m:
        x[0, 0] = float("nan")
        x[m // 2, n // 2] = float("inf")
    return x
