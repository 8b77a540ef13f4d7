"""The command line: parse, call, print. Every command returns a code of ``mlakit.errors.ExitCode``.

A user's mistake ends with one line on standard error and exit code 2, never with a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from mlakit.archs import check as check_arch
from mlakit.archs import default_device
from mlakit.errors import ExitCode, MisuseError, RefusedError, unknown

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    help="Which kernel path should run the QK RMSNorm step of MLA here, how fast is it, "
    "how far does it drift, and is it worth it?",
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Arch = Annotated[
    list[str] | None,
    typer.Option("--arch", "-a", help="An arch, or several with commas: cpu,gfx950."),
]


_UsageError = typer.BadParameter.__mro__[2]
"""click's own base error; recent typers carry a copy of click, so it is reached through typer."""


def main() -> None:
    """Run the command line and exit with the command's code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(sys.argv[1:] or ["--help"], "mlakit", standalone_mode=False)
    except (MisuseError, RefusedError) as error:
        code = _complain(str(error))
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        see = f"; see: {context.command_path} --help" if context else ""
        code = _complain(error.format_message().rstrip(".") + see)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        code = _complain(f"{error.filename or error}: {error.strerror or 'not there'}")
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("stopped; what was measured is kept", code=ExitCode.INCOMPLETE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.OK
    sys.exit(int(code or 0))


def _complain(text: str, code: int = ExitCode.MISUSE) -> int:
    print(f"mlakit: {text}", file=sys.stderr)
    return code


def _split(values: list[str] | None) -> list[str]:
    """``["a,b", "c"]`` as ``["a", "b", "c"]``."""
    return [v.strip() for text in values or [] for v in text.split(",") if v.strip()]


def _whole(values: list[str]) -> list[int]:
    from mlakit.sweep.grid import whole

    return [whole(v) for v in values]


def _print_rows(rows: list[dict], title: str, as_json: bool = False) -> None:
    """Rows as a table on a terminal, as tab-separated lines elsewhere, or as JSON."""
    from mlakit.report.show import number

    if as_json:
        print(json.dumps(rows, indent=1, default=str))
        return
    columns = list(rows[0]) if rows else []
    if not sys.stdout.isatty():
        print("\t".join(columns))
        for row in rows:
            print("\t".join(number(row[c]).replace("\n", " ") for c in columns))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(number(row[c]) for c in columns))
    Console().print(table)


def _line(text: str) -> None:
    """One plain line of progress, never in the way of what a command prints."""
    print(text, file=sys.stderr, flush=True)


@app.command(epilog="Example: mlakit doctor --json")
def doctor(as_json: Json = False) -> None:
    """What is here, what was wanted, and what to do about the difference."""
    from mlakit.dispatch.doctor import doctor as examine

    report = examine()
    if as_json:
        print(json.dumps(report.to_json(), indent=1, default=str))
        return
    _print_rows(report.to_rows(), "mlakit doctor")


@app.command(epilog="Example: mlakit paths --arch gfx950")
def paths(
    arch: Annotated[str, typer.Option(help="For this arch instead of this machine.")] = "",
    as_json: Json = False,
) -> None:
    """Every way to run the step, and why those that cannot run here cannot."""
    from mlakit.context import Context
    from mlakit.dispatch import probe
    from mlakit.paths import registry

    context = Context(arch=arch) if arch else probe.here(default_device())
    rows = [
        {
            "path": p.name,
            "output": p.output,
            "launches": p.launches,
            "rounding": p.rounding,
            "runs": "yes" if (why := _why_not(p, context)) is None else f"no: {why}",
            "what it is": p.text,
        }
        for p in registry.all_paths()
    ]
    _print_rows(rows, f"paths on {context.arch}", as_json)


def _why_not(path, context) -> str | None:
    """Why a path cannot deliver its own output in ``context``; a quantised path is asked for it."""
    from dataclasses import replace

    try:
        return path.supports(replace(context, quant=path.output))
    except MisuseError as error:
        return str(error)


@app.command(epilog="Example: mlakit explain --arch gfx950 --aiter --policy sglang_before_fix")
def explain(
    policy: Annotated[str, typer.Option(help="Whose rule: mlakit, sglang_today, ...")] = "mlakit",
    arch: Annotated[str, typer.Option(help="For this arch instead of this machine.")] = "",
    batch: Annotated[str, typer.Option("--batch", "-m", help="Rows M.")] = "64",
    hidden: Annotated[str, typer.Option(help="q+kv widths or a model's name.")] = "DeepSeek-V3",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    weight_dtype: Annotated[str, typer.Option(help="dtype of q_b_proj: bf16, fp8_ocp, ...")] = "",
    quant: Annotated[str, typer.Option(help="none, fp8_group128, fp8_token, mxfp4.")] = "none",
    aiter: Annotated[bool, typer.Option("--aiter", help="AITER is in use there.")] = False,
    aiter_api: Annotated[
        str, typer.Option(help="Its dual norm: none, pair (0.1.12, 0.1.13), unified (0.1.14 on).")
    ] = "pair",
    capture: Annotated[bool, typer.Option("--capture", help="During graph capture.")] = False,
    as_json: Json = False,
) -> None:
    """Which path a rule picks in a context, why, and why not each of the others."""
    from mlakit.context import Context
    from mlakit.dispatch import probe
    from mlakit.dispatch.explain import explain as ask
    from mlakit.shapes import parse_hidden

    widths = parse_hidden(hidden)
    asked = {
        "m": _whole([batch])[0],
        "q_lora_rank": widths.q_lora_rank,
        "kv_lora_rank": widths.kv_lora_rank,
        "dtype": dtype,
        "norm_weight_dtype": dtype,
        "weight_dtype": weight_dtype or dtype,
        "quant": quant,
        "capture": capture,
    }
    if arch:
        context = Context(
            arch=arch, use_aiter=aiter, aiter_api=aiter_api if aiter else "none", **asked
        )
    else:
        from dataclasses import replace

        if aiter:
            raise MisuseError("--aiter speaks of a card: name it too, for example --arch gfx950")
        context = replace(probe.here(default_device()), **asked)
    answer = ask(context, policy)
    if as_json:
        print(json.dumps(answer.to_json(), indent=1, default=str))
        return
    print(f"on {context.arch}, {answer.line}")
    if answer.here:
        print(f"not here: {answer.here}")
    _print_rows(answer.to_rows(), "every path")


def _given(**options) -> dict:
    """The options that were given: without None and empty lists."""
    return {k: v for k, v in options.items() if v not in (None, "", [], ())}


@app.command(epilog="Example: mlakit sweep --arch cpu --batch 1,64,1024 --model DeepSeek-V3,GLM-5")
def sweep(
    preset: Annotated[str, typer.Option(help="quick or qk-norm.")] = "",
    spec: Annotated[str, typer.Option(help="A YAML, TOML or JSON file of the same options.")] = "",
    arch: Arch = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="Models, with commas.")] = None,
    hidden: Annotated[
        list[str] | None, typer.Option(help="q+kv widths, with commas: 1536+512.")
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option("--batch", "-m", help="Rows M, with commas.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32.")] = None,
    quant: Annotated[list[str] | None, typer.Option(help="none, fp8_group128, ...")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="split, contiguous.")] = None,
    clock: Annotated[list[str] | None, typer.Option(help="cpu, graph, kernel, eager.")] = None,
    cache: Annotated[list[str] | None, typer.Option(help="cold, hot.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Paths; all by default.")] = None,
    measure: Annotated[list[str] | None, typer.Option(help="timing, accuracy.")] = None,
    budget_s: Annotated[float | None, typer.Option(help="Seconds of sampling a cell.")] = None,
    time_limit_s: Annotated[
        float | None, typer.Option(help="Seconds a cell may take in all.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs.")] = None,
    out: Annotated[str, typer.Option(help="The folder that the run's folder goes into.")] = "runs",
    resume: Annotated[str, typer.Option(help="Go on with the run in this folder.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Resume in another environment.")] = False,
    retry: Annotated[
        list[str] | None, typer.Option(help="With --resume: statuses to redo.")
    ] = None,
    every_device: Annotated[bool, typer.Option("--every-device", help="All GPUs.")] = False,
) -> int:
    """Time (and judge) paths over arch, batch and hidden sizes; one Parquet part a cell."""
    from mlakit.report import chapters
    from mlakit.sweep import run, store
    from mlakit.sweep.spec import SweepSpec

    if resume:
        chapters.require_run(resume)
        done = run.run_sweep(
            None,
            resume,
            measure=store.show_run(resume)["measure"],
            force=force,
            retry=_split(retry),
            progress=_progress(),
            every_device=every_device,
        )
    else:
        lists = {"archs": arch, "models": model, "hidden": hidden, "batches": batch}
        lists |= {"dtypes": dtype, "quants": quant, "layouts": layout, "clocks": clock}
        lists |= {"caches": cache, "paths": path, "measure": measure}
        given = _given(**{k: _split(v) for k, v in lists.items()}, preset=preset, seed=seed)
        given |= _given(budget_s=budget_s, time_limit_s=time_limit_s)
        asked = (
            SweepSpec.load(spec, **given) if spec else SweepSpec.parse(given or {"preset": "quick"})
        )
        options = asked.options() | {"every_device": every_device}
        done = run.run_asked(asked.expand_values(), store.new_run_dir(out), options, _progress())
    _print_speed(done.run_dir)
    print(done)
    print(done.run_dir)
    return done.exit_code


def _print_speed(run_dir: str) -> None:
    """The table of a sweep: microseconds a path and batch, and the headline ratio."""
    from mlakit.report import chapters
    from mlakit.sweep.store import read_rows

    frame = read_rows(run_dir, "timing")
    table = chapters.speed_table(frame)
    if table:
        _print_rows(
            table, "median microseconds per call; x: times as fast as the best unfused path"
        )
    rest = chapters.not_run(frame)
    if len(rest):
        _print_rows(rest.to_dict("records"), "without a figure")


def _progress():
    """Progress for a sweep: a bar on a terminal, one plain line a cell elsewhere."""
    if not sys.stderr.isatty():
        return lambda done, total, cell, words: _line(
            f"[{done}/{total}] {cell.arch} {cell.widths} M={cell.m} {cell.dtype}: {words}"
        )
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("measuring", total=None)
    bar.start()

    def told(done: int, total: int, cell, words: str) -> None:
        text = f"{cell.arch} {cell.widths} M={cell.m}: {words}"
        bar.update(task, completed=done, total=total, description=text)
        if done == total:
            bar.stop()

    return told


@app.command(epilog="Example: mlakit report --arch cpu,gfx950 --model DeepSeek-V3 --batch 1,64")
def report(
    arch: Arch = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Models, or q+kv widths.")
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option("--batch", "-m", help="Rows M, with commas.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    policy: Annotated[str, typer.Option(help="The rule to explain.")] = "mlakit",
    notebook: Annotated[
        list[str] | None, typer.Option(help="Only these, for example 02_speed.")
    ] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds of sampling a cell.")] = 4.0,
    cell_limit_s: Annotated[float, typer.Option(help="Seconds a cell may take.")] = 300.0,
    run_limit_s: Annotated[float, typer.Option(help="Seconds a notebook may take.")] = 900.0,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    jobs: Annotated[int, typer.Option(help="Notebooks at once.")] = 2,
    out: Annotated[
        str, typer.Option(help="The folder that the report's folder goes into.")
    ] = "runs",
) -> int:
    """Measure this machine, run the notebooks, write an offline HTML folder; prints its page."""
    from mlakit.report import build

    names = _split(notebook)
    for name in names:
        if name not in build.NOTEBOOKS:
            raise unknown("notebook", name, build.NOTEBOOKS)
    given = _given(
        archs=tuple(dict.fromkeys(check_arch(a) for a in _split(arch))),
        models=tuple(_split(model)),
        batches=tuple(_whole(_split(batch))),
        notebooks=tuple(names),
    )
    options = build.Options(
        dtype=dtype,
        policy=policy,
        seed=seed,
        budget_s=budget_s,
        cell_limit_s=cell_limit_s,
        run_limit_s=run_limit_s,
        jobs=jobs,
        **given,
    )
    done = build.build(options, out, _line)
    for name, sentences in done.verdicts.items():
        print(f"{name}:")
        for sentence in sentences:
            print(f"  {sentence}")
    print(f"status: {done.status}")
    print(done.index)
    return done.exit_code


@app.command(epilog="Example: mlakit significance --a 0.928 --b 0.935 --n 1319")
def significance(
    a: Annotated[str, typer.Option(help="Accuracy, correct answers, or a per-question file.")],
    b: Annotated[str, typer.Option(help="The same of the other side.")] = "",
    n: Annotated[int, typer.Option(help="Questions; needed unless a and b are files.")] = 0,
    as_json: Json = False,
) -> None:
    """Is the difference between two evaluation results real?"""
    from mlakit.drift.evals import significance as judge

    answer = judge(_figure(a), _figure(b) if b else None, n or None)
    print(json.dumps(answer.to_json(), indent=1) if as_json else answer.text)


def _figure(text: str) -> float | int | str:
    """A number where ``text`` is one, else the path of a file."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
