"""Measure one cell: every path of it and the controls, checked, interleaved, put into rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from mlakit.dispatch import probe
from mlakit.errors import MisuseError
from mlakit.paths import registry
from mlakit.records import SCHEMA_VERSION, Cell, CellResult, check_row
from mlakit.timing import buffers, check, clock, controls, guard, sampler, sensors, stats

MARGIN = {"cpu": 4.0, "gpu": 1.3}
"""How far above the measured copy bandwidth a cold result may be before it is implausible. A GPU's
datasheet is up to a fifth above its best copy. On a CPU outputs come from memory that was just
freed, so they may stay cached, and a copy's writes cost a read as well: 3 times, and a margin."""
LAUNCH_BOUND = 0.5
"""share of a figure that its launches take at the floor's price, from which it is launch-bound"""
FOREIGN_CORES, DRIFT = 0.25, 0.03
LOCK_WAIT_S = 600.0


@dataclass
class _Entry:
    """One path or control of a cell on its way to a row."""

    name: str
    path: Any = None
    """a ``registry.Path``; None for a control"""
    call: Any = None
    lane: Any = None
    status: str = "ok"
    reason: str | None = None
    config: str | None = None
    first_call_s: float | None = None
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        self.status = "oom" if _is_oom(error) else "failed"
        text = str(error).strip().splitlines() or [""]
        self.reason = f"{type(error).__name__}: {text[0][:200]}"
        self.lane = None


def _is_oom(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def measure_cell(cell: Cell, *, device: str = "cpu", run: dict | None = None) -> CellResult:
    """Time all of ``cell.paths`` and the two controls on ``device``, under the device's lock.

    Args:
        cell: the comparison; ``cell.arch`` must be the device's and the clock one it has.
        device: ``cpu``, ``cuda`` or ``cuda:N`` (torch's name for AMD cards as well).
        run: columns that the caller knows better (``run_id``, ``git_sha``, ``policy`` ...), and
            ``lock_wait_s``, seconds to wait for another timing run (600).

    Returns:
        One row a path, then ``copy_limit`` and ``launch_floor``; a path that cannot run, runs
        wrong or out of memory is a row that says so. Raw samples by path.

    Raises:
        MisuseError: the cell is for another arch, the clock does not exist there, or Triton
            interprets in this process.
        LockedError: another process holds the device; it is named.
    """
    run = dict(run or {})
    found = guard.device_of(device)
    device = f"cuda:{found.index}" if found else "cpu"
    _check_place(cell, device)
    wait_s = run.pop("lock_wait_s", LOCK_WAIT_S)
    identity = _identity(cell, device, run)
    entries = [_Entry(name) for name in cell.paths]
    # Without gradients from the first call on: switching later would make compiled paths recompile.
    with guard.device_lock(device, wait_s=wait_s), torch.no_grad():
        return _Measurement(cell, device, identity, entries).result()


def _check_place(cell: Cell, device: str) -> None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise MisuseError(
            "TRITON_INTERPRET is set: kernels are interpreted in this process, so nothing is "
            "timed; unset it"
        )
    found = guard.device_of(device)
    arch = found.arch if found else "cpu"
    if cell.arch != arch:
        raise MisuseError(
            f"this cell is for {cell.arch}, {device} is {arch}: nothing is timed for hardware that "
            f"is not here; give the cell arch={arch!r}"
        )
    if (cell.clock == "cpu") != (found is None):
        wanted = "cpu" if found is None else "graph, kernel or eager"
        raise MisuseError(f"clock {cell.clock!r} does not exist on {device}: use {wanted}")


def _identity(cell: Cell, device: str, run: dict) -> dict:
    known = guard.environment(device)
    columns = "device device_id vendor arch arch_raw driver torch triton mlakit git_sha".split()
    identity = {
        "schema_version": SCHEMA_VERSION,
        "cell_id": cell.id,
        "started_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "evidence": "measured",
        "source": "this run",
        **{c: known[c] for c in columns},
        "model": cell.model,
        "q_lora_rank": cell.q_lora_rank,
        "kv_lora_rank": cell.kv_lora_rank,
        **{c: getattr(cell, c) for c in "m dtype quant layout clock cache".split()},
        "cache_bytes": guard.cache_bytes(device),
    }
    allowed = {"run_id", "source", "hidden_size", "policy", *columns}
    return identity | {k: v for k, v in run.items() if k in allowed and v is not None}


class _Measurement:
    """The steps of one cell in order; each leaves what the next needs on ``self``."""

    def __init__(self, cell: Cell, device: str, identity: dict, entries: list[_Entry]) -> None:
        self.cell, self.device, self.identity = cell, device, identity
        self.entries = entries
        self.cache = identity["cache_bytes"]
        self.sampled = sampler.Sampled({})
        self.conditions: dict = {}
        self.copy_gbps: float | None = None

    def result(self) -> CellResult:
        """All rows and samples."""
        self._admit()
        if self._ready():
            before = sensors.conditions(guard.device_of(self.device))
            try:
                ring = self._ring()
            except (MisuseError, MemoryError, RuntimeError) as error:
                for entry in self._ready():
                    entry.fail(error)
                    if isinstance(error, MisuseError):
                        entry.status, entry.reason = "skipped", str(error)
            else:
                self._prepare(ring)
                self._sample(before)
                self._verify(ring)
        rows = [check_row(row) for row in self._rows()]
        return CellResult(rows, {k: v for k, v in self.sampled.samples_us.items() if v})

    def _ready(self) -> list[_Entry]:
        return [e for e in self.entries if e.status == "ok"]

    def _admit(self) -> None:
        """Refuse what cannot run here or is not for timing, and what memory does not hold."""
        context = probe.context_for(self.cell, self.device)
        for entry in self.entries:
            entry.path = path = registry.get(entry.name)
            entry.call = path.call if path.output == "none" else _without_out(path.call)
            reason = path.supports(context)
            if reason is None and not path.timed and self.device == "cpu":
                reason = "correctness only: it runs under an interpreter here"
            if reason:
                entry.status, entry.reason = "skipped", reason
            elif path.splits_from_m is not None and self.cell.m >= path.splits_from_m:
                entry.flags.append("split")
                entry.reason = f"two kernels from M = {path.splits_from_m} (library threshold)"
            if path.copies:
                entry.notes.append("copies its inputs first; the copy is timed")
        need, free = self._memory()
        for entry in self._ready():
            if need > free:
                entry.status = "skipped"
                entry.reason = f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"

    def _memory(self) -> tuple[int, int]:
        """Bytes the ring and one call's work need, and bytes free."""
        one = buffers.slot_bytes(self.cell)
        # Fresh outputs, float32 copies of unfused paths, and the check's float64 rows.
        need = self._slot_count() * one + 8 * one
        if self.device == "cpu":
            return need, _free_host_bytes()
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return need, torch.cuda.mem_get_info(self.device)[0] + kept

    def _slot_count(self) -> int:
        count = buffers.slots_for(self.cell, self.cache)
        return min(count, clock.MAX_NODES) if self.cell.clock == "graph" else count

    def _ring(self) -> buffers.Ring:
        if self.device != "cpu":
            torch.cuda.set_device(self.device)
        return buffers.Ring(self.cell, self.device, self._slot_count())

    def _prepare(self, ring: buffers.Ring) -> None:
        """First calls (build and compile), each timed by itself; then the lanes, the controls."""
        slot = ring.slots[0]
        for entry in self._ready():
            try:
                start = time.perf_counter()
                entry.call(*slot.args)
                if self.device != "cpu":
                    torch.cuda.synchronize()
                entry.first_call_s = time.perf_counter() - start
            except Exception as error:
                entry.fail(error)
        if not self._ready():
            return
        try:
            self.copy_gbps = controls.device_copy_gbps(self.device, self.cache)
        except RuntimeError as error:
            for entry in self._ready():
                entry.fail(error)
            return
        self.entries += [
            _Entry("copy_limit"),
            _Entry("launch_floor", call=controls.floor_call(self.cell.clock, self.device)),
        ]
        for entry in self._ready():
            try:
                self._make_lane(entry, ring)
            except Exception as error:
                entry.fail(error)

    def _make_lane(self, entry: _Entry, ring: buffers.Ring) -> None:
        if entry.name == "copy_limit":
            entry.config, entry.call = controls.best_copy(
                ring, self.device, clock_name=self.cell.clock
            )
            if self.cell.quant != "none":
                entry.notes.append("copies q unquantised: more bytes than a quantising path")
        entry.lane = clock.make_lane(
            self.cell.clock,
            entry.call,
            ring,
            device=self.device,
            cache_bytes=self.cache,
            launches=entry.path.launches if entry.path else 2,
        )

    def _sample(self, before: dict) -> None:
        lanes = {e.name: e.lane for e in self._ready() if e.lane is not None}
        peers = [e for e in self._ready() if e.path]
        load = guard.CpuLoad()
        self.sampled = sampler.sample(
            lanes,
            budget_s=self.cell.budget_s,
            seed=self.cell.seed,
            peers=[e.name for e in peers],
            baselines=[e.name for e in peers if not e.path.fused],
        )
        found = guard.device_of(self.device)
        after = sensors.conditions(found)
        self.conditions = {
            "clocks_before": before["clocks"],
            "clocks_after": after["clocks"],
            "temp_c": after["temp_c"],
            "power_w": after["power_w"],
            "throttle": after["throttle"],
            "cpu_load": load.read(),
        }
        foreign = sensors.foreign_processes(found) or 0
        for entry in self._ready():
            if entry.name in self.sampled.errors:
                entry.fail(self.sampled.errors[entry.name])
            if foreign:
                entry.flags.append(f"foreign-process:{foreign}")
            if (self.conditions["cpu_load"] or 0) > FOREIGN_CORES:
                entry.flags.append("busy-host")
            if not self.sampled.converged:
                entry.flags.append("budget-ended")

    def _verify(self, ring: buffers.Ring) -> None:
        """Fresh inputs into the timed buffers, then every timed function once more."""
        if not any(e.path for e in self._ready()):
            return
        ring.fill(self.cell.seed + 1)
        for entry in [e for e in self._ready() if e.path]:
            try:
                why = check.wrong_output(entry.lane, entry.path, ring)
            except Exception as error:
                entry.fail(error)
                continue
            if why:
                entry.status, entry.reason = "wrong", why

    def _rows(self) -> list[dict]:
        self._flag()
        floor_us = self._p50("launch_floor")
        copy_us = self._p50("copy_limit")
        rows = []
        for entry in self.entries:
            row = {
                **self.identity,
                "path_requested": entry.name,
                "path_ran": self._ran(entry),
                "reason": entry.reason,
                "config": entry.config,
                "status": entry.status,
                "first_call_s": entry.first_call_s,
                "launch_floor_us": floor_us,
                **self.conditions,
            }
            if entry.status in ("ok", "implausible"):
                row |= self._figures(entry, copy_us)
            row["flags"] = ",".join(sorted(set(entry.flags)))
            row["note"] = "; ".join([*entry.notes, f"torch threads {torch.get_num_threads()}"])
            rows.append(row)
        return rows

    def _ran(self, entry: _Entry) -> str | None:
        """What ran; a split or fallen-back call is no run of the path it was asked of."""
        if entry.status in ("skipped", "failed", "oom"):
            return None
        for flag in ("split", "fell-back"):
            if flag in entry.flags:
                return f"{entry.name} ({flag})"
        return entry.name

    def _p50(self, name: str) -> float | None:
        samples = self.sampled.samples_us.get(name)
        alive = name not in self.sampled.errors
        return float(np.median(samples)) if samples and alive else None

    def _bytes(self, entry: _Entry) -> int:
        if entry.name == "launch_floor":
            return 0
        q_bytes = None
        if entry.path and entry.path.output != "none" and entry.lane.seen:
            q_bytes = sum(t.nbytes for t in clock.tensors(entry.lane.seen[-1][1][0]))
        return buffers.bytes_moved(self.cell, q_bytes)

    def _flag(self) -> None:
        """What makes a figure suspect, impossible, or no figure of its path."""
        floor_us = self._p50("launch_floor") or 0.0
        for entry in self._ready():
            samples = np.array(self.sampled.samples_us.get(entry.name, ()))
            if not len(samples):
                continue
            if abs(stats.drift(samples)) > DRIFT:
                entry.flags.append("drift")
            if stats.is_bimodal(samples):
                entry.flags.append("bimodal")
            if self.sampled.recompiles.get(entry.name):
                entry.flags.append("recompile")
            p50 = float(np.median(samples))
            if p50 <= 0:
                entry.status, entry.reason = "implausible", "not positive"
            if entry.path is None:
                continue
            if floor_us * entry.path.launches >= LAUNCH_BOUND * p50 and self.device != "cpu":
                entry.flags.append("launch-bound")
            if p50 < floor_us:
                entry.flags.append("below-floor")
            kernels = getattr(entry.lane, "kernels", ())
            if kernels:
                entry.notes.append(f"kernels: {' + '.join(k[:60] for k in kernels[:6])}")
                if entry.path.fused and len(kernels) > entry.path.launches:
                    entry.flags.append("fell-back")
            self._flag_bandwidth(entry, p50)

    def _flag_bandwidth(self, entry: _Entry, p50_us: float) -> None:
        if p50_us <= 0 or not self.copy_gbps:
            return
        gbps = self._bytes(entry) / p50_us / 1e3
        margin = MARGIN["cpu" if self.device == "cpu" else "gpu"]
        if self.cell.cache == "cold" and gbps > margin * self.copy_gbps:
            entry.status = "implausible"
            entry.reason = (
                f"{gbps:.0f} GB/s, over {margin} times the copy's {self.copy_gbps:.0f} GB/s"
            )
        elif gbps > self.copy_gbps:
            entry.flags.append("cache-hot")

    def _baseline(self, entry: _Entry) -> str | None:
        """The fastest unfused path that delivers the same, of those with a sound figure."""
        if entry.path is None:
            return None
        sound = [
            e.name
            for e in self._ready()
            if e.path
            and not e.path.fused
            and e.path.output == entry.path.output
            and "below-floor" not in e.flags
        ]
        return self.sampled.fastest(sound)

    def _figures(self, entry: _Entry, copy_us: float | None) -> dict:
        samples = np.array(self.sampled.samples_us[entry.name])
        row: dict[str, Any] = {"n": len(samples), **stats.summary(samples)}
        base = self._baseline(entry)
        if base is not None:
            ratio = stats.paired_ratio(self.sampled.samples_us[base], samples)
            row |= {"ratio_to": base, "ratio": ratio.value}
            row |= {"ratio_lo": ratio.lo, "ratio_hi": ratio.hi}
        if self.cell.clock == "eager":
            row["host_us"] = float(np.median(entry.lane.host_us))
        moved = self._bytes(entry)
        if moved and row["p50_us"] > 0:
            row |= {"bytes_moved": moved, "gbps": moved / row["p50_us"] / 1e3}
            if self.copy_gbps and self.cell.cache == "cold":
                row["pct_of_copy"] = 100 * row["gbps"] / self.copy_gbps
            if copy_us:
                row["pct_of_limit"] = 100 * copy_us / row["p50_us"]
        return row


def _without_out(call: Callable) -> Callable:
    """A quantising path's call: its outputs have shapes of its own, so it always makes them."""

    def fresh(*args, out=None):
        return call(*args)

    return fresh


def _free_host_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
