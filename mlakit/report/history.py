"""A page of all runs below a folder: each against one pinned baseline, gaps and regressions shown.

A run is a report's folder (``summary.json``) or a sweep's (``run.json``). What has no figure (a
run that failed, was killed, or shares no cell with the baseline) keeps its place in the page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from mlakit import __version__, plots
from mlakit.datafiles import read_json
from mlakit.errors import ExitCode, MisuseError
from mlakit.report import page, scrub, show
from mlakit.report.compare import Change, Comparison, compare, label
from mlakit.sweep import store


@dataclass(frozen=True)
class Entry:
    """One run's place in the history; ``comparison`` is None where ``note`` says why."""

    name: str
    started_at: str
    """in UTC; empty where neither its record nor its name says it"""
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
    file = Path(root) / store.PIN
    file.write_text(run + "\n", encoding="utf-8")
    return file


def entries(root: str | Path = "runs") -> list[Entry]:
    """Every run and report below ``root``, oldest first, not yet compared; none is left out."""
    found = []
    for folder, rows_in in store.runs_below(root):
        summary, started = folder / "summary.json", store.start_of(rows_in)
        try:
            status = store.show_run(rows_in)["status"]
            if summary.exists():
                status = str(read_json(summary)["status"])
            elif rows_in != folder:
                status = "incomplete"
        except (MisuseError, KeyError, TypeError):
            status = "unreadable"
        found.append(Entry(folder.name, started, status, rows_in, rows_in != folder))
    return found


def history(root: str | Path = "runs", baseline: str = "") -> list[Entry]:
    """Every run below ``root`` against the baseline: the one named, pinned, or the oldest ``ok``.

    Raises:
        MisuseError: no run there, or no usable baseline.
    """
    runs = entries(root)
    base, _ = _baseline(root, runs, baseline)
    done = []
    for e in runs:
        note = "the baseline" if e.name == base.name else ""
        try:
            found = compare(base.rows_in, e.rows_in)
            known = found if found.changes else None
            note = note if known else "no cell of it has samples to compare"
        except (MisuseError, FileNotFoundError) as error:
            known, note = None, scrub.text(str(error))
        if not e.started_at:
            note = "; ".join(filter(None, [note, "when it began is not known: not in the trend"]))
        done.append(replace(e, comparison=known, note=note))
    return done


def _baseline(root: str | Path, runs: list[Entry], asked: str) -> tuple[Entry, bool]:
    """The run to compare with, and whether somebody chose it (named it, or pinned it)."""
    if not runs:
        raise MisuseError(f"no runs in {root}: `mlakit report` or `mlakit sweep` makes one")
    name = asked or store.pinned(root)
    if name:
        for e in runs:
            if e.name == name:
                return e, True
        raise MisuseError(f"baseline {name!r} is no run in {root}: pin another, or name one")
    for e in runs:
        if e.status == "ok" and e.started_at:
            return e, False
    raise MisuseError(
        f"no run in {root} is ok and has a start, so none can be the baseline: name one"
    )


@dataclass(frozen=True)
class Since:
    """A new run against its root's baseline; ``comparison`` is None where there is none."""

    sentences: list[str]
    pinned: bool = False
    comparison: Comparison | None = None

    @property
    def regressed(self) -> bool:
        """Slower or wrong against a baseline that somebody chose."""
        found = self.comparison
        return bool(self.pinned and found and found.exit_code == ExitCode.REGRESSION)


def since(folder: Path, baseline: str = "") -> Since:
    """What changed in the report at ``folder`` since the baseline of the folder above it."""
    root, rows_in = folder.parent, store.report_run(folder)
    try:
        runs = [e for e in entries(root) if e.name != folder.name]
        if not runs and not baseline:
            raise MisuseError("this is the first run here")
        base, pinned = _baseline(root, runs, baseline)
        found = compare(base.rows_in, rows_in)
    except (MisuseError, FileNotFoundError) as error:
        pin = f"Make this run the baseline: mlakit history {root} --pin {folder.name}"
        return Since([f"Nothing is compared: {error}.", pin])
    chosen = "the pinned baseline" if pinned else "the oldest ok run (none is pinned)"
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items())
    said = [f"Against {base.name}, {chosen}: {counts}, of {len(found.changes)} rows compared."]
    slower = sorted((c for c in found.changes if c.verdict == "slower"), key=lambda c: -c.ratio)
    said += [
        f"Slower: {c.path} at {label(c.cell)}: {c.ratio:.3f} times the time "
        f"({c.lo:.3f} to {c.hi:.3f})."
        for c in slower[:10]
    ]
    said += [f"Now wrong: {text}." for text in found.broken]
    said += [f"Differs: {text}." for text in found.environment]
    if found.missing:
        said.append(f"{len(found.missing)} rows of the baseline are not in this run.")
    return Since(said, pinned, found)


def trend_frame(found: list[Entry]) -> pd.DataFrame:
    """What ``plots.trend`` draws: at, ratio, lo, hi, status; NaN where a run has no figure.

    A run whose start is not known has no place in it; its note in the table says so.
    """
    rows = []
    for e in (e for e in found if e.started_at):
        mean = e.comparison.geometric_mean if e.comparison else None
        values = (mean.value, mean.lo, mean.hi) if mean else (float("nan"),) * 3
        rows.append([e.started_at, *values, e.status])
    frame = pd.DataFrame(rows, columns=["at", "ratio", "lo", "hi", "status"])
    frame["at"] = pd.to_datetime(frame["at"], format="ISO8601", utc=True)
    return frame


def write(root: str | Path = "runs", baseline: str = "", out: str | Path = "") -> Path:
    """The page: ``history.html`` below ``root`` unless ``out`` names a file.

    Raises:
        MisuseError: as :func:`history`.
    """
    found = history(root, baseline)
    base, pinned = _baseline(root, entries(root), baseline)
    kind, said = _verdict(found[-1])
    gaps = sum(e.comparison is None for e in found)
    rest = f"{gaps} of {len(found)} runs have no figure" if gaps else "every run has a figure"
    alt = f"Geometric mean of time ratios of {len(found)} runs against {base.name}, by start"
    return page.write(
        Path(out or Path(root) / "history.html"),
        "history.html.j2",
        title="mlakit history",
        footer=f"mlakit {__version__} · {store.now()}",
        base=base.name,
        pinned=pinned,
        kind=kind,
        said=said,
        gaps=rest,
        figure=Markup(show.picture(plots.trend(trend_frame(found)), alt)),
        table=Markup(show.table_html(_runs_frame(found), "Newest first")),
        changes=[c for e in reversed(found) if (c := _changes_of(e))],
    )


def _verdict(last: Entry) -> tuple[str, str]:
    if last.comparison is None:
        return "warn", f"the last run, {last.name}, has no figure: {last.note}"
    counts = ", ".join(f"{n} {v}" for v, n in last.comparison.counts.items())
    kind = "bad" if last.exit_code == ExitCode.REGRESSION else "ok"
    return kind, f"the last run, {last.name}: {counts}"


def _link(target: str, text: object) -> str:
    return Markup('<a href="{}">{}</a>').format(target, text) if target else str(text)


def _runs_frame(found: list[Entry]) -> pd.DataFrame:
    rows = []
    for e in reversed(found):
        c, mean = e.comparison, e.comparison.geometric_mean if e.comparison else None
        ratio = f"{mean.value:.4f} ({mean.lo:.4f} to {mean.hi:.4f})" if mean else "no figure"
        page_of = f"{e.name}/index.html" if (e.rows_in.parent / "index.html").exists() else ""
        row = {"run": _link(page_of, e.name), "start (UTC)": e.started_at or "unknown"}
        row |= {"status": e.status, "time / baseline (95 %)": ratio}
        for verdict in ("slower", "faster", "uncertain"):
            row[verdict] = str(c.counts[verdict]) if c else "–"
        if c and c.counts["slower"]:
            row["slower"] = _link(f"#{e.name}", row["slower"])
        row["missing"] = str(len(c.missing) + len(c.broken)) if c else "–"
        rows.append(row | {"note": e.note})
    return pd.DataFrame(rows, dtype=object)


def _changes_of(e: Entry) -> dict | None:
    """The section of a run that became slower or wrong somewhere: name, table, broken."""
    changes = [c for c in e.comparison.changes if c.verdict == "slower"] if e.comparison else []
    broken = e.comparison.broken if e.comparison else []
    if not changes and not broken:
        return None
    rows = [
        {
            "cell": _link(_page_of(e, c), label(c.cell)),
            "arch": c.cell["arch"],
            "path": c.path,
            "baseline us": f"{c.a_us:.4g}",
            "here us": f"{c.b_us:.4g}",
            "ratio (95 %)": f"{c.ratio:.3f} ({c.lo:.3f} to {c.hi:.3f})",
        }
        for c in sorted(changes, key=lambda c: -c.ratio)
    ]
    frame = pd.DataFrame(rows, dtype=object)
    table = show.table_html(frame, "Cells that became slower") if rows else ""
    return {"name": e.name, "table": Markup(table), "broken": broken}


def _page_of(e: Entry, change: Change) -> str:
    """The report's page on the speed of the cell's arch, relative to the history."""
    pages = sorted(e.rows_in.parent.glob(f"02_speed-{change.cell['arch']}-*.html"))
    return f"{e.name}/{pages[0].name}" if e.is_report and pages else ""
