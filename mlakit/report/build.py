"""One command, one report: sweep, notebooks, and one offline folder of pages to read."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from mlakit import __version__, archs
from mlakit.dispatch import switches
from mlakit.errors import ExitCode, MisuseError, check_limit, one_of
from mlakit.report import chapters, history, page, runbook, scrub, show
from mlakit.report.parameters import check
from mlakit.sweep import grid, store
from mlakit.sweep.run import progress_line, run_sweep

NOTEBOOKS = ("01_dispatch", "02_speed", "03_drift", "04_codegen")
_GRAVITY = ("killed", "no kernel", "failed", "timed out", "incomplete", "regression")
"""When several runs went wrong, the first of these that occurred is the report's status."""


@dataclass(frozen=True)
class Options:
    """What to report on. Times in seconds; ``batches`` is rows M of the timed cells."""

    archs: tuple[str, ...] = ()
    """empty: what is here, and the two cards of the story"""
    models: tuple[str, ...] = ("DeepSeek-V3",)
    batches: tuple[int, ...] = (1, 8, 64, 512, 4096)
    drift_batches: tuple[int, ...] = (64, 257)
    dtype: str = "bf16"
    policy: str = "mlakit"
    notebooks: tuple[str, ...] = NOTEBOOKS
    seed: int = 0
    baseline: str = ""
    """a run beside the report's folder; empty: the pinned one, or the oldest that is ok"""
    budget_s: float = 4.0
    cell_limit_s: float = 300.0
    run_limit_s: float = 900.0
    jobs: int = 2
    """notebooks at once; nothing is timed in them"""


@dataclass
class Report:
    """Where the report is and how it went."""

    folder: Path
    status: str
    runs: list[runbook.NotebookRun]
    sweep: str
    since: history.Since
    rows: dict[str, pd.DataFrame]
    """what was measured, by kind"""
    verdicts: dict[str, list[str]] = field(default_factory=dict)
    """by arch and model: the sentences on the choice, on speed, then on drift"""

    @property
    def index(self) -> Path:
        """The page to open."""
        return self.folder / "index.html"

    @property
    def exit_code(self) -> ExitCode:
        """The code of ``status``."""
        return runbook.STATUS_EXIT[self.status]


def build(
    options: Options, out: str | Path = "runs", progress: Callable[[str], None] = print
) -> Report:
    """Measure, run the notebooks, write the pages. A failing notebook gives a page, not an error.

    Raises:
        MisuseError: an unknown model, arch, dtype, policy, notebook or baseline; nothing is
            written.
        LockedError: another report is being made in ``out``; it is named.
    """
    needs = ("papermill", "nbconvert", "nbformat", "matplotlib")
    lacks = [name for name in needs if find_spec(name) is None]
    if lacks:
        raise MisuseError(f"a report needs {', '.join(lacks)}: pip install 'mlakit[notebooks]'")
    # What is here, then the story's cards, shown without a measured speed.
    named = options.archs or (*archs.here(), "gfx942", "gfx950")
    options = replace(options, archs=tuple(dict.fromkeys(map(archs.check, named))))
    one_of("notebook", NOTEBOOKS, *options.notebooks)
    check_limit("cell_limit_s", options.cell_limit_s)
    check_limit("run_limit_s", options.run_limit_s)
    check(
        {"dtype": options.dtype, "policy": options.policy, "batches": list(options.batches)}
        | {"seed": options.seed}
    )
    if options.baseline and options.baseline not in [e.name for e in history.entries(out)]:
        raise MisuseError(f"baseline {options.baseline!r} is no run in {out}: name one that is")
    jobs = {"timing": _cells(options, options.batches)}
    if any("drift" in name for name in options.notebooks):
        # Accuracy has its own, smaller batches: its verdict needs elements, not rows.
        jobs["accuracy"] = _cells(options, options.drift_batches)
    # Two reports at once would slow each other and say so of the code.
    held = store.lock(Path(out))
    try:
        return _build(options, jobs, store.new_run_dir(out), progress)
    finally:
        os.close(held)


def _build(
    options: Options, jobs: dict[str, list], folder: Path, progress: Callable[[str], None]
) -> Report:
    scrub.also(folder.resolve().parent, "[runs]")
    begun = time.monotonic()
    limit = {"time_limit_s": options.cell_limit_s}
    limit["progress"] = lambda *job: progress(progress_line(*job))
    summaries = [
        run_sweep(cells, store.report_run(folder, kind), measure=[kind], **limit)
        for kind, cells in jobs.items()
    ]
    runs = _run_notebooks(options, folder, progress)
    since = history.since(folder, options.baseline)
    rows = {kind: store.read_rows(store.report_run(folder, kind), kind) for kind in jobs}
    report = Report(folder, "ok", runs, "; ".join(map(str, summaries)), since, rows)
    report.status = _status(report)
    for arch, model in product(options.archs, options.models):
        report.verdicts[f"{arch} · {model}"] = _sentences(options, rows, arch, model)
    _write(report, options, time.monotonic() - begun)
    return report


def _cells(options: Options, batches: tuple[int, ...]) -> list:
    named = [m for m in options.models if "+" not in m]
    return grid.expand(
        archs=options.archs,
        models=named,
        hidden=[m for m in options.models if m not in named],
        batches=batches,
        dtypes=[options.dtype],
        budget_s=options.budget_s,
        seed=options.seed,
    )


def _run_notebooks(
    options: Options, folder: Path, progress: Callable[[str], None]
) -> list[runbook.NotebookRun]:
    """Each notebook once per arch and model, ``jobs`` at a time; nothing in them is timed."""
    orders = []
    for name in options.notebooks:
        source = runbook.notebooks_dir() / f"{name}.ipynb"
        declared = runbook.declared_parameters(source)
        drift = "drift" in name
        run_dir = store.report_run(folder, "accuracy" if drift else "timing").resolve()
        batches = list(options.drift_batches if drift else options.batches)
        for arch, model in product(options.archs, options.models):
            given = {"arch": arch, "model": model, "dtype": options.dtype, "seed": options.seed}
            given |= {"policy": options.policy, "run_dir": str(run_dir), "batches": batches}
            given = {k: v for k, v in given.items() if k in declared}
            target = folder / f"{name}-{arch}-{model.replace('+', '_')}.ipynb"
            orders.append((source, target, given))

    def run(order: tuple) -> runbook.NotebookRun:
        done = runbook.run_notebook(
            *order,
            cell_limit_s=options.cell_limit_s,
            run_limit_s=options.run_limit_s,
            at_once=options.jobs,
        )
        words = done.status + (f": {done.reason}" if done.reason else "")
        progress(f"{order[1].stem}: {words} ({done.seconds:.1f} s)")
        return done

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(run, orders))


def _status(report: Report) -> str:
    """The gravest status among notebooks and cells; ``ok`` only if every cell has its part."""
    found = {r.status for r in report.runs}
    for kind, frame in report.rows.items():
        record = store.show_run(store.report_run(report.folder, kind))
        states = set(frame["status"])
        complete = record["status"] in ("ok", "failed")
        complete &= set(record["cell_ids"]) <= set(frame["cell_id"])
        found |= set() if complete else {"incomplete"}
        found |= {"failed"} if states & {"failed", "wrong", "oom"} else set()
        found |= {"killed"} if "killed" in states else set()
        found |= {"timed out"} if "timeout" in states else set()
    found |= {"regression"} if report.since.regressed else set()
    return next((s for s in _GRAVITY if s in found), "ok")


def _sentences(options: Options, rows: dict, arch: str, model: str) -> list[str]:
    where = {"arch": arch, "model": model, "dtype": options.dtype}
    said = [chapters.choice_verdict(batches=options.batches, policy=options.policy, **where)]
    for kind, frame in rows.items():
        batches = list(options.batches if kind == "timing" else options.drift_batches)
        say = chapters.speed_verdict if kind == "timing" else chapters.drift_verdict
        said += say(chapters.of_call(frame, batches=batches, **where), arch)
    return said


# ---- the folder


def environment_rows(folder: Path) -> list[dict]:
    """The environment of the measurements, by allow-list: versions and device names only."""
    record = store.show_run(store.report_run(folder, "timing"))
    env = record.get("environment") or {}
    rows = [("what", "version"), ("mlakit", __version__)]
    rows.append(("python", env.get("python", platform.python_version())))
    rows.append(("eps", ", ".join(sorted({str(cell["eps"]) for cell in record["cells"]}))))
    told = [s for s in switches.read_all() if s.origin == "env"]
    rows += [(s.name, f"{s.value!r} (environment)") for s in told]
    rows.append(("every other switch", "not set: its default"))
    for name, device in env.get("devices", {}).items():
        # an AMD card is cuda:0 to torch
        name = name.replace("cuda:", "GPU ")
        rows.append((name, f"{device['device']} ({device['arch_raw']})"))
        known = [what for what in ("torch", "triton", "driver") if device.get(what)]
        rows += [(f"{name}: {what}", device[what]) for what in known]
        rows.append(("source revision", device.get("git_sha") or "not a checkout"))
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def _footer(options: Options) -> str:
    folder = runbook.notebooks_dir()
    hashes = [
        f"{name} {sha256((folder / f'{name}.ipynb').read_bytes()).hexdigest()[:12]}"
        for name in options.notebooks
    ]
    return f"mlakit {__version__} · {store.now()} · notebooks by content: {', '.join(hashes)}"


def _write(report: Report, options: Options, seconds: float) -> None:
    footer, folder = _footer(options), report.folder
    pages = {f"{Path(r.notebook).stem}.html": r for r in report.runs}
    for name, run in pages.items():
        page.write_notebook(folder / name, folder / run.notebook, run, footer)
    unjudged = _unjudged(report.rows)
    summary = {"status": report.status, "exit_code": int(report.exit_code)}
    summary |= {"seconds": round(seconds, 1), "mlakit": __version__, "options": asdict(options)}
    summary |= {"sweep": report.sweep, "verdicts": report.verdicts}
    summary |= {"changed": report.since.sentences, "unjudged": unjudged.to_dict("records")}
    summary["runs"] = [
        {k: v for k, v in asdict(r).items() if k != "parameters"}
        | {"arch": r.parameters["arch"], "model": r.parameters["model"], "page": p}
        for p, r in pages.items()
    ]
    summary["figures"] = sum(r.figures for r in report.runs)
    text = json.dumps(scrub.values(summary), indent=1)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(_markdown(summary), encoding="utf-8")
    _write_index(report, summary, unjudged, footer)


def _write_index(report: Report, summary: dict, unjudged: pd.DataFrame, footer: str) -> None:
    """Verdict first, what changed, what could not be judged, the pages, and the environment."""
    failed = []
    for run in report.runs:
        given = ", ".join(f"{k}={v!r}" for k, v in run.parameters.items() if k != "run_dir")
        failed += [f"{run.name} ({given}): {run.status}: {run.reason}"] * (run.status != "ok")
    link = Markup('<a href="{}">{}</a>').format
    pages = [
        {"page": link(r["page"], r["name"]), "arch": r["arch"], "model": r["model"]}
        | {"status": r["status"], "figures": r["figures"], "seconds": round(r["seconds"], 1)}
        for r in summary["runs"]
    ]
    all_judged = pd.DataFrame([{"nothing": "every path of every cell has its figure"}])
    tables = {
        "unjudged": (unjudged if len(unjudged) else all_judged, "Cells without a figure"),
        "pages": (pd.DataFrame(pages, dtype=object), "A page per notebook run"),
        "environment": (
            pd.DataFrame(environment_rows(report.folder), columns=["what", "version"]),
            "Versions and devices",
        ),
    }
    page.write(
        report.index,
        "report.html.j2",
        title="mlakit report",
        footer=footer,
        status=report.status,
        runs=len(report.runs),
        failed=failed,
        seconds=summary["seconds"],
        verdicts=report.verdicts,
        changed=report.since.sentences,
        sweep=report.sweep,
        **{name: Markup(show.table_html(*given)) for name, given in tables.items()},
    )


def _unjudged(rows: dict[str, pd.DataFrame]) -> pd.DataFrame:
    frames = []
    for kind, frame in rows.items():
        for arch, part in frame.groupby("arch", sort=False):
            # A card that is not here has both: a row that was skipped, and what was emulated.
            emulated = part.loc[part["evidence"].eq("emulated") & part["status"].eq("ok")]
            twice = part["path_requested"].isin(emulated["path_ran"]) & part["status"].eq("skipped")
            frames.append(chapters.not_run(part[~twice]).assign(kind=kind, arch=arch))
    columns = "arch kind path status reason batches".split()
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame()


def _markdown(summary: dict) -> str:
    lines = [f"# mlakit report: {summary['status']}", ""]
    line = "{path} on {arch} ({kind}, M = {batches}): {status}: {reason}"
    why = [line.format_map(r) for r in summary["unjudged"]] or ["Everything was judged."]
    told = summary["verdicts"] | {"What changed since the baseline": summary["changed"]}
    told |= {"What could not be judged, and why": why}
    for name, sentences in told.items():
        lines += [f"## {name}", "", *(f"- {s}" for s in sentences), ""]
    lines += ["| page | arch | model | status |", "|---|---|---|---|"]
    lines += [
        f"| [{r['name']}]({r['page']}) | {r['arch']} | {r['model']} | {r['status']} |"
        for r in summary["runs"]
    ]
    # Markdown renders HTML, and names are anybody's.
    return scrub.text("\n".join(lines).replace("<", "\\<") + "\n")
