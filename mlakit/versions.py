"""Which torch and triton were tested together, and which triton an install of torch still needs."""

from __future__ import annotations

import re
from importlib import metadata

TESTED_PAIRS = {
    "2.11": "3.6.0",
    "2.13": "3.7.1",
}
"""torch release -> triton release. 2.11: recorded on an H200; 2.13: every test, on CPUs."""


def installed(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def install_of(module: str) -> str:
    """What to install for a module that is missing: the extra of mlakit that brings it, if any."""
    for line in metadata.requires("mlakit") or []:
        found = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", line)
        if found and found[1].lower().replace("-", "_") == module.lower():
            return f"'mlakit[{found[2]}]'"
    return module


def torch_release(version: str) -> str:
    """``2.13`` for ``2.13.0+cpu``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def triton_requirement() -> str:
    """The pip requirement that completes the installed torch, or an empty string.

    Empty where torch brought a Triton of its own (ROCm and CUDA wheels do) or is a ROCm build:
    PyPI's ``triton`` would overwrite the one that such builds need.
    """
    torch = installed("torch")
    if torch is None or "rocm" in torch:
        return ""
    owners = [r for r in metadata.requires("torch") or [] if re.match(r"(pytorch-)?triton", r)]
    if owners or any(installed(d) for d in ("triton", "pytorch-triton-rocm", "triton-rocm")):
        return ""
    tested = TESTED_PAIRS.get(torch_release(torch))
    return f"triton=={tested}" if tested else "triton"


if __name__ == "__main__":
    print(triton_requirement())
