"""What is kept to be used again has a checksum: what was damaged is found, said in one line, removed, and made anew."""

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
from visavis.storage.writing import storing, write_json


class Damaged(DataError):
    """A part of a cache is not what was written there."""


class _Kept(BaseModel):
    sha256: str
    content: Any


def keep(path: str | Path, content: Any) -> None:
    """Write a JSON value with its checksum. Raises StorageError."""
    write_json(path, {"sha256": _checksum(content), "content": content})


def kept(path: str | Path, shape: Any) -> Any | None:
    """What ``keep`` wrote, as a value of a type; None where nothing is, or where what is there is damaged and now discarded."""
    path = Path(path)
    if not path.exists():
        return None
    try:
        found = read_json(path, _Kept)
        if found.sha256 != _checksum(found.content):
            raise Damaged("it does not have its checksum")
        return parse_json(json.dumps(found.content).encode(), shape, str(path))
    except DataError as damage:
        discard(path, [path], str(damage))
        return None


def discard(what: Path, files: Iterable[Path], damage: str) -> None:
    """Remove the files of a damaged part of a cache, and say in one line that it is made anew. Raises StorageError."""
    logging.getLogger("visavis").warning("%s is damaged and is made anew: %s.", what, damage.removesuffix("."))
    for file in files:
        with storing(file):
            file.unlink(missing_ok=True)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
