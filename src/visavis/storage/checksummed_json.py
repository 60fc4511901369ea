"""JSON files of caches with a checksum: a damaged file is reported, removed and computed again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from visavis.errors import DataError
from visavis.storage.reading import parse_json, read_json
from visavis.storage.writing import storage_errors, write_json


class DamagedCacheError(DataError):
    """A part of a cache differs from what was written."""


class _ChecksummedContent(BaseModel):
    sha256: str
    content: Any


def write_checksummed_json(path: str | Path, content: Any) -> None:
    """Write a JSON value with its checksum.

    Args:
        path: File to write.
        content: Value that ``json`` can write.

    Raises:
        StorageError: If the file cannot be written.
    """
    write_json(path, {"sha256": _checksum(content), "content": content})


def read_checksummed_json(path: str | Path, shape: Any) -> Any | None:
    """Read a JSON value that ``write_checksummed_json`` wrote.

    A damaged file is reported and removed.

    Args:
        path: File to read.
        shape: Type of the value.

    Returns:
        The value, or None if the file does not exist or was damaged.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        stored = read_json(path, _ChecksummedContent)
        if stored.sha256 == _checksum(stored.content):
            return parse_json(json.dumps(stored.content).encode(), shape, str(path))
        reason = "checksum mismatch"
    except DataError as error:
        reason = str(error)
    remove_damaged(path, [path], reason)
    return None


def remove_damaged(path: Path, files: Iterable[Path], reason: str) -> None:
    """Remove the files of a damaged part of a cache, and log a warning.

    Args:
        path: The part, for the warning.
        files: Files to remove.
        reason: What is damaged.

    Raises:
        StorageError: If a file cannot be removed.
    """
    logging.getLogger("visavis").warning("%s is damaged and is computed again: %s.", path, reason.removesuffix("."))
    for file in files:
        with storage_errors(file):
            file.unlink(missing_ok=True)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
