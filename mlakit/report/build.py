"""One command, one report: sweep, notebooks, and one offline folder of pages to read."""

from __future__ import annotations

import html
import json
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from mlakit import __version__, archs
from mlakit.errors import ExitCode, MisuseError
from mlakit.report import chapters, page, runbook, scrub
from mlakit.report.parameters import check
from mlakit.sweep import grid, store
from mlakit.sweep.run import run_sweep

NOTEBOOKS = ("01_dispatch", "02_speed", "03_drift", "04_codegen")
GRAVITY = ("killed", "no kernel", "failed", "timed out", "incomplete", "regression")
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
    verdicts: dict[str, list[str]] = field(default_factory=dict)
    """by arch and model: the sentences on speed, then on drift"""

    @property
    def index(self) -> Path:
        """The page to open."""
        return self.folder / "index.html"

    @property
    def exit_code(self) -> ExitCode:
        """The code of ``status``."""
        return runbook.STATUS_EXIT[self.status]


def default_archs() -> tuple[str, ...]:
    """What is here, then gfx942 and gfx950: the story's cards, shown without a measured speed."""
    return tuple(dict.fromkeys((*archs.here(), "gfx942", "gfx950")))


def build(
    options: Options, out: str | Path = "runs", progress: Callable[[str], None] = print
) -> Report:
    """Measure, run the notebooks, write the pages. A failing notebook gives a page, not an error.

    Raises:
        MisuseError: an unknown model, arch, dtype, policy or notebook; nothing is written.
    """
    needs = ("papermill", "nbconvert", "nbformat", "matplotlib")
    lacks = [name for name in needs if find_spec(name) is None]
    if lacks:
        raise MisuseError(f"a report needs {', '.join(lacks)}: pip install 'mlakit[notebooks]'")
    asked = options.archs or default_archs()
    check(
        {"dtype": options.dtype, "policy": options.policy, "batches": list(options.batches)}
        | {"seed": options.seed}
    )
    cells = _cells(options, asked)
    # Accuracy has its own, smaller batches: its verdict needs elements, not rows.
    drift_cells = _cells(options, asked, batches=options.drift_batches)
    folder = store.new_run_dir(out)
    scrub.also(folder.resolve().parent, "[runs]")
    begun = time.monotonic()

    def told(done: int, total: int, cell, words: str) -> None:
        progress(f"[{done}/{total}] {cell.arch} {cell.widths} M={cell.m}: {words}")

    summaries = []
    for kind, these in (("timing", cells), ("accuracy", drift_cells)):
        summary = run_sweep(
            these,
            run_dir(folder, kind),
            measure=[kind],
            progress=told,
            time_limit_s=options.cell_limit_s,
        )
        summaries.append(str(summary))
    runs = _run_notebooks(options, asked, folder, progress)
    report = Report(folder, _status(runs, folder), runs, "; ".join(summaries))
    for arch in asked:
        for model in options.models:
            report.verdicts[f"{arch} · {model}"] = _sentences(options, folder, arch, model)
    _write(report, options, time.monotonic() - begun)
    return report


def run_dir(folder: Path, kind: str) -> Path:
    """Where a report's rows of one kind are; the folder's name makes the run's id its own."""
    return folder / f"{folder.name}-{kind}"


def _cells(options: Options, asked: tuple[str, ...], batches: tuple[int, ...] = ()) -> list:
    named = [m for m in options.models if "+" not in m]
    return grid.expand(
        archs=asked,
        models=named,
        hidden=[m for m in options.models if m not in named],
        batches=batches or options.batches,
        dtypes=[options.dtype],
        budget_s=options.budget_s,
        seed=options.seed,
    )


def _run_notebooks(
    options: Options, asked: tuple[str, ...], folder: Path, progress: Callable[[str], None]
) -> list[runbook.NotebookRun]:
    """Each notebook once per arch and model, ``jobs`` at a time; nothing in them is timed."""
    orders = []
    for name in options.notebooks:
        source = runbook.notebooks_dir() / f"{name}.ipynb"
        declared = runbook.declared_parameters(source)
        for arch in asked:
            for model in options.models:
                given = {"arch": arch, "model": model, "dtype": options.dtype}
                given |= {"policy": options.policy, "seed": options.seed}
                kind = "accuracy" if "drift" in name else "timing"
                given |= {"run_dir": str(run_dir(folder, kind).resolve())}
                batches = options.drift_batches if kind == "accuracy" else options.batches
                given |= {"batches": list(batches)}
                given = {k: v for k, v in given.items() if k in declared}
                target = folder / f"{name}-{arch}-{model.replace('+', '_')}.ipynb"
                orders.append((source, target, given))

    def run(order: tuple) -> runbook.NotebookRun:
        done = runbook.run_notebook(
            *order, cell_limit_s=options.cell_limit_s, run_limit_s=options.run_limit_s
        )
        words = done.status + (f": {done.reason}" if done.reason else "")
        progress(f"{order[1].stem}: {words} ({done.seconds:.1f} s)")
        return done

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(run, orders))


def _status(runs: list[runbook.NotebookRun], folder: Path) -> str:
    """The gravest status among notebooks and cells; ``ok`` only if every cell has its part."""
    found = {r.status for r in runs}
    for kind in ("timing", "accuracy"):
        record = store.show_run(run_dir(folder, kind))
        if record["status"] not in ("ok", "failed"):
            found.add("incomplete")
        frame = store.read_rows(run_dir(folder, kind), kind)
        states = set(frame["status"])
        found |= {"failed"} if states & {"failed", "wrong", "oom"} else set()
        found |= {"killed"} if "killed" in states else set()
        found |= {"timed out"} if "timeout" in states else set()
        if set(record["cell_ids"]) - set(frame["cell_id"]):
            found.add("incomplete")
    return next((s for s in GRAVITY if s in found), "ok")


def _sentences(options: Options, folder: Path, arch: str, model: str) -> list[str]:
    where = {"arch": arch, "model": model, "dtype": options.dtype, "seed": options.seed}
    found = {}
    for kind, batches in (("timing", options.batches), ("accuracy", options.drift_batches)):
        of_kind = str(run_dir(folder, kind))
        found[kind] = chapters.rows(kind, of_kind, batches=list(batches), **where)
    return [
        *chapters.speed_verdict(found["timing"], arch),
        *chapters.drift_verdict(found["accuracy"], arch),
    ]


# ---- the folder


def environment_rows(folder: Path) -> list[dict]:
    """The environment of the measurements, by allow-list: versions and device names only."""
    env = store.show_run(run_dir(folder, "timing")).get("environment") or {}
    rows = [{"what": "mlakit", "version": __version__}]
    rows.append({"what": "python", "version": env.get("python", platform.python_version())})
    for name, device in env.get("devices", {}).items():
        rows.append({"what": name, "version": f"{device['device']} ({device['arch_raw']})"})
        rows += [
            {"what": f"{name}: {what}", "version": device[key]}
            for what, key in (("torch", "torch"), ("triton", "triton"), ("driver", "driver"))
            if device.get(key)
        ]
        rows.append(
            {"what": "source revision", "version": device.get("git_sha") or "not a checkout"}
        )
    return rows


def _footer(options: Options) -> str:
    folder = runbook.notebooks_dir()
    hashes = [
        f"{name} {sha256((folder / f'{name}.ipynb').read_bytes()).hexdigest()[:12]}"
        for name in options.notebooks
    ]
    return f"mlakit {__version__} · {store.now()} · notebooks by content: {', '.join(hashes)}"


def _write(report: Report, options: Options, seconds: float) -> None:
    footer = _footer(options)
    pages = {}
    for run in report.runs:
        stem = f"{run.name}-{run.parameters['arch']}-{run.parameters['model'].replace('+', '_')}"
        text = page.notebook_page(report.folder / f"{stem}.ipynb", run, footer)
        (report.folder / f"{stem}.html").write_text(scrub.text(text), encoding="utf-8")
        pages[f"{stem}.html"] = run
    summary = {
        "status": report.status,
        "exit_code": int(report.exit_code),
        "seconds": round(seconds, 1),
        "mlakit": __version__,
        "options": asdict(options),
        "sweep": report.sweep,
        "verdicts": report.verdicts,
        "runs": [
            {k: v for k, v in asdict(r).items() if k != "parameters"}
            | {"arch": r.parameters["arch"], "model": r.parameters["model"], "page": p}
            for p, r in pages.items()
        ],
        "figures": sum(r.figures for r in report.runs),
    }
    text = json.dumps(scrub.values(summary), indent=1)
    (report.folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    (report.folder / "summary.md").write_text(_markdown(summary), encoding="utf-8")
    body = _index(report, pages, seconds)
    text = page.page("mlakit report", body, footer)
    report.index.write_text(scrub.text(text), encoding="utf-8")


def _index(report: Report, pages: dict[str, runbook.NotebookRun], seconds: float) -> str:
    """Verdict first, then what could not be judged, the pages, and the environment."""
    kind = "ok" if report.status == "ok" else "bad"
    out = ["<h1>QK RMSNorm of MLA: which path, how fast, how far it drifts</h1>"]
    out.append('<div class="verdict">')
    failed = [r for r in report.runs if r.status != "ok"]
    out.append(f'<p class="{kind}"><strong>{html.escape(report.status)}</strong>')
    out.append(f" · {len(pages)} notebooks, {len(failed)} not ok · {seconds:.0f} s</p>")
    for run in failed:
        given = ", ".join(f"{k}={v!r}" for k, v in run.parameters.items() if k != "run_dir")
        text = f"{run.name} ({given}): {run.status}: {run.reason}"
        out.append(f'<p class="bad">{html.escape(text)}</p>')
    for name, sentences in report.verdicts.items():
        out.append(f"<h2>{html.escape(name)}</h2><ul>")
        out += [f"<li>{html.escape(s)}</li>" for s in sentences]
        out.append("</ul>")
    out.append("</div><h2>Pages</h2>")
    out.append('<div class="scroll"><table><caption>A page per notebook run</caption><thead><tr>')
    out += [
        f'<th scope="col">{h}</th>' for h in ("page", "arch", "model", "status", "figures", "s")
    ]
    out.append("</tr></thead><tbody>")
    for name, run in pages.items():
        cells = [run.parameters["arch"], run.parameters["model"], run.status]
        row = f'<td><a href="{html.escape(name)}">{html.escape(run.name)}</a></td>'
        row += "".join(f'<td class="text">{html.escape(c)}</td>' for c in cells)
        out.append(f"<tr>{row}<td>{run.figures}</td><td>{run.seconds:.1f}</td></tr>")
    out.append("</tbody></table></div>")
    unjudged = _unjudged(report.folder)
    if len(unjudged):
        out.append("<h2>What could not be judged, and why</h2>")
        out.append(page.table(unjudged, "Cells without a figure"))
    out.append("<h2>Environment of the measurements</h2>")
    out.append(page.table(pd.DataFrame(environment_rows(report.folder)), "Versions and devices"))
    out.append(f"<p>{html.escape(report.sweep)}</p>")
    out.append(
        "<p>The measurements (Parquet) and every raw sample are in this folder's "
        "<code>*-timing</code> and <code>*-accuracy</code>; "
        '<a href="summary.json">summary.json</a> and <a href="summary.md">summary.md</a> say the '
        "same to machines.</p>"
    )
    return "".join(out)


def _unjudged(folder: Path) -> pd.DataFrame:
    frames = []
    for kind in ("timing", "accuracy"):
        frame = store.read_rows(run_dir(folder, kind), kind)
        for arch, part in frame.groupby("arch", sort=False):
            rest = chapters.not_run(part)
            rest.insert(0, "kind", kind)
            rest.insert(0, "arch", arch)
            frames.append(rest)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _markdown(summary: dict) -> str:
    lines = [f"# mlakit report: {summary['status']}", ""]
    for name, sentences in summary["verdicts"].items():
        lines += [f"## {name}", "", *(f"- {s}" for s in sentences), ""]
    lines += ["| page | arch | model | status |", "|---|---|---|---|"]
    for run in summary["runs"]:
        lines.append(
            f"| [{run['name']}]({run['page']}) | {run['arch']} | {run['model']} | {run['status']} |"
        )
    return scrub.text("\n".join(lines) + "\n")
