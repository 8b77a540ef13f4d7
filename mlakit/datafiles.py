"""Where mlakit's data files are: one rule, in one place."""

from __future__ import annotations

import os
from pathlib import Path


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
