"""The sweep's specification: one schema for the command line, a file and a notebook."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mlakit.errors import MisuseError, one_of
from mlakit.records import Cell
from mlakit.sweep.grid import DEFAULTS, expand, whole
from mlakit.sweep.run import TIME_LIMIT_S
from mlakit.sweep.worker import FUNCTIONS


def _listed(value: object) -> list | None:
    """``"a,b"``, ``["a,b", "c"]`` and a single value are lists too, as a command line has them."""
    if value is None:
        return None
    listed: list = []
    for part in value if isinstance(value, list | tuple) else [value]:
        if isinstance(part, str):
            listed += [p.strip() for p in part.split(",") if p.strip()]
        else:
            listed.append(part)
    return listed


def _rows(value: object) -> list | None:
    listed = _listed(value)
    return listed and [whole(m) for m in listed]


def _pairs(value: object) -> list | None:
    """Widths as ``"1536+512"``; a pair of numbers is one entry of the list."""
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
        value = [value]
    listed = _listed(value)
    return listed and ["+".join(map(str, v)) if isinstance(v, list | tuple) else v for v in listed]


Names = Annotated[list[str] | None, BeforeValidator(_listed)]


class SweepSpec(BaseModel):
    """What to sweep. None means the preset's value or the default of ``grid.DEFAULTS``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str | None = None
    archs: Names = None
    models: Names = None
    hidden: Annotated[list[str] | None, BeforeValidator(_pairs)] = None
    batches: Annotated[list[int] | None, BeforeValidator(_rows)] = None
    dtypes: Names = None
    quants: Names = None
    layouts: Names = None
    clocks: Names = None
    caches: Names = None
    paths: Names = None
    budget_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    seed: int | None = None
    measure: Annotated[list[str], BeforeValidator(_listed)] = ["timing"]
    time_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = TIME_LIMIT_S

    @classmethod
    def parse(cls, values: Mapping) -> SweepSpec:
        """The specification that plain values describe, checked down to its cells.

        Raises:
            MisuseError: an unknown name (with the near match) or a value outside its set.
        """
        one_of("sweep option", cls.model_fields, *values)
        try:
            spec = cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            # a MisuseError raised by a validator comes back wrapped, with its text after a comma
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, MisuseError):
                raise MisuseError(str(cause)) from None
            where = ".".join(map(str, first["loc"]))
            given = repr(first["input"])
            raise MisuseError(f"{where} is {given:.80}: {first['msg']}") from None
        one_of("kind of measurement", FUNCTIONS, *spec.measure)
        if not spec.measure:
            raise MisuseError(f"measure is empty: give {' or '.join(FUNCTIONS)}")
        spec.cells(default_arch="cpu")
        return spec

    @classmethod
    def load(cls, path: str | Path, **given) -> SweepSpec:
        """The specification in a TOML or JSON file; ``given`` values win over the file's.

        Raises:
            MisuseError: no such file, another format, or not a table of values.
        """
        path = Path(path)
        try:
            values = _load(path)
        except OSError as error:
            raise MisuseError(f"cannot read {path} ({error.strerror}): name a file") from None
        except (ValueError, RecursionError) as error:
            if isinstance(error, MisuseError):
                raise
            reason = " ".join(str(error).split())
            raise MisuseError(f"{path} does not read as {path.suffix[1:]}: {reason:.120}") from None
        if not isinstance(values, dict):
            raise MisuseError(f"{path} holds no table: write lines such as batches = [1, 64]")
        return cls.parse(values | {k: v for k, v in given.items() if v is not None})

    def values(self) -> dict:
        """The keyword arguments of ``grid.expand``."""
        return {"preset": self.preset} | {name: getattr(self, name) for name in DEFAULTS}

    def options(self) -> dict:
        """The keyword arguments of ``run.run_sweep`` that the specification holds."""
        return {"measure": self.measure, "time_limit_s": self.time_limit_s}

    def cells(self, default_arch: str) -> list[Cell]:
        """The cells, on ``default_arch`` where the specification names none."""
        values = self.values()
        if self.archs is None and self.clocks and set(self.clocks) != {"cpu"}:
            # which clocks exist is known once the machine has been asked
            values["clocks"] = None
        return expand(**values | {"archs": self.archs or [default_arch]})


def _load(path: Path) -> object:
    text = path.read_text(encoding="utf-8")
    if len(text) > 100_000:
        raise MisuseError(f"{path} has {len(text)} characters: a sweep file is a few lines")
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        return tomllib.loads(text)
    raise MisuseError(f"{path}: a sweep file ends in .toml or .json")
