"""Where mlakit's data files are: one rule, in one place; and reading what may be damaged."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mlakit.errors import MisuseError

Row = TypeVar("Row")


def data_dir() -> Path:
    """The folder that holds ``models.csv``, ``archs.csv``, ``published.csv`` and ``recorded/``.

    In order: the environment variable ``MLAKIT_DATA``; ``data/`` beside the package (a checkout);
    ``_data/`` inside the package (an installed wheel).

    Raises:
        FileNotFoundError: none of the three exists.
    """
    package = Path(__file__).resolve().parent
    chosen = os.environ.get("MLAKIT_DATA")
    candidates = [Path(chosen)] if chosen else [package.parent / "data", package / "_data"]
    for folder in candidates:
        if (folder / "models.csv").is_file():
            return folder
    tried = ", ".join(str(c) for c in candidates)
    raise FileNotFoundError(
        f"no mlakit data at {tried}; set MLAKIT_DATA to a folder that holds models.csv"
    )


def read_table(path: Path, build: Callable[[dict], Row]) -> tuple[Row, ...]:
    """``build`` of every row of a CSV file, in the file's order.

    Raises:
        MisuseError: the file or a row of it does not read; the message names the line.
    """
    line, found = 1, []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                line = reader.line_num
                if None in row or None in row.values():
                    raise ValueError("it has not as many fields as the head line")
                found.append(build(row))
    except OSError as error:
        raise MisuseError(f"cannot read {path} ({error.strerror}): restore it") from None
    except KeyError as error:
        raise MisuseError(f"{path} has no column {error}: restore it") from None
    except (ValueError, csv.Error) as error:
        raise MisuseError(f"{path} line {line} is damaged ({error}): restore the file") from None
    return tuple(found)


def maybe(kind: Callable[[str], Row], text: str) -> Row | None:
    """``kind(text)``, None where a field is empty."""
    return kind(text) if text else None


def read_json(path: str | Path) -> Any:
    """What a JSON file holds.

    Raises:
        MisuseError: it cannot be opened, or is no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MisuseError(f"cannot read {path} ({error.strerror}): name another") from None
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{path} does not read as JSON: {error}") from None
