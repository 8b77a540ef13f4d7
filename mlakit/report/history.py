"""A page of all runs below a folder: each against one pinned baseline, gaps and regressions shown.

A run is a report's folder (``summary.json``) or a sweep's (``run.json``). What has no figure (a
run that failed, was killed, or shares no cell with the baseline) keeps its place in the page.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from mlakit import __version__, plots
from mlakit.errors import ExitCode, MisuseError
from mlakit.report import page, scrub
from mlakit.report.compare import Change, Comparison, compare
from mlakit.sweep import store
from mlakit.widgets import picture

PIN = "baseline.txt"
"""The file below the root that names the pinned run."""


@dataclass(frozen=True)
class Entry:
    """One run's place in the history; ``comparison`` is None where ``note`` says why."""

    name: str
    started_at: str
    status: str
    rows_in: Path
    is_report: bool
    comparison: Comparison | None = None
    note: str = ""

    @property
    def exit_code(self) -> ExitCode | None:
        """The comparison's code; None where there is none."""
        return self.comparison.exit_code if self.comparison else None


def pin(root: str | Path, run: str) -> Path:
    """Make ``run`` the baseline of every later history of ``root``.

    Raises:
        MisuseError: no such run below ``root``.
    """
    known = [e.name for e in entries(root)]
    if run not in known:
        raise MisuseError(f"no run {run!r} in {root}: there are {', '.join(known) or 'none'}")
    file = Path(root) / PIN
    file.write_text(run + "\n", encoding="utf-8")
    return file


def entries(root: str | Path = "runs") -> list[Entry]:
    """Every run and report below ``root``, oldest first, not yet compared; none is left out."""
    found = []
    for folder in sorted(p for p in Path(root).glob("*") if p.is_dir()):
        inner = folder / f"{folder.name}-timing"
        rows_in = folder if (folder / "run.json").exists() else inner
        summary = folder / "summary.json"
        if not (summary.exists() or (rows_in / "run.json").exists()):
            continue
        started, status = "", "incomplete"
        try:
            record = store.show_run(rows_in)
            started, status = record["started_at"], record["status"]
            if summary.exists():
                status = json.loads(summary.read_text(encoding="utf-8"))["status"]
            elif rows_in == inner:
                status = "incomplete"
        except (MisuseError, ValueError, KeyError):
            status = "unreadable"
        found.append(Entry(folder.name, started, status, rows_in, rows_in == inner))
    return sorted(found, key=lambda e: e.started_at or e.name)


def history(root: str | Path = "runs", baseline: str = "", smallest: float = 0.03) -> list[Entry]:
    """Every run below ``root`` against the baseline: the one named, pinned, or the oldest ``ok``.

    Raises:
        MisuseError: no run there, no usable baseline, or ``smallest`` is no share.
    """
    runs = entries(root)
    base = _baseline(root, runs, baseline)
    done = []
    for e in runs:
        try:
            found, note = compare(base.rows_in, e.rows_in, smallest=smallest), ""
            if not found.changes:
                found, note = None, "no cell of it has samples to compare"
        except (MisuseError, FileNotFoundError) as error:
            found, note = None, scrub.text(str(error))
        note = note or ("the baseline" if e.name == base.name else "")
        done.append(Entry(e.name, e.started_at, e.status, e.rows_in, e.is_report, found, note))
    return done


def _baseline(root: str | Path, runs: list[Entry], asked: str) -> Entry:
    if not runs:
        raise MisuseError(f"no runs in {root}: `mlakit report` or `mlakit sweep` makes one")
    file = Path(root) / PIN
    name = asked or (file.read_text(encoding="utf-8").strip() if file.exists() else "")
    if name:
        for e in runs:
            if e.name == name:
                return e
        raise MisuseError(f"baseline {name!r} is no run in {root}: pin another, or name one")
    for e in runs:
        if e.status == "ok":
            return e
    raise MisuseError(f"no run in {root} is ok, so none can be the baseline: name one")


def trend_frame(found: list[Entry]) -> pd.DataFrame:
    """What ``plots.trend`` draws: at, ratio, lo, hi, status; NaN where a run has no figure."""
    rows = []
    for e in found:
        mean = e.comparison.geometric_mean if e.comparison else None
        values = (mean.value, mean.lo, mean.hi) if mean else (float("nan"),) * 3
        rows.append([e.started_at, *values, e.status])
    frame = pd.DataFrame(rows, columns=["at", "ratio", "lo", "hi", "status"])
    # A run too damaged to have a start time stands where its neighbour stood.
    frame["at"] = pd.to_datetime(frame["at"].replace("", None)).ffill().bfill()
    return frame


def write(
    root: str | Path = "runs", baseline: str = "", out: str | Path = "", smallest: float = 0.03
) -> Path:
    """Write the page, ``history.html`` below ``root`` unless ``out`` names a file; its path.

    Raises:
        MisuseError: as ``history``.
    """
    found = history(root, baseline, smallest)
    base = _baseline(root, entries(root), baseline)
    target = Path(out or Path(root) / "history.html")
    pinned = "" if baseline or (Path(root) / PIN).exists() else " (not pinned: the oldest ok run)"
    body = [f"<h1>Runs against {html.escape(base.name)}{pinned}</h1>", _verdict(found)]
    said = f"Geometric mean of time ratios of {len(found)} runs against {base.name}, by start"
    body.append(f"<p>{picture(plots.trend(trend_frame(found)), said)}</p>")
    body.append(_runs_table(found))
    body += [_changes_of(e) for e in reversed(found)]
    text = page.page("mlakit history", "".join(body), f"mlakit {__version__} · {store.now()}")
    target.write_text(scrub.text(text), encoding="utf-8")
    return target


def _verdict(found: list[Entry]) -> str:
    last, gaps = found[-1], [e.name for e in found if e.comparison is None]
    if last.comparison is None:
        kind, said = "warn", f"the last run, {last.name}, has no figure: {last.note}"
    else:
        counts = ", ".join(f"{n} {v}" for v, n in last.comparison.counts.items())
        kind = "bad" if last.exit_code == ExitCode.REGRESSION else "ok"
        said = f"the last run, {last.name}: {counts}"
    rest = f"{len(gaps)} of {len(found)} runs have no figure" if gaps else "every run has a figure"
    said = f'<p class="{kind}"><strong>{html.escape(said)}</strong></p>'
    return f'<div class="verdict">{said}<p>{rest}.</p></div>'


def _runs_table(found: list[Entry]) -> str:
    head = "run|start (UTC)|status|time / baseline (95 %)|slower|faster|uncertain|missing|note"
    rows = []
    for e in reversed(found):
        c, mean = e.comparison, e.comparison.geometric_mean if e.comparison else None
        ratio = f"{mean.value:.4f} ({mean.lo:.4f} to {mean.hi:.4f})" if mean else "no figure"
        counts = [c.counts[v] for v in ("slower", "faster", "uncertain")] if c else ["–"] * 3
        slower = (
            f'<a href="#{html.escape(e.name)}">{counts[0]}</a>' if c and counts[0] else counts[0]
        )
        link = f"{e.name}/index.html" if (e.rows_in.parent / "index.html").exists() else ""
        name = f'<a href="{html.escape(link)}">{html.escape(e.name)}</a>' if link else e.name
        rest = [len(c.missing) + len(c.broken) if c else "–", html.escape(e.note)]
        rows.append([name, e.started_at or "unknown", e.status, ratio, slower, *counts[1:], *rest])
    return _table("Newest first", head.split("|"), rows)


def _changes_of(e: Entry) -> str:
    changes = [c for c in e.comparison.changes if c.verdict == "slower"] if e.comparison else []
    broken = e.comparison.broken if e.comparison else []
    if not changes and not broken:
        return ""
    rows = []
    for c in sorted(changes, key=lambda c: -c.ratio):
        at = f"{c.cell['q_lora_rank']}+{c.cell['kv_lora_rank']} M={c.cell['m']} {c.cell['dtype']}"
        link = _page_of(e, c)
        cell = f'<a href="{html.escape(link)}">{html.escape(at)}</a>' if link else html.escape(at)
        times = f"{c.a_us:.4g}", f"{c.b_us:.4g}", f"{c.ratio:.3f} ({c.lo:.3f} to {c.hi:.3f})"
        rows.append([cell, html.escape(f"{c.cell['arch']} {c.cell['clock']}"), c.path, *times])
    head = ["cell", "arch, clock", "path", "baseline us", "here us", "ratio (95 %)"]
    out = f'<h2 id="{html.escape(e.name)}">Slower in {html.escape(e.name)}</h2>'
    out += _table("Cells that became slower", head, rows) if rows else ""
    return out + "".join(f'<p class="bad">Now wrong: {html.escape(b)}</p>' for b in broken)


def _page_of(e: Entry, change: Change) -> str:
    """The report's page on the speed of the cell's arch, relative to the history."""
    pages = sorted(e.rows_in.parent.glob(f"02_speed-{change.cell['arch']}-*.html"))
    return f"{e.name}/{pages[0].name}" if e.is_report and pages else ""


def _table(caption: str, head: list[str], rows: list[list]) -> str:
    """A table whose cells are HTML already."""
    top = "".join(f'<th scope="col" class="text">{html.escape(h)}</th>' for h in head)
    lines = "".join(
        "<tr>" + "".join(f'<td class="text">{cell}</td>' for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )
