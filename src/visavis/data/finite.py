"""Whether stored features are all finite: they are read once; the result is cached until a file changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from visavis import storage
from visavis.data.own_features import ArrayFeatures, PrecompFeatures

ROWS = 1024
"""Rows that are read at once."""


@dataclass(frozen=True)
class _Seen:
    first_broken_row: int | None


def first_broken_row(features: ArrayFeatures | PrecompFeatures) -> int | None:
    """The first row with NaN or infinity in it; None if there is none.

    All rows are read, unless that was done before and path, size and time of every file are as they were then.
    """
    marks = list(file_marks(features.files).values())
    record = storage.cache_folder() / "checks" / f"finite-{hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:32]}.json"
    seen = storage.kept(record, _Seen)
    if seen is None:
        seen = _Seen(_scan(features))
        storage.keep(record, asdict(seen))
    return seen.first_broken_row


def file_marks(paths: Iterable[Path]) -> dict[Path, list[str | int]]:
    """What identifies each file's content without reading it: its full path, size in bytes, and time of last change in ns."""
    return {path: _mark(os.path.realpath(path)) for path in sorted(paths)}


def _mark(path: str) -> list[str | int]:
    try:
        status = os.stat(path)
    except OSError:  # whoever reads it says why
        return [path, -1, -1]
    return [path, status.st_size, status.st_mtime_ns]


def _scan(features: ArrayFeatures | PrecompFeatures) -> int | None:
    for start in range(0, len(features), ROWS):
        vectors = features.read(np.arange(start, min(start + ROWS, len(features)))).vectors
        assert isinstance(vectors, Tensor)
        for row in (~vectors.flatten(1).isfinite().all(1)).nonzero()[:1, 0].tolist():
            return start + row
    return None
