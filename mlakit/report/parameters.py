"""One schema of a notebook's parameters: for the command line, Python and the kernel."""

from __future__ import annotations

from typing import get_args, get_origin

from mlakit import archs, shapes
from mlakit.context import DTYPES
from mlakit.errors import MisuseError, one_of

NOTEBOOK_PARAMETERS: dict[str, type] = {
    "arch": str, "model": str, "batches": list[int], "dtype": str, "policy": str,
    "families": list[str], "run_dir": str, "seed": int,
}  # fmt: skip
"""Every parameter a notebook of mlakit may have. ``run_dir`` empty: measure in the notebook."""


def check(values: dict) -> dict:
    """``values`` if every name is known and every value of its type and range.

    Raises:
        MisuseError: one line that names the parameter, what was given and what is wanted.
    """
    from mlakit.dispatch import policies
    from mlakit.inputs import FAMILIES

    one_of("parameter", NOTEBOOK_PARAMETERS, *values)
    for name, value in values.items():
        kind = NOTEBOOK_PARAMETERS[name]
        if not _is(value, kind):
            raise MisuseError(f"parameter {name} is {value!r}: give {_text(kind)}")
    if "arch" in values:
        archs.check(values["arch"])
    if "model" in values:
        shapes.parse_hidden(values["model"])
    if "dtype" in values:
        one_of("dtype", DTYPES, values["dtype"])
    if "policy" in values:
        policies.get(values["policy"])
    one_of("input family", FAMILIES, *values.get("families", []))
    for m in values.get("batches", []):
        if m < 1:
            raise MisuseError(f"batch is {m}: give a whole number of rows, 1 or more")
    return values


def _is(value: object, kind: type) -> bool:
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return isinstance(value, list) and bool(value) and all(_is(v, inner) for v in value)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _text(kind: type) -> str:
    if get_origin(kind) is list:
        return f"a list of {_text(get_args(kind)[0])[2:]}s, not empty"
    return {str: "a text", int: "a whole number"}[kind]
