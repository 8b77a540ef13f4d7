"""Depth: the same tokens through many MLA layers with two steps; how they part, layer by layer.

Two runs that differ in one bit part anyway: the same step with another order of the products' sums
is the noise floor, and only what lies above it can be laid at the step's door. A shrinking or
growing step moves the residual's size as well, which noise does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import rms_norm

from mlakit.errors import MisuseError
from mlakit.models import mla
from mlakit.models.hf import step_of

DIMS = mla.Dims(512, 8, 192, 128, nope=32, rope=16, v=32)
"""DeepSeek-V3's proportions at a size that a CPU runs 61 layers of in seconds"""
VOCABULARY = 2048
"""rows of the seeded output matrix"""
_GAIN = 0.25
"""size of what a layer adds, against a residual of size 1"""
LAWS = ("square root", "linear", "exponential")


@dataclass(frozen=True)
class Law:
    """How a divergence d grows with the layer l: ``c * sqrt(l)``, ``c * l`` or ``c * exp(r * l)``.

    ``error`` is the root mean square of log d minus its log, 0.1 being about 10 %.
    """

    name: str
    scale: float
    rate: float
    """per layer; 0 but for the exponential"""
    error: float


@dataclass(frozen=True)
class Depth:
    """How two runs part. Arrays have one figure a layer; the last layer's logits are compared."""

    a: str
    b: str
    rel_l2: np.ndarray
    """|h_b - h_a| / |h_a| of the residual stream after each layer"""
    floor: np.ndarray
    """the same for a against itself with its sums in other orders: the largest of all tried"""
    size: np.ndarray
    """mean over tokens of |h_b| / |h_a| - 1"""
    size_floor: np.ndarray
    """the largest magnitude that it has between orders"""
    top1_flips: float
    """share of tokens whose best of ``VOCABULARY`` differs"""
    top1_floor: float
    kl: float
    """mean Kullback-Leibler divergence of b's distribution from a's, in nats"""
    kl_floor: float
    laws: tuple[Law, ...]
    """all of ``LAWS``, the best fit first"""

    @property
    def text(self) -> str:
        """One sentence: how far, against what floor, by which law."""
        if not self.rel_l2.any():
            return f"{self.b} against {self.a}: bit-equal after each of {len(self.rel_l2)} layers"
        law, above = self.laws[0], self.rel_l2[-1] / self.floor[-1]
        grown = f"grows as {law.name} (fit within {100 * np.expm1(law.error):.0f} %)"
        return (
            f"{self.b} against {self.a}: {self.rel_l2[-1]:.2%} apart after {len(self.rel_l2)} "
            f"layers, {above:.1f} times the floor of reordered sums; {grown}; size "
            f"{self.size[-1]:+.2%} (floor {self.size_floor[-1]:.2%}); top-1 flips "
            f"{self.top1_flips:.1%} (floor {self.top1_floor:.1%}), KL {self.kl:.2g} "
            f"(floor {self.kl_floor:.2g})"
        )

    def rows(self) -> list[dict]:
        """One row a layer, for a frame."""
        names = ("rel_l2", "floor", "size", "size_floor")
        return [
            {"layer": i + 1} | {n: float(getattr(self, n)[i]) for n in names}
            for i in range(len(self.rel_l2))
        ]


def divergence(
    a: str | Callable,
    b: str | Callable,
    *,
    layers: int = 61,
    tokens: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    orders: int = 3,
    seed: int = 0,
) -> Depth:
    """Run the same seeded tokens through the same seeded layers with steps ``a`` and ``b``.

    Args:
        a: a path's name, a rounding's name, or a callable with a path's signature: the baseline.
        b: the other one.
        layers: of attention with a residual; there are no MLPs.
        tokens: of one sequence, attended causally.
        dtype: of weights and activations.
        device: where to run.
        orders: orders of the products' sums that make the floor, 1 at least.
        seed: of everything.

    Raises:
        MisuseError: an unknown name, or no order.
    """
    if orders < 1 or layers < 2:
        raise MisuseError(f"{orders} orders, {layers} layers: give 1 and 2 at least")
    generator = torch.Generator(device).manual_seed(seed)
    made = [mla.random_layer(DIMS, generator, dtype, _GAIN) for _ in range(layers)]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    hidden, head = normal(tokens, DIMS.hidden_size), normal(VOCABULARY, DIMS.hidden_size)
    step_a, step_b = step_of(a), step_of(b)
    base = _run(hidden, made, step_a)
    other = _run(hidden, made, step_b)
    floors = [_run(hidden, made, step_a, seed + 1 + n) for n in range(orders)]
    rel_l2, size = _apart(base, other)
    noise = [_apart(base, run) for run in floors]
    flips, kl = _ends(base[-1], other[-1], head)
    ends = [_ends(base[-1], run[-1], head) for run in floors]
    return Depth(
        _name(a), _name(b), rel_l2, np.max([n[0] for n in noise], 0), size,
        np.max([np.abs(n[1]) for n in noise], 0), flips, max(e[0] for e in ends), kl,
        max(e[1] for e in ends), fit(rel_l2),
    )  # fmt: skip


def _name(step: str | Callable) -> str:
    return step if isinstance(step, str) else getattr(step, "__name__", "a callable")


@torch.no_grad()
def _run(hidden, layers, step, order: int | None = None) -> list[torch.Tensor]:
    """The residual after each layer. ``order`` seeds a permutation of each qkv_a and o sum."""
    dims = DIMS
    tables = mla.rope_tables(torch.arange(len(hidden), device=hidden.device), dims.rope)
    shuffle = None if order is None else torch.Generator().manual_seed(order)
    after = []
    for layer in layers:
        x = rms_norm(hidden, (dims.hidden_size,), layer.input_norm, dims.eps)
        if shuffle is not None:
            order_in = torch.randperm(x.shape[1], generator=shuffle).to(x.device)
            x, layer = x[:, order_in], replace(layer, qkv_a=layer.qkv_a[:, order_in])
        ready = mla.prepare(x, layer, dims, tables, step)
        latent = mla.attend_causal(ready, dims.scaling)
        if shuffle is not None:
            # kv's columns: the sums of w_vc, and of nothing before the softmax.
            order_out = torch.randperm(dims.kv_lora_rank, generator=shuffle).to(x.device)
            latent = latent[..., order_out]
            layer = replace(layer, w_vc=layer.w_vc[..., order_out])
        hidden = hidden + mla.finish(latent, layer, hidden.dtype)
        after.append(hidden)
    return after


def _apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    far, size = [], []
    for x, y in zip(a, b, strict=True):
        x64, y64 = x.double(), y.double()
        far.append(float((y64 - x64).norm() / x64.norm()))
        size.append(float((y64.norm(dim=-1) / x64.norm(dim=-1) - 1).mean()))
    return np.array(far), np.array(size)


def _ends(a: torch.Tensor, b: torch.Tensor, head: torch.Tensor) -> tuple[float, float]:
    """(share of top-1 flips, mean KL) of the output distributions of two last residuals."""
    logs = []
    for hidden in (a, b):
        normed = rms_norm(hidden.double(), (hidden.shape[-1],))
        # 4 / sqrt(hidden) makes logits of deviation 4: as peaked as a language model's.
        logs.append((normed @ head.double().t() * (4 * hidden.shape[-1] ** -0.5)).log_softmax(-1))
    flips = (logs[0].argmax(-1) != logs[1].argmax(-1)).double().mean()
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    return float(flips), max(float(kl), 0.0)


def fit(values: np.ndarray) -> tuple[Law, ...]:
    """``LAWS`` fitted to a divergence by layer, in its logarithm, the least error first.

    The exponential has one parameter more; the error's divisor counts them. Layers without any
    divergence are left out; with fewer than four others every error is infinite.
    """
    values = np.asarray(values, dtype=float)
    layer = np.arange(1, len(values) + 1)[values > 0]
    logs = np.log(values[values > 0])
    if len(logs) < 4:
        return tuple(Law(name, 0.0, 0.0, float("inf")) for name in LAWS)
    found = []
    for name, power in (("square root", 0.5), ("linear", 1.0)):
        offset = float(np.mean(logs - power * np.log(layer)))
        rest = logs - power * np.log(layer) - offset
        error = float(np.sqrt(np.sum(rest**2) / (len(logs) - 1)))
        found.append(Law(name, float(np.exp(offset)), 0.0, error))
    rate, offset = np.polyfit(layer, logs, 1)
    rest = logs - rate * layer - offset
    error = float(np.sqrt(np.sum(rest**2) / (len(logs) - 2)))
    found.append(Law("exponential", float(np.exp(offset)), float(rate), error))
    return tuple(sorted(found, key=lambda law: law.error))
