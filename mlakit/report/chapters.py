"""What the notebooks and the index say: frames and sentences made from rows, one place for both."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pandas as pd

from mlakit import archs
from mlakit.context import Context
from mlakit.datafiles import data_dir, read_table
from mlakit.records import CONTROLS, with_figure
from mlakit.shapes import parse_hidden
from mlakit.sweep import store

_FEW_ROUNDS = 20
"""Below this many rounds a comparison of two runs is called uncertain."""

SPEED_COLUMNS = (
    "m path_ran status p50_us p20_us p80_us ratio ratio_lo ratio_hi pct_of_limit n evidence flags"
).split()
DRIFT_COLUMNS = (
    "path_ran output input_family share_correct max_ulp signed_bias bias_se rel_l2 elements "
    "evidence"
).split()


# ---- 01_dispatch


def _story_contexts(arch: str) -> list[tuple[str, Context]]:
    """(name, context) of the calls that the story's branches tell apart, on one arch."""
    base = {"arch": arch, "m": 64}
    if archs.vendor_of(arch) != "amd":
        return [
            ("BF16 weights", Context(**base)),
            ("BF16 weights, graph capture, second stream", _captured(base)),
        ]
    # "pair" is the generation that the fix's own release was written for.
    base |= {"use_aiter": True, "aiter_api": "pair"}
    found = [
        ("no AITER, BF16 weights", Context(arch=arch, m=64)),
        ("AITER on, BF16 weights", Context(**base)),
        ("AITER on, BF16 weights, graph capture, second stream", _captured(base)),
    ]
    fp8 = archs.fp8_format(arch)
    if fp8:
        found.append(("AITER on, FP8 block-scaled weights", Context(**base, weight_dtype=fp8)))
    if archs.arch(arch).mxfp4_native:
        found.append(("AITER on, MXFP4 weights", Context(**base, weight_dtype="mxfp4")))
    return found


def _captured(base: dict) -> Context:
    streams = frozenset({"SGLANG_ROCM_USE_MULTI_STREAM"})
    return Context(**base, capture=True, switches=streams)


def policy_frame(arch: str, policies: list[str]) -> pd.DataFrame:
    """Which path each policy picks in each of ``_story_contexts``: context, policy, path, ..."""
    from mlakit.dispatch import policies as rules

    rows = []
    for name, context in _story_contexts(arch):
        for policy in policies:
            choice = rules.choose(context, policy)
            row = {"context": name, "policy": policy, "path": choice.path}
            rows.append(row | {"launches": choice.launches, "reason": choice.reason})
    return pd.DataFrame(rows)


# ---- 02_speed and 03_drift: rows


def rows(
    kind: str, run_dir: str, *, arch: str, model: str, batches: list[int], dtype: str, seed: int = 0
) -> pd.DataFrame:
    """Rows of ``kind`` (timing or accuracy) for one notebook: of ``run_dir``, or measured now.

    Raises:
        MisuseError: ``run_dir`` is no run.
    """
    if run_dir:
        frame = store.read_rows(run_dir, kind)
    else:
        from mlakit.sweep.run import sweep

        key = "models" if "+" not in model else "hidden"
        asked = {"archs": [arch], key: [model], "batches": batches, "dtypes": [dtype]}
        frame = sweep(**asked, measure=[kind], seed=seed, budget_s=1.0)
    return of_call(frame, arch=arch, model=model, batches=batches, dtype=dtype)


def of_call(
    frame: pd.DataFrame, *, arch: str, model: str, batches: list[int], dtype: str
) -> pd.DataFrame:
    """The rows of one arch, widths and dtype, at these batches."""
    widths = parse_hidden(model)
    keep = (
        (frame["arch"] == archs.base_name(arch))
        & (frame["q_lora_rank"] == widths.q_lora_rank)
        & (frame["kv_lora_rank"] == widths.kv_lora_rank)
        & (frame["dtype"] == dtype)
        & frame["m"].isin(batches)
    )
    return frame[keep].reset_index(drop=True)


_recorded = cache(store.recorded_rows)


def recorded(arch: str = "") -> pd.DataFrame:
    """Every committed timing row, or those of ``arch``; empty where nobody ran it."""
    rows = _recorded()
    return rows[rows["arch"] == archs.base_name(arch)].reset_index(drop=True) if arch else rows


def published(arch: str) -> pd.DataFrame:
    """Figures that others published for ``arch`` and this kind of step, each with its source."""
    columns = "metric value unit fused_or_split op m n_q n_kv hardware source_url date".split()
    kept = ("arch", *columns)
    lines = read_table(data_dir() / "published.csv", lambda r: {c: r[c] for c in kept})
    frame = pd.DataFrame(lines, columns=kept)
    base = archs.base_name(arch)
    here = frame["arch"].str.contains(rf"\b{base}\b") & (base != "cpu")
    return frame.loc[here, columns].reset_index(drop=True)


def peers(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of paths: without the controls."""
    return frame[~frame["path_ran"].isin(CONTROLS)]


def not_run(frame: pd.DataFrame) -> pd.DataFrame:
    """Paths without figures: those of one status, reason and set of batches share a row."""
    rest = peers(frame)
    rest = rest[rest["status"] != "ok"]
    if rest.empty:
        return pd.DataFrame(columns=["path", "status", "reason", "batches"])
    why = ["status", "reason"]
    by_path = rest.groupby(["path_requested", *why], dropna=False, sort=False)["m"]
    frame = by_path.agg(lambda m: ", ".join(str(v) for v in sorted(set(m)))).reset_index()
    frame["path_requested"] = frame["path_requested"].str.replace(",", ", ")
    alike = frame.groupby([*why, "m"], dropna=False, sort=False)["path_requested"]
    frame = alike.agg(", ".join).reset_index()
    return frame[["path_requested", *why, "m"]].set_axis(["path", *why, "batches"], axis=1)


# ---- sentences


def stretches(picks: Iterable[tuple[int, str]]) -> str:
    """(M, name) in order of M, as ``a from M = 1, b from M = 64``."""
    found: list[tuple[int, str]] = []
    for m, name in picks:
        if not found or found[-1][1] != name:
            found.append((m, name))
    return ", ".join(f"{name} from M = {m}" for m, name in found)


def choice_verdict(arch: str, model: str, batches: list[int], dtype: str, policy: str) -> str:
    """The path that a rule takes on ``arch`` at each batch, in a sentence."""
    from mlakit.dispatch import policies

    widths = parse_hidden(model)
    sizes = {"q_lora_rank": widths.q_lora_rank, "kv_lora_rank": widths.kv_lora_rank}
    calls = [Context(arch=arch, m=m, dtype=dtype, **sizes) for m in sorted(batches)]
    picks = [policies.choose(call, policy) for call in calls]
    named = stretches((call.m, pick.path) for call, pick in zip(calls, picks, strict=True))
    return f"Chosen on {arch} by {policy}: {named} ({picks[0].reason})."


def speed_verdict(frame: pd.DataFrame, arch: str) -> list[str]:
    """What the timing rows of one arch say, in sentences that hold only what was measured."""
    from mlakit.paths import registry

    ran = with_figure(peers(frame))
    if ran.empty:
        reasons = sorted(set(not_run(frame)["reason"])) or ["nothing was asked for"]
        return [f"No time is stated for {arch}: {reasons[0]}."]
    source = f"{ran['evidence'].iloc[0]} on {ran['device'].iloc[0]}"
    best = ran.loc[ran.groupby("m")["p50_us"].idxmin()].sort_values("m")
    wins = best["path_ran"].value_counts()
    sentences = [
        f"Fastest on {arch} ({source}): "
        + ", ".join(f"{p} at {c} of {len(best)} batches" for p, c in wins.items())
        + "."
    ]
    fused = {p.name for p in registry.all_paths() if p.fused}
    rows = ran[ran["path_ran"].isin(fused) & ran["ratio"].notna()]
    if rows.empty:
        why = not_run(frame)
        why = why[[not fused.isdisjoint(paths.split(", ")) for paths in why["path"]]]
        reason = why["reason"].iloc[0] if len(why) else "none was asked for"
        return [*sentences, f"No fused path ran ({reason}); no speedup is stated."]
    top = rows.loc[rows.groupby("m")["p50_us"].idxmin()].sort_values("m")
    parts = [
        f"{r.ratio:.2f} times ({r.ratio_lo:.2f} to {r.ratio_hi:.2f}) at M={r.m}"
        for r in top.iloc[[0, -1]].itertuples()
    ]
    name = " / ".join(dict.fromkeys(top["path_ran"]))
    sentences.append(
        f"{name} against the best unfused path of each cell: {', '.join(dict.fromkeys(parts))} "
        "(paired medians, 95 % intervals)."
    )
    early = top[top["config"].fillna("").str.contains('"pdl": true')]
    if len(early):
        batches = ", ".join(f"M={m}" for m in early["m"])
        sentences.append(
            f"At {batches} {name} overlaps the launches beside it (programmatic dependent launch): "
            "its ratio there is of launches in a stream."
        )
    busy = top["flags"].fillna("").str.contains("busy-host")
    if busy.any():
        sentences.append(
            f"Other programs used the machine while {int(busy.sum())} of {len(top)} cells were "
            "timed (flag busy-host): read them with that in mind, or measure again."
        )
    few = top[top["n"] < _FEW_ROUNDS]
    if len(few):
        batches = ", ".join(f"M={m}" for m in few["m"])
        sentences.append(f"Fewer than {_FEW_ROUNDS} rounds fitted the budget at {batches}.")
    return sentences


def drift_verdict(frame: pd.DataFrame, arch: str) -> list[str]:
    """What the accuracy rows of one arch say: rounding share, largest step, bias."""
    from mlakit.drift.ulp import BIAS_FLAG, BIAS_MIN_ELEMENTS

    rows = frame[frame["share_correct"].notna()]
    if rows.empty:
        reasons = sorted(set(not_run(frame)["reason"])) or ["nothing was asked for"]
        return [f"No drift is stated for {arch}: {reasons[0]}."]
    found: dict[str, list[str]] = {}
    finite = rows[rows["input_family"] != "nonfinite"]
    # A note says how, and on how many rows, a card that is not here was emulated.
    how = finite["note"].where(finite["evidence"] == "emulated").fillna("")
    finite = finite.assign(how=finite["evidence"].str.cat(how, " ").str.strip())
    for (path, evidence), part in finite.groupby(["path_ran", "how"], sort=False):
        enough = part[part["elements"] >= BIAS_MIN_ELEMENTS]
        biased = enough[
            (enough["signed_bias"].abs() > BIAS_FLAG)
            & (enough["signed_bias"].abs() > 3 * enough["bias_se"])
        ]
        text = (
            f"({evidence}): {part['share_correct'].min() * 100:.2f} % of elements correctly "
            f"rounded in the worst case, at most {int(part['max_ulp'].max())} ulp"
        )
        if len(biased):
            worst = biased.loc[biased["signed_bias"].abs().idxmax()]
            text += f", with a one-sided bias of {worst['signed_bias']:+.2e}"
        elif len(enough):
            text += ", no one-sided bias"
        else:
            text += ", too few elements to judge a bias"
        found.setdefault(text, []).append(path)
    return [f"{', '.join(paths)} {text}." for text, paths in found.items()]


def flag_marks(frame: pd.DataFrame) -> dict[str, str]:
    """By each set of flags that a figure has: its mark beside the figure, ``[1]`` and on."""
    sets = sorted(set(with_figure(frame)["flags"].dropna()) - {""})
    return {flags: f"[{number}]" for number, flags in enumerate(sets, 1)}


def speed_table(frame: pd.DataFrame) -> list[dict]:
    """A row a batch, a column a path: ``p50_us``, in brackets the headline ratio, and its mark."""
    rows, marks = with_figure(frame), flag_marks(frame)
    shape = "arch q_lora_rank kv_lora_rank dtype quant layout clock cache m".split()
    rows = rows.sort_values(shape, kind="stable")
    table = []
    for key, part in rows.groupby(shape, sort=False):
        line = {"arch": key[0], "q+kv": f"{key[1]}+{key[2]}", "dtype": key[3]}
        line |= {"quant": key[4], "layout": key[5], "clock": f"{key[6]}, {key[7]}"}
        line |= {"evidence": part["evidence"].iloc[0], "M": key[8]}
        for r in part.itertuples():
            ratio = "" if pd.isna(r.ratio) or r.path_ran in CONTROLS else f" ({r.ratio:.2f}x)"
            mark = f" {marks[r.flags]}" if r.flags in marks else ""
            line[r.path_ran] = f"{r.p50_us:.4g}{ratio}{mark}"
        table.append(line)
    columns = list(dict.fromkeys(c for line in table for c in line))
    return [{c: line.get(c) for c in columns} for line in table]
