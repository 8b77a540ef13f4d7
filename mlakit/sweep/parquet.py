"""One Parquet file of rows: there whole or not at all, and never read as what was not written."""

from __future__ import annotations

import os
import secrets
import warnings
import zlib
from pathlib import Path

from mlakit.errors import MisuseError
from mlakit.records import COLUMNS, INTEGER_COLUMNS, SCHEMA_VERSION, TEXT_COLUMNS

_VERSION_KEY = b"mlakit_schema_version"
_DIGEST_KEY = b"mlakit_crc32"


def schema(kind: str):
    """The Arrow schema of ``timing`` or ``accuracy`` rows, with its version."""
    import pyarrow as pa

    def column_type(name: str):
        if name in TEXT_COLUMNS:
            return pa.string()
        return pa.int64() if name in INTEGER_COLUMNS else pa.float64()

    return pa.schema(
        [(name, column_type(name)) for name in COLUMNS[kind]],
        metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
    )


def timing_files(folder: Path, pattern: str = "*.parquet") -> list[Path]:
    """The recorded files of timing rows below ``folder``, by name: not accuracy, not samples."""
    found = sorted(folder.glob(pattern))
    return [f for f in found if not f.stem.endswith(("accuracy", "samples"))]


def replace_whole(target: Path, write) -> None:
    """Call ``write(temporary)`` and rename it to ``target``: there whole, or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(3)}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_table(table, target: Path) -> None:
    """``table`` as Parquet, there whole or not, with checksums of its pages and of itself."""
    import pyarrow.parquet as pq

    metadata = (table.schema.metadata or {}) | {_DIGEST_KEY: _digest(table)}
    table = table.replace_schema_metadata(metadata)
    options = {"compression": "zstd", "write_page_checksum": True}
    replace_whole(target, lambda temporary: pq.write_table(table, temporary, **options))


def _digest(table) -> bytes:
    """Of names and values: Parquet's page checksums leave its footer, with the names, out."""
    import pyarrow as pa

    digest = 0
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            data = column.to_numpy().tobytes()
        else:
            data = "\0".join(map(str, column.to_pylist())).encode()
        digest = zlib.crc32(data, zlib.crc32(f"{name} {column.type}".encode(), digest))
    return str(digest).encode()


def migrate(table, kind: str, name: str):
    """An older part in today's columns: a column it did not know is null, its others are kept.

    Raises:
        MisuseError: ``name``, the part, was written by a newer mlakit.
    """
    import pyarrow as pa

    written = int((table.schema.metadata or {}).get(_VERSION_KEY, SCHEMA_VERSION))
    if written > SCHEMA_VERSION:
        raise MisuseError(
            f"{name} has schema version {written}, this mlakit reads up to {SCHEMA_VERSION}: "
            "update mlakit"
        )
    for column in schema(kind):
        if column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(table.num_rows, column.type))
    extra = [c for c in table.column_names if c not in COLUMNS[kind]]
    return table.select([*COLUMNS[kind], *extra]).replace_schema_metadata(None)


def read_file(path: Path, damaged: list[str], keep: bool = False):
    """The table at ``path``; None where the file is damaged, which is named and set aside.

    ``keep``: a file that somebody named is never renamed; it is refused.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # memory_map: pyarrow's own reader keeps a thread pool that a small part does not need
        table = pq.read_table(
            path, memory_map=True, use_threads=False, page_checksum_verification=True
        )
        metadata = table.schema.metadata or {}
        int(metadata.get(_VERSION_KEY, 0))
        if _DIGEST_KEY in metadata and metadata[_DIGEST_KEY] != _digest(table):
            raise ValueError("its rows are not those that were written")
        kept = {k: v for k, v in metadata.items() if k == _VERSION_KEY}
        return table.replace_schema_metadata(kept)
    except (OSError, ValueError, pa.ArrowException) as error:
        if getattr(error, "errno", None):
            raise  # not opened at all: that says nothing of the file's bytes
        if keep:
            raise MisuseError(
                f"{path} does not read as Parquet: name a run's folder or a recorded file"
            ) from None
        aside = path.with_name(path.name + ".damaged")
        try:
            path.rename(aside)
            what = f"set aside as {aside.name}"
        except OSError:
            what = "left where it is (the folder is read-only)"
        damaged.append(path.name)
        first = " ".join(str(error).split())[:80]
        warnings.warn(f"damaged part {path.name} ({first}): {what}", stacklevel=3)
        return None
