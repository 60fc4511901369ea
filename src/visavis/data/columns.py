"""Columns of a large table: texts and images as lazy sequences over memory-mapped Arrow files.

No Python object exists per item: a ``str`` or an ``Image`` is made when an item is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis.data.dataset import ByteRange, Image, LazyImages
from visavis.data.sequences import LazySequence, hash_parts
from visavis.errors import requires_extra

if TYPE_CHECKING:
    import pyarrow as pa

# Rows of each record batch of a column file. So a row number gives its record batch without a search.
ROWS_PER_CHUNK = 2**20


def import_pyarrow() -> Any:
    """Import ``pyarrow``, which reads and writes large tables.

    Returns:
        The module.

    Raises:
        MissingExtra: If it is not installed.
    """
    with requires_extra("large", "a large table of captions"):
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.dataset
        import pyarrow.fs
        import pyarrow.parquet
    return pa


class TextColumn(LazySequence[str]):
    """Texts of a column file, which is memory-mapped.

    Args:
        path: Arrow file with one column and ``ROWS_PER_CHUNK`` rows in each record batch except the last one.
        content_hash: Hash of the file's content.
        rows: Row of each text. None: all rows.
    """

    def __init__(self, path: Path, content_hash: str, rows: np.ndarray | None = None):
        self.path, self.content_hash, self.rows = path, content_hash, rows

    def __reduce__(self) -> tuple[Any, ...]:
        return TextColumn, (self.path, self.content_hash, self.rows)

    @cached_property
    def _chunks(self) -> list[pa.Array]:
        pa = import_pyarrow()
        reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
        return [reader.get_batch(number).column(0) for number in range(reader.num_record_batches)]

    @cached_property
    def _num_rows(self) -> int:
        return sum(map(len, self._chunks))

    def __len__(self) -> int:
        return self._num_rows if self.rows is None else len(self.rows)

    def take(self, indices: np.ndarray) -> TextColumn:
        rows = np.asarray(indices) if self.rows is None else self.rows[indices]
        column = TextColumn(self.path, self.content_hash, rows)
        column.__dict__["_chunks"] = self._chunks
        return column

    def read(self, indices: np.ndarray) -> list[str]:
        rows = np.asarray(indices) if self.rows is None else self.rows[indices]
        chunk, within = np.divmod(rows, ROWS_PER_CHUNK)
        if len(rows) < 32:
            return [self._chunks[c][i].as_py() for c, i in zip(chunk.tolist(), within.tolist(), strict=True)]
        texts = np.empty(len(rows), object)
        for number in np.unique(chunk).tolist():
            inside = chunk == number
            texts[inside] = self._chunks[number].take(import_pyarrow().array(within[inside])).to_pylist()
        return texts.tolist()

    def blocks(self) -> Iterator[pa.Array]:
        """Yield the texts as Arrow arrays, for functions of ``pyarrow.compute``.

        Yields:
            Arrays of up to ``ROWS_PER_CHUNK`` texts, in order.
        """
        if self.rows is None:
            yield from self._chunks
            return
        pa = import_pyarrow()
        for start in range(0, len(self.rows), ROWS_PER_CHUNK):
            rows = self.rows[start : start + ROWS_PER_CHUNK]
            chunk, within = np.divmod(rows, ROWS_PER_CHUNK)
            if (np.diff(chunk) >= 0).all():  # as in a split, whose rows are sorted
                for number in np.unique(chunk).tolist():
                    yield self._chunks[number].take(pa.array(within[chunk == number]))
            else:
                yield pa.array(self.read(np.arange(start, start + len(rows))), pa.large_string())

    @cached_property
    def num_spaces(self) -> np.ndarray:
        """Number of spaces of each text, a measure of its length, shape ``[texts]``."""
        compute = import_pyarrow().compute
        counts = [compute.count_substring(block, " ").to_numpy(zero_copy_only=False) for block in self.blocks()]
        return np.concatenate(counts) if counts else np.empty(0, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of all texts."""
        return hash_parts(self.content_hash.encode(), b"" if self.rows is None else self.rows.tobytes())


class ImageColumn(LazyImages):
    """Images of a large table.

    Args:
        names: Their names.
        split_names: Names of all splits.
        splits: Index of the split of each image in ``split_names``, shape ``[images]``.
        folder: Folder of their files. None: without pixels.
    """

    def __init__(self, names: TextColumn, split_names: tuple[str, ...], splits: np.ndarray, folder: Path | None):
        self.names, self.split_names, self.splits, self.folder = names, split_names, splits, folder

    def __len__(self) -> int:
        return len(self.splits)

    @property
    def split_codes(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Names of splits, and the index of the split of each image."""
        return self.split_names, self.splits

    def take(self, indices: np.ndarray) -> ImageColumn:
        return ImageColumn(self.names.take(indices), self.split_names, self.splits[indices], self.folder)

    def read(self, indices: np.ndarray) -> list[Image]:
        names, folder = self.names.read(indices), self.folder
        locations = [None if folder is None else ByteRange(folder / name, root=folder) for name in names]
        splits = [self.split_names[code] for code in self.splits[indices].tolist()]
        return [Image(*fields) for fields in zip(names, splits, locations, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of all names and splits."""
        return hash_parts(self.names.fingerprint.encode(), "\x1f".join(self.split_names).encode(), self.splits.tobytes())
