"""Whether stored features are all finite: they are read once; the result is cached until a file changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from visavis import storage
from visavis.data.features import ArrayFeatures, PrecompFeatures

ROWS = 1024
"""Rows that are read at once."""


def first_broken_row(features: ArrayFeatures | PrecompFeatures) -> int | None:
    """The first row with NaN or infinity in it; None if there is none.

    All rows are read, unless that was done before and path, size and time of every file are as they were then.
    """
    marks = file_marks(features.files)
    record = storage.cache_folder() / "checks" / f"features-{hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:32]}.json"
    if record.exists():
        return storage.read_json(record)["first_broken_row"]
    row = _scan(features)
    storage.write_json(record, {"files": marks, "first_broken_row": row})
    return row


def file_marks(paths: Iterable[Path]) -> list[list[str | int]]:
    """What identifies a file's content without reading it: its full path, size in bytes, and time of last change in ns."""
    return [[str(path.resolve()), status.st_size, status.st_mtime_ns] for path in sorted(paths) for status in [path.stat()]]


def _scan(features: ArrayFeatures | PrecompFeatures) -> int | None:
    for start in range(0, len(features), ROWS):
        vectors = features.read(np.arange(start, min(start + ROWS, len(features)))).vectors
        assert isinstance(vectors, Tensor)
        for row in (~vectors.flatten(1).isfinite().all(1)).nonzero()[:1, 0].tolist():
            return start + row
    return None
