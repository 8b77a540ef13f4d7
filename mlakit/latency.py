"""The latency model: what a microsecond of this step is made of, on any arch.

A path is a list of launches (``mlakit.launches``). On a GPU a launch costs its own start; the
chain of one program (beginning and end, the reads that wait for one another, a sum exchanged,
addresses); what that chain grows by once the card is busy; and its work: the longer of its bytes
over bandwidth and of the turns that its programs take, since a compute unit holds only so many
threads at once. On a CPU: a start, and bytes or elements over their rates. Launches follow each
other, so a path is their sum. Nothing here is per path.

Parameters and known errors are in ``data/latency.csv`` (made by ``mlakit.sweep.latency_table``); an
arch without a line there borrows latencies and shares of peak from the card that it is most like,
and says so. Evidence is ``modelled``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache

import numpy as np
import pandas as pd

from mlakit import archs, launches
from mlakit.archs import Arch
from mlakit.context import Context
from mlakit.datafiles import data_dir, read_table
from mlakit.errors import MisuseError
from mlakit.launches import KINDS, ONE_LAUNCH, ROW_PAIRS, Launch
from mlakit.paths import registry
from mlakit.shapes import Widths

PARAMETERS = {
    "launch_us": "an empty launch, back to back",
    "program_us": "a program's beginning and end",
    "read_us": "a read of memory that is waited for",
    "reread_us": "the same from a cache",
    "meet_us": "warps exchanging a sum",
    "index_us": "addresses computed from strides",
    "loaded_us": "what a chain grows by on a busy card",
    "half_loaded": "programs a compute unit at which it has grown by half",
    "crowd": "a program's life on a full card, in chains of a lone one",
    "gbps": "memory",
    "cache_gbps": "the last cache",
    **{f"call_us:{kind}": f"one call: {text}" for kind, text in KINDS.items()},
    **{f"rate:{kind}": f"elements a ns and thread: {text}" for kind, text in KINDS.items()},
}
"""What a card's parameters mean. Calls and rates by kind are a CPU's, which has only ``launch_us``
and ``gbps`` beside them; a GPU has the others."""
_SHARPNESS = 4.0
"""Exponent of the smooth maximum of the kinds of work: two that are level overlap badly."""
_CPU_GRAIN = 32768
"""Elements that torch gives a thread at least: ``at::internal::GRAIN_SIZE``."""
_LAUNCH_COLUMNS = tuple(f.name for f in fields(Launch))


def resident_threads(arch: str) -> int:
    """Threads a compute unit holds at once: 2048 on NVIDIA and CDNA, 1024 on RDNA."""
    return 1024 if arch.startswith("gfx1") else 2048


_CHAIN = {"reads": "read_us", "rereads": "reread_us", "meets": "meet_us", "indexed": "index_us"}
"""Fields of a launch that its chain counts, and what each costs."""


def _per_launch(p: Mapping[str, float], units: int, resident: int, x: Mapping) -> dict:
    """Microseconds of each launch by cause; see ``by_cause``."""
    rate = np.array([p.get(f"rate:{k}", np.inf) for k in KINDS])[x["kind"]]
    call_us = np.array([p.get(f"call_us:{k}", p.get("program_us", 0)) for k in KINDS])[x["kind"]]
    chain = (x["programs"] > 0) * call_us
    for count, cost in _CHAIN.items():
        chain = chain + x[count] * p.get(cost, 0)
    half = units * p.get("half_loaded", 1)
    turns = np.maximum(x["programs"] * x["threads"] / (units * resident) - 1, 0)
    shared = np.minimum(units, np.maximum(1, x["elements"] / _CPU_GRAIN))
    bounds = {
        "bandwidth": x["moved"] / p["gbps"] / 1e3
        + x["cached"] / p.get("cache_gbps", p["gbps"]) / 1e3,
        "waves": p.get("crowd", 0) * chain * turns,
        "kernel rate": x["elements"] / rate / shared / 1e3,
    }
    # A cause's part of the smooth maximum is its part of the sum of powers.
    powers = np.maximum(sum(bound**_SHARPNESS for bound in bounds.values()), 1e-300)
    part = powers ** (1 / _SHARPNESS - 1)
    return {
        "launch": p["launch_us"] * x["starts"],
        "chain": chain,
        "loaded": p.get("loaded_us", 0) * x["programs"] / (x["programs"] + half),
    } | {cause: bound**_SHARPNESS * part for cause, bound in bounds.items()}


_WAITS = ("launch", "chain", "loaded")


def by_cause(
    p: Mapping[str, float], units: int, resident: int, made: Mapping[str, np.ndarray], call, calls
) -> dict[str, np.ndarray]:
    """Microseconds of each of ``calls`` calls by cause, from their launches' columns.

    Args:
        p: parameters; one that is missing costs nothing.
        units: compute units, or threads of a CPU.
        resident: threads a compute unit holds at once.
        made: by field of ``Launch``, its value in each launch (``columns_of``).
        call: which call each launch belongs to.
        calls: how many there are.

    Two streams run side by side: what their launches wait for is the longer stream's, and one
    start more, the join; what they work is added.
    """
    each = _per_launch(p, units, resident, made)
    side = np.asarray(made["side"])

    def total(values) -> np.ndarray:
        return np.bincount(call, values, minlength=calls)

    first, second = ({k: total(each[k] * (side == s)) for k in _WAITS} for s in (0, 1))
    longer = sum(second.values()) > sum(first.values())
    found = {k: np.where(longer, second[k], first[k]) for k in _WAITS}
    found["launch"] = found["launch"] + p["launch_us"] * (total(side) > 0)
    return found | {cause: total(us) for cause, us in each.items() if cause not in _WAITS}


def columns_of(made: Iterable[Launch]) -> dict[str, np.ndarray]:
    """Launches as columns, the form ``by_cause`` takes; ``kind`` as its place in ``KINDS``."""
    place = {kind: i for i, kind in enumerate(KINDS)}
    rows = zip(*((place[x.kind], *astuple(x)[1:]) for x in made), strict=True)
    return {name: np.array(column) for name, column in zip(_LAUNCH_COLUMNS, rows, strict=True)}


@dataclass(frozen=True)
class Card:
    """One card's parameters, where they come from, and what was calibrated.

    ``parameters``: microseconds, GB/s, and elements a nanosecond and compute unit.
    """

    arch: str
    device: str
    units: int
    parameters: Mapping[str, float]
    source: str
    ranges: Mapping[str, int]
    """``m_from``, ``m_to``, ``width_from``, ``width_to`` of the calibration; empty: none"""

    def outside(self, widths: Widths, m: int, dtype: str) -> list[str]:
        """What of a call lies outside the calibrated range, in words."""
        if not self.ranges:
            return ["card not calibrated"]
        words = []
        values = [("m", "M", m)]
        values += [("width", "width", w) for w in (widths.q_lora_rank, widths.kv_lora_rank) if w]
        for key, name, value in values:
            low, high = self.ranges[f"{key}_from"], self.ranges[f"{key}_to"]
            if not low <= value <= high:
                words.append(f"{name} {value} outside {low} to {high}")
        return words + (["fp32 was not calibrated"] if dtype == "fp32" else [])


@cache
def _lines() -> tuple[dict, ...]:
    columns = "arch device what path name unit source".split()
    # a damaged line is told by its number here, not where it is used
    read = lambda row: {c: row[c] for c in columns} | {"value": float(row["value"])}  # noqa: E731
    return read_table(data_dir() / "latency.csv", read)


def _of(arch: str, what: str) -> list[dict]:
    return [line for line in _lines() if line["arch"] == arch and line["what"] == what]


@cache
def card(arch: str) -> Card:
    """The parameters for an arch: calibrated, or borrowed and scaled by ``data/archs.csv``.

    Raises:
        MisuseError: unknown arch, or no source gives its compute units or bandwidth.
    """
    arch = archs.check(arch)
    own = _of(arch, "parameter")
    if not own and arch == "cpu":
        raise MisuseError("no model for cpu: data/latency.csv has no line for it; calibrate first")
    if own:
        values = {line["name"]: line["value"] for line in own}
        p = {n: values[n] for n in PARAMETERS if n in values}
        ranges = {n: int(v) for n, v in values.items() if n.endswith(("_from", "_to"))}
        first = own[0]
        return Card(arch, first["device"], int(values["units"]), p, first["source"], ranges)
    return _borrowed(archs.arch(arch))


def _lender(arch: str) -> str:
    """The calibrated arch whose latencies ``arch`` borrows: AMD from gfx950, others from sm_90."""
    return "gfx950" if archs.vendor_of(arch) == "amd" else "sm_90"


def _borrowed(product: Arch) -> Card:
    """Parameters of a card nobody calibrated, from another card's and this one's table line.

    Memory bandwidth is this card's peak times the share of peak that the lender reaches, a cache's
    goes with the compute units; latencies are carried over.

    Raises:
        MisuseError: no compute units or no bandwidth in ``data/archs.csv``.
    """
    if not product.compute_units or not product.hbm_gbps:
        raise MisuseError(
            f"no model for {product.name}: data/archs.csv has no "
            f"{'bandwidth' if product.compute_units else 'compute units'} for {product.product}"
        )
    if not _of(_lender(product.name), "parameter"):
        raise MisuseError(
            f"no model for {product.name}: data/latency.csv has no line for it, nor for "
            f"{_lender(product.name)}; record a card first (mlakit record)"
        )
    lent = card(_lender(product.name))
    theirs = next(a for a in archs.products() if a.product == lent.device)
    p = dict(lent.parameters)
    p["gbps"] *= product.hbm_gbps / (theirs.hbm_gbps or product.hbm_gbps)
    p["cache_gbps"] *= product.compute_units / lent.units
    published = [x for x in _of(product.name, "launch") if x["name"] == "launch_us"]
    source = f"data/archs.csv ({product.product}); latencies of {lent.device}"
    if published:
        p["launch_us"] = published[0]["value"]
        source += f"; launch: {published[0]['source']}"
    return Card(product.name, product.product, product.compute_units, p, source, {})


def error_words(median_pct: float | str | None, worst_pct: float | str | None) -> str:
    """An error beside a figure: half of unseen cells within the first, nine in ten in the other."""
    if not isinstance(median_pct, float) or not isinstance(worst_pct, float):
        return "error unknown"
    return f"± {median_pct:.0f} %, nine in ten within {worst_pct:.0f} %"


@dataclass(frozen=True)
class Estimate:
    """A modelled figure and what is known of its error."""

    us: float
    parts: Mapping[str, float]
    """microseconds by cause; their sum is ``us``"""
    launches: int
    error_pct: float | None
    """median absolute error on cells the fit never saw, in percent; None: unknown"""
    worst_pct: float | None
    """the same, ninth decile"""
    scored_on: str
    outside: tuple[str, ...]
    """what lies outside the calibrated range"""
    source: str
    evidence: str = "modelled"

    def __str__(self) -> str:
        error = error_words(self.error_pct, self.worst_pct)
        more = f", extrapolated: {'; '.join(self.outside)}" if self.outside else ""
        return f"{self.us:.3g} us ({error}, {self.evidence}{more})"


def known_error(arch: str, path: str) -> tuple[float | None, float | None, str]:
    """(median, ninth decile, what it was scored on) in percent; Nones where nothing was scored.

    The path's own error if it was timed, else that of one-launch norms (``row``, published), else
    that of paths the fit never saw (``all``).
    """
    single = "row" if path in (*ONE_LAUNCH, *ROW_PAIRS) else path
    found: dict[str, dict] = {}
    for scope in (path, single, "all"):
        for line in _of(arch, "error"):
            if line["path"] == scope:
                found.setdefault(line["name"], line)
    if "median_pct" not in found:
        return None, None, f"nothing: no figure of {path} on {arch} to score on"
    source = found["median_pct"]["source"]
    return found["median_pct"]["value"], found["p90_pct"]["value"], source


def error_lines(arch: str) -> list[dict]:
    """The known errors of one arch as rows: device, path, median_pct, p90_pct, scored_on."""
    found: dict[tuple, dict] = {}
    for line in [x for what in ("blind", "seen", "error", "unseen") for x in _of(arch, what)]:
        row = found.setdefault((line["path"], line["source"]), {})
        row |= {"device": line["device"], "path": line["path"], "scored_on": line["source"]}
        row[line["name"]] = line["value"]
    return list(found.values())


def estimate(path: str, arch: str, widths: Widths, m: int, dtype: str = "bf16") -> Estimate:
    """The modelled time of one call, split by cause, with its known error.

    Cold cache, launches back to back (graph clock) on a GPU; wall time on a CPU.

    Raises:
        MisuseError: no model for that path or arch, a path that no card of the arch can run, or m
            below 1.
    """
    if m < 1:
        raise MisuseError(f"batch is {m}: give a whole number of rows, 1 or more")
    of = card(arch)
    made = launches.plan(path, widths, m, dtype, arch=of.arch)
    # asked of the usual shape with all packages there, so that only the arch can be the reason
    is_path = path in registry.names()  # and no control
    if is_path and (why := registry.get(path).supports(Context(arch=of.arch))):
        raise MisuseError(f"no time of {path} on {of.arch}: {why}; give a path that runs there")
    none = np.zeros(len(made), int)
    found = by_cause(of.parameters, of.units, resident_threads(of.arch), columns_of(made), none, 1)
    parts = {k: float(v[0]) for k, v in found.items()}
    outside = of.outside(widths, m, dtype)
    error, worst, scored = known_error(of.arch, path)
    us = math.fsum(parts.values())
    return Estimate(us, parts, len(made), error, worst, scored, tuple(outside), of.source)


def breakdown(
    arch: str, widths: Widths, batches: list[int], paths: Iterable[str], dtype: str = "bf16"
) -> pd.DataFrame:
    """Estimates as rows: m, path, us by cause, total, error, what is extrapolated, evidence."""
    rows = []
    for m in batches:
        for path in paths:
            e = estimate(path, arch, widths, m, dtype)
            row = {"m": m, "path": path, "launches": e.launches, **e.parts, "us": e.us}
            known = {"error_pct": e.error_pct, "worst_decile_pct": e.worst_pct}
            error = {k: "unknown" if v is None else v for k, v in known.items()}
            rows.append(row | error | {"outside": "; ".join(e.outside), "evidence": e.evidence})
    return pd.DataFrame(rows)


def fused_path(arch: str) -> str:
    """mlakit's own fused path on an arch."""
    return "cpu_fused" if arch == "cpu" else "triton_fused"


def fusion(arch: str, widths: Widths, batches: list[int], dtype: str = "bf16") -> pd.DataFrame:
    """What the one launch saved buys at each M: fused against two good kernels of the same kind.

    Two good kernels are QuACK's where it runs, else the fused kernel called once a part. With kv
    alone there is no second launch to save: the fused kernel stands on both sides.
    ``slack_pct``: how much slower the fused kernel may be in all before two launches win.
    """
    name = archs.check(arch)
    one, quack = fused_path(name), archs.from_sm_90(name)
    parts = [Widths(0, w) for w in (widths.q_lora_rank, widths.kv_lora_rank) if w]
    rows = []
    for m in batches:
        fused = estimate(one, arch, widths, m, dtype)
        if quack and widths.q_lora_rank:
            pair_us = estimate("quack_rms_norm", arch, widths, m, dtype).us
        else:
            pair_us = math.fsum(estimate(one, arch, w, m, dtype).us for w in parts)
        saved = pair_us - fused.us
        row: dict = {"m": m, "fused_us": fused.us, "two_launches_us": pair_us, "saved_us": saved}
        row |= {"saved_pct": 100 * saved / pair_us, "slack_pct": 100 * saved / fused.us}
        error = "unknown" if fused.error_pct is None else fused.error_pct
        about = {"outside": "; ".join(fused.outside), "evidence": fused.evidence}
        rows.append(row | {"error_pct": error} | about)
    return pd.DataFrame(rows)


LEVEL_PCT = 5.0
"""Below this share of the pair's time two ways count as level: a good kernel's own choice of
config moves it by as much."""


def meeting_m(arch: str, widths: Widths, dtype: str = "bf16") -> int | None:
    """The power of two of M from which the saved launch is under ``LEVEL_PCT`` of the pair's time.

    None: not up to 2^20 rows.
    """
    frame = fusion(arch, widths, [2**n for n in range(21)], dtype)
    over = frame.loc[frame["saved_pct"] >= LEVEL_PCT, "m"]
    first = 1 if over.empty else 2 * int(over.max())
    return first if first <= 2**20 else None
