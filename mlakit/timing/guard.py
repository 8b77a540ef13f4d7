"""What surrounds a measurement: the device's identity, who else is busy, and the lock on it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from mlakit import locks
from mlakit.archs import Device, arch, devices
from mlakit.errors import LockedError, MisuseError
from mlakit.timing import sensors


def device_of(device: str) -> Device | None:
    """The GPU behind ``"cuda"`` or ``"cuda:1"``; None for ``"cpu"``.

    Raises:
        MisuseError: no such device here.
    """
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    number = int(index) if index.isdecimal() else 0
    if kind != "cuda" or number >= len(devices()):
        here = ", ".join(["cpu", *(f"cuda:{d.index} ({d.name})" for d in devices())])
        raise MisuseError(f"device {device!r} is not here: choose one of {here}")
    return devices()[number]


def uuid_hash(device: str) -> str:
    """12 hex digits of the device's UUID (of the host's name and ``cpu`` for the CPU)."""
    found = device_of(device)
    text = found.uuid if found else f"cpu-{os.uname().nodename}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_bytes(device: str) -> int:
    """Bytes of the largest cache between the cores and memory.

    A GPU reports its L2. AMD's last-level cache behind it is not among the properties torch
    shows, so the larger of the report and the arch's table row is taken there.
    """
    found = device_of(device)
    if found is None:
        return _cpu_cache_bytes()
    reported = found.l2_bytes or 0
    if found.vendor == "amd":
        table = arch(found.arch)
        reported = max(reported, int(max(table.l2_mib or 0, table.llc_mib or 0) * 2**20))
    # 256 MiB is the largest cache of any card here: too large a guess only costs memory.
    return reported or 256 * 2**20


@cache
def _cpu_cache_bytes() -> int:
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1024, "M": 2**20}.get(text[-1], 1))
    # 32 MiB is more than most desktop parts have: too large a guess only costs memory.
    return max(sizes, default=32 * 2**20)


@cache
def environment(device: str) -> dict[str, str | None]:
    """Names and versions for a row's identity, and ``device_id`` (:func:`uuid_hash`)."""
    import torch

    found = device_of(device)
    cpu = f"{sensors.cpu_model()} x{len(os.sched_getaffinity(0))}"  # cores this process may use
    return {
        "device": found.name if found else cpu,
        "vendor": found.vendor if found else "cpu",
        "arch": found.arch if found else "cpu",
        "arch_raw": found.arch_raw if found else os.uname().machine,
        "driver": _driver(found),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "mlakit": _version("mlakit"),
        "git_sha": git_sha(),
        "device_id": uuid_hash(device),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(package)
        return getattr(module, "__version__", None)


@cache
def git_sha() -> str | None:
    """The commit this copy of mlakit comes from, ``+`` if it was changed; None outside git."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        sha = _run("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
        dirty = _run("git", "-C", str(folder), "status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return sha + ("+" if dirty else "")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _driver(device: Device | None) -> str | None:
    import torch

    if device is None:
        return None
    if device.vendor == "amd":
        return f"ROCm {torch.version.hip}"
    return sensors.nvidia_driver()


class CpuLoad:
    """Cores that other processes kept busy, on average, between construction and ``read``."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), _busy_s(), time.process_time()

    def read(self) -> float | None:
        """Foreign load in cores; the 1-minute load average where ``/proc/stat`` tells nothing."""
        wall, busy, own = (b - a for a, b in zip(self._start, self._now(), strict=True))
        if busy <= 0 or wall <= 0:
            return os.getloadavg()[0]
        return max(0.0, (busy - own) / wall)


def _busy_s() -> float:
    """CPU seconds of the whole machine that were not idle, since boot."""
    try:
        ticks = [int(v) for v in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    # Fields 3 and 4 are idle and waiting for a disk.
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


_HELD: dict[str, int] = {}


def lock_path(device: str) -> Path:
    """The device's lock file: in ``MLAKIT_LOCK_DIR``, else in ``/tmp``, which all users share.

    Neither ``TMPDIR`` (a job's own on many clusters) nor ``XDG_RUNTIME_DIR`` (one user's own) may
    move it: a second user must meet the same lock.
    """
    shared = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    folder = os.environ.get("MLAKIT_LOCK_DIR") or shared
    return Path(folder) / f"mlakit-{uuid_hash(device)}.lock"


@contextlib.contextmanager
def device_lock(device: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the device for timing, host-wide; nested use in one process is free.

    The lock is the kernel's (``flock``), so a file that a dead process left behind holds nothing.

    Raises:
        LockedError: another process still holds it after ``wait_s`` seconds; names the holder.
    """
    path = lock_path(device)
    if _HELD.get(str(path)):
        _HELD[str(path)] += 1
        try:
            yield
        finally:
            _HELD[str(path)] -= 1
        return
    try:
        handle = _open_shared(path)
    except OSError as error:
        raise MisuseError(
            f"cannot open the lock {path} ({error.strerror}): set MLAKIT_LOCK_DIR to a folder that "
            "all users can write to"
        ) from None
    try:
        if held := locks.take(handle, wait_s=wait_s):
            raise LockedError(
                f"{device} is held for timing by {held}: wait for it, or end it "
                f"(lock file {path.name})"
            )
        holder = {
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]]),
        }
        locks.sign(handle, json.dumps(holder))
        _HELD[str(path)] = 1
        try:
            yield
        finally:
            _HELD.pop(str(path), None)
            locks.sign(handle)
    finally:
        os.close(handle)


def _open_shared(path: Path) -> int:
    # Opened without O_CREAT first: Linux refuses O_CREAT on another user's file in a sticky folder.
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.fchmod(handle, 0o666)
        return handle
