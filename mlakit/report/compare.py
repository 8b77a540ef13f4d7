"""Verdicts: whether each path of each cell became faster or slower between two runs.

Two runs of the same code differ by more than their samples show: the machine moved (clocks,
neighbours, memory layout). So a change is looked at in two *views*, and both must show it:

* *session*: the change of the median, less the session's shift, which is the median change of the
  same-traffic copies of all cells (a copy never changes, so what moved it was the machine);
* *copy*: the change of the paired median ratio of path to copy, taken round by round in the same
  cell: what slowed a whole cell cancels.

Each view's error has two parts: a block bootstrap of the samples, whose blocks of a tenth of the
run let drift inside it count; and the spread between runs, the largest of 0.5 %, of 0.6 times the
spread within the runs (what varies within a run varies between runs), and of the spread of all
changes in this comparison, read off their tightest 40 % so that a change in half of the rows does
not widen it. So a noisy machine answers ``uncertain``. The view with the smaller error gives the
estimate. Faster or slower needs all of these: the p-value,
Holm-corrected over all rows, under 0.05; the estimate at least the smallest effect of interest;
the other view, and the plain medians (a copy that itself got faster must accuse nobody), at least
half of it in the same direction. ``same`` needs both 95 % intervals inside the smallest effect.
The rest is ``uncertain``, and so is a row whose flags say that others used what was timed. Holm,
not Benjamini-Hochberg: this is a gate, and one false alarm in thousands of cells is too many.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import norm

from mlakit.errors import ExitCode, MisuseError
from mlakit.records import CONTROLS
from mlakit.sweep import parquet, store
from mlakit.timing import stats

_KEY = (
    "device arch q_lora_rank kv_lora_rank m dtype quant layout clock cache path_requested"
).split()
_ENVIRONMENT = "torch triton driver mlakit git_sha".split()
_MIN_SAMPLES = 20
"""fewer on either side leave a row uncertain"""
_BETWEEN_RUNS = 0.005
"""least spread between two runs of the same code, as a share"""
_OF_WITHIN = 0.6
"""spread between two runs as a share of the spread within them: the root mean square over the 40
lanes of a live A/A on a busy 2-core machine was 0.61 (largest 1.35); by the copy view 0.36"""
ALPHA, Z95 = 0.05, 1.96
_VERDICTS = ("slower", "faster", "uncertain", "same")


@dataclass(frozen=True)
class Source:
    """Rows of ``records.TIMING_COLUMNS`` and raw samples by (cell_id, path)."""

    name: str
    rows: pd.DataFrame
    samples_us: Mapping[tuple[str, str], np.ndarray]


def load(source: Source | str | Path) -> Source:
    """A run's folder, or a file that ``mlakit record`` wrote, with the samples beside it.

    Raises:
        MisuseError: nothing there, or no samples of it.
    """
    if isinstance(source, Source):
        return source
    path = Path(source)
    inner = store.report_run(path)
    path = inner if (inner / "run.json").is_file() else path
    rows = store.read_rows(path)
    if path.is_file():
        beside = path.with_name(f"{path.stem}-samples.parquet")
        if not beside.exists():
            raise MisuseError(f"no samples beside {path.name}: {beside.name} is wanted")
        frame = parquet.read_file(beside, [], keep=True).to_pandas()
    else:
        frame = store.read_samples(path)
    if not {"cell_id", "path", "us"} <= set(frame.columns):
        raise MisuseError(f"no samples beside {path.name}: its columns are others")
    groups = frame.groupby(["cell_id", "path"], sort=False)["us"]
    return Source(path.name, rows, {key: us.to_numpy() for key, us in groups})


@dataclass(frozen=True)
class Change:
    """One path of one cell. ``ratio`` is B's time over A's: above 1, B is slower."""

    cell: dict
    path: str
    a_us: float
    b_us: float
    ratio: float
    lo: float
    hi: float
    view: str
    p_holm: float
    verdict: str
    note: str = ""


@dataclass
class Comparison:
    """B against A; ``pinned`` is B against the pinned baseline, where one was given."""

    a: str
    b: str
    smallest: float
    changes: list[Change]
    missing: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    shift: float = 0.0
    """the session's shift, as a share: how much the copies of B were slower than A's"""
    environment: list[str] = field(default_factory=list)
    pinned: Comparison | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Rows by verdict."""
        found = Counter(c.verdict for c in self.changes)
        return {v: found[v] for v in _VERDICTS}

    @property
    def geometric_mean(self) -> stats.Interval | None:
        """Geometric mean of the time ratios of all rows, with a bootstrap interval over rows."""
        if not self.changes:
            return None
        logs = np.log([c.ratio for c in self.changes])
        picks = np.random.default_rng(0).integers(0, len(logs), (1000, len(logs)))
        lo, hi = np.percentile(logs[picks].mean(1), (2.5, 97.5))
        return stats.Interval(float(np.exp(logs.mean())), float(np.exp(lo)), float(np.exp(hi)))

    @property
    def exit_code(self) -> ExitCode:
        """REGRESSION if anything is slower or now wrong, else INCOMPLETE if anything is missing."""
        both = [self] + ([self.pinned] if self.pinned else [])
        if any(c.broken or c.counts["slower"] for c in both):
            return ExitCode.REGRESSION
        return ExitCode.INCOMPLETE if any(c.missing for c in both) else ExitCode.OK

    def to_json(self) -> str:
        """Everything, as JSON text."""
        return json.dumps(self._as_dict(), indent=1)

    def _as_dict(self) -> dict:
        mean, pinned = self.geometric_mean, self.pinned and self.pinned._as_dict()
        told = {"correction": "holm", "exit_code": int(self.exit_code), "counts": self.counts}
        told |= {"geometric_mean": asdict(mean) if mean else None, "pinned": pinned}
        return asdict(self) | told

    def to_markdown(self, *, most: int = 40) -> str:
        """For a pull request: counts, the mean, and the rows that are not the same."""
        parts = [f"### {self.b} against {self.a}", "", *self._summary(), ""]
        shown = sorted(
            (c for c in self.changes if c.verdict != "same"),
            key=lambda c: (_VERDICTS.index(c.verdict), -abs(math.log(c.ratio))),
        )
        if shown:
            parts += ["| cell | path | A us | B us | B / A | 95 % | verdict |", "|---" * 7 + "|"]
            parts += [_line(c) for c in shown[:most]]
        if len(shown) > most:
            parts += ["", f"and {len(shown) - most} more rows."]
        for title, names in (("Now wrong", self.broken), ("Missing from B", self.missing)):
            if names:
                parts += ["", f"{title} ({len(names)}):", *(f"- {n}" for n in names[:most])]
        # Markdown renders HTML, and names are anybody's.
        text = "\n".join(parts).replace("<", "\\<")
        return text + (f"\n\n{self.pinned.to_markdown(most=most)}" if self.pinned else "")

    def _summary(self) -> list[str]:
        counts = ", ".join(f"{n} {v}" for v, n in self.counts.items())
        lines = [f"{len(self.changes)} rows: {counts}. Smallest effect {self.smallest:.1%}, Holm."]
        mean = self.geometric_mean
        if mean:
            lines.append(
                f"Geometric mean of B / A: {mean.value:.4f} ({mean.lo:.4f} to {mean.hi:.4f}); "
                f"the machine itself moved by {self.shift:+.1%}."
            )
        return lines + [f"Differs: {text}." for text in self.environment]


def _line(c: Change) -> str:
    figures = f"{c.a_us:.4g} | {c.b_us:.4g} | {c.ratio:.3f} | {c.lo:.3f} to {c.hi:.3f}"
    return f"| {label(c.cell)} | {c.path} | {figures} | {c.verdict}{c.note} |"


def label(cell: Mapping) -> str:
    """A cell in words: widths, M, dtype, layout, clock and cache."""
    text = f"{cell['q_lora_rank']}+{cell['kv_lora_rank']} M={cell['m']} {cell['dtype']}"
    if cell["quant"] != "none":
        text += f" {cell['quant']}"
    return f"{text} {cell['layout']} {cell['clock']} {cell['cache']}"


def compare(
    a: Source | str | Path,
    b: Source | str | Path,
    *,
    smallest: float = 0.03,
    baseline: Source | str | Path | None = None,
) -> Comparison:
    """B against A, and against a pinned ``baseline``, so that a slow creep is seen too.

    Rows are matched by device, widths, M, dtype, quant, layout, clock, cache and path; repeats of
    a cell in order. Only ``ok`` rows have a verdict; controls have none.

    Raises:
        MisuseError: ``smallest`` is no share, or the two have no cell of one device in common.
    """
    if not 0 < smallest < 1:
        raise MisuseError(f"smallest effect {smallest!r}: give a share such as 0.03 for 3 %")
    a, b = load(a), load(b)
    result = _compare(a, b, smallest)
    if baseline is not None:
        result.pinned = _compare(load(baseline), b, smallest)
    return result


def _indexed(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows[~rows.path_requested.isin(CONTROLS)].sort_values("cell_id", kind="stable")
    repeat = rows.groupby(_KEY, dropna=False).cumcount()
    return rows.assign(repeat=repeat).set_index([*_KEY, "repeat"])


def _compare(a: Source, b: Source, smallest: float) -> Comparison:
    rows_a, rows_b = _indexed(a.rows), _indexed(b.rows)
    if not len(rows_a.index.intersection(rows_b.index)):
        devices = [sorted(set(s.rows.device.dropna())) for s in (a, b)]
        raise MisuseError(
            f"{a.name} (of {devices[0]}) and {b.name} (of {devices[1]}) have no cell in common: "
            "compare two runs of the same cells on the same device"
        )
    result = Comparison(a.name, b.name, smallest, [], environment=_differences(a, b))
    found = []
    for key, row in rows_a[rows_a.status == "ok"].iterrows():
        cell = dict(zip([*_KEY, "repeat"], key, strict=True))
        name = f"{label(cell)} {cell['path_requested']}"
        if key not in rows_b.index:
            result.missing.append(name)
            continue
        other = rows_b.loc[key]
        pair = [_samples(s, r) for s, r in ((a, row), (b, other))]
        if other.status in ("wrong", "implausible"):
            result.broken.append(f"{name}: {other.status}, {_reason(other, 'no reason kept')}")
        elif other.status != "ok" or not all(p is not None for p in pair):
            result.missing.append(f"{name}: {_reason(other, 'no samples')}")
        elif row.path_ran != other.path_ran:
            result.missing.append(f"{name}: {row.path_ran} ran in A, {other.path_ran} in B")
        else:
            found.append((cell, row.cell_id, *pair, _doubt(pair, row, other)))
    result.shift, result.changes = _verdicts(found, smallest)
    return result


def _reason(row, otherwise: str) -> str:
    """A row's reason; pandas holds an absent one as NaN, which is true."""
    return row.reason if isinstance(row.reason, str) and row.reason else otherwise


def _doubt(pair: list, *rows) -> str:
    """Why the samples bear no verdict, empty where they do: too few, or others were at work."""
    if min(len(us) for us, _ in pair) < _MIN_SAMPLES:
        return f" (under {_MIN_SAMPLES} samples)"
    flags = " ".join(str(row["flags"]) for row in rows)
    host_timed = rows[0].name[_KEY.index("clock")] in ("cpu", "eager")
    busy = "foreign-process" in flags or (host_timed and "busy-host" in flags)
    return " (the machine was busy)" if busy else ""


def _differences(a: Source, b: Source) -> list[str]:
    texts = []
    for column in _ENVIRONMENT:
        values = [sorted({str(v) for v in s.rows[column].dropna()}) for s in (a, b)]
        if values[0] != values[1]:
            texts.append(f"{column} {', '.join(values[0])} -> {', '.join(values[1])}")
    return texts


def _samples(source: Source, row) -> tuple[np.ndarray, np.ndarray | None] | None:
    """A path's samples, and those of the copy in the same rounds."""
    path = source.samples_us.get((row.cell_id, row.name[_KEY.index("path_requested")]))
    copy = source.samples_us.get((row.cell_id, CONTROLS[0]))
    if path is None or not len(path):
        return None
    paired = copy is not None and len(copy) == len(path)
    return np.asarray(path), np.asarray(copy) if paired else None


def _verdicts(found: list[tuple], smallest: float) -> tuple[float, list[Change]]:
    if not found:
        return 0.0, []
    plain = np.array([_change(a[0], b[0]) for _, _, a, b, _ in found])
    copies, relative = {}, np.full_like(plain, np.nan)
    for i, (_, cell_id, (a_us, a_copy), (b_us, b_copy), _) in enumerate(found):
        if a_copy is not None and b_copy is not None:
            copies[cell_id] = float(np.log(np.median(b_copy) / np.median(a_copy)))
            relative[i] = _change(a_us / a_copy, b_us / b_copy)
    shift = float(np.median(list(copies.values()))) if copies else 0.0
    session = _with_spread(plain[:, 0] - shift, *plain[:, 1:].T)
    copy = _with_spread(*relative.T)
    copy = np.where(np.isfinite(copy), copy, session)
    by_copy = copy[1] < session[1]
    main, other = np.where(by_copy, (copy, session), (session, copy))
    p_holm = stats.holm(2 * norm.sf(np.abs(main[0]) / main[1]))
    changes = []
    for i, (cell, _, (a_us, _), (b_us, _), doubt) in enumerate(found):
        verdict = _verdict(main[:, i], other[:, i], plain[i, 0], p_holm[i], smallest)
        ratio, lo, hi = map(float, np.exp(main[0, i] + np.array([0, -Z95, Z95]) * main[1, i]))
        before, after = float(np.median(a_us)), float(np.median(b_us))
        told: dict = {"view": "copy" if by_copy[i] else "session", "p_holm": float(p_holm[i])}
        told |= {"verdict": "uncertain" if doubt else verdict, "note": doubt}
        changes.append(Change(cell, cell["path_requested"], before, after, ratio, lo, hi, **told))
    return math.expm1(shift), changes


def _change(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """log(median b / median a), its bootstrap error, and the spread expected between two runs."""
    scaled = [np.log(x / np.median(x)) for x in (a, b)]
    within = 1.4826 * math.hypot(*(np.median(np.abs(x)) for x in scaled)) / math.sqrt(2)
    return *stats.log_change(a, b), _OF_WITHIN * within


def _with_spread(change: np.ndarray, error: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """A view: (2, rows), the changes and their errors with the spread between runs included."""
    known = np.isfinite(change)
    seen = _BETWEEN_RUNS
    if known.sum() >= 8:
        own = np.median(error[known] ** 2)
        seen = math.sqrt(max(_BETWEEN_RUNS**2, _tight_spread(change[known]) ** 2 - own))
    return np.array([change, np.sqrt(error**2 + np.maximum(seen, expected) ** 2)])


def _tight_spread(values: np.ndarray) -> float:
    """Standard deviation of a Gaussian whose tightest 40 % is as wide as the tightest 40 % here.

    40 and not 50, so that a change in exactly half of the rows leaves a whole cluster to read.
    """
    ordered = np.sort(values)
    part = max(2, int(0.4 * len(ordered)))
    width = float(np.min(ordered[part - 1 :] - ordered[: len(ordered) - part + 1]))
    return width / (2 * norm.ppf(0.7))


def _verdict(main, other, plain: float, p_holm: float, smallest: float) -> str:
    least = math.log1p(smallest)
    direction = math.copysign(1, main[0])
    agreed = min(direction * other[0], direction * plain) >= least / 2
    if p_holm < ALPHA and abs(main[0]) >= least and agreed:
        return "slower" if direction > 0 else "faster"
    inside = all(abs(x) + Z95 * se <= least for x, se in (main, other))
    return "same" if inside else "uncertain"
