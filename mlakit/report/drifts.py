"""What 03_drift says beyond its accuracy rows: ulps, fingerprints, depth, answers, findings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from mlakit import locks
from mlakit.context import Context
from mlakit.datafiles import data_dir
from mlakit.dispatch import probe
from mlakit.drift import depth, findings, flips, implementations
from mlakit.drift.evals import significance
from mlakit.drift.ulp import compare
from mlakit.inputs import make
from mlakit.paths import registry
from mlakit.rounding import ROUNDINGS, oracle
from mlakit.shapes import parse_hidden
from mlakit.sweep import parquet

FORMULAS = ("cast_then_weight", "truncate", "bf16_sum")
PATHS = ("torch_native", "torch_rms_norm", "cpu_fused")
PAIRS = (("round_once", "cast_then_weight"), ("round_once", "truncate"), ("round_once", "bf16_sum"))


def ulp_bars(model: str, dtype: str, m: int = 64, seed: int = 0) -> pd.DataFrame:
    """Bars for ``plots.error_histogram``: this CPU's paths, measured, and formulas.

    Of q; of kv where the model has no q latent.
    """
    given = make(m, parse_hidden(model), dtype, seed=seed)
    part = 0 if given.q.shape[-1] else 1
    x, weight, eps = given.args[3 * part : 3 * part + 3]
    want, bars = oracle(x, weight, eps), []
    context = Context(packages=probe.packages(), q_lora_rank=given.q.shape[-1])
    able = [name for name in PATHS if registry.get(name).supports(context) is None]
    for name in (*able, *FORMULAS):
        if name in ROUNDINGS:
            got = ROUNDINGS[name](x, weight, eps)
        else:
            got = registry.get(name).call(*given.args)[part]
        bars += compare(got, want).bars(name, "emulated" if name in ROUNDINGS else "measured")
    return pd.DataFrame(bars)


def recorded(kind: str) -> pd.DataFrame:
    """``*-{kind}*.csv`` of every recorded device, with its folder's name as ``device``."""
    files = sorted((data_dir() / "recorded").glob(f"*/*-{kind}*.csv"))
    frames = [pd.read_csv(f, keep_default_na=False).assign(device=f.parent.name) for f in files]
    frames = [f.assign(evidence="recorded") for f in frames]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _once(run_dir: str, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """``make()``, made by the first notebook of a report and kept with the run for the others.

    Neither an arch nor a model changes it, and it takes many seconds.
    """
    if not run_dir or not Path(run_dir).is_dir() or not os.access(run_dir, os.W_OK):
        return make()
    file = Path(run_dir) / f"{name}.parquet"
    with open(file.with_suffix(".lock"), "a+") as held:
        locks.take(held.fileno(), wait_s=600)
        if not file.exists():
            parquet.replace_whole(file, lambda there: make().to_parquet(there))
        return pd.read_parquet(file)


def fingerprints(dtype: str, run_dir: str = "") -> pd.DataFrame:
    """Everything that is installed here, then what was recorded; what was not measured says why."""

    def made() -> pd.DataFrame:
        return implementations.fingerprint_everything("cpu", dtype, compiler=False)

    here = _once(run_dir, f"fingerprints-{dtype}", made)
    frame = pd.concat([here.assign(evidence="measured"), recorded("fingerprints")])
    frame = frame[frame["dtype"] == dtype].reset_index(drop=True)
    frame["names"] = frame["names"].where(frame["status"] == "ok", "not measured")
    return frame["implementation device names reads_as agrees evidence text".split()]


def audits() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Recorded report cards: verdicts counted by path and device; each line that is no pass."""
    rows = recorded("audit")
    if rows.empty:
        return rows, rows
    by = ["target", "device"]
    counts = rows.groupby(by, sort=False)["verdict"].value_counts().unstack(fill_value=0)
    odd = rows[~rows["verdict"].isin(["pass", "not applicable"])]
    targets = odd.groupby(["name", "verdict", "detail"], sort=False)["target"]
    listed = targets.agg(lambda names: ", ".join(dict.fromkeys(names)))
    return counts.reset_index(), listed.reset_index()


def growth(layers: int = 61, seed: int = 0) -> tuple[pd.DataFrame, list[str]]:
    """Rows for ``plots.growth`` of ``PAIRS`` on this CPU at a small size; a sentence each."""
    rows, words = [], []
    for a, b in PAIRS:
        found = depth.divergence(a, b, layers=layers, seed=seed)
        rows += [{"way": b, "evidence": "emulated", **row} for row in found.rows()]
        words.append(found.text)
    return pd.DataFrame(rows), words


def answers(run_dir: str = "", n: int = 2000) -> pd.DataFrame:
    """The small model's answers on this CPU, then those recorded on other devices."""
    here = _once(run_dir, f"flips-{n}", lambda: flips.flips("cpu", n))
    here = here.assign(device="cpu", evidence="measured")
    return pd.concat([here, recorded("flips")], ignore_index=True)


def known() -> pd.DataFrame:
    """``field_findings`` in the columns of a page."""
    columns = "finding property_of a b share_differ max_ulp bias_a bias_b evidence source".split()
    return findings.field_findings()[columns]


def story() -> pd.DataFrame:
    """The judge on the figures that the field reported: an accuracy pair and a throughput pair."""
    pairs = {
        "GSM8K 0.928 and 0.935, 1319 questions": significance(0.928, 0.935, 1319),
        "90.12 and 90.84 token/s, one figure each": significance(90.12, 90.84),
        "0.935 alone": significance(None, 0.935, 1319),
    }
    return pd.DataFrame(
        {"what": what, "verdict": j.verdict, "why": j.text} for what, j in pairs.items()
    )
