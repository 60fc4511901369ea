"""A copy of a table's items in the order of keys, mapped from files: derived from one version of the table, and made anew for another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from visavis import storage
from visavis.memory import Memory
from visavis.retrieval.exact import Exact
from visavis.retrieval.filters import allowed_rows
from visavis.retrieval.item import Item, Where, tags_to_metadata
from visavis.retrieval.reduced import CODES, multiplies_int8, open_reduced, pays, write_reduced
from visavis.retrieval.store import Near

if TYPE_CHECKING:
    import pyarrow as pa

ITEMS, VECTORS = "items.arrow", "vectors.npy"


class Mirror:
    """The items and vectors of a folder that ``write_mirror`` wrote."""

    def __init__(self, folder: Path, memory: Memory = None):
        import pyarrow as pa

        with pa.memory_map(str(folder / ITEMS)) as file:
            self.table = pa.ipc.open_file(file).read_all()
        self.keys = self.table["key"]
        self.vectors = storage.read_array(folder / VECTORS, dimensions=2, mapped=True)
        self.folder, self.memory = folder, memory

    @cached_property
    def exact(self) -> Exact:
        reduced = open_reduced(self.folder) if (self.folder / CODES).exists() and multiplies_int8() else None
        return Exact(self.vectors, reduced=reduced, memory=self.memory)

    def search(self, queries: np.ndarray, top: int, where: Where) -> list[list[Near]]:
        mask = allowed_rows(self.table, where) if where else None
        scores, rows = self.exact.search(queries, top, mask)
        keys = self.keys.take(rows.ravel()).to_pylist()
        each = iter(zip(keys, scores.ravel().tolist(), strict=True))
        return [[Near(*next(each)) for _ in row] for row in rows]

    def count(self, where: Where) -> int:
        return int(allowed_rows(self.table, where).sum())

    def items(self) -> list[Item]:
        return items_of(self.table)

    def rows(self, keys: Sequence[str]) -> list[int]:
        """The rows of keys. Raises KeyError for one that is not there."""
        found = []
        for key in keys:
            row = bisect_left(range(len(self.keys)), key, key=lambda row: self.keys[row].as_py())
            if row == len(self.keys) or self.keys[row].as_py() != key:
                raise KeyError(key)
            found.append(row)
        return found


def items_of(table: pa.Table) -> list[Item]:
    """The items of a table, in its order."""
    return [Item(**row | {"metadata": tags_to_metadata(row["metadata"])}) for row in table.to_pylist()]


def write_mirror(folder: Path, items: pa.Table, batches: Iterable[tuple[pa.Array, np.ndarray]], width: int) -> None:
    """Write a mirror at once.

    items: all columns but the vectors, in any order. batches: keys and their vectors ``[B, width]``, in any order. Raises StorageError.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    items = items.take(pc.sort_indices(items, [("key", "ascending")])).combine_chunks()
    keys = items["key"].combine_chunks()
    with storage.replacing_folder(folder) as part:
        with pa.OSFile(str(part / ITEMS), "wb") as file, pa.ipc.new_file(file, items.schema) as writer:
            writer.write_table(items)
        storage.create_array(part / VECTORS, shape=(len(items), width), dtype="float32")
        vectors = np.lib.format.open_memmap(part / VECTORS, mode="r+")
        for own, block in batches:
            vectors[pc.index_in(own, keys).to_numpy()] = block
        vectors.flush()
        if pays(*vectors.shape):
            write_reduced(part, vectors)


def remove_others(place: Path, name: str) -> None:
    """Remove what was derived from other versions, and what killed processes left behind."""
    storage.remove_parts(place)
    for folder in place.iterdir():
        if folder.is_dir() and folder.name != name:
            storage.remove_folder(folder)
