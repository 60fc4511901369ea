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
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import SKIP_BAD_ADVICE, DataError, requires_extra
from visavis.data.dataset import Dataset
from visavis.data.features.arrays import ROWS_PER_READ, ArrayFeatures

INDEX_FILE = "index.json"
"""File that makes a folder an index."""
# An index is read by a layer above this one, as the kinds of stores are: by its place.
INDEX_READER = "visavis.retrieval.index_vectors:read_index_vectors"


def holds_item_vectors(path: str | Path) -> bool:
    """Check whether a path holds vectors with the ids of their items.

    Args:
        path: Value of ``visual.features``.

    Returns:
        Whether it is an index, a Parquet file, or a ``.npy`` array with ``NAME.ids.txt``.
    """
    path = Path(path)
    return (
        os.path.isfile(path / INDEX_FILE)
        or path.suffix == ".parquet"
        or (path.suffix == ".npy" and os.path.isfile(_ids_file(path)))
    )


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
        """Open item vectors.

        Args:
            path: Folder of an index, Parquet file, or ``.npy`` array.
            dataset: Data set in whose order an array without ids is. None: it must have ids.

        Returns:
            The vectors.

        Raises:
            DataError: If the file has no vectors with distinct ids, or another number of rows.
            RunError: If the index cannot be read.
        """
        if os.path.isdir(path):
            module, _, name = INDEX_READER.partition(":")
            names, vectors, fingerprint = getattr(import_module(module), name)(path)
            return cls(path, [path / INDEX_FILE], vectors, names, fingerprint)
        if path.suffix == ".parquet":
            names, vectors = _read_parquet(path)
            return cls(path, [path], vectors, _distinct(names, path))
        if not os.path.isfile(file := _ids_file(path)) and dataset is not None:
            [vectors] = ArrayFeatures.open(path, dataset).arrays
            return cls(path, [path], vectors, dataset)
        vectors = storage.read_array(path, dimensions=2, kinds="fiu", memory_map=True)
        names = storage.read_text(file).splitlines()
        if len(names) != len(vectors):
            raise DataError(
                f"{file}: expected {len(vectors):,} ids, one per line for each row of {path.name}, "
                f"got {len(names):,}. Write both again."
            )
        return cls(path, [path, file], vectors, _distinct(names, file))

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
        """Hash the vectors of some items.

        Args:
            names: Names of the items.

        Returns:
            SHA-256 of names and float32 vectors, in hex.
        """
        digest, rows = hashlib.sha256(json.dumps(list(names)).encode()), self.rows(names)
        for start in range(0, len(rows), ROWS_PER_READ):
            block: Any = self.read(rows[start : start + ROWS_PER_READ]).vectors
            digest.update(block.numpy().tobytes())
        return digest.hexdigest()

    def rows(self, keys: Iterable[str]) -> np.ndarray:
        """Look up the rows of images by name.

        Args:
            keys: Image names.

        Returns:
            Row numbers.

        Raises:
            DataError: If images have no vector. The message has their number and an example.
        """
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
        """Leave out the images without a vector.

        Args:
            data: Data set.

        Returns:
            The images with a vector. ``skipped`` has a sentence about the others.
        """
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


def _ids_file(path: Path) -> Path:
    return path.with_suffix(".ids.txt")


def _distinct(names: list[str], file: Path) -> list[str]:
    """The ids of a file, each of which occurs once."""
    if len(set(names)) < len(names):
        first = next(name for number, name in enumerate(names) if name in names[:number])
        raise DataError(
            f"{file}: expected each id once, got {first!r} more than once. Remove all but one."
        )
    return names


def _read_parquet(path: Path) -> tuple[list[str], np.ndarray]:
    """Read the only column of texts and the only column of lists of numbers."""
    with requires_extra("large", "vectors in a Parquet file"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        with storage.open_file(path) as file:
            table = pq.read_table(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path}: expected a Parquet file, got one that cannot be read "
            f"({str(error).splitlines()[0]}). Write it again."
        ) from None
    types = pa.types
    ids = [field.name for field in table.schema if _is_text(types, field.type)]
    lists = [
        field.name
        for field in table.schema
        if (
            types.is_list(field.type)
            or types.is_large_list(field.type)
            or types.is_fixed_size_list(field.type)
        )
        and (types.is_floating(field.type.value_type) or types.is_integer(field.type.value_type))
    ]
    if len(ids) != 1 or len(lists) != 1:
        columns = ", ".join(f"{field.name} ({field.type})" for field in table.schema) or "none"
        raise DataError(
            f"{path}: expected one column of texts (ids) and one of lists of numbers (vectors), got "
            f"{columns}. Write only these two columns."
        )
    column = table[lists[0]].combine_chunks()
    lengths = column.value_lengths().unique().to_pylist()
    if column.null_count or table[ids[0]].null_count or len(lengths) != 1 or not lengths[0]:
        raise DataError(
            f"{path}: expected an id and a vector of the same length in each row, got lengths "
            f"{lengths[:5]} and {column.null_count + table[ids[0]].null_count} empty cells. Correct "
            "these rows."
        )
    values = column.flatten().to_numpy(zero_copy_only=False)
    return table[ids[0]].to_pylist(), values.reshape(len(column), -1)


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind))
