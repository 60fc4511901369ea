"""Formats of item vectors: Parquet, arrays with ids, and formats of installed packages and own code."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, requires_extra
from visavis.core.own_code import loaded_parts


@dataclass(frozen=True, eq=False)
class NamedVectors:
    """Content of a source of item vectors.

    Attributes:
        names: Name of the item of each row, each once: the path of its image in the data set.
        vectors: Vectors, shape ``[N, D]``. May be memory-mapped.
        files: Files whose change changes the vectors.
        fingerprint: Fingerprint of the model that made the vectors. "": it is not known.

    Raises:
        DataError: If a name occurs twice.
    """

    names: Sequence[str]
    vectors: np.ndarray
    files: Sequence[Path]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if 0 in self.vectors.shape:
            raise DataError(
                f"{self.files[0]}: expected vectors of one number or more, got shape "
                f"{list(self.vectors.shape)}. Write them again."
            )
        if len(set(self.names)) < len(self.names):
            first = next(name for name, count in Counter(self.names).items() if count > 1)
            raise DataError(
                f"{self.files[-1]}: expected each id once, got {first!r} more than once. Remove "
                "all but one."
            )


@dataclass(frozen=True)
class VectorFormat:
    """A format of item vectors, against which a text side is trained.

    Attributes:
        holds: Whether a path has this format. It is called for features of any kind, so it should
            open no large file.
        read: Reads the vectors of a path. Raises DataError if it cannot.
    """

    holds: Callable[[Path], bool]
    read: Callable[[Path], NamedVectors] = field(repr=False)


def find_vector_format(path: Path) -> VectorFormat | None:
    """Find the format of item vectors: of the user's own code and installed packages first."""
    formats = [*loaded_parts(VectorFormat, "vectors"), PARQUET, NAMED_ARRAY]
    return next((each for each in formats if each.holds(path)), None)


def _ids_file(path: Path) -> Path:
    return path.with_suffix(".ids.txt")


def read_named_array(path: Path) -> NamedVectors:
    """Read a ``.npy`` array, memory-mapped, with its ids in ``NAME.ids.txt``."""
    vectors = storage.read_array(path, dimensions=2, kinds="fiu", memory_map=True)
    file = _ids_file(path)
    names = storage.read_text_lines(file)
    if len(names) != len(vectors):
        raise DataError(
            f"{file}: expected {len(vectors):,} ids, one per line for each row of {path.name}, "
            f"got {len(names):,}. Write both again."
        )
    return NamedVectors(names, vectors, [path, file])


def _read_parquet(path: Path) -> NamedVectors:
    """Read the column of texts and the column of lists of numbers. Of several columns of texts, the
    ids are in ``id`` or ``key``.
    """
    with requires_extra("large", "vectors in a Parquet file"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    with storage.open_file(path) as file:
        try:
            table = pq.read_table(file)
            # Damaged offsets would be read outside the file.
            table.validate(full=True)
            # Names that are not UTF-8 raise the error here.
            _ = table.schema.names
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{path}: expected a Parquet file, got one that cannot be read "
                f"({storage.error_reason(error)}). Write it again."
            ) from None
    types: Any = pa.types
    ids = [
        field.name
        for field in table.schema
        if types.is_string(field.type) or types.is_large_string(field.type)
    ]
    ids = [name for name in ids if name in ("id", "key")] or ids
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
            f"{columns}. Write only these two columns, or name the ids 'id'."
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
    return NamedVectors(table[ids[0]].to_pylist(), values.reshape(len(column), -1), [path])


PARQUET = VectorFormat(lambda path: path.suffix == ".parquet", _read_parquet)
NAMED_ARRAY = VectorFormat(
    lambda path: path.suffix == ".npy" and os.path.isfile(_ids_file(path)), read_named_array
)
