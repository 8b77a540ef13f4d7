"""What ``05_tokens`` says: the decode stack's rows, what was predicted, the story's claim."""

from __future__ import annotations

import pandas as pd

from mlakit import archs
from mlakit.datafiles import data_dir, read_json
from mlakit.drift import evals
from mlakit.errors import MisuseError
from mlakit.models import amdahl, stack
from mlakit.timing.stats import Interval

STORY = ("90.12", "90.84")
"""Decode token/s before and after, SGLang pull request 23186"""
_STORY_LAYERS = 61
"""of Kimi-K2.5, the model of that pull request: as many as DeepSeek-V3"""
_CPU_PATHS = ("torch_native", "torch_rms_norm", "cpu_fused")
_CLOSE = 0.2
"""share of the measured saving within which a prediction counts as right"""
COLUMNS = (
    "batch lane n step_us tokens_per_s tokens_lo tokens_hi gain gain_lo gain_hi gain_predicted"
).split()
COST_COLUMNS = ["batch", "lane", "cost_us", "cost_us_lo", "cost_us_hi"]
COST_COLUMNS += [f"{kind}_us" for kind in stack.MICRO]
SAVED_COLUMNS = ["batch", "lane", "saved_us", "saved_us_lo", "saved_us_hi"]
SAVED_COLUMNS += [f"{what}_{kind}" for kind in stack.MICRO for what in ("saved", "off")]


def stack_result(arch: str, batches: list[int], seed: int) -> dict | None:
    """A stack's measurement: taken here and small on a CPU, the latest recorded one elsewhere."""
    if arch == "cpu":
        made = stack.small(batch=max(batches), seed=seed)
        lanes = [*_CPU_PATHS, stack.DELETED]
        return stack.measure(made, batches, lanes, rounds=60, budget_s=3.0, seed=seed)
    return next(iter(recorded(arch)), None)


def recorded(arch: str = "") -> list[dict]:
    """Committed stack measurements (on ``arch``): with float weights first, then the latest.

    Raises:
        MisuseError: a file that holds none.
    """
    files = sorted((data_dir() / "recorded").glob("*/*stack*.json"))
    found = [read_json(f) for f in files]
    for file, held in zip(files, found, strict=True):
        if not isinstance(held, dict) or not isinstance(held.get("started_at"), str):
            raise MisuseError(f"{file} holds no stack measurement: restore it")
    here = [held for held in found if not arch or held["arch"] == archs.base_name(arch)]
    here.sort(key=lambda r: (r.get("weights", "float") == "float", r["started_at"]), reverse=True)
    return [held | {"evidence": "recorded"} for held in here]


def frame(result: dict | None) -> pd.DataFrame:
    """``stack.summarise`` as a frame, with ``evidence`` and, for each microbenchmark, ``off``.

    ``off_hot`` is the saving that ``hot`` predicts over the measured one, less 1, where the
    measured one's interval tells it from none; and so for each of ``stack.MICRO``.
    """
    columns = list(dict.fromkeys([*COLUMNS, *COST_COLUMNS, *SAVED_COLUMNS]))
    if result is None:
        return pd.DataFrame(columns=[*columns, "evidence"])
    rows = pd.DataFrame(stack.summarise(result))
    rows = rows.rename(columns={f"saved_{kind}_us": f"saved_{kind}" for kind in stack.MICRO})
    rows = rows.reindex(columns=columns)
    known = (rows["saved_us_lo"] > 0) | (rows["saved_us_hi"] < 0)
    for kind in stack.MICRO:
        rows[f"off_{kind}"] = (rows[f"saved_{kind}"] / rows["saved_us"] - 1).where(known)
    return rows.assign(evidence=result["evidence"])


def verdict(result: dict | None, rows: pd.DataFrame, arch: str) -> list[str]:
    """Which step made most tokens, what the step costs, and how near the prediction came."""
    if result is None or rows.empty:
        return [f"No token rate is stated for {arch}: no decode stack was measured there."]
    where = f"{result['evidence']} on {result['device']}, {result['layers']} attention layers"
    paths = rows[rows["lane"] != stack.DELETED]
    sentences = []
    for batch, part in paths.groupby("batch"):
        best = part.loc[part["step_us"].idxmin()]
        text = f"Batch {batch} ({where}): {best['lane']} makes {best['tokens_per_s']:,.0f} token/s"
        if best["lane"] != stack.BASE and best["gain"] == best["gain"]:
            text += (
                f", {best['gain'] - 1:+.2%} against {stack.BASE} "
                f"({best['gain_lo'] - 1:+.2%} to {best['gain_hi'] - 1:+.2%})"
            )
        if best["cost_us"] == best["cost_us"]:
            share = best["cost_us"] * result["layers"] / best["step_us"]
            text += f"; the step is {share:.1%} of it"
        sentences.append(text + ".")
    for kind, what in stack.MICRO.items():
        judged = paths.loc[paths["lane"] != stack.BASE, f"off_{kind}"].dropna()
        if len(judged):
            near = int((judged.abs() <= _CLOSE).sum())
            sentences.append(
                f"Timed {what}: {near} of {len(judged)} savings predicted within {_CLOSE:.0%}."
            )
    return sentences


def story(rows: pd.DataFrame, arch: str) -> list[str]:
    """The story's claim: what it implies a layer, the judge's verdict, and what was seen here."""
    sentences = [
        f"Published: {implied().text} at batch 1 (intervals of the last digit alone).",
        f"The judge: {evals.significance(*map(float, STORY)).text}.",
    ]
    ones = rows[(rows["batch"] == 1) & rows["saved_us"].notna()]
    ones = ones[ones["lane"] != stack.DELETED]
    for r in ones.itertuples():
        sentences.append(
            f"{r.lane} against {stack.BASE} at batch 1 on {arch} ({r.evidence}): "
            f"{r.saved_us:+.2f} us a layer ({r.saved_us_lo:+.2f} to {r.saved_us_hi:+.2f})."
        )
    return sentences


def launches() -> list[str]:
    """What one launch more in each layer costs, from the recorded experiments on graphs."""
    sentences = []
    for file in sorted((data_dir() / "recorded").glob("*/*stack-forks.csv")):
        rows = pd.read_csv(file)
        whole = rows[(rows["layers"] == rows["layers"].max()) & (rows["forks"] == 0)]
        for batch, part in whole.groupby("batch"):
            with_it, without = (
                part[part["experiment"] == e].iloc[0] for e in ("forks", "torch_rms_norm")
            )
            more, least, most = (
                (with_it[a] - without[b]) / with_it["layers"]
                for a, b in (("step_us", "step_us"), ("step_lo", "step_hi"), ("step_hi", "step_lo"))
            )
            sentences.append(
                f"One launch more in each layer, of a kernel that writes one number, costs "
                f"{more:.2f} us ({least:.2f} to {most:.2f}) a layer at batch {batch} (recorded on "
                f"{with_it['device']})."
            )
    return sentences


def gains(saved: Interval, layers: int, speeds: tuple[float, ...]) -> pd.DataFrame:
    """What ``saved`` us a layer is worth to models that decode at ``speeds`` token/s a sequence."""
    rows = []
    for speed in speeds:
        gain = amdahl.tokens(saved, layers, 1e6 / speed)
        rows.append(
            {"tokens_per_s": speed, "after": gain.after.value, "gain": gain.ratio.value,
             "gain_lo": gain.ratio.lo, "gain_hi": gain.ratio.hi, "evidence": "modelled"}
        )  # fmt: skip
    return pd.DataFrame(rows)


def savings(rows: pd.DataFrame) -> dict[str, Interval]:
    """By lane: us a layer saved against two F.rms_norm, where above none, at batch 1."""
    part = rows[(rows["batch"] == 1) & (rows["saved_us_lo"] > 0)]
    part = part[part["lane"] != stack.DELETED]
    return {r.lane: Interval(r.saved_us, r.saved_us_lo, r.saved_us_hi) for r in part.itertuples()}


def implied() -> amdahl.Saving:
    """What the story's two figures imply a layer and a token."""
    return amdahl.saving(*map(amdahl.rounded, STORY), _STORY_LAYERS)
