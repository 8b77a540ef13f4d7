"""A decode stack of MLA attention layers that fits on one card: what the step costs in tokens.

Layers have weights of their own (61 of DeepSeek-V3 are 23 GB in BF16, so every step reads them from
memory), a latent cache filled by prefilling one sequence that all rows of a batch then share, and
the residual stream between them. There is no MLP, no embedding and no sampling: tokens/s are the
attention stack's, and the step's share of a whole model's token is smaller than here.

    python -m mlakit.models.stack --layers 61 --batches 1,8,64,256 --out stack.json

needs torch, triton and numpy only. With ``--weights fp8_block128`` the three large projections are
FP8, and a step that delivers q quantised feeds its product without another launch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import rms_norm

from mlakit.errors import MisuseError
from mlakit.models import mla
from mlakit.models.lanes import (
    BASE,
    COPIES,
    DELETED,
    LANES,
    MICRO,
    PREDICTOR,
    StepLane,
    microbenchmarks,
    refusal,
    step_of,
)
from mlakit.paths import registry
from mlakit.timing import guard, sampler, stats

ROOM = 64
"""cache rows behind the context; decoding wraps round there, so memory and traffic stay constant"""


class Stack:
    """``layers`` MLA layers, their latent caches for ``batch`` sequences, and a decode step."""

    def __init__(
        self,
        dims: mla.Dims,
        layers: int,
        batch: int,
        context: int,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        weights: str = "float",
        seed: int = 0,
    ) -> None:
        """Draw the weights and prefill the caches with ``context`` tokens.

        ``weights`` is of ``mla.WEIGHT_FORMATS``. On a CPU quantised products are references.

        Raises:
            MisuseError: weights and caches do not fit in the device's free memory, or its products
                with such weights would be references, whose time says nothing.
        """
        self.dims, self.context, self.dtype, self.device = dims, context, dtype, device
        self.weights = weights
        self.capacity = context + ROOM
        _check_memory(dims, layers, batch, self.capacity, device, dtype)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.layers = [
            mla.quantise_layer(mla.random_layer(dims, self.generator, dtype), weights)
            for _ in range(layers)
        ]
        # Quantised products are references here, whose time says nothing of any hardware.
        self.referred = weights != "float" and not mla.runs_block_scaled(self.layers[0].q_b)
        if self.referred and device != "cpu":
            raise MisuseError(f"torch has no {weights} product on {device}: use --device cpu")
        shape = (batch, self.capacity, dims.kv_lora_rank + dims.rope)
        self.caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.position = torch.full((1,), context, dtype=torch.int64, device=device)
        self.slots = torch.arange(self.capacity, device=device)
        if context:
            self._prefill(self.tokens(context))

    def tokens(self, n: int) -> torch.Tensor:
        """(n, hidden_size) seeded stand-ins for embeddings, of unit size."""
        shape = (n, self.dims.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(
            generator=self.generator
        )

    @torch.no_grad()
    def _prefill(self, hidden: torch.Tensor) -> torch.Tensor:
        tables = mla.rope_tables(self.slots[: len(hidden)], self.dims.rope)
        step = registry.get(BASE).call
        for layer, cache in zip(self.layers, self.caches, strict=True):
            ready = self.prepared(hidden, layer, tables, step)
            cache[:, : len(hidden)] = torch.cat((ready.kv, ready.k_rope), -1)
            latent = mla.attend_causal(ready, self.dims.scaling)
            hidden = hidden + mla.finish(latent, layer, self.dtype)
        return hidden

    def prepared(self, hidden, layer, tables, step) -> mla.Prepared:
        """The attention-prepare block of one layer, on the normed residual."""
        x = rms_norm(hidden, (self.dims.hidden_size,), layer.input_norm, self.dims.eps)
        return mla.prepare(x, layer, self.dims, tables, step)

    @torch.no_grad()
    def decode(self, hidden: torch.Tensor, step: Callable) -> torch.Tensor:
        """One token of each of B sequences, (B, hidden_size), through all layers; moves on by one.

        Nothing but tensors decides what runs, so the whole may be captured in a graph.
        """
        b, d = hidden.shape[0], self.dims
        tables = mla.rope_tables(self.position, d.rope)
        ahead = (self.slots > self.position).to(self.dtype) * torch.finfo(self.dtype).min
        for layer, whole in zip(self.layers, self.caches, strict=True):
            ready = self.prepared(hidden, layer, tables, step)
            cache = whole[:b]
            new = torch.cat((ready.kv, ready.k_rope), -1)
            cache.index_copy_(1, self.position, new.unsqueeze(1))
            query = torch.cat((ready.q_latent, ready.q_rope), -1) * d.scaling
            scores = torch.bmm(query, cache.transpose(1, 2)) + ahead
            weights = scores.softmax(-1, dtype=torch.promote_types(self.dtype, torch.float32))
            latent = torch.bmm(weights.to(self.dtype), cache[..., : d.kv_lora_rank])
            hidden = hidden + mla.finish(latent, layer, self.dtype)
        self.position.copy_(self.context + (self.position + 1 - self.context) % ROOM)
        return hidden


def _check_memory(dims, layers, batch, capacity, device, dtype) -> None:
    d = dims
    weights = d.hidden_size * (d.widths.row_stride + d.heads * d.v)
    weights += d.heads * (d.q_lora_rank * (d.nope + d.rope) + d.kv_lora_rank * (d.nope + d.v))
    wanted = layers * (weights + batch * capacity * (d.kv_lora_rank + d.rope)) * dtype.itemsize
    if device == "cpu":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if wanted > 0.9 * free:
        raise MisuseError(
            f"{layers} layers and batch {batch} need {wanted / 2**30:.0f} GiB, {device} has "
            f"{free / 2**30:.0f} GiB free: give fewer layers, a smaller batch or context"
        )


def measure(
    stack: Stack,
    batches: Sequence[int],
    lanes: Sequence[str] = tuple(LANES),
    *,
    rounds: int = 42,
    budget_s: float = 30.0,
    seed: int = 0,
    micro: bool = True,
    after: Callable[[dict], object] = bool,
) -> dict:
    """Time one decode step with each lane's step, interleaved, at each batch.

    Args:
        stack: made for the largest batch at least.
        batches: sequences that decode together: the step's M.
        lanes: of ``LANES``, or any path's name.
        rounds: samples of each lane, unless the budget ends first (3 at least).
        budget_s: seconds of sampling a batch.
        seed: of the order inside rounds.
        micro: also time the step by itself and between its two products (``MICRO``).
        after: called with the result so far after each batch, to save it.

    Returns:
        A plain dict for JSON: what was run where, ``samples_us[batch][lane]``, ``refused[batch]``,
        ``micro_us[batch][kind][lane]`` (medians, us). ``summarise`` makes rows of it.
    """
    device = stack.device
    about = guard.environment(device)
    arch = about["arch"] or "cpu"
    result: dict = {
        "schema": 1, "evidence": "measured",
        "started_at": datetime.now(UTC).isoformat("T", "seconds"),
        **about, "clock": "graph" if device != "cpu" else "cpu", "layers": len(stack.layers),
        "dims": asdict(stack.dims), "context": stack.context, "dtype": str(stack.dtype),
        "weights": stack.weights, "reference_products": stack.referred,
        "copies": COPIES if device != "cpu" else 1,
        "samples_us": {}, "refused": {}, "micro_us": {},
    }  # fmt: skip
    with guard.device_lock(device, wait_s=600.0), torch.no_grad():
        for batch in batches:
            hidden, key = stack.tokens(batch), str(batch)
            why = {lane: refusal(stack, hidden, lane, arch) for lane in lanes}
            result["refused"][key] = {lane: text for lane, text in why.items() if text}
            taken = {n: StepLane(stack, hidden, step_of(n)) for n in lanes if not why[n]}
            done = sampler.sample(
                taken, budget_s=budget_s, seed=seed, min_rounds=rounds, max_rounds=rounds
            )
            result["samples_us"][key] = {n: done.samples_us[n] for n in done.alive(list(taken))}
            result["refused"][key] |= {n: f"failed: {e}" for n, e in done.errors.items()}
            del taken, done
            if device != "cpu":
                torch.cuda.empty_cache()
            if micro:
                alive = [n for n in lanes if not why[n]]
                result["micro_us"][key] = microbenchmarks(stack, hidden, alive)
            after(result)
    return result


def summarise(result: dict) -> list[dict]:
    """One row a batch and lane of what ``measure`` returned (or a file of it); us and tokens/s.

    ``cost_us`` is what the lane's step adds to a layer, over ``no_step``; ``gain`` is the step
    time of ``BASE`` over the lane's, paired by round; ``saved_us`` a layer's saving against it.
    ``given_us``, ``hot_us``, ``cold_us`` and ``between_us`` are the step's times by ``MICRO``, and
    ``saved_given_us`` ... the savings that each predicts; ``gain_predicted`` is made of
    ``PREDICTOR``'s. Each ``_lo`` and ``_hi`` is an interval: of the captures on a GPU (``COPIES``),
    a 95 % bootstrap of the rounds on a CPU.
    """
    rows, layers, copies = [], result["layers"], result.get("copies", 1)
    for key, samples in result["samples_us"].items():
        taken = {lane: np.asarray(v) for lane, v in samples.items()}
        micro = result["micro_us"].get(key, {})
        base_us = float(np.median(taken[BASE])) if BASE in taken else 0.0
        for lane, us in taken.items():
            time_us = _interval(us, copies)
            row = {
                "batch": int(key), "lane": lane, "n": len(us), "step_us": time_us.value,
                "step_lo": time_us.lo, "step_hi": time_us.hi,
                "tokens_per_s": int(key) * 1e6 / time_us.value,
                "tokens_lo": int(key) * 1e6 / time_us.hi, "tokens_hi": int(key) * 1e6 / time_us.lo,
            }  # fmt: skip
            for name, more, less in (("cost", lane, DELETED), ("saved", BASE, lane)):
                if more != less and more in taken and less in taken:
                    n = min(len(taken[more]), len(taken[less]))
                    apart = (taken[more][:n] - taken[less][:n]) / layers
                    _put(row, f"{name}_us", _interval(apart, copies))
            if BASE in taken:
                n = min(len(us), len(taken[BASE]))
                _put(row, "gain", _interval(taken[BASE][:n] / us[:n], copies))
            for kind, times in micro.items():
                if lane in times:
                    row[f"{kind}_us"] = times[lane] - times.get(DELETED, 0.0)
                if lane in times and BASE in times:
                    row[f"saved_{kind}_us"] = times[BASE] - times[lane]
            if f"saved_{PREDICTOR}_us" in row:
                left = base_us - layers * row[f"saved_{PREDICTOR}_us"]
                row["gain_predicted"] = base_us / left
            rows.append(row)
    return rows


def _interval(values: np.ndarray, copies: int) -> stats.Interval:
    """Of samples that ``copies`` captures took in turn."""
    if copies == 1:
        return stats.median_interval(values)
    each = [float(np.median(values[i::copies])) for i in range(min(copies, len(values)))]
    return stats.Interval(float(np.median(each)), min(each), max(each))


def _put(row: dict, name: str, interval: stats.Interval) -> None:
    row |= {name: interval.value, f"{name}_lo": interval.lo, f"{name}_hi": interval.hi}


def small(layers: int = 4, batch: int = 8, context: int = 32, seed: int = 0) -> Stack:
    """A stack that a CPU runs in milliseconds: sizes a tenth of DeepSeek-V3's, float bf16."""
    dims = mla.Dims(256, 4, 192, 64, nope=32, rope=16, v=32)
    return Stack(dims, layers, batch, context, seed=seed)


def main(argv: Sequence[str] | None = None) -> int:
    """The bare entry: build, measure, write JSON, print a table."""
    parser = argparse.ArgumentParser(prog="python -m mlakit.models.stack", description=__doc__)
    parser.add_argument("--model", default="DeepSeek-V3")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--lanes", default=",".join(LANES))
    parser.add_argument("--weights", default="float", choices=mla.WEIGHT_FORMATS)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=42)
    parser.add_argument("--budget-s", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="stack.json")
    given = parser.parse_args(argv)
    batches = [int(b) for b in given.batches.split(",")]
    stack = Stack(
        mla.Dims.of(given.model), given.layers, max(batches), given.context,
        device=given.device, weights=given.weights, seed=given.seed,
    )  # fmt: skip

    def save(result: dict) -> None:
        text = json.dumps(result | {"model": given.model})
        Path(given.out).write_text(text, encoding="utf-8")

    result = measure(
        stack, batches, given.lanes.split(","), rounds=given.rounds, budget_s=given.budget_s,
        seed=given.seed, after=save,
    )  # fmt: skip
    shown = "batch lane n step_us tokens_per_s gain gain_lo gain_hi gain_predicted cost_us saved_us"
    shown += " saved_us_lo saved_us_hi " + " ".join(f"saved_{kind}_us" for kind in MICRO)
    print(shown.replace(" ", "\t"))
    for row in summarise(result):
        values = (row.get(c) for c in shown.split())
        print("\t".join(f"{v:.5g}" if isinstance(v, float) else str(v) for v in values))
    for key, refused in result["refused"].items():
        for lane, why in refused.items():
            print(f"batch {key}: {lane} was not timed: {why}")
    if stack.referred:
        print(f"{given.weights} products are references here: compare lanes, not formats or cards")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
