"""What the sweep's tests share: the doubles importable in workers, and their log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def doubles_log(tmp_path, monkeypatch):
    """The doubles' log; while it is in force, worker processes can import ``doubles``."""
    log = tmp_path / "doubles.log"
    log.touch()
    monkeypatch.setenv("DOUBLES_LOG", str(log))
    path = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    monkeypatch.setenv("PYTHONPATH", path)
    # a commit made while the tests run would be another environment
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-repository"))
    # and a timing run elsewhere on this machine is none of theirs
    monkeypatch.setenv("MLAKIT_LOCK_DIR", str(tmp_path))
    return log
