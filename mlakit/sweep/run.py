"""Run a sweep: cells in warm workers, one row for whatever goes wrong, resumable at any point."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mlakit.errors import ExitCode, MisuseError, check_limit, one_of
from mlakit.records import STATUSES, Cell
from mlakit.sweep import grid, store
from mlakit.sweep.worker import (
    FUNCTIONS,
    WarmDevice,
    Worker,
    devices_of,
    difference,
    here,
    write_fault,
)
from mlakit.timing.guard import LockedError

TIME_LIMIT_S = 300.0
Job = tuple[str, Cell]
Progress = Callable[[int, int, Cell, str], None]
"""Called with (jobs done, jobs in all, the cell, its statuses in words) after each job."""


RunJobs = Callable[
    [Path, list[Job], Callable[[dict, int], None], Mapping[str, str], float],
    Iterator[tuple[Cell, dict]],
]
"""Measures a run's jobs; yields each cell with its worker's reply. Called with the run's folder,
the jobs, what is to be told the environment and the number of devices before anything is measured,
what measures a cell by kind, and the most seconds a cell may take."""


def progress_line(done: int, total: int, cell: Cell, words: str) -> str:
    """What ``Progress`` is called with, as one plain line."""
    shape = f"{cell.widths} M={cell.m} {cell.dtype} {cell.clock} {cell.cache}"
    return f"[{done}/{total}] {cell.arch} {shape}: {words}"


@dataclass
class SweepSummary:
    """What a sweep came to; ``statuses`` counts the rows of the whole run."""

    run_id: str
    run_dir: str
    jobs: int
    """cells to measure, each once for timing and once for accuracy where both are asked for"""
    done: int = 0
    reused: int = 0
    """jobs of ``done`` whose parts an earlier call had written"""
    statuses: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    measuring_s: float = 0.0
    """seconds inside the measuring function, all workers together"""
    workers: int = 1
    """devices that are in use at the same time, at most"""

    @property
    def measuring_share(self) -> float | None:
        """The share of the workers' wall time spent measuring; None where nothing was."""
        total = self.wall_s * self.workers
        return self.measuring_s / total if total and self.measuring_s else None

    @property
    def exit_code(self) -> ExitCode:
        """The gravest thing that happened; ``NO_KERNEL`` where every row was skipped."""
        had = {s for s, n in self.statuses.items() if n}
        if self.done < self.jobs:
            return ExitCode.INCOMPLETE
        if had & {"killed", "oom"}:
            return ExitCode.KILLED
        if "timeout" in had:
            return ExitCode.TIMED_OUT
        if had & {"failed", "wrong"}:
            return ExitCode.FAILED
        return ExitCode.NO_KERNEL if had == {"skipped"} else ExitCode.OK

    def __str__(self) -> str:
        words = ", ".join(f"{n} {s}" for s, n in self.statuses.items()) or "none"
        share = self.measuring_share
        spent = f", {share:.0%} of it measuring" if share is not None else ""
        reused = f" ({self.reused} from before)" if self.reused else ""
        return (
            f"{self.run_id}: {self.done} of {self.jobs} cells{reused}; rows: {words}; "
            f"{self.wall_s:.1f} s{spent}"
        )


def _settle_environment(run: store.Run, env: dict, force: bool) -> None:
    """Record the environment of a new run; hold that of a resumed one against what was recorded.

    Raises:
        MisuseError: they differ, and ``force`` is not set.
    """
    known = run.record.get("environment")
    differs = known and difference(known, env)
    if differs and not force:
        raise MisuseError(
            f"run {run.id} was measured elsewhere: {differs}; "
            "start a new run, or force it to hold rows of both"
        )
    if differs:
        others = run.record.get("other_environments") or []
        run.save(environment=env, other_environments=[*others, known])
    elif not known:
        run.save(environment=env, other_environments=[])


# ---- a run's jobs


@contextlib.contextmanager
def _open_sweep(
    cells: Sequence[Cell] | None,
    run_dir: Path,
    measure: Sequence[str],
    resume: bool,
    spec: dict | None,
    time_limit_s: float | None,
) -> Iterator[tuple[store.Run, float]]:
    """Create the run at ``run_dir`` or open the one that is there; whatever happens, close it.

    Yields the run, and the most seconds that a cell of it may take.

    Raises:
        MisuseError: a run is there and ``resume`` is False, it holds other cells, or no limit.
    """
    if time_limit_s is not None:
        check_limit("time_limit_s", time_limit_s)
    one_of("kind of measurement", FUNCTIONS, *measure)
    before = {"status": "incomplete", "ended_at": store.now()}
    if cells is not None and not (run_dir / "run.json").exists():
        limit = {"time_limit_s": time_limit_s or TIME_LIMIT_S}
        run = store.create_run(run_dir, list(cells), measure=list(measure), spec=spec, **limit)
    elif not resume:
        raise MisuseError(f"{run_dir} holds a run already: resume it, or name a new folder")
    else:
        run = store.open_run(run_dir)
        before = {name: run.record[name] for name in before}
    try:
        asked = None if cells is None else ([c.id for c in cells], list(measure))
        if asked not in (None, (run.record["cell_ids"], run.record["measure"])):
            raise MisuseError(f"run {run.id} is of other cells: name a new folder for this sweep")
        run.save(status="running", ended_at=None)
        yield run, time_limit_s or run.record.get("time_limit_s") or TIME_LIMIT_S
    except (MisuseError, LockedError):
        run.save(**before)
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        run.save(status="interrupted" if interrupted else "failed", ended_at=store.now())
        raise
    finally:
        run.close()


def _set_aside(run: store.Run, missing: list[Job]) -> None:
    """Rename the parts that are measured again: what is there afterwards is of this call."""
    for kind, cell in missing:
        part = store.part_path(run.path, kind, cell.id)
        if part.exists():
            part.replace(part.with_name(f"{part.name}.retried"))


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """In an order that lets several devices end together: no long cell is left for the end.

    Cells of about 2000 rows are the quickest (0.8 s on an H200): fewer rows sample up to their
    budget (2 to 3 s at M = 1 to 64), more take longer to fill and check.
    """
    return sorted(jobs, key=lambda job: -abs(math.log2(job[1].m / 2048)))


def _all_jobs(run: store.Run) -> list[Job]:
    """The jobs of a run, those of GPUs first."""
    jobs: list[Job] = []
    for kind in run.record["measure"]:
        cells = run.cells if kind == "timing" else grid.accuracy_cells(run.cells)
        jobs += [(kind, c) for c in sorted(cells, key=lambda c: c.arch == "cpu")]
    return jobs


def _missing_jobs(run: store.Run, retry: Iterable[str] = ()) -> tuple[list[Job], SweepSummary]:
    """The jobs still to do, and a summary that counts those already done.

    Args:
        run: the run.
        retry: statuses (``timeout``, ``failed``, ...) whose cells are to be measured again.
    """
    again = set()
    one_of("status", STATUSES, *retry)
    if retry:
        for kind in run.record["measure"]:
            rows = store.read_rows(run.path, kind)
            again |= {(kind, i) for i in rows.cell_id[rows.status.isin(list(retry))]}
    jobs = _all_jobs(run)
    missing = [
        (kind, c)
        for kind, c in jobs
        if (kind, c.id) in again or not store.is_done(run.path, kind, c.id)
    ]
    known = len(jobs) - len(missing)
    return missing, SweepSummary(run.id, str(run.path), len(jobs), done=known, reused=known)


def run_sweep(
    cells: Sequence[Cell] | None,
    out_dir: str | Path,
    *,
    measure: Sequence[str] = ("timing",),
    resume: bool = True,
    force: bool = False,
    retry: Sequence[str] = (),
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    spec: dict | None = None,
    functions: dict[str, str] | None = None,
    worker: Worker | None = None,
    run_jobs: RunJobs | None = None,
) -> SweepSummary:
    """Measure every cell that the run at ``out_dir`` lacks. One device is at work at a time.

    Args:
        cells: what to measure; None goes on with the run at ``out_dir``.
        out_dir: the run's own folder (``store.new_run_dir`` names one).
        measure: ``timing``, ``accuracy`` or both, of a new run.
        resume: go on with a run that is there; False refuses it.
        force: let a resumed run hold rows of another environment.
        retry: statuses whose cells are measured again.
        time_limit_s: the most seconds a cell may take, build and all; by default what the run
            was begun with, or ``TIME_LIMIT_S``.
        progress: called after each job.
        spec: what the sweep was asked for, kept in ``run.json``.
        functions: what measures, by kind, as ``module:function``; ``worker.FUNCTIONS`` if absent.
        worker: a started worker to use first; it is stopped at the end.
        run_jobs: what measures instead of this machine's devices (``mlakit.sweep.spread``).

    Raises:
        MisuseError: the folder, the run in it or its environment does not allow this.
        LockedError: another process is at this run, or another timing run kept the device; what
            was measured is kept.
        KeyboardInterrupt: interrupted; the run is marked so and can be resumed.
    """
    begun, run_dir = time.perf_counter(), Path(out_dir)
    device = WarmDevice("", run_dir / "worker.log", worker)
    try:
        with _open_sweep(cells, run_dir, measure, resume, spec, time_limit_s) as (run, limit_s):
            missing, summary = _missing_jobs(run, retry)

            def settle(env: dict, workers: int) -> None:
                _settle_environment(run, env, force)
                _set_aside(run, missing)
                summary.workers = workers

            if missing:
                order = missing, settle, FUNCTIONS | (functions or {}), limit_s
                for cell, reply in (run_jobs or _jobs_here(device))(run_dir, *order):
                    _count_in(summary, progress, cell, reply)
            return _finish(run, summary, begun)
    finally:
        device.stop()


def refuse_beside_resume(*asked: str) -> None:
    """A run goes on with what it was begun with.

    Raises:
        MisuseError: something was asked for.
    """
    if asked:
        raise MisuseError(
            f"a resumed run keeps its own {', '.join(asked)}: leave them out, or sweep anew"
        )


def _finish(run: store.Run, summary: SweepSummary, begun: float) -> SweepSummary:
    """Count the run's rows, and close its record."""
    summary.wall_s = round(time.perf_counter() - begun, 3)
    kinds = [store.read_rows(run.path, kind) for kind in run.record["measure"]]
    # A worker's word is not enough: done is what is there, now that the damaged are set aside.
    parts = [store.part_path(run.path, kind, cell.id) for kind, cell in _all_jobs(run)]
    summary.done = sum(part.is_file() for part in parts)
    summary.statuses = dict(sum((Counter(rows.status) for rows in kinds), Counter()))
    status = "ok" if summary.exit_code in (ExitCode.OK, ExitCode.NO_KERNEL) else "failed"
    status = "incomplete" if summary.done < summary.jobs else status
    kept = asdict(summary) | {"measuring_share": summary.measuring_share}
    del kept["run_dir"]
    run.save(status=status, ended_at=store.now(), summary=kept)
    return summary


def _jobs_here(device: WarmDevice) -> RunJobs:
    """Each job on the first device of its arch on this machine.

    An absent card's time is never stated; its arithmetic may be emulated on the CPU.
    """

    def run_jobs(run_dir, jobs, settle, functions, limit_s):
        env = device.environment
        settle(env, 1)
        for kind, cell in jobs:
            names = devices_of(cell.arch, env)
            if not names and kind == "timing":
                reason = f"{cell.arch} is not on this machine (here: {', '.join(here(env))})"
                statuses = write_fault(run_dir, kind, cell, env, "skipped", reason)
                yield cell, {"statuses": statuses}
                continue
            name = names[0] if names else "cpu"
            if device.name not in ("", name):
                device.stop()  # nothing of one device is left to another's figures
            device.name = name
            yield cell, device.measure(run_dir, kind, cell, env, functions[kind], limit_s)

    return run_jobs


def _count_in(summary: SweepSummary, progress: Progress | None, cell: Cell, reply: dict) -> None:
    """Add a job's reply to the summary, and tell of it."""
    summary.done += 1
    summary.measuring_s += reply.get("measure_s", 0.0)
    if progress:
        counts = Counter(reply["statuses"]).items()
        words = ", ".join(f"{n} {status}" for status, n in counts)
        progress(summary.done, summary.jobs, cell, words)


# ---- from what was asked for, without cells


def sweep(*, out: str | Path = "runs", progress: Progress | None = None, **spec):
    """Run a sweep from a notebook: ``sweep(models=["DeepSeek-V3"], batches=[1, 64])``.

    Args:
        out: the folder that the run's folder goes into.
        progress: called after each job.
        **spec: fields of ``mlakit.sweep.spec.SweepSpec``; without ``archs``, this machine's GPU or,
            where there is none, its CPU.

    Returns:
        The rows as a DataFrame (of the first kind in ``measure``); ``attrs["run_dir"]`` and
        ``attrs["summary"]`` say where they are and how it went.

    Raises:
        MisuseError: a value or a name that the specification does not allow, in one line.
    """
    from mlakit.sweep.spec import SweepSpec

    asked = SweepSpec.parse(spec)
    summary = run_asked(asked.values(), out, progress=progress, **asked.options())
    frame = store.read_rows(summary.run_dir, asked.measure[0])
    frame.attrs |= {"run_dir": summary.run_dir, "summary": str(summary)}
    return frame


def run_asked(values: dict, out: str | Path, **options) -> SweepSummary:
    """``run_sweep`` of ``grid.expand(**values)`` into a new folder below ``out``.

    Where no arch is named it is this machine's first, which a worker is asked for.
    """
    worker = None
    if values.get("archs") is None:
        grid.expand(**values | {"archs": ("cpu",), "clocks": None})
        worker = Worker()
        values = values | {"archs": (here(worker.environment)[0],)}
    try:
        cells = grid.expand(**values)
    except MisuseError:
        if worker:
            worker.stop()
        raise
    plain = {k: v for k, v in values.items() if v is not None}
    return run_sweep(cells, store.new_run_dir(out), worker=worker, spec=plain, **options)
