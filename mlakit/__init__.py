"""mlakit: which kernel path should run the QK RMSNorm step of MLA here, and is it worth it.

The names below are loaded when first used, so importing mlakit loads no optional package and
touches no driver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Context": ("mlakit.context", "Context"),
    "Widths": ("mlakit.shapes", "Widths"),
    "audit": ("mlakit.drift.audit", "audit"),
    "explain": ("mlakit.dispatch.explain", "explain"),
    "fingerprint": ("mlakit.drift.fingerprint", "fingerprint"),
    "last_call": ("mlakit.dispatch.call", "last_call"),
    "make_inputs": ("mlakit.inputs", "make"),
    "measure": ("mlakit.sweep.run", "sweep"),
    "parse_hidden": ("mlakit.shapes", "parse_hidden"),
    "patch": ("mlakit.models.hf", "patch"),
    "qk_rmsnorm": ("mlakit.dispatch.call", "qk_rmsnorm"),
    "read_rows": ("mlakit.sweep.store", "read_rows"),
    "significance": ("mlakit.drift.evals", "significance"),
}
"""name -> where it lives; ``measure`` is not called ``sweep``, which is a package of mlakit."""

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from mlakit.context import Context as Context
    from mlakit.dispatch.call import last_call as last_call
    from mlakit.dispatch.call import qk_rmsnorm as qk_rmsnorm
    from mlakit.dispatch.explain import explain as explain
    from mlakit.drift.audit import audit as audit
    from mlakit.drift.evals import significance as significance
    from mlakit.drift.fingerprint import fingerprint as fingerprint
    from mlakit.inputs import make as make_inputs  # noqa: F401
    from mlakit.models.hf import patch as patch
    from mlakit.shapes import Widths as Widths
    from mlakit.shapes import parse_hidden as parse_hidden
    from mlakit.sweep.run import sweep as measure  # noqa: F401
    from mlakit.sweep.store import read_rows as read_rows


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'mlakit' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
