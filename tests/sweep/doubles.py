"""Measuring functions for tests of the sweep: what happens is chosen by the cell's M.

A line goes to the file that ``DOUBLES_LOG`` names when a cell begins and when it ends.
"""

from __future__ import annotations

import os
import signal
import time

from mlakit.records import CellResult

HANG, SEGFAULT, RAISE, KILL, MEMORY, ILLEGAL, SLOW = 1001, 1002, 1003, 1004, 1005, 1006, 1007


def _note(what: str, cell) -> None:
    log = os.environ.get("DOUBLES_LOG")
    if log:
        with open(log, "a") as file:
            file.write(f"{what} {cell.id} {os.getpid()}\n")


def measure(cell, *, device, run) -> CellResult:
    """One legal row a path, or the fault that the cell's M stands for."""
    _note("begin", cell)
    print("a library that prints to standard output")
    if cell.m == HANG:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        with open(os.environ["DOUBLES_LOG"], "a") as file:
            file.write(f"forked {cell.id} {child}\n")
        time.sleep(60)
    if cell.m == SEGFAULT:
        os.kill(os.getpid(), signal.SIGSEGV)
    if cell.m == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.m == RAISE:
        raise RuntimeError("no kernel image in /home/someone/cache/kernel.so\nmore")
    if cell.m == MEMORY:
        raise MemoryError("cannot allocate")
    if cell.m == SLOW:
        time.sleep(0.3)
    rows = [
        {
            "path_requested": path,
            "path_ran": path,
            "status": "skipped" if cell.m == ILLEGAL else "ok",
            "n": 3,
            "p50_us": 2.0 + i,
        }
        for i, path in enumerate(cell.paths)
    ]
    _note("end", cell)
    return CellResult(rows, {path: [1.0, 2.0, 3.5] for path in cell.paths})


def accuracy(cell, *, device, run) -> CellResult:
    """One accuracy row a path."""
    _note("accuracy", cell)
    return CellResult(
        [
            {"path_requested": p, "path_ran": p, "status": "ok", "share_correct": 1.0, "max_ulp": 0}
            for p in cell.paths
        ]
    )


def slow(cell, *, device, run) -> CellResult:
    """As ``measure``, but long enough to be killed in between."""
    _note("begin", cell)
    time.sleep(0.3)
    _note("end", cell)
    return CellResult([{"path_requested": p, "status": "ok", "n": 1} for p in cell.paths])
