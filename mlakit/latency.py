"""The latency model: what a microsecond of this step is made of, on any arch.

A path is a list of launches; a launch costs its own start (``launch_us``), the latency chain of
one row (``chain_us``), what that latency grows by once every compute unit has work (``loaded_us``),
and its work: the longest of bytes over the card's bandwidth, the busiest unit's bytes over a
unit's bandwidth (waves), and its elements over the rate of its kind of kernel. Launches follow
each other, so a path is their sum. Nothing here is per path: only how a path works is.

Parameters and known errors are in ``data/latency.csv`` (made by ``mlakit.sweep.calibrate``); an
arch without a line there borrows latencies and shares of peak from the card that it is most like,
and says so. Evidence is ``modelled``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np
import pandas as pd

from mlakit import archs
from mlakit.archs import Arch
from mlakit.datafiles import data_dir
from mlakit.errors import MisuseError, unknown
from mlakit.shapes import Widths

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}

KINDS = {
    "copy": "moves rows, computes nothing",
    "row": "a row once through registers, 16 bytes a lane, no lane idle",
    "padded": "a row padded to a power of two of lanes, once through registers or in a loop",
    "loop": "walks a row twice, the second time from a cache",
    "map": "elementwise over contiguous memory",
    "gather": "elementwise with strides or broadcasts: one element an access",
    "reduce": "torch's sum over each row",
    "tiny": "elementwise over one number a row",
}
"""How a kernel works. Each kind has a chain (us) and a rate (elements a ns and compute unit)."""

CARD_PARAMETERS = ("launch_us", "loaded_us", "gbps", "unit_gbps")
PARAMETERS = (
    *CARD_PARAMETERS,
    *(f"chain_us:{k}" for k in KINDS),
    *(f"rate:{k}" for k in KINDS),
)
MEMORY_BOUND = ("copy", "row", "tiny")
"""Kinds without a rate on a GPU: nothing but memory and latency bounds them."""

_GPU_GRAIN, _CPU_GRAIN = 1024, 32768
"""Elements of one piece of an elementwise operation: a thread block of 256 threads with 4 each in
torch's GPU loops; ``at::internal::GRAIN_SIZE`` on a CPU."""
EARLY_ARCHS, EARLY_ROWS = ("sm_90", "sm_100"), 128
"""Where ``mlakit.paths.triton_config`` asks for programmatic dependent launch (a test compares);
the same-traffic copy uses it at every M."""
_SHARPNESS = 4.0
"""Exponent of the smooth maximum of the three kinds of work: two that are level overlap badly."""


@dataclass(frozen=True)
class Launch:
    """One kernel. ``tasks``: independent pieces that compute units share.

    ``starts`` is 0 where the launch begins while the kernel before it drains: nothing is waited
    for.
    """

    kind: str
    tasks: float
    elements: float
    bytes_moved: float
    starts: float = 1.0


def _rows(kind: str, m: int, widths: list[int], size: int, starts: float = 1.0) -> Launch:
    """A kernel that normalises (or copies) rows of each width, weights read once.

    A loop's second walk is counted as traffic: its rows have left the L1 by then. Padded rows have
    as many elements as lanes.
    """
    hidden, walks = sum(widths), 3 if kind == "loop" else 2
    lanes = sum(1 << (w - 1).bit_length() for w in widths) if kind == "padded" else hidden
    return Launch(kind, m * len(widths), m * lanes, (walks * m + 1) * hidden * size, starts)


def _pieces(kind: str, elements: float, bytes_each: float, grain: int) -> Launch:
    return Launch(kind, max(1.0, elements / grain), elements, elements * bytes_each)


def _eager(m: int, width: int, size: int, grain: int, contiguous: bool) -> list[Launch]:
    """torch_native's eight operations on one part, in order, all in float32."""
    n = m * width
    # A view of one row is contiguous; any other makes torch compute each element's offset.
    cast = "map" if contiguous or m == 1 else "gather"
    spread = "map" if m == 1 else "gather"
    return [
        _pieces(cast, n, size + 4, grain),
        _pieces("map", n, 8, grain),
        Launch("reduce", m, n, 4 * n),
        _pieces("tiny", m, 8, grain),
        _pieces("tiny", m, 8, grain),
        _pieces(spread, n, 8, grain),
        _pieces(spread, n, 8, grain),
        _pieces("map", n, 4 + size, grain),
    ]


ONE_LAUNCH = ("triton_fused", "aiter_fused", "cpu_fused")
ROW_PAIRS = ("quack_rms_norm", "liger_rms_norm", "flashinfer_rms_norm")
MODELLED = (
    "copy_limit", "launch_floor", *ONE_LAUNCH, *ROW_PAIRS,
    "inductor", "torch_rms_norm", "torch_rms_norm_copied", "torch_native",
)  # fmt: skip
"""Names that ``plan`` knows how they work; quantised paths and dual_stream are not modelled."""


def plan(
    path: str,
    widths: Widths,
    m: int,
    dtype: str = "bf16",
    *,
    arch: str,
    into_out: bool = True,
    contiguous: bool = False,
) -> list[Launch]:
    """The launches one call takes.

    Args:
        path: a path, or ``copy_limit`` / ``launch_floor`` (a cell's controls).
        widths: elements of the two parts.
        m: rows.
        dtype: of inputs and outputs.
        arch: on a CPU F.rms_norm is the eager operations in C++, and one thread takes at least
            32,768 elements; on sm_90 and later copy_limit, and triton_fused up to 128
            rows, start early (programmatic dependent launch).
        into_out: outputs are given; a path that makes its own then copies them (graph clock).
        contiguous: the parts are not views of one buffer.

    Raises:
        MisuseError: a path whose working is not described here, or no such dtype.
    """
    if path not in MODELLED:
        raise unknown("path to model", path, MODELLED)
    if dtype not in ITEMSIZE:
        raise unknown("dtype", dtype, ITEMSIZE)
    cpu = arch == "cpu"
    size, grain = ITEMSIZE[dtype], _CPU_GRAIN if cpu else _GPU_GRAIN
    parts = [w for w in (widths.q_lora_rank, widths.kv_lora_rank) if w]
    if path == "launch_floor":
        return [Launch("copy", 0, 0, 0)]
    early = 0.0 if arch in EARLY_ARCHS else 1.0
    if path == "copy_limit":
        return [_rows("copy", m, parts, size, early)]
    if path in ONE_LAUNCH:
        own = path == "triton_fused" and m <= EARLY_ROWS
        return [_rows("row", m, parts, size, early if own else 1.0)]
    out: list[Launch] = []
    if cpu and path == "torch_native" and not widths.q_lora_rank:
        parts = [0, *parts]  # eager operations on an empty tensor are dispatched all the same
    for width in parts:
        copied = _pieces("map", m * width, 2 * size, grain)
        gathered = _pieces("gather", m * width, 2 * size, grain)
        strided = not contiguous and m > 1
        if path == "torch_native" or (cpu and path.startswith("torch_rms_norm")):
            if path.endswith("_copied") and strided:
                out.append(gathered)
            out += _eager(m, width, size, grain, contiguous or path.endswith("_copied"))
            # A cast into the given output is the last operation; only F.rms_norm adds a copy.
            out += [copied] if into_out and path != "torch_native" else []
            continue
        if path == "inductor":
            out.append(_rows("loop" if cpu else "padded", m, [width], size))
            continue
        if path.startswith("torch_rms_norm"):
            # The CUDA kernel wants contiguous rows: it copies views by itself.
            out += [gathered] if strided else []
            out.append(_rows("loop", m, [width], size))
        else:
            kind = "padded" if path == "liger_rms_norm" else "row"
            out.append(_rows(kind, m, [width], size))
        out += [copied] if into_out else []
    return out


def terms(
    p: Mapping[str, float], units: int, kind, tasks, elements, bytes_moved, starts
) -> dict[str, np.ndarray]:
    """Microseconds of launches by cause: launch, chain, loaded, and the work by its bound.

    ``kind`` and the rest may be arrays of one length; an empty launch (no tasks) is all launch.
    """
    tasks, elements, moved = (np.asarray(x, float) for x in (tasks, elements, bytes_moved))
    kinds = np.broadcast_to(np.asarray(kind), tasks.shape)
    chain_of = {k: p[f"chain_us:{k}"] for k in KINDS}
    rate_of = {k: p.get(f"rate:{k}", np.inf) for k in KINDS}
    chain = np.vectorize(chain_of.__getitem__, otypes=[float])(kinds)
    rate = np.vectorize(rate_of.__getitem__, otypes=[float])(kinds)
    some = tasks > 0
    held = np.maximum(tasks, 1e-9)
    busiest = np.where(some, np.ceil(held / units) / np.maximum(np.ceil(held), 1), 0)
    work = np.stack(
        [
            moved / p["gbps"] / 1e3,
            moved * busiest / p["unit_gbps"] / 1e3,
            elements * busiest / rate / 1e3,
        ]
    )
    total = (work**_SHARPNESS).sum(0) ** (1 / _SHARPNESS)
    shares = work**_SHARPNESS / np.maximum((work**_SHARPNESS).sum(0), 1e-300)
    return {
        "launch": p["launch_us"] * np.asarray(starts, float),
        "chain": np.where(some, chain, 0),
        "loaded": np.where(some, p["loaded_us"] * held / (held + units), 0),
        "bandwidth": total * shares[0],
        "waves": total * shares[1],
        "kernel rate": total * shares[2],
    }


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
    with open(data_dir() / "latency.csv", newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


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
        values = {line["name"]: float(line["value"]) for line in own}
        p = {n: values[n] for n in PARAMETERS if n in values}
        ranges = {n: int(v) for n, v in values.items() if n.endswith(("_from", "_to"))}
        first = own[0]
        return Card(arch, first["device"], int(values["units"]), p, first["source"], ranges)
    return borrowed(archs.arch(arch))


def lender(arch: str) -> str:
    """The calibrated arch whose latencies ``arch`` borrows: AMD from gfx950, others from sm_90."""
    return "gfx950" if archs.vendor_of(arch) == "amd" else "sm_90"


def borrowed(product: Arch) -> Card:
    """Parameters of a card nobody calibrated, from another card's and this one's table line.

    Bandwidth is this card's peak times the share of peak that the lender reaches; a unit's
    bandwidth, latencies and rates are carried over, by clock where both clocks are known.

    Raises:
        MisuseError: no compute units or no bandwidth in ``data/archs.csv``.
    """
    if not product.compute_units or not product.hbm_gbps:
        raise MisuseError(
            f"no model for {product.name}: data/archs.csv has no "
            f"{'bandwidth' if product.compute_units else 'compute units'} for {product.product}"
        )
    if not _of(lender(product.name), "parameter"):
        raise MisuseError(
            f"no model for {product.name}: data/latency.csv has no line for it, nor for "
            f"{lender(product.name)}; record a card first (mlakit record)"
        )
    lent = card(lender(product.name))
    theirs = next(a for a in archs.products() if a.product == lent.device)
    p = dict(lent.parameters)
    p["gbps"] *= product.hbm_gbps / (theirs.hbm_gbps or product.hbm_gbps)
    here_mhz, there_mhz = product.max_clock_mhz, theirs.max_clock_mhz
    clock = here_mhz / there_mhz if here_mhz and there_mhz else 1.0
    p["unit_gbps"] *= clock
    p |= {k: v * clock for k, v in p.items() if k.startswith("rate:")}
    published = [x for x in _of(product.name, "launch") if x["name"] == "launch_us"]
    source = f"data/archs.csv ({product.product}); latencies of {lent.device}"
    if published:
        p["launch_us"] = float(published[0]["value"])
        source += f"; launch: {published[0]['source']}"
    return Card(product.name, product.product, product.compute_units, p, source, {})


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
        error = "error unknown" if self.error_pct is None else f"± {self.error_pct:.0f} %"
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
    return float(found["median_pct"]["value"]), float(found["p90_pct"]["value"]), source


def error_lines(arch: str) -> list[dict]:
    """The known errors of one arch as rows: device, path, median_pct, p90_pct, scored_on."""
    found: dict[tuple, dict] = {}
    for line in [*_of(arch, "seen"), *_of(arch, "error"), *_of(arch, "unseen")]:
        row = found.setdefault((line["path"], line["source"]), {})
        row |= {"device": line["device"], "path": line["path"], "scored_on": line["source"]}
        row[line["name"]] = float(line["value"])
    return list(found.values())


def estimate(
    path: str, arch: str, widths: Widths, m: int, dtype: str = "bf16", *, into_out: bool = False
) -> Estimate:
    """The modelled time of one call, split by cause, with its known error.

    Cold cache, launches back to back (graph clock) on a GPU; wall time on a CPU.

    Raises:
        MisuseError: no model for that path or arch, or m below 1.
    """
    if m < 1:
        raise MisuseError(f"batch is {m}: give a whole number of rows, 1 or more")
    of = card(arch)
    launches = plan(path, widths, m, dtype, arch=of.arch, into_out=into_out)
    columns = zip(*map(astuple, launches), strict=True)
    parts = {k: float(v.sum()) for k, v in terms(of.parameters, of.units, *columns).items()}
    outside = of.outside(widths, m, dtype)
    error, worst, scored = known_error(of.arch, path)
    us = math.fsum(parts.values())
    return Estimate(us, parts, len(launches), error, worst, scored, tuple(outside), of.source)


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


def fusion(arch: str, widths: Widths, batches: list[int], dtype: str = "bf16") -> pd.DataFrame:
    """What the one launch saved buys at each M: fused against two good kernels of the same kind.

    ``slack_pct``: how much slower the fused kernel may be in all before two launches win. On a
    CPU the pair is the fused kernel called once a part.
    """
    cpu = archs.check(arch) == "cpu"
    one, two = ("cpu_fused", "cpu_fused") if cpu else ("triton_fused", "quack_rms_norm")
    rows = []
    for m in batches:
        fused = estimate(one, arch, widths, m, dtype)
        if cpu:
            parts = [Widths(0, w) for w in (widths.q_lora_rank, widths.kv_lora_rank) if w]
            pair_us = math.fsum(estimate(two, arch, w, m, dtype).us for w in parts)
        else:
            pair_us = estimate(two, arch, widths, m, dtype).us
        saved = pair_us - fused.us
        rows.append(
            {
                "m": m,
                "fused_us": fused.us,
                "two_launches_us": pair_us,
                "saved_us": saved,
                "saved_pct": 100 * saved / pair_us,
                "slack_pct": 100 * saved / fused.us,
                "error_pct": "unknown" if fused.error_pct is None else fused.error_pct,
                "outside": "; ".join(fused.outside),
                "evidence": fused.evidence,
            }
        )
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
