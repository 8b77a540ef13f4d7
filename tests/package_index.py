"""Packages of an index, for tests that read them; a test is skipped where no index offers one."""

import subprocess
import sys
from pathlib import Path

import pytest


def install(requirement: str, folder: Path) -> None:
    """Install one package, without its dependencies, into ``folder``."""
    _pip("install", requirement, "--no-compile", "--target", str(folder))


def download(requirement: str, folder: Path) -> Path:
    """Download one wheel into ``folder``: its path."""
    there = set(folder.glob("*.whl"))
    _pip("download", requirement, "--only-binary", ":all:", "-d", str(folder))
    return next(iter(set(folder.glob("*.whl")) - there))


def _pip(verb: str, requirement: str, *options: str) -> None:
    command = [sys.executable, "-m", "pip", verb, "--no-deps", "-q", "--timeout", "20"]
    done = subprocess.run(
        [*command, "--retries", "1", *options, requirement],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip gave no message"])[-1]
        pytest.skip(f"no package index offers {requirement} here: {last[:150]}")
