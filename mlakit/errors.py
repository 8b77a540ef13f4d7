"""The errors a person can act on, the exit codes, and the near-match hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What every mlakit command returns to the shell: the gravest thing that happened."""

    OK = 0
    REGRESSION = 1
    """slower or wrong against a baseline, or a line of an audit that fails"""
    MISUSE = 2
    """what was asked for cannot be, here or at all"""
    FAILED = 3
    INCOMPLETE = 4
    """interrupted, a cell without rows, or another process holds the run or the device"""
    TIMED_OUT = 5
    KILLED = 6
    NO_KERNEL = 7
    """nothing that was asked for could run here"""


class MisuseError(ValueError):
    """What was asked for cannot be; the message is one line and says what to do instead."""

    def __init__(self, text: str) -> None:
        # it quotes what a person or a file gave, and that may have lines
        super().__init__(" ".join(str(text).splitlines()))


class RefusedError(RuntimeError):
    """A path that may not be replaced (named, or ``strict``) cannot run here; the text says why."""


def unknown(kind: str, given: object, known: Iterable[str]) -> MisuseError:
    """A ``MisuseError`` for a name outside ``known``, with the nearest match when there is one."""
    names = sorted(str(k) for k in known)
    near = difflib.get_close_matches(
        str(given).lower(), [n.lower() for n in names], n=1, cutoff=0.5
    )
    by_lower = {n.lower(): n for n in names}
    hint = f"did you mean {by_lower[near[0]]!r}? " if near else ""
    return MisuseError(f"unknown {kind} {given!r}: {hint}known: {', '.join(names)}")


def one_of(kind: str, known: Iterable, *given: object) -> None:
    """Refuse each of ``given`` that is not among ``known``; ``kind`` is what they are called.

    Raises:
        MisuseError: with the nearest match.
    """
    for name in given:
        if name not in known:
            raise unknown(kind, name, known)


class LockedError(RuntimeError):
    """Another process holds a device or a run; the message names it. Commands end with code 4."""


def fault_status(error: BaseException) -> str:
    """The status of a row whose path raised ``error``: ``oom`` or ``failed``."""
    # torch's own error is told by its name: a driver of workers does without torch
    lost = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return "oom" if lost or "can't allocate memory" in str(error) else "failed"


def one_line(error: BaseException) -> str:
    """``Type: first line of the message``, cut at 200 characters."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"[:200]


def check_limit(name: str, seconds: float) -> None:
    """Refuse what is no time limit, or one that a system call does not take (a poll: 24 days).

    Raises:
        MisuseError: not above 0, or above 1e6.
    """
    if not 0 < seconds <= 1e6:
        raise MisuseError(f"{name} is {seconds!r}: give seconds above 0, to 1e6")
