"""What is run and what is written down: the cell, the two kinds of row, and their rules."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime

from mlakit.archs import check
from mlakit.context import DTYPES, LAYOUTS, QUANTS
from mlakit.errors import MisuseError, one_of
from mlakit.shapes import Widths

SCHEMA_VERSION = 1

EVIDENCE = ("measured", "recorded", "published", "modelled", "compiled", "emulated")
CLOCKS = ("eager", "graph", "kernel", "cpu")
_CACHES = ("cold", "hot")
STATUSES = ("ok", "wrong", "skipped", "failed", "timeout", "killed", "oom", "implausible")
CONTROLS = (
    *("copy_limit", "launch_floor", "copy_plain"),
    *("fused_plain", "fused_early", "pair_plain", "pair_early"),
)
"""Rows with these in ``path_ran`` are controls of their cell, never peers.

``copy_limit`` is the fastest same-traffic copy of any launch. Where launches can overlap
(programmatic dependent launch) there is also ``copy_plain``, the fastest that does not, and the
fused path, and of a quant the pair, launched the other way than it chose: ``fused_plain`` or
``fused_early``, ``pair_plain`` or ``pair_early``.
"""

_IDENTITY = (
    "schema_version run_id cell_id started_at evidence source device device_id vendor arch "
    "arch_raw driver torch triton mlakit git_sha model hidden_size q_lora_rank kv_lora_rank m "
    "dtype quant layout clock cache cache_bytes path_requested path_ran reason policy config status"
).split()
FIGURES = (
    "n p05_us p20_us p50_us p80_us p95_us mad_us ratio_to ratio ratio_lo ratio_hi host_us "
    "first_call_s bytes_moved gbps pct_of_copy pct_of_limit launch_floor_us"
).split()
_CONDITIONS = "clocks_before clocks_after temp_c power_w throttle cpu_load".split()
TIMING_COLUMNS = (*_IDENTITY, *FIGURES, *_CONDITIONS, "flags", "note")

ACCURACY_FIGURES = (
    "rounding reference input_family seed elements share_correct max_ulp ulp_p999 signed_bias "
    "bias_se rel_l2 cosine nonfinite_mismatch worst_row worst_channel"
).split()
ACCURACY_COLUMNS = (*_IDENTITY, "output", *ACCURACY_FIGURES, "flags", "note")
COLUMNS = {"timing": TIMING_COLUMNS, "accuracy": ACCURACY_COLUMNS}
"""by kind of measurement"""

TEXT_COLUMNS = frozenset(
    "run_id cell_id started_at evidence source device device_id vendor arch arch_raw driver torch "
    "triton mlakit git_sha model dtype quant layout clock cache path_requested path_ran reason "
    "policy config status ratio_to clocks_before clocks_after throttle flags note rounding "
    "reference input_family output".split()
)
INTEGER_COLUMNS = frozenset(
    "schema_version hidden_size q_lora_rank kv_lora_rank m cache_bytes n bytes_moved seed elements "
    "max_ulp nonfinite_mismatch worst_row worst_channel".split()
)
"""Every other column is float64. ``device_id`` is 12 hex digits of the device's hashed UUID;
``config`` is JSON; ``flags`` is a comma-separated set."""


MAX_ROWS = 2**40
"""of a cell; a row's bytes times this is still an int64"""


def _whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True)
class Cell:
    """One comparison: all of ``paths`` at one point, interleaved in one process on one device.

    Raises:
        MisuseError: a value outside its set.
    """

    arch: str
    m: int
    q_lora_rank: int
    kv_lora_rank: int
    paths: tuple[str, ...]
    qk_rope_head_dim: int = 64
    model: str = ""
    dtype: str = "bf16"
    norm_weight_dtype: str = ""
    """empty: the same as ``dtype``"""
    quant: str = "none"
    layout: str = "split"
    clock: str = "cpu"
    cache: str = "cold"
    eps: float = 1e-6
    seed: int = 0
    budget_s: float = 2.0
    """the most seconds that sampling of this cell may take"""
    repeat: int = 0
    """tells apart cells that are otherwise equal (A/A controls)"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", check(self.arch))
        object.__setattr__(self, "paths", tuple(self.paths))
        if not _whole(self.m, 1, MAX_ROWS):
            raise MisuseError(f"batch is {self.m!r}: give a whole number of rows, 1 or more")
        for name, value, allowed in (
            ("dtype", self.dtype, DTYPES),
            ("quant", self.quant, QUANTS),
            ("layout", self.layout, LAYOUTS),
            ("clock", self.clock, CLOCKS),
            ("cache", self.cache, _CACHES),
        ):
            one_of(name, allowed, value)
        for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "seed", "repeat"):
            if not _whole(getattr(self, name), 0, 2**63 - 1):
                value = getattr(self, name)
                raise MisuseError(f"{name} is {value!r}: give a whole number, 0 to 2**63 - 1")

    @property
    def widths(self) -> Widths:
        """The pair's widths and the rope part behind them."""
        return Widths(self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def id(self) -> str:
        """16 hex digits: the hash of the definition, the same on every machine."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def columns(self) -> dict:
        """The columns of a row that say which cell it is of."""
        names = "model q_lora_rank kv_lora_rank m dtype quant layout clock cache".split()
        return {"cell_id": self.id} | {name: getattr(self, name) for name in names}

    def to_json(self) -> dict:
        """A plain dict that ``Cell.from_json`` takes back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> Cell:
        """The cell a dict describes.

        Raises:
            MisuseError: a name that a cell does not have, with the near match, or one it lacks.
        """
        known = {f.name for f in fields(cls)}
        one_of("cell field", known, *values)
        try:
            return cls(**values)
        except TypeError as error:
            raise MisuseError(f"no cell: {error}") from None


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def instant(text: str) -> str:
    """The time that ISO 8601 ``text`` means, as ``now`` writes it; without an offset it is of UTC.

    Empty where it means none, or one that no run can have begun at (before 1970, after 2199).
    """
    try:
        at = datetime.fromisoformat(text)
        at = at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return ""
    text = at.replace(tzinfo=None).isoformat("T", "seconds") + "Z"
    return text if 1970 <= at.year < 2200 else ""


def measured_now(cell: Cell) -> dict:
    """The columns of a row that say what was measured, and when; where is not among them."""
    about = {"schema_version": SCHEMA_VERSION, "started_at": now(), **cell.columns}
    return about | {"evidence": "measured", "source": "this run"}


@dataclass
class CellResult:
    """What measuring one cell gave: rows of ``TIMING_COLUMNS`` (or accuracy) and raw samples."""

    rows: list[dict]
    samples_us: dict[str, list[float]] = field(default_factory=dict)
    """by path, every sample in the order taken; nothing is ever dropped"""


def with_figure(rows):
    """Those of a DataFrame of timing rows that hold a sound figure."""
    return rows[(rows["status"] == "ok") & rows["p50_us"].notna()]


def check_row(row: dict, kind: str = "timing") -> dict:
    """``row`` of a kind of ``COLUMNS``, completed with None for absent columns, if it is legal.

    Raises:
        ValueError: an unknown column, status, evidence or clock, or a timing figure where the
            status does not allow one (only ``ok`` and ``implausible`` rows have figures).
    """
    columns = COLUMNS[kind]
    extra = set(row) - set(columns)
    if extra:
        raise ValueError(f"row has columns outside the schema: {sorted(extra)}")
    for name, allowed in (("status", STATUSES), ("evidence", EVIDENCE)):
        if row.get(name) not in allowed:
            raise ValueError(f"row's {name} is {row.get(name)!r}; one of {', '.join(allowed)}")
    if row["status"] not in ("ok", "implausible"):
        figures = [c for c in FIGURES if c.endswith(("_us", "ratio", "gbps")) and row.get(c)]
        figures = [c for c in figures if c != "launch_floor_us"]
        if figures:
            raise ValueError(f"a {row['status']} row may not hold figures: {figures}")
    return {c: row.get(c) for c in columns}
