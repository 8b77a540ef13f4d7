"""Measure one cell: every path of it and the controls, checked, interleaved, put into rows."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlakit.archs import arch
from mlakit.dispatch import probe
from mlakit.errors import MisuseError
from mlakit.paths import registry
from mlakit.records import Cell, CellResult, check_row, measured_now
from mlakit.timing import buffers, check, clock, controls, guard, sampler, sensors, stats
from mlakit.timing.entry import Entry

_FOREIGN_CORES = 0.25
_FASTEST_GBPS = 8000.0
"""taken for the memory of a card whose table has none: too many only asks for more memory"""
LOCK_WAIT_S = 600.0


def measure_cell(cell: Cell, *, device: str = "cpu", run: dict | None = None) -> CellResult:
    """Time all of ``cell.paths`` and their controls on ``device``, under the device's lock.

    Args:
        cell: the comparison; ``cell.arch`` must be the device's and the clock one it has.
        device: ``cpu``, ``cuda`` or ``cuda:N`` (torch's name for AMD cards as well).
        run: identity columns that the caller knows better (``run_id``, ``policy`` ...).

    Returns:
        One row a path, then the controls (``records.CONTROLS``); a path that cannot run, runs
        wrong or out of memory is a row that says so. Raw samples by path.

    Raises:
        MisuseError: the cell is for another arch, the clock does not exist there, or Triton
            interprets in this process.
        LockedError: another process holds the device; it is named.
    """
    found = guard.device_of(device)
    device = f"cuda:{found.index}" if found else "cpu"
    _check_place(cell, device)
    identity = measured_now(cell) | guard.environment(device)
    identity |= {"cache_bytes": guard.cache_bytes(device)} | (run or {})
    entries = [Entry(name) for name in cell.paths]
    # Without gradients from the first call on: switching later would make compiled paths recompile.
    with guard.device_lock(device, wait_s=LOCK_WAIT_S), torch.no_grad():
        if found:
            # Graphs of the cell before hold their outputs until collected: tens of GiB.
            gc.collect()
            torch.cuda.empty_cache()
        return _Measurement(cell, device, identity, entries).result()


def _check_place(cell: Cell, device: str) -> None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise MisuseError(
            "TRITON_INTERPRET is set: kernels are interpreted in this process, so nothing is "
            "timed; unset it"
        )
    found = guard.device_of(device)
    here = found.arch if found else "cpu"
    if cell.arch != here:
        raise MisuseError(
            f"this cell is for {cell.arch}, {device} is {here}: nothing is timed for hardware that "
            f"is not here; give the cell arch={here!r}"
        )
    if (cell.clock == "cpu") != (found is None):
        wanted = "cpu" if found is None else "graph, kernel or eager"
        raise MisuseError(f"clock {cell.clock!r} does not exist on {device}: use {wanted}")


class _Measurement:
    """The steps of one cell in order; each leaves what the next needs on ``self``."""

    def __init__(self, cell: Cell, device: str, identity: dict, entries: list[Entry]) -> None:
        self.cell, self.device, self.identity, self.entries = cell, device, identity, entries
        self.found, self.cache = guard.device_of(device), identity["cache_bytes"]
        self.sampled = sampler.Sampled({})
        self.conditions: dict = {}
        self.copy_gbps: float | None = None

    def result(self) -> CellResult:
        """All rows and samples."""
        self._admit()
        if self._ready():
            before = sensors.conditions(self.found)
            try:
                if self.found:
                    torch.cuda.set_device(self.device)
                ring = buffers.Ring(self.cell, self.device, self._slot_count())
            except (MisuseError, MemoryError, RuntimeError) as error:
                for entry in self._ready():
                    entry.fail(error)
                    if isinstance(error, MisuseError):
                        entry.status, entry.reason = "skipped", str(error)
            else:
                self._prepare(ring)
                self._sample(before)
                if any(e.path for e in self._ready()):
                    # Fresh inputs into the timed buffers, then every timed function once more.
                    ring.fill(self.cell.seed + 1)
                    self._attempt(self._check, ring)
        rows = [check_row(row) for row in self._rows()]
        return CellResult(rows, {k: v for k, v in self.sampled.samples_us.items() if v})

    def _ready(self) -> list[Entry]:
        return [e for e in self.entries if e.status == "ok"]

    def _attempt(self, step: Callable, *args) -> None:
        """``step(entry, *args)`` for every entry still alive; one that raises fails alone."""
        for entry in self._ready():
            try:
                step(entry, *args)
            except Exception as error:
                entry.fail(error)

    def _as_timed(self, path: registry.Path, call: Callable) -> Callable:
        """``call`` of ``path``, as its lane calls it."""
        # Copying into outputs that a path cannot take would be held against it: in the graph
        # clock such a path returns its own, which lie as far apart, unless outputs are given.
        own = path.makes_outputs and self.cell.layout != "split_out"
        return _without_out(call) if own or path.output != "none" else call

    def _admit(self) -> None:
        """Refuse what cannot run here or is not for timing, and what memory does not hold."""
        context = probe.context_for(self.cell, self.device)
        for entry in self.entries:
            entry.path = path = registry.get(entry.name)
            entry.call = self._as_timed(path, path.call)
            reason = path.supports(context)
            if reason is None and not path.timed and not self.found:
                reason = "correctness only: it runs under an interpreter here"
            if reason:
                entry.status, entry.reason = "skipped", reason
            elif path.splits_from_m is not None and self.cell.m >= path.splits_from_m:
                entry.flags.append("split")
                entry.reason = f"two kernels from M = {path.splits_from_m} (library threshold)"
            if path.copies:
                entry.notes.append("copies its inputs first; the copy is timed")
            if reason is None and path.knobs:
                knobs = path.knobs(context)
                entry.overlaps = bool(knobs.get("pdl"))
                entry.config = json.dumps(knobs)
        need, free = self._memory()
        for entry in self._ready():
            if need > free:
                entry.status = "skipped"
                entry.reason = f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"

    def _memory(self) -> tuple[int, int]:
        """Bytes the ring, one call's work and what graphs hold need, and bytes free."""
        # Eight slots for fresh outputs, float32 copies of unfused paths, the check's float64 rows.
        need = (self._slot_count() + 8) * buffers.slot_bytes(self.cell)
        if not self.found:
            return need, sensors.free_host_bytes()
        if self.cell.clock == "graph":
            held = [*self._ready(), *self._movable().values()]
            own = sum(entry.call is not entry.path.call for entry in held)
            gbps = arch(self.cell.arch).hbm_gbps or _FASTEST_GBPS
            need += clock.graphs_hold(self.cell, own, self.cache, gbps)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return need, torch.cuda.mem_get_info(self.device)[0] + kept

    def _slot_count(self) -> int:
        count = buffers.slots_for(self.cell, self.cache)
        return min(count, clock.MAX_NODES) if self.cell.clock == "graph" else count

    def _prepare(self, ring: buffers.Ring) -> None:
        """First calls (build and compile), each timed by itself; then the lanes, the controls."""
        self._attempt(self._first_call, ring.slots[0])
        if not self._ready():
            return
        try:
            self.copy_gbps = controls.device_copy_gbps(self.device, self.cache)
            copies = controls.best_copies(ring, self.device, self.cache, clock_name=self.cell.clock)
        except RuntimeError as error:
            for entry in self._ready():
                entry.fail(error)
            return
        movable = self._movable() if "copy_plain" in copies else {}
        self.entries += [Entry(n, call=call, config=c) for n, (c, call) in copies.items()]
        floor = controls.floor_call(self.cell.clock, self.device)
        self.entries.append(Entry("launch_floor", call=floor))
        for kind, entry in movable.items():
            early = not entry.overlaps
            call = self._as_timed(entry.path, entry.path.launched(early))
            name = f"{kind}_{'early' if early else 'plain'}"
            self.entries.append(Entry(name, like=entry.path, call=call, overlaps=early))
        self._attempt(self._make_lane, ring)

    def _movable(self) -> dict[str, Entry]:
        """By kind, the first fused path and the first pair that can be launched another way.

        Not where the host is on the clock: a call that is told how to launch is no usual call.
        """
        if self.cell.clock == "eager":
            return {}
        can = [e for e in self._ready() if e.path.launched]
        return {"fused" if e.path.fused else "pair": e for e in reversed(can)}

    def _first_call(self, entry: Entry, slot: buffers.Slot) -> None:
        start = time.perf_counter()
        # With outputs or without, as its lane calls it: inductor builds one for each.
        entry.call(*slot.args, out=slot.out)
        if self.found:
            torch.cuda.synchronize()
        entry.first_call_s = time.perf_counter() - start

    def _make_lane(self, entry: Entry, ring: buffers.Ring) -> None:
        if entry.name.startswith("copy") and self.cell.quant != "none":
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
        after = sensors.conditions(self.found)
        self.conditions = {"clocks_before": before["clocks"], "clocks_after": after.pop("clocks")}
        self.conditions |= after | {"cpu_load": load.read()}
        foreign = sensors.foreign_processes(self.found) or 0
        for entry in self._ready():
            if entry.name in self.sampled.errors:
                entry.fail(self.sampled.errors[entry.name])
            if foreign:
                entry.flags.append(f"foreign-process:{foreign}")
            if (self.conditions["cpu_load"] or 0) > _FOREIGN_CORES:
                entry.flags.append("busy-host")
            if not self.sampled.converged:
                entry.flags.append("budget-ended")

    def _check(self, entry: Entry, ring: buffers.Ring) -> None:
        why = check.wrong_output(entry.lane, entry.path, ring) if entry.path else None
        if why:
            entry.status, entry.reason = "wrong", why

    def _rows(self) -> list[dict]:
        self._flag()
        floor_us = self._p50("launch_floor")
        limits_us = self._p50("copy_plain") or self._p50("copy_limit"), self._p50("copy_limit")
        rows = []
        for entry in self.entries:
            row = self.identity | self.conditions | {"launch_floor_us": floor_us}
            row |= {"path_requested": entry.name, "path_ran": entry.ran, "config": entry.config}
            row |= {"status": entry.status, "reason": entry.reason}
            row |= {"first_call_s": entry.first_call_s}
            if entry.status in ("ok", "implausible"):
                early = entry.overlaps or entry.name == "copy_limit"
                row |= self._figures(entry, limits_us[early])
            row["flags"] = ",".join(sorted(set(entry.flags)))
            row["note"] = "; ".join([*entry.notes, f"torch threads {torch.get_num_threads()}"])
            rows.append(row)
        return rows

    def _p50(self, name: str) -> float | None:
        samples = self.sampled.samples_us.get(name)
        alive = name not in self.sampled.errors
        return float(np.median(samples)) if samples and alive else None

    def _bytes(self, entry: Entry) -> int:
        if entry.name == "launch_floor":
            return 0
        q_bytes = None
        path = entry.path or entry.like
        if path and path.output != "none" and entry.lane.seen:
            q_bytes = sum(t.nbytes for t in clock.tensors(entry.lane.seen[-1][1][0]))
        return buffers.bytes_moved(self.cell, q_bytes)

    def _flag(self) -> None:
        floor_us = self._p50("launch_floor") or 0.0
        for entry in self._ready():
            samples = np.array(self.sampled.samples_us.get(entry.name, ()))
            if not len(samples):
                continue
            if self.sampled.recompiles.get(entry.name):
                entry.flags.append("recompile")
            entry.flag(samples, floor_us, on_gpu=self.found is not None)
            if entry.path and self.copy_gbps:
                entry.flag_bandwidth(self._bytes(entry), samples, self.copy_gbps, self.cell)

    def _baseline(self, entry: Entry) -> str | None:
        """The fastest unfused path that delivers the same, of those with a sound figure."""
        if entry.path is None:
            return None
        unfused = [e for e in self._ready() if e.path and not e.path.fused]
        alike = [e for e in unfused if e.path.output == entry.path.output]
        return self.sampled.fastest([e.name for e in alike if "below-floor" not in e.flags])

    def _figures(self, entry: Entry, copy_us: float | None) -> dict:
        """``copy_us``: of the copy that is launched as the entry is, early or not."""
        samples = np.array(self.sampled.samples_us[entry.name])
        row: dict[str, Any] = {"n": len(samples), **stats.summary(samples)}
        base = self._baseline(entry)
        if base is not None:
            r = stats.paired_ratio(self.sampled.samples_us[base], samples)
            row |= {"ratio_to": base, "ratio": r.value, "ratio_lo": r.lo, "ratio_hi": r.hi}
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
    """A call that makes its outputs: it cannot write into others, or theirs have other shapes."""

    def fresh(*args, out=None):
        return call(*args)

    return fresh
