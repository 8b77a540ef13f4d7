"""Commands that judge: runs against runs, kernels against float64, scores against chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mlakit.archs import check as check_arch
from mlakit.archs import default_device, devices, vendor_of
from mlakit.cli import base
from mlakit.cli.base import Arch, Json, Names, app, given, print_rows, progress, split
from mlakit.context import DTYPES
from mlakit.errors import ExitCode, MisuseError, one_of, unknown

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; this machine's first by default.")]
Target = Annotated[str, typer.Argument(help="A path's name, or module:function.")]


def _where(device: str, dtype: str) -> str:
    """The device to use, if it is here and the dtype is known; empty: this machine's first."""
    one_of("dtype", DTYPES, dtype)
    gpus = [f"cuda:{i}" for i in range(len(devices()))]
    if device and device not in ("cpu", *gpus, *(["cuda"] if gpus else [])):
        raise unknown("device", device, ["cpu", *gpus])
    return device or default_device()


@app.command(epilog="Example: mlakit compare runs/A runs/B --baseline runs/pinned")
def compare(
    a: Annotated[str, typer.Argument(help="A run's folder, or a recorded file: the old one.")],
    b: Annotated[str, typer.Argument(help="The new one.")],
    baseline: Annotated[str, typer.Option(help="Also against this pinned run.")] = "",
    smallest: Annotated[float, typer.Option(help="Smallest effect of interest.")] = 0.03,
    markdown: Annotated[str, typer.Option(help="Also write Markdown to this file.")] = "",
    as_json: Json = False,
) -> int:
    """Faster, slower, same or uncertain, a verdict per path and cell; 1 on a regression."""
    from mlakit.report.compare import compare as judge

    result = judge(a, b, smallest=smallest, baseline=baseline or None)
    if markdown:
        Path(markdown).write_text(result.to_markdown(), encoding="utf-8")
    print(result.to_json() if as_json else result.to_markdown())
    return result.exit_code


@app.command(epilog="Example: mlakit drift --arch cpu --batch 257 --model DeepSeek-V3")
def drift(
    context: typer.Context,
    arch: Arch = None,
    model: base.Models = None,
    hidden: base.Hidden = None,
    batch: base.Batches = None,
    dtype: base.Dtypes = None,
    quant: base.Quants = None,
    path: base.Paths = None,
    seed: base.Seed = None,
    out: base.Out = "runs",
    emulate: Annotated[bool, typer.Option("--emulate", help="Only an AMD card's binary.")] = False,
    as_json: Json = False,
) -> int:
    """How far each path drifts from float64: rounding share, ulps, signed bias."""
    from mlakit.report import chapters
    from mlakit.sweep import run, store
    from mlakit.sweep.spec import SweepSpec

    if emulate:
        cards = split(arch)
        if not cards or any(vendor_of(check_arch(a)) != "amd" for a in cards):
            raise MisuseError("--emulate runs an AMD card's binary: name it, --arch gfx942")
        base.refuse_beside(context, "with --emulate", "path")
        path, batch = ["triton_fused"], batch or ["64"]
    chosen = given(
        archs=arch, models=model, hidden=hidden, batches=batch or ["257"], dtypes=dtype,
        quants=quant, paths=path, seed=seed,
    )  # fmt: skip
    asked = SweepSpec.parse(chosen | {"measure": ["accuracy"]})
    done = run.run_asked(asked.values(), out, progress=progress(), **asked.options())
    rows = store.read_rows(done.run_dir, "accuracy")
    judged = rows[rows["share_correct"].notna()]
    if emulate:
        judged = judged[judged["note"].str.contains("machine code")]
    print_rows(judged[["arch", "m", *chapters.DRIFT_COLUMNS]].to_dict("records"), "drift", as_json)
    if not as_json:
        for name, part in rows.groupby("arch", sort=False):
            print("\n".join(chapters.drift_verdict(part, name)))
        print(done.run_dir)
    return done.exit_code


@app.command(epilog="Example: mlakit fingerprint cpu_fused")
def fingerprint(
    target: Target,
    device: Device = "",
    dtype: base.Dtype = "bf16",
    as_json: Json = False,
) -> None:
    """Which rounding order a norm uses, by experiments that tell the candidates apart."""
    from mlakit.drift.audit import load_target
    from mlakit.drift.fingerprint import fingerprint as name_it

    found = name_it(load_target(target), device=_where(device, dtype), dtype=dtype)
    if as_json:
        print(json.dumps(vars(found) | {"names": sorted(found.names)}, indent=1))
        return
    print(f"{target}: {found.name}")
    print(found.text)
    for finding in found.evidence:
        print(f"  {finding}")


@app.command(epilog="Example: mlakit audit torch_rms_norm; mlakit audit mypackage.kernels:fused")
def audit(
    target: Target,
    device: Device = "",
    dtype: base.Dtype = "bf16",
    as_json: Json = False,
) -> int:
    """A report card of anyone's fused QK norm; exit code 1 if a line fails."""
    from mlakit.drift.audit import audit as examine

    card = examine(target, device=_where(device, dtype), dtype=dtype)
    print(json.dumps(card.to_json(), indent=1) if as_json else card.text)
    return ExitCode.OK if card.ok else ExitCode.REGRESSION


@app.command(epilog="Example: mlakit significance --a 0.928 --b 0.935 --n 1319")
def significance(
    a: Annotated[str, typer.Option(help="Accuracy, correct answers, or a per-question file.")],
    b: Annotated[str, typer.Option(help="The same of the other side.")] = "",
    n: Annotated[int, typer.Option(help="Questions; needed unless a and b are files.")] = 0,
    as_json: Json = False,
) -> None:
    """Is the difference between two evaluation results real?"""
    from mlakit.drift.evals import significance as judge

    answer = judge(figure(a), figure(b) if b else None, n or None)
    print(json.dumps(answer.to_json(), indent=1) if as_json else answer.text)


@app.command("eval", epilog="Example: mlakit eval --small")
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A transformers model's local folder.")] = "",
    questions: Annotated[str, typer.Option(help="JSONL of id, prompt and answer.")] = "",
    a: Annotated[str, typer.Option(help="unpatched, a path, or a rounding.")] = "unpatched",
    b: Annotated[str, typer.Option(help="The other side.")] = "torch_rms_norm",
    out: Annotated[str, typer.Option(help="Folder for the per-question results.")] = "eval",
    small: Annotated[bool, typer.Option("--small", help="mlakit's own small model.")] = False,
    n: Annotated[int, typer.Option(min=1, max=10_000, help="Questions of --small.")] = 2000,
    device: Device = "",
    as_json: Json = False,
) -> None:
    """The same questions through two paths of one model, and whether the flips mean anything."""
    if small:
        from mlakit.drift.flips import flips

        base.refuse_beside(context, "with --small", "model", "questions", "a", "b", "out")
        rows = flips(_where(device, "bf16"), n).to_dict("records")
        print_rows(rows, "answers of the small model, against one rounding", as_json)
        return
    base.refuse_beside(context, "without --small", "n", "device")
    if not model or not questions:
        raise MisuseError("give a model's folder and --questions, or --small")
    from mlakit.drift.evals import evaluate as ask

    answer = ask(model, questions, a, b, out)
    print(json.dumps(answer.to_json(), indent=1) if as_json else answer.text)


def figure(text: str) -> float | int | str:
    """A number where ``text`` is one, else the path of a file."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


@app.command(epilog="Example: mlakit tune runs/A --judge runs/B")
def tune(
    run: Annotated[list[str], typer.Argument(help="Runs or recorded files, or a folder of them.")],
    judge: Annotated[Names, typer.Option(help="Regret over these, not tuned on.")] = None,
    traffic: Annotated[str, typer.Option(help="even, decode-heavy, prefill-heavy.")] = "even",
    out: Annotated[str, typer.Option(help="Instead of data/dispatch.")] = "",
    source: Annotated[str, typer.Option(help="What the reason names; the files by default.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print, write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Build mlakit's own dispatch table from timing rows; show what each policy loses."""
    from mlakit.dispatch import policies
    from mlakit.sweep import regret
    from mlakit.sweep import tune as tuning

    one_of("traffic profile", regret.TRAFFIC, traffic)
    rows = _usable_rows(run)
    lines = tuning.build(rows, source or ", ".join(Path(r).resolve().stem for r in run))
    held_out = _usable_rows(judge) if judge else rows
    if not dry_run:
        arch = tuning.candidates(rows)["arch"].iloc[0]
        print(tuning.write(arch, lines, out or None))
    print_rows(lines, "thresholds", as_json)
    found = [_in_percent(regret.regret(held_out, name, traffic)) for name in policies.POLICIES]
    print_rows(found, "regret" + ("" if judge else " (on the rows that were tuned on)"), as_json)


def _usable_rows(named: list[str]):
    """The timing rows of runs, recorded files and folders of such files, in one DataFrame.

    Raises:
        MisuseError: one of them gives no row to tune from.
    """
    import pandas as pd

    from mlakit.sweep.parquet import timing_files
    from mlakit.sweep.store import read_rows
    from mlakit.sweep.tune import candidates

    frames = []
    for name in named:
        frame = read_rows(name)
        if frame.empty and (files := timing_files(Path(name))):
            frame = pd.concat([read_rows(f) for f in files], ignore_index=True)
        if candidates(frame).empty:
            raise MisuseError(
                f"{name} holds no timing row to tune from (cold cache, split layout): "
                "name a run, a recorded file, or a folder of these"
            )
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _in_percent(found) -> dict:
    """A policy's regret as a row, its shares in percent."""
    row, shares = vars(found), ("mean", "worst", "weighted")
    return {f"{k}_pct" if k in shares else k: 100 * v if k in shares else v for k, v in row.items()}
