"""Surroundings as cron, a container or a full disk make them."""

import json
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
BARE = {"PATH": "/nonexistent", "MPLBACKEND": "module://nonsense", "OMP_NUM_THREADS": "1"}
"""No HOME, no DISPLAY, no USER, no programs; a matplotlib backend that is none; one thread, since
others that wait for each other on a busy machine only burn its time."""


@cache
def no_mounts() -> str:
    """Why nothing can be mounted here; empty where it can. Root writes to whatever mode bits say,
    so only a mount makes a folder read-only, or a disk small, for everybody."""
    if shutil.which("unshare") is None:
        return "no unshare on PATH"
    trial = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=8k tmpfs /mnt"]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def mounted(mounts: list[str], command: list, env: dict[str, str]) -> list[str]:
    """``command`` in ``env``, in a mount namespace of its own where ``mounts`` were made."""
    given = shlex.join(["env", "-i", *(f"{k}={v}" for k, v in env.items()), *map(str, command)])
    return ["unshare", "-m", "sh", "-ec", "\n".join([*mounts, f"exec {given}"])]


def read_only(folder: Path) -> str:
    """The mount that makes ``folder`` read-only, for root too."""
    where = shlex.quote(str(folder))
    return f"mount --bind {where} {where} && mount -o remount,bind,ro {where}"


def mlakit(*arguments: object) -> list[str]:
    """The command line without relying on PATH."""
    return [sys.executable, "-m", "mlakit.cli", *map(str, arguments)]


def notebook(folder: Path, *cells: str) -> Path:
    """A notebook of one parameters cell and ``cells``."""
    cell = {"cell_type": "code", "execution_count": None, "outputs": []}
    first = {"source": "arch = 'cpu'\nbatches = [1]\n", "metadata": {"tags": ["parameters"]}}
    rest = [{"source": source, "metadata": {}} for source in cells]
    made = [cell | each | {"id": f"cell-{i}"} for i, each in enumerate((first, *rest))]
    whole = {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "small.ipynb").write_text(json.dumps(whole))
    return folder / "small.ipynb"
