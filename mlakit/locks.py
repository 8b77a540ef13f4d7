"""The kernel's lock on an open file (``flock``): a process that dies lets go, however it dies."""

from __future__ import annotations

import fcntl
import os
import time


def take(descriptor: int, *, wait_s: float = 0.0, shared: bool = False) -> str | None:
    """Lock an open file: None once it is held here, else what its holder wrote into it.

    ``wait_s``: seconds to wait for the holder. ``shared``: only to see whether it is held.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return os.pread(descriptor, 4096, 0).decode(errors="replace") or "another process"
            time.sleep(0.05)


def sign(descriptor: int, holder: str = "") -> None:
    """Write into a locked file who holds it; empty: nobody any more."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, holder.encode(), 0)
