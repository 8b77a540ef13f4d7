"""The errors a person can act on, the exit codes, and the near-match hint."""

from __future__ import annotations

import difflib
import errno
import traceback
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

    def __str__(self) -> str:
        # it quotes what a person or a file gave, and that may have lines
        return " ".join(super().__str__().splitlines())


class RefusedError(RuntimeError):
    """A path that may not be replaced (named, or ``strict``) cannot run here; the text says why."""


def unknown(kind: str, given: object, known: Iterable[str]) -> MisuseError:
    """A ``MisuseError`` for a name outside ``known``, with the nearest match when there is one."""
    names = sorted(str(k) for k in known if k != "")
    by_lower, asked = {n.lower(): n for n in names}, str(given).lower()
    near = [n for n in by_lower if asked and n.startswith(asked)]
    if not 0 < len(near) <= 3:  # what many begin with says as little as what none does
        near = difflib.get_close_matches(asked, list(by_lower), n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(by_lower[n]) for n in near)}? " if near else ""
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


_MISNAMED = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}
"""what the system says of a file or folder that a person named"""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def unforeseen(error: Exception) -> tuple[str, ExitCode]:
    """One line for an error that ends a command, and its code: Python's 1 would be "regression".

    Its traceback is printed, but for a file that was misnamed and for a full disk.
    """
    number = getattr(error, "errno", None)
    if isinstance(error, OSError) and number in _MISNAMED:
        return f"{error.filename or 'a file'}: {error.strerror}", ExitCode.MISUSE
    if number not in _FULL:
        traceback.print_exception(error)
    return f"{one_line(error)}; what was measured is kept", ExitCode.FAILED
