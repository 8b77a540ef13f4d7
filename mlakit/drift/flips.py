"""Does it matter? The small model's answers through every path, rounding and quantisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from mlakit.dispatch import probe
from mlakit.drift.evals import paired, verdict_of, z_of
from mlakit.errors import MisuseError, unknown
from mlakit.models import mla, small
from mlakit.models.hf import step_of
from mlakit.paths import quantised, registry
from mlakit.rounding import ROUNDINGS
from mlakit.timing import stats

BASELINE = "round_once"
"""as a formula: the same on every machine, but for the products around it"""
COLUMNS = (
    "side kind n accuracy lost won p p_holm difference low high smallest_detectable verdict"
).split()


def sides(device: str = "cpu") -> dict[str, str]:
    """Every side that runs on ``device``, and its kind: rounding, path, q latent, q latent and q_b.

    Left out on a CPU: what torch.compile or Triton's interpreter takes minutes for.
    """
    found = dict.fromkeys(ROUNDINGS, "rounding")
    here = probe.here(device)
    d = small.DIMS
    for path in registry.all_paths():
        context = replace(
            here, m=64, q_lora_rank=d.q_lora_rank, kv_lora_rank=d.kv_lora_rank, dtype="bf16",
            norm_weight_dtype="bf16", quant=path.output,
        )  # fmt: skip
        slow = device == "cpu" and (not path.timed or path.name.startswith(("inductor", "unfused")))
        if slow or path.supports(context):
            continue
        if path.output == "none":
            found[path.name] = "path"
        else:
            found |= {path.name: "q latent", f"{path.name}, q_b too": "q latent and q_b"}
    return found


def _model_and_step(side: str, device: str) -> tuple[small.Small, Callable]:
    name, _, with_weight = side.partition(", ")
    model = small.load(device)
    if name in ROUNDINGS:
        return model, step_of(name)
    path = registry.get(name)
    if path.output == "none":
        return model, path.call
    if not with_weight:
        return model, partial(_dequantised, path)
    form = "mxfp4" if path.output == "mxfp4" else "fp8_block128"
    encoding = quantised.native_encoding(torch.device(device)).name
    layers = [
        replace(layer, q_b=mla.quantise_weight(mla.dense(layer.q_b), form, encoding))
        for layer in model.layers
    ]
    return replace(model, layers=layers), path.call


def _dequantised(path: registry.Path, q, q_weight, q_eps, k, k_weight, k_eps):
    """The q that a quantised one stands for, in q's dtype: what quantising q alone does."""
    found, k_out = path.call(q, q_weight, q_eps, k, k_weight, k_eps)
    return quantised.dequantise(path.output, found).to(q.dtype), k_out


def flips(device: str = "cpu", n: int = 2000, names: list[str] | None = None) -> pd.DataFrame:
    """The same n questions through ``BASELINE`` and through each side; a paired verdict a row.

    Exact McNemar on the flips; ``low`` and ``high`` bound the difference in accuracy (95 %), and
    ``smallest_detectable`` is what this many questions, with this many flips, could have shown.
    ``p_holm`` allows for the number of sides that were tried; the verdict is taken from it. A
    convention that is not the model's own (gemma's 1 + w) stands among them as a difference that
    must show. Some 10 s on one core for 2000 questions and every side of a CPU.

    Args:
        device: ``cpu`` or ``cuda``.
        n: questions; the first n of one seeded list (of 10,000), all of which training saw.
        names: of ``sides(device)``; all by default.

    Raises:
        MisuseError: a name that is no side on this device, or no questions.
    """
    if n < 1:
        raise MisuseError(f"n is {n}: give a number of questions from 1 on, such as 2000")
    known = sides(device)
    for name in names or ():
        if name not in known:
            raise unknown("side", name, known)
    asked = small.questions(n).to(device)
    model, step = _model_and_step(BASELINE, device)
    base = small.right(model, asked, step).tolist()
    rows = []
    for side in names or known:
        model, step = _model_and_step(side, device)
        got = small.right(model, asked, step).tolist()
        judged = paired(dict(enumerate(base)), dict(enumerate(got)))
        (lost, won), (low, high) = judged.flips or (0, 0), judged.interval or (0.0, 0.0)
        figures = (judged.p, 1.0, judged.difference, low, high, judged.smallest_detectable)
        rows.append((side, known[side], len(base), judged.b, lost, won, *figures, ""))
    frame = pd.DataFrame(rows, columns=COLUMNS)
    tried = frame["side"] != BASELINE
    frame.loc[tried, "p_holm"] = stats.holm(frame.loc[tried, "p"])
    frame["verdict"] = [verdict_of(z_of(float(p))) for p in frame["p_holm"]]
    return frame
