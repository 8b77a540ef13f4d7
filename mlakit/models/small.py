"""A small MLA transformer that multiplies: its answers are exact, so flips can be counted.

Two layers of the attention of ``mla`` (q and kv latents, the norm step through any path, RoPE,
absorbed products) and of an MLP, 0.4 M parameters, trained in float32 and stored in bf16, on three
digits times one. It is trained on all 10,000 products and asked some of them, so it recalls more
than it generalises; its training is short, so that some answers are wrong and others nearly so:
there is something to flip. Train it anew: ``python -m mlakit.models.small``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from mlakit.datafiles import data_dir
from mlakit.models import mla
from mlakit.timing import sensors

DIMS = mla.Dims(128, 4, 256, 64, nope=32, rope=16, v=32)
LAYERS, MLP_WIDTH = 2, 256
DIGITS, ANSWER = 3, 4
TIMES, EQUALS, VOCABULARY = 10, 11, 12
"""tokens: the ten digits, then these two"""
STEPS, BATCH, LEARNING_RATE, SEED = 1000, 256, 2e-3, 0


class Mlp(NamedTuple):
    """``down(silu(up(norm(x))))``; up (MLP_WIDTH, hidden_size), down its transpose's shape."""

    mlp_norm: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass
class Small:
    """The weights; a layer's attention is followed by its MLP."""

    layers: list[mla.Layer]
    mlps: list[Mlp]
    embedding: torch.Tensor
    last_norm: torch.Tensor
    head: torch.Tensor


def _shapes() -> dict[str, tuple[int, ...]]:
    d, h = DIMS, DIMS.heads
    layer = {
        "qkv_a": (d.widths.row_stride, d.hidden_size),
        "q_norm": (d.q_lora_rank,),
        "k_norm": (d.kv_lora_rank,),
        "q_b": (h * (d.nope + d.rope), d.q_lora_rank),
        "w_kc": (h, d.nope, d.kv_lora_rank),
        "w_vc": (h, d.v, d.kv_lora_rank),
        "o": (d.hidden_size, h * d.v),
        "input_norm": (d.hidden_size,),
        "mlp_norm": (d.hidden_size,),
        "up": (MLP_WIDTH, d.hidden_size),
        "down": (d.hidden_size, MLP_WIDTH),
    }
    shapes = {f"{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    ends = {"embedding": (VOCABULARY, d.hidden_size), "head": (VOCABULARY, d.hidden_size)}
    return shapes | ends | {"last_norm": (d.hidden_size,)}


def _small(weights: dict[str, torch.Tensor]) -> Small:
    names = [f.name for f in fields(mla.Layer)]
    return Small(
        [mla.Layer(**{n: weights[f"{i}.{n}"] for n in names}) for i in range(LAYERS)],
        [Mlp(*(weights[f"{i}.{n}"] for n in Mlp._fields)) for i in range(LAYERS)],
        *(weights[n] for n in ("embedding", "last_norm", "head")),
    )


def logits(model: Small, tokens: torch.Tensor, step: Callable) -> torch.Tensor:
    """(n, t, VOCABULARY) of ``tokens`` (n, t), in the weights' dtype; ``step``: a path's call."""
    n, t = tokens.shape
    hidden = functional.embedding(tokens, model.embedding).flatten(0, 1)
    positions = torch.arange(t, device=tokens.device).repeat(n)
    tables = mla.rope_tables(positions, DIMS.rope)
    for layer, mlp in zip(model.layers, model.mlps, strict=True):
        ready = mla.prepare(_norm(hidden, layer.input_norm), layer, DIMS, tables, step)
        hidden = hidden + mla.finish(_attend(ready, n), layer, hidden.dtype)
        wide = functional.silu(functional.linear(_norm(hidden, mlp.mlp_norm), mlp.up))
        hidden = hidden + functional.linear(wide, mlp.down)
    return functional.linear(_norm(hidden, model.last_norm), model.head).view(n, t, -1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, DIMS.eps)


def _attend(ready: mla.Prepared, n: int) -> torch.Tensor:
    """Causal latent attention within each of n sequences: (n*t, heads, kv_lora_rank)."""
    q, q_rope, kv, k_rope = (part.unflatten(0, (n, -1)) for part in ready)
    q = torch.cat((q, q_rope), -1).transpose(1, 2)
    scores = q @ torch.cat((kv, k_rope), -1).unsqueeze(1).transpose(2, 3) * DIMS.scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    share = scores.masked_fill(future, float("-inf")).softmax(-1, dtype=torch.float32)
    return (share.to(kv.dtype) @ kv.unsqueeze(1)).transpose(1, 2).flatten(0, 1)


# ---- questions


def write(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(n, 10) tokens of ``aaa*b=pppp``: leading zeros are written, and p's units come first."""
    times, equals = torch.full((len(a), 1), TIMES), torch.full((len(a), 1), EQUALS)
    answer = _digits(a * b, ANSWER).flip(1)
    return torch.cat((_digits(a, DIGITS), times, _digits(b, 1), equals, answer), 1)


def _digits(number: torch.Tensor, count: int) -> torch.Tensor:
    return number[:, None] // 10 ** torch.arange(count - 1, -1, -1) % 10


def _products() -> torch.Tensor:
    """All 10,000 products, written out."""
    every = torch.arange(10 ** (DIGITS + 1))
    return write(every // 10, every % 10)


def questions(n: int = 2000) -> torch.Tensor:
    """(n, 10) tokens with their answers: the first n products of a seeded order."""
    order = torch.randperm(10 ** (DIGITS + 1), generator=torch.Generator().manual_seed(1))
    return _products()[order[:n]]


@torch.no_grad()
def right(model: Small, asked: torch.Tensor, step: Callable) -> torch.Tensor:
    """(n,) bool: whether greedy decoding gives the whole product.

    One pass with the right digits given: decoding takes the same digits for as long as it is right.
    """
    best = logits(model, asked[:, :-1], step)[:, -ANSWER:].argmax(-1)
    return (best == asked[:, -ANSWER:]).all(1)


# ---- training and storage


def plain_step(q, q_weight, q_eps, k, k_weight, k_eps):
    """The step as two differentiable torch norms: what training uses."""
    norm = functional.rms_norm
    return norm(q, q_weight.shape, q_weight, q_eps), norm(k, k_weight.shape, k_weight, k_eps)


def train(steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The weights after the first ``steps`` of ``STEPS``, float32, on the CPU.

    The same bits on the same build of torch, kind of processor and number of threads.
    """
    generator = torch.Generator().manual_seed(SEED)
    weights = {name: _start(name, shape, generator) for name, shape in _shapes().items()}
    model, given = _small(weights), _products()
    adam = torch.optim.AdamW(weights.values(), betas=(0.9, 0.98), weight_decay=0.01)
    for done in range(steps):
        rate = min((done + 1) / 50, (1 + math.cos(math.pi * done / STEPS)) / 2)
        adam.param_groups[0]["lr"] = LEARNING_RATE * rate
        tokens = given[torch.randint(0, len(given), (BATCH,), generator=generator)]
        found = logits(model, tokens[:, :-1], plain_step)[:, -ANSWER:]
        loss = functional.cross_entropy(found.flatten(0, 1), tokens[:, -ANSWER:].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        adam.step()
        if (done + 1) % 100 == 0:
            print(f"step {done + 1}: loss {loss.item():.4f}")
    return {name: w.detach() for name, w in weights.items()}


def _start(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32).requires_grad_()
    size = 1.0 if name == "embedding" else shape[-1] ** -0.5
    if name.endswith((".o", ".down")):
        size /= 2
    return (torch.randn(shape, generator=generator, dtype=torch.float32) * size).requires_grad_()


def digest(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all bits, in the order of the names; the first 16 hex digits."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def build() -> str:
    """What bits depend on here: processor, torch, instruction set and threads."""
    name, kind = sensors.cpu_model(), torch.backends.cpu.get_cpu_capability()
    return f"{name}, torch {torch.__version__}, {kind}, {torch.get_num_threads()} thread(s)"


def weights_file() -> Path:
    """Where the weights are kept: bf16 bits as int16, by name, in one .npz."""
    return data_dir() / "small" / "multiplier.npz"


@cache
def _stored() -> dict[str, torch.Tensor]:
    with np.load(weights_file(), allow_pickle=False) as kept:
        return {n: torch.from_numpy(kept[n]).view(torch.bfloat16) for n in kept.files}


def load(device: str = "cpu") -> Small:
    """The committed weights, bf16, on ``device``."""
    return _small({name: w.to(device) for name, w in _stored().items()})


def main() -> None:
    """Train with one thread; write the weights and what they came to beside them."""
    parser = argparse.ArgumentParser(description="Train mlakit's small model anew.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=weights_file())
    asked = parser.parse_args()
    torch.set_num_threads(1)
    weights = train(asked.steps)
    half = {name: w.bfloat16() for name, w in weights.items()}
    kept: Any = {name: w.view(torch.int16).numpy() for name, w in half.items()}
    np.savez_compressed(asked.out, **kept)
    share = float(right(_small(half), questions(10_000), plain_step).double().mean())
    came_to = {"build": build(), "steps": asked.steps, "digest": digest(half)}
    came_to |= {"digest_of_20_steps": digest(train(20)), "right_of_all_10000": share}
    text = json.dumps(came_to, indent=1)
    asked.out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
