"""Take paths, user, host and token-like values out of everything a report keeps."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
from functools import cache
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_SECRET = re.compile(
    r"(?i)\b([\w.-]*(?:token|secret|password|passwd|api[_-]?key)[\w.-]*)(['\"]?\s*[:=]\s*['\"]?)"
    r"([^\s'\",;&<>]{4,})"
)
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|sk-[A-Za-z0-9_-]{8,}"
    r"|AKIA[A-Z0-9]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_KEPT_METADATA = ("kernelspec", "language_info", "mlakit")


_more: dict[str, str] = {}


def also(folder: Path, by: str) -> None:
    """Take ``folder`` out of texts too, wherever the user put it."""
    _more[str(folder)] = by
    _replacements.cache_clear()


@cache
def _replacements() -> tuple[tuple[str, str], ...]:
    """(what, by what), longest first, so that a folder goes before the one that holds it."""
    found = {
        str(Path(__file__).resolve().parents[2]): "[mlakit]",
        str(Path.cwd()): "[here]",
        os.path.expanduser("~"): "[home]",  # a user without an entry has none: "~" stays
        sys.prefix: "[env]",
        sys.base_prefix: "[python]",
        tempfile.gettempdir(): "[tmp]",
    } | _more
    pairs = [(k, v) for k, v in found.items() if len(k) > 1]
    return tuple(sorted(pairs, key=lambda kv: -len(kv[0])))


@cache
def _names() -> re.Pattern | None:
    """User and host as whole words; ``root`` and ``localhost`` name nobody."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    words = {user, os.environ.get("USER", ""), socket.gethostname()}
    words -= {"", "root", "localhost", "vm", "runner"}
    words = {w for w in words if len(w) > 2}
    return re.compile(r"\b(" + "|".join(map(re.escape, sorted(words))) + r")\b") if words else None


def text(value: str) -> str:
    """``value`` without terminal colours, machine paths, user, host and token-like values."""
    value = _ANSI.sub("", value)
    for what, by in _replacements():
        value = value.replace(what, by)
    value = re.sub(r"/(?:home|Users)/[^/\s'\"<>]+", "[home]", value)
    value = _SECRET.sub(r"\1\2[removed]", value)
    value = _TOKEN.sub("[removed]", value)
    names = _names()
    return names.sub("[name]", value) if names else value


def values(item):
    """The same for every string inside dicts and lists; other values are kept."""
    if isinstance(item, str):
        return text(item)
    if isinstance(item, dict):
        return {
            text(k): "[removed]" if isinstance(v, str) and _SECRET.match(f"{k}=xxxx") else values(v)
            for k, v in item.items()
        }
    if isinstance(item, list | tuple):
        return [values(v) for v in item]
    return item


def notebook(nb):
    """Scrub a notebook node in place: cells, outputs, tracebacks, metadata. Images are kept."""
    nb.metadata = {k: v for k, v in nb.metadata.items() if k in _KEPT_METADATA}
    for cell in nb.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in ("tags", "mlakit")}
        cell.source = text(cell.source)
        for output in cell.get("outputs", []):
            for key in ("text", "evalue", "traceback"):
                if key in output:
                    output[key] = values(output[key])
            for kind, data in output.get("data", {}).items():
                if not kind.startswith("image/png"):
                    output["data"][kind] = values(data)
            if "metadata" in output:
                output["metadata"] = values(output["metadata"])
    return nb
