"""The ladder: each rung's sentence, its figure with evidence, and a check against float64.

``python ladder.py`` checks every rung here; without a GPU, Triton interprets the rungs 4 to 7.
"""

import ast
import csv
import importlib
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PATHS = {
    "rung1_eager": "torch_native",
    "rung2_two_norms": "torch_rms_norm",
    "rung3_compile": "inductor",
    "rung4_one_row": "liger_rms_norm",
    "rung7_quantised": "triton_fp8_group128",
}
"""Rungs that committed runs time, under these paths; rungs 5 and 6 are in a search's file."""
RUNGS = tuple(sorted(p.stem for p in FOLDER.glob("rung*.py")))


def sentence(rung: str) -> str:
    """The rung's own first line; its module is not imported, so Triton need not be there."""
    tree = ast.parse((FOLDER / f"{rung}.py").read_text(encoding="utf-8"))
    return ast.get_docstring(tree).splitlines()[0]


def figures() -> list[dict]:
    """A row a rung, device and M: rung, path, m, p50_us, evidence, device, source.

    Those of committed runs that timed a rung's path, then those of ``figures.csv``.
    """
    from mlakit.report.chapters import recorded

    rows = recorded()
    asked = {"status": "ok", "dtype": "bf16", "cache": "cold", "layout": "split"}
    for column, value in (asked | {"q_lora_rank": 1536, "kv_lora_rank": 512}).items():
        rows = rows[rows[column] == value]
    rows = rows[rows["clock"].isin(["graph", "cpu"]) & rows["m"].isin([64, 8192])]
    rows = rows.drop_duplicates(["device", "path_ran", "m"])
    found = []
    for rung, path in PATHS.items():
        for r in rows[rows["path_ran"] == path].itertuples():
            row = {"rung": rung, "path": path, "m": str(r.m), "p50_us": f"{r.p50_us:.4g}"}
            found.append(row | {"evidence": r.evidence, "device": r.device, "source": r.run_id})
    with open(FOLDER / "figures.csv", newline="", encoding="utf-8") as file:
        return found + list(csv.DictReader(file))


def table():
    """What a lesson shows: the sentence, and times by M with device and evidence."""
    import pandas as pd

    frame = pd.DataFrame(figures())
    frame["us"] = frame["p50_us"] + " (" + frame["evidence"] + ", " + frame["device"] + ")"
    wide = frame.pivot_table(index="rung", columns="m", values="us", aggfunc="; ".join)
    wide.columns = [f"us at M = {m}" for m in wide.columns]
    wide = wide.reindex(RUNGS)
    wide.insert(0, "what it is", [sentence(r).split(": ", 1)[1] for r in wide.index])
    return wide.reset_index().fillna("–")


def check(rung: str, m: int = 5) -> float:
    """The largest error of a rung against float64, as a share of the largest element.

    Triton's interpreter cuts where a card rounds: twice the error, up to 2**-7 in bf16.
    """
    import torch

    from mlakit.inputs import make
    from mlakit.rounding import oracle
    from mlakit.shapes import Widths

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = make(m, Widths(256, 128), "bf16", family="heavy", device=device)
    q, k = importlib.import_module(rung).call(*given.args)
    if isinstance(q, tuple):
        values, scales = q
        q = values.float() * scales.repeat_interleave(128, -1)
    worst = 0.0
    for got, x, w, eps in ((q, *given.args[:3]), (k, *given.args[3:])):
        want = oracle(x, w, eps)
        worst = max(worst, float((got.double() - want).abs().max() / want.abs().max()))
    return worst


if __name__ == "__main__":
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    for name in sys.argv[1:] or RUNGS:
        print(f"{name}\t{check(name):.2e}")
