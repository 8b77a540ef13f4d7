"""Commands that measure: sweeps, reports, runs, and files for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mlakit.archs import here
from mlakit.cli import base
from mlakit.cli.base import Arch, Json, Names, app, given, line, print_rows, progress, split, whole
from mlakit.errors import ExitCode, MisuseError


@app.command(epilog="Example: mlakit sweep --arch cpu --batch 1,64,1024 --model DeepSeek-V3,GLM-5")
def sweep(
    context: typer.Context,
    preset: Annotated[str, typer.Option(help="quick or qk-norm.")] = "",
    spec: Annotated[str, typer.Option(help="A TOML or JSON file of the same options.")] = "",
    arch: Arch = None,
    model: base.Models = None,
    hidden: base.Hidden = None,
    batch: base.Batches = None,
    dtype: base.Dtypes = None,
    quant: base.Quants = None,
    layout: Annotated[Names, typer.Option(help="split, split_out, contiguous.")] = None,
    clock: Annotated[Names, typer.Option(help="cpu, graph, kernel, eager.")] = None,
    cache: Annotated[Names, typer.Option(help="cold, hot.")] = None,
    path: base.Paths = None,
    measure: Annotated[Names, typer.Option(help="timing, accuracy.")] = None,
    budget_s: Annotated[float | None, typer.Option(help="Seconds of sampling a cell.")] = None,
    time_limit_s: Annotated[float | None, typer.Option(help="Seconds a cell may take.")] = None,
    seed: base.Seed = None,
    out: base.Out = "runs",
    resume: Annotated[str, typer.Option(help="Go on with the run in this folder.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Resume in another environment.")] = False,
    retry: Annotated[Names, typer.Option(help="With --resume: statuses to redo.")] = None,
    dask: Annotated[str, typer.Option(help="All GPUs: `local`, or a scheduler's address.")] = "",
) -> int:
    """Time (and judge) paths over arch, batch and hidden sizes; one Parquet part a cell."""
    from mlakit.sweep import run, store
    from mlakit.sweep.spec import SweepSpec

    chosen = given(
        preset=preset, archs=arch, models=model, hidden=hidden, batches=batch, dtypes=dtype,
        quants=quant, layouts=layout, clocks=clock, caches=cache, paths=path, measure=measure,
        budget_s=budget_s, time_limit_s=time_limit_s, seed=seed,
    )  # fmt: skip
    options: dict = {"progress": progress()}
    if resume:
        base.refuse_beside(context, "with --resume", "out")
        cells, folder = None, Path(resume)
        options |= {"force": force, "retry": split(retry), "time_limit_s": time_limit_s}
        chosen.pop("time_limit_s", None)
        run.refuse_beside_resume(*chosen, *given(spec=spec))
    else:
        base.refuse_beside(context, "without --resume", "force", "retry")
        read = SweepSpec.load(spec, **chosen) if spec else None
        asked = read or SweepSpec.parse(chosen or {"preset": "quick"})
        cells, folder = asked.cells(here()[0]), store.new_run_dir(out)
        options |= asked.options()
    if dask:
        from mlakit.sweep.spread import over_dask

        done = over_dask(cells, folder, scheduler=None if dask == "local" else dask, **options)
    else:
        done = run.run_sweep(cells, folder, **options)
    _print_speed(done.run_dir)
    print(done)
    print(done.run_dir)
    return done.exit_code


def _print_speed(run_dir: str) -> None:
    """The table of a sweep: microseconds a path and batch, the headline ratio, what is doubtful."""
    from mlakit.report import chapters
    from mlakit.sweep.store import read_rows

    frame = read_rows(run_dir, "timing")
    table = chapters.speed_table(frame)
    title = "median microseconds per call; x: times as fast as the best unfused path"
    marks = [{"mark": m, "flags": flags} for flags, m in chapters.flag_marks(frame).items()]
    if table:
        print_rows(table, title + ("; [n]: flagged, see below" if marks else ""))
    if marks:
        print_rows(marks, "flags of the figures so marked")
    rest = chapters.not_run(frame)
    if len(rest):
        print_rows(rest.to_dict("records"), "without a figure")


@app.command(epilog="Example: mlakit report --arch cpu,gfx950 --model DeepSeek-V3 --batch 1,64")
def report(
    arch: Arch = None,
    model: Annotated[Names, typer.Option("--model", help="Models, or q+kv widths.")] = None,
    batch: base.Batches = None,
    drift_batch: Annotated[Names, typer.Option(help="Rows M of the accuracy, with commas.")] = None,
    dtype: base.Dtype = "bf16",
    policy: Annotated[str, typer.Option(help="The rule to explain.")] = "mlakit",
    notebook: Annotated[Names, typer.Option(help="Only these, for example 02_speed.")] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds of sampling a cell.")] = 4.0,
    cell_limit_s: Annotated[float, typer.Option(min=1, help="Seconds a cell may take.")] = 300.0,
    run_limit_s: Annotated[float, typer.Option(min=1, help="Seconds a notebook may take.")] = 900.0,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Notebooks at once.")] = 2,
    baseline: Annotated[str, typer.Option(help="Against this run, not the pinned one.")] = "",
    out: Annotated[str, typer.Option(help="The folder that its folder goes into.")] = "runs",
) -> int:
    """Measure this machine, run the notebooks, write an offline HTML folder; prints its page."""
    from mlakit.report import build

    chosen = given(archs=split(arch), models=split(model), notebooks=split(notebook))
    chosen |= given(batches=whole(batch), drift_batches=whole(drift_batch))
    options = build.Options(
        **{name: tuple(dict.fromkeys(values)) for name, values in chosen.items()},
        dtype=dtype, policy=policy, seed=seed, budget_s=budget_s, cell_limit_s=cell_limit_s,
        run_limit_s=run_limit_s, jobs=jobs, baseline=baseline,
    )  # fmt: skip
    done = build.build(options, out, line)
    for name, sentences in done.verdicts.items():
        print(f"{name}:")
        for sentence in sentences:
            print(f"  {sentence}")
    print("\n".join(done.since.sentences))
    print(f"status: {done.status}")
    print(done.index)
    return done.exit_code


@app.command(epilog="Example: mlakit runs --prune 20")
def runs(
    context: typer.Context,
    root: Annotated[str, typer.Argument(help="The folder of runs.")] = "runs",
    show: Annotated[str, typer.Option(help="A run's name: its record, its rows.")] = "",
    prune: Annotated[int | None, typer.Option(min=0, help="Delete all but the newest N.")] = None,
    as_json: Json = False,
) -> None:
    """List the runs in a folder, show one, or delete old ones."""
    from mlakit.sweep import store

    if not Path(root).is_dir():
        raise MisuseError(f"no folder {root}: name one of runs, as `mlakit sweep` makes")
    if show:
        base.refuse_beside(context, "with --show", "prune", "as_json")
        record = store.show_run(Path(root) / show)
        print(json.dumps({k: v for k, v in record.items() if k != "cells"}, indent=1))
        for kind in record["measure"]:
            if kind == "timing":
                _print_speed(str(Path(root) / show))
    elif prune is not None:
        base.refuse_beside(context, "with --prune", "as_json")
        gone = store.prune(root, keep=prune)
        print(f"deleted {len(gone)} runs" + (f": {', '.join(gone)}" if gone else ""))
    else:
        print_rows(store.list_runs(root).to_dict("records"), f"runs in {root}", as_json)


@app.command(epilog="Example: mlakit record --out .")
def record(
    out: Annotated[str, typer.Option(help="The folder that the file goes into.")] = ".",
    keep: Annotated[str, typer.Option(help="The folder that the run itself goes into.")] = "runs",
) -> int:
    """Measure the standard grid on the card that is here and write one file to contribute.

    A run that stopped midway goes on.
    """
    from mlakit.report import contribute
    from mlakit.sweep import run

    folder = Path(out)
    if not folder.is_dir():
        raise MisuseError(f"no folder {out}: name one that is there")
    cells = contribute.cells(here()[0])
    done = run.run_sweep(cells, _run_to_record(keep, cells), progress=progress())
    print(done)
    if done.exit_code not in (ExitCode.OK, ExitCode.FAILED):
        return done.exit_code
    file = folder / contribute.file_name(done.run_dir)
    print(contribute.pack(done.run_dir, file))
    return done.exit_code


def _run_to_record(keep: str, cells: list) -> Path:
    """The newest run below ``keep`` that stopped midway through these cells here, or a new one."""
    from mlakit.sweep import store
    from mlakit.sweep.worker import difference, environment

    ids = [cell.id for cell in cells]
    for _, folder in reversed(store.runs_below(keep)):
        try:
            run = store.show_run(folder)
        except MisuseError:
            continue  # unreadable
        same = (run["cell_ids"], run["measure"]) == (ids, ["timing"])
        stopped = run["status"] in ("crashed", "interrupted") or run["done"]["timing"] < len(ids)
        if not same or not stopped or run["status"] == "running":
            continue
        if not (run["environment"] and difference(run["environment"], environment())):
            line(f"going on with {folder}")
            return folder
    return store.new_run_dir(keep)


@app.command(epilog="Example: mlakit ingest mi300x-2026-12-01.parquet")
def ingest(
    file: Annotated[str, typer.Argument(help="A file that `mlakit record` wrote.")],
    into: Annotated[str, typer.Option(help="Instead of data/recorded.")] = "",
) -> None:
    """Check a contribution and file it, or refuse it with the reason."""
    from mlakit.report import contribute

    print(contribute.ingest(file, into or None))


@app.command(epilog="Example: mlakit history runs --pin 20261130-085424-161306")
def history(
    root: Annotated[str, typer.Argument(help="The folder of runs and reports.")] = "runs",
    baseline: Annotated[str, typer.Option(help="Against the run of this name, once.")] = "",
    pin: Annotated[str, typer.Option(help="A run's name: the baseline from now.")] = "",
) -> None:
    """One page of every run against a pinned baseline: trend, gaps, regressions."""
    from mlakit.report import history as pages

    if pin:
        print(pages.pin(root, pin))
    print(pages.write(root, baseline))
