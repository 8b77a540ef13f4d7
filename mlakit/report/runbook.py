"""Run one notebook in a child process and say truthfully how that went.

The status never comes from the saved notebook: papermill saves a killed kernel, a timeout and a
missing kernel as completed. It comes from the child's own record and the parent's wait.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mlakit.datafiles import read_json
from mlakit.errors import ExitCode, MisuseError, one_line, one_of
from mlakit.report import scrub
from mlakit.report.parameters import check
from mlakit.sweep.worker import die_with, share_of_cores

STATUS_EXIT = {code.name.lower().replace("_", " "): code for code in ExitCode}
"""By status of a run ("timed out"): each exit code is the one of its own name."""
KERNEL = "mlakit-here"
"""The name of a kernel spec made for each run: the running interpreter, registered or not."""


@dataclass(frozen=True)
class NotebookRun:
    """How one notebook went; ``reason`` is one line, empty when ok."""

    name: str
    parameters: dict
    status: str
    reason: str
    seconds: float
    notebook: str
    """the file that it was to be saved in"""
    figures: int = 0


def notebooks_dir() -> Path:
    """The folder of mlakit's notebooks: ``notebooks/`` of a checkout, else the wheel's copy.

    Raises:
        FileNotFoundError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "notebooks", package / "_notebooks"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError("mlakit's notebooks are missing: install mlakit again")


def declared_parameters(source: Path) -> dict:
    """The names and defaults of a notebook's one ``parameters`` cell.

    Raises:
        MisuseError: no such cell, or more than one.
    """
    try:
        cells = read_json(source)["cells"]
        tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
        trees = [ast.parse("".join(c["source"])) for c in tagged]
        given = [[n for n in tree.body if isinstance(n, ast.Assign)] for tree in trees]
        found = [{n.targets[0].id: ast.literal_eval(n.value) for n in each} for each in given]
    except (KeyError, TypeError, AttributeError, ValueError, SyntaxError) as error:
        if isinstance(error, MisuseError):
            raise
        raise MisuseError(f"{source.name} is no notebook, or a damaged one: restore it") from None
    if len(found) != 1:
        raise MisuseError(
            f"{source.name} has {len(found)} cells tagged 'parameters': it needs exactly one"
        )
    return found[0]


def check_parameters(source: Path, parameters: dict) -> dict:
    """``parameters`` if the notebook declares each of them with a value of that type.

    Raises:
        MisuseError: an unknown name, with the near match, or a value of another type.
    """
    one_of(f"parameter of {source.name}", declared_parameters(source), *parameters)
    return check(dict(parameters))


def run_notebook(
    source: Path,
    target: Path,
    parameters: dict,
    *,
    cell_limit_s: float = 300,
    run_limit_s: float = 900,
    at_once: int = 1,
) -> NotebookRun:
    """Execute ``source`` with ``parameters`` into ``target``; never raises for a failing notebook.

    Both limits end the whole process tree; nothing is left running. What was executed is saved
    in every case in which papermill saved anything, without paths, user, host and tokens. Of
    ``at_once`` notebooks each takes its share of the cores, unless ``OMP_NUM_THREADS`` is set.

    Raises:
        MisuseError: parameters that the notebook does not declare, before a kernel starts.
    """
    check_parameters(source, parameters)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlakit-") as scratch:
        order = {"parent": os.getpid(), "record": str(Path(scratch) / "record.json")}
        order |= {"source": str(source), "target": str(target), "parameters": parameters}
        order |= {"cell_limit_s": cell_limit_s}
        child = subprocess.Popen(
            [sys.executable, "-m", "mlakit.report.runbook"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_environment(Path(scratch), at_once),
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = child.communicate(json.dumps(order), timeout=run_limit_s)
            status, reason = _read_record(order["record"], child.returncode, errors)
        except subprocess.TimeoutExpired:
            status, reason = "timed out", f"over the run limit of {run_limit_s:g} s"
        finally:
            _end_tree(child.pid)
            child.wait()
    figures = None
    try:
        figures = _finish(target, status, reason)
    except (OSError, ValueError) as error:  # a full disk, or what it left of the notebook
        status, reason = ("failed", one_line(error)) if status == "ok" else (status, reason)
    if status == "ok" and figures is None:
        status, reason = "incomplete", "the end marker is missing: not every cell ran"
    how = parameters, status, scrub.text(reason), time.monotonic() - started
    return NotebookRun(source.stem, *how, target.name, figures or 0)


def _environment(scratch: Path, at_once: int = 1) -> dict[str, str]:
    """The child's environment: works with no HOME, no display and any MPLBACKEND."""
    spec = scratch / "share" / "kernels" / KERNEL
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": argv, "display_name": "mlakit", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(kernel))
    names = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
    folders = {name: scratch / name.lower() for name in names}
    for folder in folders.values():
        folder.mkdir()
    home = os.path.expanduser("~")
    shared = filter(None, (str(scratch / "share"), os.environ.get("JUPYTER_PATH")))
    return {
        **os.environ,
        **share_of_cores(at_once),
        **{k: str(v) for k, v in folders.items()},
        # Compilers keep their caches at home: an empty one each time would build all anew.
        "HOME": home if os.access(home, os.W_OK) else str(scratch),
        "JUPYTER_PATH": os.pathsep.join(shared),
        "MPLBACKEND": "agg",
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def _read_record(path: str, code: int, errors: str) -> tuple[str, str]:
    try:
        record = json.loads(Path(path).read_text())
        return record["status"], record["reason"]
    except (OSError, ValueError):
        last = (errors.strip().splitlines() or ["no message"])[-1]
        if code < 0:
            return "killed", f"the runner was ended by {signal.Signals(-code).name}"
        return "failed", f"the runner stopped with exit code {code}: {last}"


def _end_tree(pid: int) -> None:
    """Kill a process and all that it started; kernels run in sessions of their own."""
    for p in (*_descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(p, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [*_descendants(child), child]
    return found


def _finish(target: Path, status: str, reason: str) -> int | None:
    """Scrub the saved notebook, write our status into it; the figures it counted, or None."""
    import nbformat

    if not target.exists():
        return None
    nb = scrub.notebook(nbformat.read(target, as_version=4))
    code = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
    marks = [o.metadata.get("mlakit") for c in code for o in c.outputs if "metadata" in o]
    ends = [m for m in marks if m and m.get("end")]
    complete = bool(ends) and all(c.execution_count for c in code)
    nb.metadata["mlakit"] = {"status": status, "reason": scrub.text(reason), "complete": complete}
    nbformat.write(nb, target)
    return ends[-1]["figures"] if complete else None


def _child(order: dict) -> dict:
    """Inside the child: execute, and classify what came of it."""
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    try:
        options = {"kernel_name": KERNEL, "language": "python", "start_timeout": 120}
        options |= {"progress_bar": False, "log_output": False}
        options |= {"execution_timeout": int(order["cell_limit_s"])}
        what = order["source"], order["target"], order["parameters"]
        papermill.execute_notebook(*what, **options)
    except papermill.PapermillExecutionError as error:
        return {"status": "failed", "reason": f"{error.ename}: {error.evalue}"}
    except CellTimeoutError:
        limit = f"a cell took over its limit of {order['cell_limit_s']:g} s"
        return {"status": "timed out", "reason": limit}
    except DeadKernelError:
        return {"status": "killed", "reason": "the kernel died"}
    except NoSuchKernel as error:
        return {"status": "no kernel", "reason": str(error)}
    except RuntimeError as error:
        # A cell's own errors come as PapermillExecutionError: this is a kernel that never answered.
        return {"status": "no kernel", "reason": f"the kernel did not start: {error}"}
    return {"status": "ok", "reason": ""}


if __name__ == "__main__":
    task = json.load(sys.stdin)
    die_with(task["parent"])  # and the kernel ends with this process, which it watches
    outcome = _child(task)
    temporary = Path(task["record"] + ".tmp")
    temporary.write_text(json.dumps(outcome))
    temporary.rename(task["record"])
