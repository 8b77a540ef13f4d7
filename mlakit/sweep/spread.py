"""The same sweep on the devices of many machines, or of this one, through dask.distributed.

A dask worker stands for one device: it offers one unit of a resource named after the device's arch
(``sm_90``, ``gfx950``, ``cpu``), and a cell takes that unit, so timing is exclusive. The cell runs
in the dask worker's own warm child process, which writes its part to the run's folder; nothing but
the cell's id and statuses goes through the scheduler. All paths of a cell run in that one process,
so two paths are only ever compared on the same device.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

from mlakit import locks
from mlakit.archs import vendor_of
from mlakit.errors import MisuseError
from mlakit.records import Cell
from mlakit.sweep import store, worker
from mlakit.sweep.run import RunJobs, SweepSummary, longest_first, run_sweep
from mlakit.sweep.worker import Worker, devices_of

_LOOK_S = 10.0
"""how often a sweep looks whether the devices it waits for are still offered"""


def local_cluster(archs: Sequence[str] | None = None):
    """A dask cluster on this machine, one worker a device; close it when done.

    Args:
        archs: the arch that each worker offers; by default one worker for each device here.

    Raises:
        MisuseError: dask.distributed is not installed.
    """
    distributed = _distributed()
    if archs is None:
        probe = Worker()
        probe.stop()
        archs = [d["arch"] for d in probe.environment["devices"].values()]
    # dask would give each worker one thread, and figures of a CPU would be another machine's
    threads = worker.share_of_cores(len(archs) - archs.count("cpu"))
    workers: dict = {}
    seen: dict[str, int] = {}
    for number, arch in enumerate(archs):
        index = seen[arch] = seen.get(arch, -1) + 1
        shown = "HIP_VISIBLE_DEVICES" if vendor_of(arch) == "amd" else "CUDA_VISIBLE_DEVICES"
        options: dict = {"nthreads": 1, "resources": {arch: 1}, "dashboard_address": None}
        options["silence_logs"] = logging.ERROR
        options["env"] = threads | ({} if arch == "cpu" else {shown: str(index)})
        workers[number] = {"cls": distributed.Nanny, "options": options}
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"host": "127.0.0.1", "port": 0, "dashboard": False},
    }
    return distributed.SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50)


def _distributed():
    try:
        import distributed
    except ImportError:
        raise MisuseError(
            "dask.distributed is not here: pip install 'mlakit[dask]', or sweep without dask"
        ) from None
    return distributed


def over_dask(
    cells: Sequence[Cell] | None, out_dir: str | Path, *, scheduler: str | None = None, **options
) -> SweepSummary:
    """``run_sweep`` on the workers of a dask scheduler; ``out_dir`` is storage that all share.

    Args:
        cells: as ``run_sweep`` has them.
        out_dir: as ``run_sweep`` has it.
        scheduler: the scheduler's address; by default a cluster of this machine's devices.
        **options: as ``run_sweep`` has them.

    Raises:
        MisuseError: as ``run_sweep``; no dask; no worker that offers an arch; workers of one arch
            whose environments differ; or the scheduler was lost.
    """
    distributed = _distributed()
    with contextlib.ExitStack() as stack:
        cluster = scheduler or stack.enter_context(local_cluster())
        try:
            client = distributed.Client(cluster, timeout=20, set_as_default=False)
        except (OSError, ValueError) as error:
            raise MisuseError(f"no dask scheduler at {scheduler}: {error}") from None
        stack.enter_context(client)
        return run_sweep(cells, Path(out_dir).absolute(), run_jobs=_jobs_on(client), **options)


def _jobs_on(client) -> RunJobs:
    """Each job on a worker that offers its arch, the long ones first."""

    def run_jobs(run_dir, jobs, settle, functions, limit_s):
        env = _cluster_environment(client)
        # dask gives one key's result to whoever asks for it, and folders of two sweeps share names
        sweep = secrets.token_hex(8)
        settle(env, len(client.scheduler_info(n_workers=-1)["workers"]))
        queues = {}
        for kind, cell in longest_first(jobs):
            if devices_of(cell.arch, env):
                queues.setdefault(cell.arch, deque()).append((kind, cell))
                continue
            reason = f"no dask worker offers {cell.arch} (offered: {', '.join(worker.here(env))})"
            statuses = worker.write_fault(run_dir, kind, cell, env, "skipped", reason)
            yield cell, {"statuses": statuses}

        def submit(kind: str, cell: Cell):
            arguments = (str(run_dir), kind, cell.to_json(), env, functions[kind], limit_s)
            key, offer = f"{run_dir.name}-{sweep}-{kind}-{cell.id}", {cell.arch: 1}
            return client.submit(_run_cell, *arguments, key=key, resources=offer, pure=False)

        for (kind, cell), future in _one_a_device(client, queues, submit):
            try:
                reply = future.result()
            except _distributed().KilledWorker:
                reason = "every dask worker that took this cell died"
                reply = {"statuses": worker.write_fault(run_dir, kind, cell, env, "killed", reason)}
            except CancelledError:
                raise MisuseError(
                    "the dask scheduler was lost; what was measured is kept: start it again, "
                    "then go on with the run"
                ) from None
            yield cell, reply
        shutil.rmtree(run_dir / "claims", ignore_errors=True)

    return run_jobs


def _one_a_device(client, queues: dict[str, deque], submit: Callable) -> Iterator[tuple]:
    """Submit each arch's jobs in order, as many at once as it has devices; yield them as they end.

    Dask would hand every job to a worker at once and move those of a late one in the end, which
    left a card idle for 1.3 of 35 seconds.
    """
    running: dict = {}
    done = _distributed().as_completed(loop=client.loop)

    def feed() -> None:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        for arch, queue in queues.items():
            devices = max(1, sum(int(w["resources"].get(arch, 0)) for w in workers))
            busy = sum(cell.arch == arch for _, cell in running.values())
            for job in [queue.popleft() for _ in range(min(len(queue), devices - busy))]:
                future = submit(*job)
                running[future] = job
                done.add(future)

    feed()
    with _told_of_lost_workers(client, running):
        for future in done:
            job = running.pop(future)
            feed()
            yield job, future


@contextlib.contextmanager
def _told_of_lost_workers(client, running: dict) -> Iterator[None]:
    """Meanwhile say on stderr, once each time, that nobody offers what ``running`` jobs need."""
    over = threading.Event()

    def look() -> None:
        missed: dict[str, int] = {}
        while not over.wait(_LOOK_S):
            workers = client.scheduler_info(n_workers=-1).get("workers", {}).values()
            needed = {cell.arch for _, cell in list(running.values())}
            lost = needed.difference(*(w["resources"] for w in workers))
            missed = {arch: missed.get(arch, 0) + 1 for arch in lost}
            # The second look in a row: one that was killed is back after some seconds.
            for arch in (arch for arch, looks in missed.items() if looks == 2):
                said = f"no dask worker offers {arch} any more: start one, or end the sweep"
                print(f"waiting: {said} (what was measured is kept)", file=sys.stderr, flush=True)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)


def _cluster_environment(client) -> dict:
    """One environment for all workers: the device behind each unit of an arch that is offered.

    Raises:
        MisuseError: no worker offers an arch, or two of one arch differ.
    """
    offered: dict[str, dict] = {}
    names: dict[str, dict] = {}
    workers = client.scheduler_info(n_workers=-1)["workers"]
    for address, env in client.run(_environment).items():
        for arch in workers[address]["resources"]:
            if not devices_of(arch, env):
                continue
            only = _only(arch, env)
            differs = arch in offered and worker.difference(offered[arch], only)
            if differs:
                raise MisuseError(
                    f"the dask workers of {arch} are not alike: {differs}; sweep them apart"
                )
            offered[arch] = only
            names[f"{arch}:{len(names)}"] = only["devices"][arch]
    if not names:
        raise MisuseError(
            "no dask worker offers a device: start one a device, "
            'for example `dask worker ADDRESS --nthreads 1 --resources "sm_90=1"`'
        )
    return {"python": env["python"], "devices": names}


def _only(arch: str, env: dict) -> dict:
    """``env`` with the first device of ``arch`` alone, under the arch's name."""
    return {"python": env["python"], "devices": {arch: env["devices"][devices_of(arch, env)[0]]}}


# ---- inside a dask worker

_DEVICE = worker.WarmDevice("")
_ALONE = threading.Lock()  # a dask worker may have many threads and offer more than one unit


def _environment() -> dict:
    """The environment of this dask worker's device, from its warm child: torch is kept out."""
    return _DEVICE.environment


def _run_cell(
    run_dir: str, kind: str, cell_json: dict, run_env: dict, function: str, limit_s: float
) -> dict:
    """Measure one cell unless its part is there; its id and statuses.

    Raises:
        MisuseError: this worker joined with another environment than the run's.
    """
    cell, folder = Cell.from_json(cell_json), Path(run_dir)
    env = _environment()
    differs = worker.difference(_only(cell.arch, run_env), _only(cell.arch, env))
    if differs:
        raise MisuseError(f"a dask worker of {cell.arch} is not like the run: {differs}")
    reply: dict = {"statuses": []}
    with _ALONE, _claim(folder / "claims" / f"{kind}-{cell.id}", limit_s + worker.START_S):
        if not store.is_done(folder, kind, cell.id):
            _DEVICE.name = devices_of(cell.arch, env)[0]
            reply = _DEVICE.measure(folder, kind, cell, env, function, limit_s)
    return {"cell_id": cell.id} | reply


@contextlib.contextmanager
def _claim(path: Path, wait_s: float) -> Iterator[None]:
    """Hold a cell, for as long as this process lives at most: the kernel frees a dead one's."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "a+") as file:
        if locks.take(file.fileno(), wait_s=wait_s):
            raise TimeoutError(f"{path.name} is claimed elsewhere")
        yield
