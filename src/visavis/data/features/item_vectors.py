"""Item vectors: one vector per image from an index, a Parquet file or a ``.npy`` array, against
which only the text side is trained.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core.errors import SKIP_BAD_ADVICE, DataError
from visavis.data.dataset import Dataset
from visavis.data.features.arrays import ROWS_PER_READ, ArrayFeatures
from visavis.data.features.vector_formats import find_vector_format, read_named_array


def holds_item_vectors(path: str | Path) -> bool:
    """Check whether a path holds vectors with the ids of their items."""
    return find_vector_format(Path(path)) is not None


class ItemVectors(ArrayFeatures):
    """One vector per item, found by the name of the image.

    Args:
        path: The index or file.
        files: Files whose change changes the vectors.
        vectors: Vectors, shape ``[N, D]``. May be memory-mapped.
        names: Name of each item, or a data set whose images have their number as their row.
        fingerprint: Fingerprint of the model that made the vectors. "": hash of ids and vectors.
    """

    def __init__(
        self,
        path: Path,
        files: list[Path],
        vectors: np.ndarray,
        names: Sequence[str] | Dataset,
        fingerprint: str = "",
    ):
        super().__init__(path, files, {str(path): vectors}, names)
        self._fingerprint = fingerprint

    @classmethod
    def open_items(cls, path: Path, dataset: Dataset | None = None) -> ItemVectors:
        """Open the vectors of an index or file, or an array without ids in the order of ``dataset``."""
        if (kind := find_vector_format(path)) is not None:
            found = kind.read(path)
        elif os.path.isdir(path):
            raise DataError(
                f"{path}: expected item vectors, such as an index, got a folder without them. Make "
                f"an index with visavis index RUN SOURCE --out {path}."
            )
        elif os.path.isfile(path.with_suffix(".ids.txt")) or dataset is None:
            found = read_named_array(path)
        else:
            [vectors] = ArrayFeatures.open(path, dataset).arrays
            return cls(path, [path], vectors, dataset)
        return cls(path, list(found.files), found.vectors, found.names, found.fingerprint)

    def __contains__(self, name: object) -> bool:
        return name in self._row_of

    @property
    def first_name(self) -> str:
        """Name of the first item, as an example."""
        return next(iter(self._row_of), "none")

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model that made the vectors of an index, else the first 16 digits of
        ``content_hash``.
        """
        if self._fingerprint:
            return self._fingerprint
        names = self._names
        if isinstance(names, Dataset):
            names = [image.name for image in names.images]
        return self.content_hash(names)[:16]

    def content_hash(self, names: Sequence[str]) -> str:
        """Hash the names and float32 vectors of some items."""
        digest = hashlib.sha256(json.dumps(list(names)).encode())
        rows = self.rows(names)
        for start in range(0, len(rows), ROWS_PER_READ):
            block: Any = self.read(rows[start : start + ROWS_PER_READ]).vectors
            digest.update(block.numpy().tobytes())
        return digest.hexdigest()

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of images by name."""
        keys = list(keys)
        missing = [key for key in keys if key not in self._row_of]
        if missing:
            raise DataError(
                f"{self.path}: expected a vector of each of {len(keys):,} images, got none of "
                f"{len(missing):,}, such as {missing[0]!r} (its first item is {self.first_name!r}). Index the "
                f"folder of the data. {SKIP_BAD_ADVICE}"
            )
        return np.array([self._row_of[key] for key in keys], dtype=np.int64)

    def keep_items(self, data: Dataset) -> Dataset:
        """Leave out the images without a vector. ``skipped`` of the result has a sentence about them."""
        row_of = self._row_of
        kept = np.array([image.name in row_of for image in data.images])
        if kept.all():
            return data
        example = data.images[int(np.argmin(kept))].name
        skipped = (
            f"{int((~kept).sum()):,} images without a vector in {self.path}, such as {example}"
        )
        part = data.take(np.flatnonzero(kept))
        return replace(part, skipped=(*data.skipped, skipped))
