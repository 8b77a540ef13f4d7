"""The grid: cells from plain values, and the presets. Needs neither pydantic nor torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import product

from mlakit.archs import check
from mlakit.context import QUANTS
from mlakit.errors import MisuseError, one_of
from mlakit.paths import registry
from mlakit.records import CLOCKS, MAX_ROWS, Cell
from mlakit.shapes import Widths, model, parse_hidden

PRESETS: dict[str, dict] = {
    "quick": {
        "models": ("DeepSeek-V3",),
        "batches": (1, 8, 64, 512, 4096),
        "dtypes": ("bf16",),
        "budget_s": 1.0,
    },
    "qk-norm": {
        "models": ("DeepSeek-V3",),
        "hidden": ("768+256", "2048+512", "1024+512", "0+512"),
        "batches": (
            *(1, 2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
            65536,
        ),
        "dtypes": ("bf16", "fp16"),
        "budget_s": 2.0,
    },
}
"""Values of ``expand`` by preset; what a call gives by name wins over its preset."""

DEFAULTS: dict = {
    "archs": ("cpu",), "models": (), "hidden": (), "batches": (1, 64, 1024), "dtypes": ("bf16",),
    "quants": ("none",), "layouts": ("split",), "clocks": (), "caches": ("cold",), "paths": (),
    "budget_s": 2.0, "seed": 0,
}  # fmt: skip


def whole(value: object) -> int:
    """A whole number of rows, 1 or more, from an int or its spelling.

    Raises:
        MisuseError: anything else (1.5, "many", 0, True).
    """
    text = str(value).strip()
    if isinstance(value, bool | float) or not text.isdecimal() or not 1 <= int(text) <= MAX_ROWS:
        raise MisuseError(f"batch is {value!r}: give a whole number of rows, 1 or more (to 2**40)")
    return int(text)


def _clocks(arch: str, asked: Sequence[str]) -> list[str]:
    """The clocks of ``asked`` that an arch has: ``cpu`` is the CPU's only one, never a GPU's."""
    default = "cpu" if arch == "cpu" else "graph"
    return [c for c in asked if (c == "cpu") == (arch == "cpu")] or [default]


def _paths(quant: str) -> tuple[str, ...]:
    """The paths that deliver q as ``quant``: a quantising path's name ends in its quant.

    Told by name, so that making a grid imports no path (and with it no torch).
    """
    quants = {n: next((q for q in QUANTS if n.endswith(q)), "none") for n in registry.names()}
    return tuple(name for name, delivers in quants.items() if delivers == quant)


def _shapes(
    models: Iterable[str], hidden: Iterable[str | Iterable[int] | Widths]
) -> list[tuple[str, Widths, float]]:
    """(model's name or empty, widths, eps), each once."""
    found = [(m.name, m.widths, m.eps) for m in map(model, models)]
    for given in hidden:
        if isinstance(given, Widths):
            widths = given
        else:
            text = given if isinstance(given, str) else "+".join(map(str, given))
            widths = parse_hidden(text)
        found.append(("", widths, 1e-6))
    if not found:
        return _shapes(["DeepSeek-V3"], [])
    return list(dict.fromkeys(found))


def expand(*, preset: str | None = None, **given) -> list[Cell]:
    """The cells of a sweep, in a fixed order, each once.

    Args:
        preset: a name of ``PRESETS`` to start from.
        **given: any of ``DEFAULTS``: archs, models (names), hidden (``"1536+512"``, a pair, or
            ``Widths``), batches (rows M), dtypes, quants, layouts, clocks (empty: ``cpu`` on the
            CPU, ``graph`` on a GPU), caches, paths (empty: all that deliver the quant), budget_s,
            seed. None means "not given".

    Raises:
        MisuseError: an unknown name or a value outside its set, with what is wanted.
    """
    if preset is not None:
        one_of("preset", PRESETS, preset)
    one_of("sweep option", DEFAULTS, *given)
    asked = {name: value for name, value in given.items() if value is not None}
    base = dict(PRESETS[preset]) if preset else {}
    if "models" in asked or "hidden" in asked:
        base.pop("models", None)
        base.pop("hidden", None)
    v = DEFAULTS | base | asked
    for name, value in v.items():
        if isinstance(value, str):
            raise MisuseError(f"{name} is {value!r}: give a list, for example [{value!r}]")
        if name not in ("clocks", "paths", "models", "hidden") and not value and value != 0:
            raise MisuseError(f"{name} is empty: give at least one value")
    if not (isinstance(v["budget_s"], int | float) and 0 < v["budget_s"] < math.inf):
        raise MisuseError(f"budget_s is {v['budget_s']!r}: give seconds above 0")
    one_of("path", registry.names(), *v["paths"])
    archs = list(dict.fromkeys(map(check, v["archs"])))
    one_of("clock", CLOCKS, *v["clocks"])
    for clock in v["clocks"]:
        if not any(clock in _clocks(arch, v["clocks"]) for arch in archs):
            raise MisuseError(
                f"clock {clock!r} does not exist on {', '.join(archs)}: "
                "the CPU has 'cpu', a GPU has 'graph', 'kernel' and 'eager'"
            )
    same = {"seed": v["seed"], "budget_s": float(v["budget_s"])}
    axes = {"dtype": v["dtypes"], "quant": v["quants"], "layout": v["layouts"], "clock": (),
            "cache": v["caches"], "m": [whole(m) for m in v["batches"]]}  # fmt: skip
    shapes, cells = _shapes(v["models"], v["hidden"]), {}
    for arch in archs:
        axes["clock"] = _clocks(arch, v["clocks"])
        for (name, widths, eps), *values in product(shapes, *axes.values()):
            point: dict = dict(zip(axes, values, strict=True))
            paths = tuple(dict.fromkeys(v["paths"])) or _paths(point["quant"])
            about = {"paths": paths, "model": name, "eps": eps, **same, **asdict(widths)}
            cell = Cell(arch=arch, **point, **about)
            cells[cell.id] = cell
    return list(cells.values())


def accuracy_cells(cells: Iterable[Cell]) -> list[Cell]:
    """``cells`` without those that differ from an earlier one only in how time is taken."""
    first: dict[Cell, Cell] = {}
    for cell in cells:
        first.setdefault(replace(cell, clock="cpu", cache="cold", budget_s=1.0, repeat=0), cell)
    return list(first.values())
