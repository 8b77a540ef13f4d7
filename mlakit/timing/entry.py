"""One path or control of a cell on its way to a row, and what makes its figure suspect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlakit.errors import fault_status, one_line
from mlakit.records import Cell
from mlakit.timing import stats

_MARGIN = {"cpu": 4.0, "gpu": 1.3}
"""How far above the measured copy bandwidth a cold result may be before it is implausible. A GPU's
datasheet is up to a fifth above its best copy. On a CPU outputs come from memory that was just
freed, so they may stay cached, and a copy's writes cost a read as well: 3 times, and a margin."""
_LAUNCH_BOUND = 0.5
"""share of a figure that its launches take at the floor's price, from which it is launch-bound"""
_DRIFT = 0.03
"""change of the median within a run that is flagged"""


@dataclass
class Entry:
    """One path or control of a cell on its way to a row."""

    name: str
    path: Any = None
    """a ``registry.Path``; None for a control"""
    like: Any = None
    """of a control, the ``registry.Path`` whose other launch it is"""
    call: Any = None
    lane: Any = None
    status: str = "ok"
    reason: str | None = None
    config: str | None = None
    overlaps: bool = False
    """it launches before the kernel ahead of it has ended, as the overlapping copy does"""
    first_call_s: float | None = None
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        """The row says what was raised; the entry has no lane from now on."""
        self.status, self.reason, self.lane = fault_status(error), one_line(error), None

    @property
    def ran(self) -> str | None:
        """What ran; a split or fallen-back call is no run of the path it was asked of."""
        if self.status in ("skipped", "failed", "oom"):
            return None
        how = next((f" ({flag})" for flag in ("split", "fell-back") if flag in self.flags), "")
        return self.name + how

    def flag(self, samples_us: np.ndarray, floor_us: float, *, on_gpu: bool) -> None:
        """What makes a figure suspect, impossible, or no figure of its path."""
        if abs(stats.drift(samples_us)) > _DRIFT:
            self.flags.append("drift")
        if stats.is_bimodal(samples_us):
            self.flags.append("bimodal")
        p50_us = float(np.median(samples_us))
        if p50_us <= 0:
            self.status, self.reason = "implausible", "not positive"
        if self.path is None:
            return
        if floor_us * self.path.launches >= _LAUNCH_BOUND * p50_us and on_gpu:
            self.flags.append("launch-bound")
        if p50_us < floor_us:
            self.flags.append("below-floor")
        kernels = getattr(self.lane, "kernels", ())
        if kernels:
            self.notes.append(f"kernels: {' + '.join(k[:60] for k in kernels[:6])}")
            if self.path.fused and len(kernels) > self.path.launches:
                self.flags.append("fell-back")

    def flag_bandwidth(
        self, moved: int, samples_us: np.ndarray, copy_gbps: float, cell: Cell
    ) -> None:
        """A cold figure well above the memory's own copy is no figure."""
        p50_us = float(np.median(samples_us))
        if p50_us <= 0:
            return
        gbps, margin = moved / p50_us / 1e3, _MARGIN["cpu" if cell.clock == "cpu" else "gpu"]
        if cell.cache == "cold" and gbps > margin * copy_gbps:
            self.status = "implausible"
            self.reason = f"{gbps:.0f} GB/s, over {margin} times the copy's {copy_gbps:.0f} GB/s"
        elif gbps > copy_gbps:
            self.flags.append("cache-hot")
