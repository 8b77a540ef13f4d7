"""A warm worker: a child process that measures one cell after another, and its parent's handle.

Both ends of one pipe, JSON lines. The child (``python -m mlakit.sweep.worker``) says what machine
it is on, then answers each request once the cell's part is written. Whatever a cell does to its
process (segfault, out of memory, a hang) happens to the child; the parent keeps the record.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from mlakit.archs import devices, vendor_of
from mlakit.errors import MisuseError, fault_status, one_line
from mlakit.records import Cell, CellResult, measured_now
from mlakit.shapes import model
from mlakit.sweep.store import is_done, write_part
from mlakit.timing import guard

FUNCTIONS = {
    "timing": "mlakit.timing.measure:measure_cell",
    "accuracy": "mlakit.drift.accuracy:accuracy_cell",
}
"""What measures a cell: ``function(cell, *, device, run) -> CellResult``.

``run`` holds the columns that only the sweep knows: ``run_id`` and ``hidden_size``.
"""

LOCK_WAIT_S = 600.0
"""the most seconds that a cell waits for another timing run to leave its device"""

START_S = 120.0
"""the most seconds a worker takes to start: importing torch from a cold disk took over a minute"""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


# ---- what both ends write


def environment() -> dict:
    """Python's version, and by device (``cpu``, ``cuda:0``) what its rows are identified by."""
    names = [*(f"cuda:{d.index}" for d in devices()), "cpu"]
    return {
        "python": platform.python_version(),
        "devices": {name: guard.environment(name) for name in names},
    }


def here(env: dict) -> tuple[str, ...]:
    """The archs of an environment, GPUs first; ``cpu`` is always the last."""
    return tuple(dict.fromkeys(d["arch"] for d in env["devices"].values()))


def devices_of(arch: str, env: dict) -> list[str]:
    """torch's names of the devices of an arch, in order."""
    return [name for name, d in env["devices"].items() if d["arch"] == arch]


def difference(old: dict, new: dict) -> str | None:
    """In words, what differs between two environments; None where figures may be compared."""

    def seen(env: dict, name: str) -> str:
        return ", ".join(sorted({str(d[name]) for d in env["devices"].values() if d.get(name)}))

    found = [
        f"{name} {seen(old, name) or 'none'} there, {seen(new, name) or 'none'} here"
        for name in ("device", "driver", "torch", "triton", "mlakit", "git_sha")
        if seen(old, name) != seen(new, name)
    ]
    return "; ".join(found) or None


def identity(cell: Cell, run: str, env: dict, device: str = "") -> dict:
    """The identity columns of a cell's rows, where the measuring function left them out."""
    found = env["devices"][device or (devices_of(cell.arch, env) or [*env["devices"]])[0]]
    if found["arch"] != cell.arch:
        found = found | dict.fromkeys(("device", "device_id", "driver"))
        found |= {"vendor": vendor_of(cell.arch), "arch": cell.arch, "arch_raw": cell.arch}
    hidden_size = model(cell.model).hidden_size if cell.model else None
    return measured_now(cell) | found | {"run_id": run, "hidden_size": hidden_size}


def write_fault(
    run_dir: Path, kind: str, cell: Cell, env: dict, status: str, reason: str, device: str = ""
) -> list[str]:
    """Write one row, without figures, for a cell that could not be measured; its statuses.

    The row's ``path_requested`` names all of the cell's paths: what happened, happened to all.
    """
    row = identity(cell, Path(run_dir).resolve().name, env, device)
    row |= {"path_requested": ",".join(cell.paths), "status": status, "reason": reason}
    write_part(run_dir, kind, cell.id, [row])
    return [status]


def plain_reason(error: BaseException) -> str:
    """An exception in one line of at most 200 characters, without the folders of its paths."""
    return re.sub(r"(?<![\w.])(?:/[^\s/:'\"]+)+/", "", one_line(error))


# ---- the child


def share_of_cores(children: int) -> dict[str, str]:
    """Variables that give each of so many children its share of the cores; one set already stays.

    Two that each spin on every core take three times as long as one after the other.
    """
    share = str(max(1, len(os.sched_getaffinity(0)) // max(1, children)))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: os.environ.get(name, share) for name in names}


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however that dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def _measure(request: dict, env: dict) -> dict:
    """Measure one cell and write its part; the reply to the parent."""
    cell = Cell.from_json(request["cell"])
    run_dir, kind, device = Path(request["run_dir"]), request["kind"], request["device"]
    run = run_dir.resolve().name
    module, _, name = request["function"].partition(":")
    begun = time.perf_counter()
    try:
        function = getattr(importlib.import_module(module), name)
        base = identity(cell, run, env, device)
        known = {name: base[name] for name in ("run_id", "hidden_size")}
        result: CellResult = function(cell, device=device, run=known)
        measured = time.perf_counter() - begun
        rows = [base | {k: v for k, v in row.items() if v is not None} for row in result.rows]
        write_part(run_dir, kind, cell.id, rows, result.samples_us)
        return {"statuses": [r["status"] for r in rows], "measure_s": measured}
    except Exception as error:
        # one process serves many cells: a fault of any kind is this cell's row, and no more
        traceback.print_exc()
        fault = fault_status(error), plain_reason(error), device
        reply = {"statuses": write_fault(run_dir, kind, cell, env, *fault)}
        return reply | {"measure_s": time.perf_counter() - begun, "recycle": _sticky(device)}


def _sticky(device: str) -> bool:
    """Whether the device stays unusable for this process, as after an illegal memory access."""
    if device == "cpu":
        return False
    import torch

    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return False
    except RuntimeError:
        return True


def main() -> None:
    """Serve requests from standard input until it ends."""
    die_with(int(sys.argv[1]))
    # libraries print to standard output; replies go where nothing else does
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    env = environment()

    def reply(message: dict) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    reply({"environment": env})
    for line in sys.stdin:
        request = json.loads(line)
        device, wait_s = request["device"], request["lock_wait_s"]
        try:
            with contextlib.ExitStack() as held:
                if request["kind"] == "timing":
                    try:
                        held.enter_context(guard.device_lock(device))
                    except guard.LockedError as error:
                        reply({"waiting": str(error)})
                        held.enter_context(guard.device_lock(device, wait_s=wait_s))
                reply({"begun": True})
                answer = _measure(request, env)
        except (guard.LockedError, MisuseError) as error:
            answer = {"locked": str(error)}
        reply(answer)


# ---- the parent's handle


class WorkerLostError(RuntimeError):
    """The worker ended or was ended; ``status`` is the cell's status and the message its reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Worker:
    """The parent's handle on one worker process. Starting it waits until it has imported torch.

    Raises:
        WorkerLostError: it ended before it was ready, or a cell ended it.
    """

    def __init__(self, log: Path | None = None) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH")) if p)
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._ooms = _oom_kills()
        with open(log or os.devnull, "ab") as stderr:
            self._process: Any = subprocess.Popen(
                [sys.executable, "-m", "mlakit.sweep.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env | {"PYTHONPATH": path},
                start_new_session=True,
            )
        self._pending = b""
        try:
            self.environment: dict = self._answer(START_S)["environment"]
        except BaseException:
            self.stop()
            raise

    def measure(
        self, run_dir: Path, kind: str, cell: Cell, device: str, function: str, limit_s: float
    ) -> dict:
        """Have one cell measured and its part written; the worker's reply.

        ``limit_s`` counts from when the device is this worker's.

        Raises:
            LockedError: another timing run held the device for ``LOCK_WAIT_S``.
            WorkerLostError: past ``limit_s`` (the worker's process group is killed) or crashed.
        """
        request: dict = {"run_dir": str(run_dir), "kind": kind, "cell": cell.to_json()}
        request |= {"device": device, "function": function, "lock_wait_s": LOCK_WAIT_S}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        begun = self._answer(LOCK_WAIT_S + START_S)
        if "waiting" in begun:
            print(f"waiting: {begun['waiting']}", file=sys.stderr, flush=True)
            begun = self._answer(LOCK_WAIT_S + START_S)
        if "locked" in begun:
            raise guard.LockedError(begun["locked"])
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> dict:
        stdout, deadline = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                raise WorkerLostError("timeout", f"over the time limit of {limit_s:g} s")
            chunk = os.read(stdout, 65536)
            if not chunk:
                raise self._lost()
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _lost(self) -> WorkerLostError:
        code = self._process.wait()
        self.stop()
        if code >= 0:
            return WorkerLostError("failed", f"the worker exited with code {code}")
        known = {s.value: s.name for s in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        if code == -signal.SIGKILL and _oom_kills() > self._ooms:
            return WorkerLostError("oom", "the kernel killed the worker: out of memory")
        status = "killed" if -code in (signal.SIGKILL, signal.SIGTERM) else "failed"
        return WorkerLostError(status, f"the worker died of {name}")

    def stop(self) -> None:
        """End the worker and everything it started, at once; a second call does nothing."""
        if self._process.stdout.closed:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


class WarmDevice:
    """One device's worker: started when first needed, replaced after a fault."""

    def __init__(self, name: str, log: Path | None = None, worker: Worker | None = None) -> None:
        self.name, self._log, self._worker = name, log, worker

    @property
    def environment(self) -> dict:
        """What its worker says of this machine."""
        self._worker = self._worker or Worker(self._log)
        return self._worker.environment

    def measure(
        self, run_dir: Path, kind: str, cell: Cell, env: dict, function: str, limit_s: float
    ) -> dict:
        """Measure one cell, or write the row that says why it could not be; the reply."""
        try:
            self._worker = self._worker or Worker(self._log)
            reply = self._worker.measure(run_dir, kind, cell, self.name, function, limit_s)
        except WorkerLostError as lost:
            self.stop()
            # it may have died after its part was whole
            if is_done(run_dir, kind, cell.id):
                return {"statuses": []}
            fault = (lost.status, str(lost), self.name)
            return {"statuses": write_fault(run_dir, kind, cell, env, *fault)}
        if reply.get("recycle"):
            self.stop()
        return reply

    def stop(self) -> None:
        """End the worker, if there is one."""
        if self._worker:
            self._worker.stop()
        self._worker = None


def _oom_kills() -> int:
    """How often the kernel's memory killer has struck in this process's control group."""
    try:
        events = Path("/sys/fs/cgroup/memory.events").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)", events, re.MULTILINE)
    return int(found.group(1)) if found else 0


if __name__ == "__main__":
    main()
