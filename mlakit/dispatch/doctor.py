"""The doctor: what was found, what was wanted, and what to do; never a traceback."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mlakit import archs
from mlakit.dispatch import probe, switches
from mlakit.errors import one_line
from mlakit.paths import aiter_api
from mlakit.versions import installed

_NOTEBOOK_EXTRAS = ("notebooks",)
_IMPORT_LIMIT_S = 120


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. ``todo`` is empty where there is nothing to do."""

    section: str
    subject: str
    state: str
    found: str
    wanted: str = ""
    todo: str = ""


@dataclass(frozen=True)
class Report:
    """All findings; ``ok`` is False where one is an error (a conflict or an odd switch)."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing found is an error; missing optional things are none."""
        return all(f.state != "error" for f in self.findings)

    def to_rows(self) -> list[dict]:
        """One dict a finding: section, subject, state, found, wanted, todo."""
        return [asdict(f) for f in self.findings]

    def to_json(self) -> dict:
        """Plain values only."""
        return {"ok": self.ok, "findings": self.to_rows()}


def doctor(deep: bool = True) -> Report:
    """Look at this machine. Never raises: a look that fails is a finding of its own.

    ``deep`` also imports Triton and AITER, each in a child process, since importing them may run
    for seconds, raise anything, or end the process.
    """
    found: list[Finding] = []
    looks = (_machine, _devices, _conflicts, _packages, _aiter, _switches, _notebooks, _caches)
    for look in (*looks, *((_imports,) if deep else ())):
        found.extend(_safely(look))
    return Report(tuple(found))


def _safely(look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(look())
    except Exception as error:
        name = look.__name__.lstrip("_")
        text = one_line(error)
        return [Finding(name, name, "error", f"this look failed: {text}", todo="report this line")]


def _machine() -> Iterator[Finding]:
    import torch

    build = "ROCm " + torch.version.hip if torch.version.hip else None
    build = build or ("CUDA " + torch.version.cuda if torch.version.cuda else "CPU only")
    yield Finding("machine", "python", "ok", platform.python_version(), "3.11 to 3.13")
    yield Finding("machine", "torch", "ok", f"{torch.__version__} ({build})", "2.11 or newer")


def _devices() -> Iterator[Finding]:
    import torch

    for d in archs.devices():
        state = "ok" if d.arch in archs.known() else "error"
        text = f"{d.name}, {d.arch_raw}, {d.compute_units} units, {d.memory_bytes / 2**30:.0f} GiB"
        todo = "" if state == "ok" else "add its row to data/archs.csv"
        yield Finding("devices", f"GPU {d.index}", state, text, "an arch mlakit knows", todo)
    if not archs.devices():
        gpu_build = torch.version.hip or torch.version.cuda
        todo = (
            "check the driver and *_VISIBLE_DEVICES"
            if gpu_build
            else "for a GPU, install torch's CUDA or ROCm build; a CPU needs nothing"
        )
        yield Finding("devices", "GPU", "note", "none that this torch can use", "optional", todo)


def _conflicts() -> Iterator[Finding]:
    for c in probe.conflicts():
        yield Finding("devices", "conflict", "error", c.text, "facts that agree", c.todo)


_DISTRIBUTIONS = {
    "liger_kernel": "liger-kernel",
    "quack": "quack-kernels",
    "flashinfer": "flashinfer-python",
}


def _packages() -> Iterator[Finding]:
    for name, why in probe.package_reasons().items():
        if name == "aiter":
            continue
        version = installed(_DISTRIBUTIONS.get(name, name)) or "here"
        if why is None:
            yield Finding("packages", name, "ok", version, "optional")
        else:
            what, _, todo = why.partition("; ")
            yield Finding("packages", name, "missing", what, "optional", todo)


def _aiter() -> Iterator[Finding]:
    found = aiter_api.find()
    what = f"amd-aiter {found.version}" if found.version else "no amd-aiter"
    if found.signature:
        what += f", generation {found.generation}: {found.signature}"
    reasons = [r for r in (probe.package_reason("aiter"), found.error) if r]
    reason = "; ".join(dict.fromkeys(reasons))
    if not reason:
        state, todo = "ok", ""
        if not probe.aiter_in_use():
            state = "note"
            todo = "SGLANG_USE_AITER and VLLM_ROCM_USE_AITER are not on: engines run without it"
    else:
        state = "missing" if probe.vendor() == "amd" or found.file else "note"
        what = f"{what}: {reason}" if found.version else reason
        todo = "nothing to do without an AMD card"
        if probe.vendor() == "amd":
            todo = "install AMD's build as https://github.com/ROCm/aiter says, or set the switch"
    yield Finding("packages", "aiter", state, what, aiter_api.WANTED, todo)


def _switches() -> Iterator[Finding]:
    for s in switches.read_all():
        found = f"{s.value or '(unset)'} from {s.origin}"
        if s.error:
            yield Finding("switches", s.name, "error", found, s.text, s.error.partition(": ")[2])
        else:
            yield Finding("switches", s.name, "ok", found, s.text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:4])


def _notebooks() -> Iterator[Finding]:
    """Versions found against those that mlakit's own metadata asks for."""
    try:
        wanted = importlib.metadata.requires("mlakit") or []
    except importlib.metadata.PackageNotFoundError:
        todo = "pip install -e '.[notebooks]' in the checkout"
        yield Finding("notebooks", "mlakit", "missing", "no package metadata", "installed", todo)
        return
    for line in wanted:
        match = re.fullmatch(r"""([\w.-]+)>=([\w.]+);\s*extra == ['"](\w+)['"]""", line.strip())
        if match is None or match.group(3) not in _NOTEBOOK_EXTRAS:
            continue
        name, least, extra = match.groups()
        found = installed(name)
        good = found is not None and _numbers(found) >= _numbers(least)
        todo = "" if good else f"pip install 'mlakit[{extra}]'"
        state = "ok" if good else "missing"
        yield Finding("notebooks", name, state, found or "absent", f"{least} or newer", todo)


def _short(folder: Path) -> str:
    """The folder with the home directory as ``~``: reports carry no user names."""
    home = str(Path.home())
    text = str(folder)
    return "~" + text[len(home) :] if text.startswith(home + os.sep) else text


def _caches() -> Iterator[Finding]:
    places = {
        "Triton": os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache",
        "inductor": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
        "AITER": os.environ.get("AITER_JIT_DIR") or Path.home() / ".aiter" / "jit",
    }
    for name, place in places.items():
        if place is None:
            yield Finding("caches", name, "ok", "torch's default, in the temporary folder")
            continue
        folder = Path(place)
        if not folder.is_dir():
            yield Finding("caches", name, "ok", f"{_short(folder)}: none yet")
            continue
        count = sum(1 for _ in os.scandir(folder))
        writable = os.access(folder, os.W_OK)
        text = f"{_short(folder)}: {count} entries" + ("" if writable else ", not writable")
        todo = "" if writable else "make it writable or point its variable elsewhere"
        yield Finding("caches", name, "ok" if writable else "error", text, "writable", todo)


def _imports() -> Iterator[Finding]:
    names = ["triton"] if probe.package_reason("triton") is None else []
    if aiter_api.find().version and not switches.aiter_forbidden():
        names.append("aiter")
    for name in names:
        error = import_error(name)
        state = "ok" if error is None else "error" if probe.vendor() != "cpu" else "note"
        todo = "" if error is None else f"{name}'s paths are refused until it imports"
        yield Finding("imports", name, state, error or "imports", "imports", todo)


_IMPORT = """
import sys
try:
    __import__(sys.argv[1])
except BaseException as error:
    text = (str(error).strip().splitlines() or ["no message"])[0]
    print(f"{type(error).__name__}: {text}"[:200])
    sys.exit(1)
"""


def import_error(name: str) -> str | None:
    """None if ``name`` imports in a fresh child process, else one line that says why not."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT, name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing {name} took over {_IMPORT_LIMIT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stdout.splitlines() if done.returncode == 1 else []
    return lines[-1] if lines else f"importing {name} ended with exit status {done.returncode}"
