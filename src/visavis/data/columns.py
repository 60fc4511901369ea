"""Columns of a large table: texts and images as lazy sequences over memory-mapped Arrow files.

No Python object exists per item: a ``str`` or an ``Image`` is made when an item is read.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis.core.errors import requires_extra
from visavis.data.dataset import LazyImages
from visavis.data.image_file import ByteRange, Image
from visavis.data.parallel import map_in_order
from visavis.data.sequences import LazySequence, hash_parts

if TYPE_CHECKING:
    import pyarrow as pa

# Rows of each record batch of a column file. So a row number gives its record batch without a
# search.
ROWS_PER_CHUNK = 2**20
# Hash tables of unique texts. With 10 million texts, 4 took twice as long as 64 on two cores, and a
# single one four times as long.
_HASH_TABLES = 64


def import_pyarrow() -> Any:
    """Import ``pyarrow``, which reads and writes large tables."""
    with requires_extra("large", "a large table of captions"):
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.dataset
        import pyarrow.fs
        import pyarrow.parquet
    return pa


def unique_texts(blocks: Iterable[pa.Array]) -> tuple[np.ndarray, pa.Array]:
    """Return the index of each row's unique text (int32, -1: null), and the unique texts in order
    of first mention. Each block is ``large_string``.
    """
    pa = import_pyarrow()
    all_blocks = list[Any]()
    num_rows = 0
    rows_of, texts_of = ([list[Any]() for _ in range(_HASH_TABLES)] for _ in range(2))
    # Texts are divided by the sum of their bytes. So the hash table of each part is small enough
    # for the processor's cache, and the parts are searched in parallel.
    for block, rows, texts, bounds in map_in_order(_sort_by_hash_table, blocks):
        for table, (start, end) in enumerate(pairwise(bounds)):
            rows_of[table].append(num_rows + rows[start:end])
            texts_of[table].append(texts.slice(start, end - start))
        all_blocks.append(block)
        num_rows += len(block)

    def encode(table: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows of a table, the index of each row's text in it, and the first row of each
        text.
        """
        rows = np.concatenate(rows_of[table])
        encoded = pa.chunked_array(texts_of[table]).combine_chunks().dictionary_encode()
        rows_of[table].clear()
        texts_of[table].clear()
        indices = encoded.indices.to_numpy()
        return rows, indices, rows[np.diff(np.maximum.accumulate(indices), prepend=-1) > 0]

    if not all_blocks:
        return np.empty(0, np.int32), pa.array([], pa.large_string())
    # Rows, index of the text and first rows of each hash table.
    encoded = list(map_in_order(encode, range(_HASH_TABLES)))
    is_first = np.zeros(num_rows, bool)
    unique_index = np.full(num_rows, -1, np.int32)
    # Unique texts are numbered by their first row, whatever hash table they are in.
    is_first[np.concatenate([first_rows for _, _, first_rows in encoded])] = True
    index_of_row = np.cumsum(is_first, dtype=np.int32) - 1
    for rows, indices, first_rows in encoded:
        unique_index[rows] = index_of_row[first_rows[indices]]
    start = 0
    # In place, so that memory holds the texts once.
    for number, block in enumerate(all_blocks):
        all_blocks[number] = block.filter(pa.array(is_first[start : start + len(block)]))
        start += len(block)
    return unique_index, pa.concat_arrays(all_blocks)


def _sort_by_hash_table(block: pa.Array) -> tuple[pa.Array, np.ndarray, pa.Array, list[int]]:
    """Return a block, its rows and texts in order of their hash table, and the bounds of the
    tables.
    """
    texts = block.drop_null()
    offsets, content = offsets_and_bytes(texts)
    # Sum of all bytes before each byte, modulo 256.
    sums = np.zeros(offsets[-1] - offsets[0] + 1, np.uint8)
    np.cumsum(content[offsets[0] : offsets[-1]], dtype=np.uint8, out=sums[1:])
    tables = np.diff(sums[offsets - offsets[0]]) % _HASH_TABLES
    order = np.argsort(tables, kind="stable")
    rows = np.flatnonzero(block.is_valid().to_numpy(zero_copy_only=False))
    bounds = np.searchsorted(tables[order], np.arange(_HASH_TABLES + 1)).tolist()
    return block, rows[order], texts.take(import_pyarrow().array(order)), bounds


def offsets_and_bytes(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the first byte of each text and the end of the last, shape ``[texts + 1]``, and all
    bytes. The array is ``large_string`` and may be a slice.
    """
    _, offsets_buffer, content = texts.buffers()
    # A slice shares the buffers of the whole array.
    offsets = np.frombuffer(offsets_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    # An array without bytes has no buffer of them.
    return offsets, np.frombuffer(content or b"", np.uint8)


class TextColumn(LazySequence[str]):
    """Texts of a column file, which is memory-mapped.

    Args:
        path: Arrow file with one column and ``ROWS_PER_CHUNK`` rows in each record batch except the
            last one.
        content_hash: Hash of the file's content.
        rows: Row of each text. None: all rows.
    """

    def __init__(self, path: Path, content_hash: str, rows: np.ndarray | None = None):
        self.path = path
        self.content_hash = content_hash
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return TextColumn, (self.path, self.content_hash, self.rows)

    @cached_property
    def _chunks(self) -> list[pa.Array]:
        pa = import_pyarrow()
        reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
        return [reader.get_batch(number).column(0) for number in range(reader.num_record_batches)]

    def __len__(self) -> int:
        return sum(map(len, self._chunks)) if self.rows is None else len(self.rows)

    def take(self, indices: np.ndarray) -> TextColumn:
        rows = np.asarray(indices) if self.rows is None else self.rows[indices]
        column = TextColumn(self.path, self.content_hash, rows)
        # The selection shares the memory map.
        column.__dict__["_chunks"] = self._chunks
        return column

    def read(self, indices: np.ndarray) -> list[str]:
        rows = np.asarray(indices) if self.rows is None else self.rows[indices]
        chunk, within = np.divmod(rows, ROWS_PER_CHUNK)
        # For a few texts, a lookup is faster than the vectorized selection.
        if len(rows) < 32:
            return [
                self._chunks[c][i].as_py()
                for c, i in zip(chunk.tolist(), within.tolist(), strict=True)
            ]
        texts = np.empty(len(rows), object)
        for number in np.unique(chunk).tolist():
            inside = chunk == number
            texts[inside] = (
                self._chunks[number].take(import_pyarrow().array(within[inside])).to_pylist()
            )
        return texts.tolist()

    def blocks(self) -> Iterator[pa.Array]:
        """Yield the texts in order, as Arrow arrays of up to ``ROWS_PER_CHUNK``."""
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
        counts = [
            compute.count_substring(block, " ").to_numpy(zero_copy_only=False)
            for block in self.blocks()
        ]
        return np.concatenate(counts) if counts else np.empty(0, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of all texts."""
        return hash_parts(
            self.content_hash.encode(), b"" if self.rows is None else self.rows.tobytes()
        )


def _find_file(folder: Path, name: str) -> Path:
    """The path of a file. File systems differ in the form of letters with accents."""
    if name.isascii() or os.path.exists(folder / name):
        return folder / name
    forms = (folder / unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    return next(filter(os.path.exists, forms), folder / name)


class ImageColumn(LazyImages):
    """Images of a large table.

    Args:
        names: Their names.
        split_names: Names of all splits.
        splits: Index of the split of each image in ``split_names``, shape ``[images]``.
        folder: Folder of their files. None: without pixels.
    """

    def __init__(
        self,
        names: TextColumn,
        split_names: tuple[str, ...],
        splits: np.ndarray,
        folder: Path | None,
    ):
        self.names = names
        self.split_names = split_names
        self.splits = splits
        self.folder = folder

    def __len__(self) -> int:
        return len(self.splits)

    @property
    def split_codes(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Names of splits, and the index of the split of each image."""
        return self.split_names, self.splits

    def with_splits(self, codes: np.ndarray) -> ImageColumn:
        return ImageColumn(self.names, self.split_names, codes, self.folder)

    def take(self, indices: np.ndarray) -> ImageColumn:
        return ImageColumn(
            self.names.take(indices), self.split_names, self.splits[indices], self.folder
        )

    def read(self, indices: np.ndarray) -> list[Image]:
        names = self.names.read(indices)
        folder = self.folder
        locations = [
            None if folder is None else ByteRange(_find_file(folder, name), root=folder)
            for name in names
        ]
        splits = [self.split_names[code] for code in self.splits[indices].tolist()]
        return [Image(*fields) for fields in zip(names, splits, locations, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of all names and splits."""
        return hash_parts(
            self.names.fingerprint.encode(),
            "\x1f".join(self.split_names).encode(),
            self.splits.tobytes(),
        )
