"""Snapshot of a table of items: immutable parts on disk, which are mapped for exact search.

A part is a folder with items in the order of keys and their vectors. The newest part lists the
older parts that the snapshot also contains, and their items that were removed since. So a change
writes only the changed items, and a killed process leaves the previous snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from visavis.core import storage
from visavis.core.encoded import MaxSimDirection
from visavis.core.errors import DataError, StorageError, log_debug, requires_extra
from visavis.core.memory_budget import MemoryLimit
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores.arrow_tables import (
    find_keys,
    item_times,
    items_from_table,
    matching_rows,
    row_indices,
)
from visavis.retrieval.stores.base import (
    CHECKSUM,
    ItemVectors,
    Neighbor,
    Queries,
    StoreDigest,
    VectorSets,
    concatenate_vectors,
)
from visavis.retrieval.stores.exact_search import (
    CODES,
    ExactSearch,
    is_int8_faster,
    open_int8_codes,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from visavis.retrieval.stores.maxsim_search import MaxSimSearch
    from visavis.retrieval.stores.set_codec import SetCodec

ITEMS_FILE = "items.arrow"
VECTORS_FILE = "vectors.npy"
REMOVED_FILE = "removed.npy"
CHECKSUMS_FILE = "checksums.json"
MAX_MASKS = 8
"""Recent filters whose rows each part keeps, 1 byte per item. Pages of results and further queries
usually have the same filter.
"""
OFFSETS_FILE = "offsets.npy"
POOLED_FILE = "pooled.npy"
POOLED_OFFSETS_FILE = "pooled_offsets.npy"


@dataclass(frozen=True)
class PartDescription:
    """Content of ``checksums.json``: origin and files of a part, and the older parts of the
    snapshot that was written with it.

    Attributes:
        index_id: Id of the index.
        version: Version of the table, the name of the folder.
        files: SHA-256 by file name.
        file_stats: Size in bytes and time of change in ns of each file when its SHA-256 was
            verified last.
        parts: Older parts of the snapshot.
        digest: Items of the snapshot. None: an earlier version wrote the part.
        max_norm: Upper bound of the norms of the vectors of the part. None: unknown.
    """

    index_id: str
    version: str
    files: dict[str, str]
    file_stats: dict[str, tuple[int, int]] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    digest: StoreDigest | None = None
    max_norm: float | None = None

    @classmethod
    def read(cls, folder: Path, index_id: str) -> PartDescription:
        """Read the description of a part.

        Args:
            folder: Folder of the part.
            index_id: Id of the index.

        Returns:
            The description.

        Raises:
            DataError: If it is damaged or missing, the part belongs to another table, or other
                files are in the folder.
        """
        description: PartDescription | None = storage.read_checksummed_json(
            folder / CHECKSUMS_FILE, cls, error=DataError
        )
        if description is None or (
            (description.index_id, description.version) != (index_id, folder.name)
            # A file more or less than described means that a copy of the folder is incomplete or
            # mixed.
            or {path.name for path in folder.iterdir()} != {*description.files, CHECKSUMS_FILE}
        ):
            raise DataError("it is missing or belongs to another table, or a file is missing.")
        return description

    def write(self, folder: Path) -> None:
        """Write ``checksums.json``.

        Args:
            folder: Folder of the part.
        """
        storage.write_checksummed_json(folder / CHECKSUMS_FILE, asdict(self))

    def verify(self, folder: Path, *, in_full: bool) -> None:
        """Check the files of the part by size and time, or by SHA-256 if one has changed.

        Args:
            folder: Folder of the part.
            in_full: Whether to check the SHA-256 in any case.

        Raises:
            DataError: If a file differs from what was written.
        """
        stats = file_stats(folder, self.files)
        if stats == self.file_stats and not in_full:
            return
        for name, expected in self.files.items():
            if storage.content_hash(folder / name) != expected:
                raise DataError(f"{name} has another checksum.")
        if stats != self.file_stats:
            with suppress(StorageError):  # files of a read-only snapshot are hashed each time
                replace(self, file_stats=stats).write(folder)


def file_stats(folder: Path, names: Sequence[str] | dict[str, str]) -> dict[str, tuple[int, int]]:
    """Return size in bytes and time of change in ns of files.

    Args:
        folder: Folder of the files.
        names: Names of the files.

    Returns:
        Size and time by name.
    """
    return {
        name: (status.st_size, status.st_mtime_ns)
        for name in names
        for status in [os.stat(folder / name)]
    }


@dataclass(eq=False)
class SnapshotPart:
    """Items in the order of keys, and their vectors.

    Attributes:
        table: Items and their checksums.
        vectors: Their vectors, which may be memory-mapped.
        vector_search: Search in the vectors.
        name: Name of the folder.
        live: Whether each item is in the snapshot, bool, shape ``[N]``. None: all are.
    """

    table: pa.Table
    vectors: ItemVectors
    vector_search: ExactSearch | MaxSimSearch
    name: str = ""
    live: np.ndarray | None = None
    _masks: dict[ItemFilter, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def open(
        cls,
        folder: Path,
        description: PartDescription,
        memory: MemoryLimit,
        late_interaction: MaxSimDirection | None,
        codec: SetCodec | None = None,
    ) -> SnapshotPart:
        """Map the files of a part.

        Args:
            folder: Folder of the part.
            description: Its description.
            memory: Memory limit of a search.
            late_interaction: Which means of MaxSim a score contains. None: one vector per item.
            codec: Codec of compressed vectors.

        Returns:
            The part.

        Raises:
            MissingExtra: If PyArrow is not installed.
        """
        with requires_extra("search", "reading an index"):
            import pyarrow as pa

        with pa.memory_map(str(folder / ITEMS_FILE)) as file:
            table = pa.ipc.open_file(file).read_all()
        rows: np.ndarray = storage.read_array(
            folder / VECTORS_FILE,
            dimensions=2,
            kinds="f" if codec is None else "u",
            memory_map=True,
        )
        # Everything is opened now: another process may remove the files of this version later.
        if late_interaction is None:
            has_codes = os.path.exists(folder / CODES) and is_int8_faster(*rows.shape)
            coarse = open_int8_codes(folder) if has_codes else None
            first_pass = "int8 codes first" if coarse else "float32"
            log_debug(__name__, "exact search in %d vectors, %s", len(rows), first_pass)
            search = ExactSearch(rows, coarse=coarse, memory=memory, max_norm=description.max_norm)
            return cls(table, rows, search, folder.name)
        from visavis.retrieval.stores.maxsim_search import MaxSimSearch

        offsets = storage.read_array(folder / OFFSETS_FILE, dimensions=1, kinds="i")
        sets = VectorSets(rows, offsets, codec)
        pooled = None
        if os.path.exists(folder / POOLED_FILE):
            pooled_rows = storage.read_array(folder / POOLED_FILE, dimensions=2, memory_map=True)
            offsets = storage.read_array(folder / POOLED_OFFSETS_FILE, dimensions=1, kinds="i")
            pooled = VectorSets(pooled_rows, offsets)
        set_search = MaxSimSearch(sets, late_interaction, pooled=pooled, memory=memory)
        return cls(table, sets, set_search, folder.name)

    @cached_property
    def keys(self) -> pa.Array:
        """Keys of the items."""
        column = self.table["key"]
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    @property
    def live_table(self) -> pa.Table:
        """The items that are in the snapshot."""
        return self.table if self.live is None else self.table.filter(self.live)

    @property
    def live_vectors(self) -> ItemVectors:
        """Vectors of the items that are in the snapshot."""
        return self.vectors if self.live is None else self.vectors[np.flatnonzero(self.live)]

    def mask(self, item_filter: ItemFilter) -> np.ndarray | None:
        """Select the items that are in the snapshot and match a filter.

        Args:
            item_filter: Conditions on the items.

        Returns:
            Whether an item may be returned, bool, shape ``[N]``. None: all.
        """
        if not item_filter:
            return self.live
        mask = self._masks.get(item_filter)
        if mask is None:
            mask = matching_rows(self.table, item_filter, lambda: self.times)
            if self.live is not None:
                mask &= self.live
            # A new dictionary, because other threads may read the old one. The oldest go first.
            kept = list(self._masks.items())[1 - MAX_MASKS :]
            self._masks = {**dict(kept), item_filter: mask}
        return mask

    @cached_property
    def times(self) -> np.ndarray:
        """Times of the items, see ``item_times``."""
        return item_times(self.table)

    def find(self, keys: Sequence[str]) -> np.ndarray:
        """Find the rows of keys.

        Args:
            keys: Keys of items.

        Returns:
            Their rows, -1 for keys that are not in the snapshot, int64, shape ``[n]``.
        """
        rows = find_keys(self.keys, keys)
        return (
            rows if self.live is None or not len(self.live) else np.where(self.live[rows], rows, -1)
        )


class TableSnapshot:
    """Items and vectors of one version of a table.

    Args:
        parts: Its parts, at least one. A key is live in at most one of them.
        digest: Summary of the items. None: it is computed.
    """

    def __init__(self, parts: Sequence[SnapshotPart], digest: StoreDigest | None = None):
        self.parts = list(parts)
        # A row of the snapshot counts through all parts.
        self._starts = np.cumsum([0, *(len(part.table) for part in self.parts)])
        self._digest = digest
        # Rows of the last results, whose items and vectors are usually read next.
        self._recent_rows = dict[str, int]()

    @classmethod
    def open(
        cls,
        folder: Path,
        description: PartDescription,
        memory: MemoryLimit = None,
        late_interaction: MaxSimDirection | None = None,
        codec: SetCodec | None = None,
    ) -> TableSnapshot:
        """Open the snapshot that was written with a part.

        Args:
            folder: Folder of the part. The older parts are next to it.
            description: Its description.
            memory: Memory limit of a search.
            late_interaction: Which means of MaxSim a score contains. None: one vector per item.
            codec: Codec of compressed vectors.

        Returns:
            The snapshot.

        Raises:
            DataError: If a part is missing or damaged.
        """
        folders = [*(folder.parent / name for name in description.parts), folder]
        parts = [
            SnapshotPart.open(
                path,
                PartDescription.read(path, description.index_id),
                memory,
                late_interaction,
                codec,
            )
            for path in folders
        ]
        snapshot = cls(parts, description.digest)
        if REMOVED_FILE in description.files:
            removed = storage.read_array(folder / REMOVED_FILE, dimensions=1, kinds="i")
            for part, start in zip(parts, snapshot._starts, strict=False):
                rows = removed[(removed >= start) & (removed < start + len(part.table))] - start
                if len(rows):
                    part.live = np.ones(len(part.table), bool)
                    part.live[rows] = False
        return snapshot

    def search(
        self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[list[Neighbor]]:
        """Find the items with the highest scores, see ``VectorStore.search``."""
        recent_rows = dict[str, int]()
        found = list[list[list[Neighbor]]]()
        for part, start in zip(self.parts, self._starts, strict=False):
            scores, rows = part.vector_search.search(queries, top, part.mask(item_filter))  # type: ignore[arg-type]
            keys = part.keys.take(row_indices(rows.ravel())).to_pylist()
            recent_rows |= zip(keys, (rows.ravel() + start).tolist(), strict=True)
            neighbors = list(map(Neighbor, keys, scores.ravel().tolist()))
            num_queries, count = rows.shape
            found.append(
                [neighbors[query * count : (query + 1) * count] for query in range(num_queries)]
            )
        # One assignment: another thread sees the rows of one search or of the next, never a
        # mixture.
        self._recent_rows = recent_rows
        if len(found) == 1:
            return found[0]
        return [
            list(islice(merge(*lists, key=lambda near: (-near.score, near.key)), top))
            for lists in zip(*found, strict=True)
        ]

    def _find(self, keys: Sequence[str]) -> np.ndarray:
        """Rows of keys, -1 for unknown ones, int64, shape ``[n]``."""
        recent_rows = self._recent_rows
        rows = np.array([recent_rows.get(key, -1) for key in keys], np.int64)
        for part, start in zip(self.parts, self._starts, strict=False):
            if len(missing := np.flatnonzero(rows < 0)):
                found = part.find([keys[number] for number in missing.tolist()])
                # A row of a part counts through all parts.
                rows[missing] = np.where(found < 0, -1, found + start)
        return rows

    def get(self, keys: Sequence[str]) -> dict[str, IndexItem]:
        """Read some items, see ``VectorStore.get``."""
        rows = self._find(keys)
        items = [
            item
            for part, own in zip(self.parts, self._split(rows), strict=True)
            for item in items_from_table(part.table.take(row_indices(own)))
        ]
        # Read part by part, so that the order of the keys is restored.
        by_key = {item.key: item for item in items}
        return {key: by_key[key] for key in keys if key in by_key}

    def vectors(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items, see ``VectorStore.vectors``."""
        rows = self._find(keys)
        if (rows < 0).any():
            raise KeyError(keys[int(np.argmax(rows < 0))])
        # Indexing with a list copies from the map.
        vectors = concatenate_vectors(
            [part.vectors[own] for part, own in zip(self.parts, self._split(rows), strict=True)]
        )
        # Vectors were read part by part. The inverse permutation restores the order of the keys.
        order = np.argsort(np.searchsorted(self._starts, rows, "right"), kind="stable")
        return vectors[np.argsort(order)]

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        """Rows of each part, in the given order."""
        pairs = zip(self._starts, self._starts[1:], strict=False)
        return [rows[(rows >= start) & (rows < stop)] - start for start, stop in pairs]

    @cached_property
    def table(self) -> pa.Table:
        """All items in the order of keys, and their checksums."""
        import pyarrow as pa

        if len(self.parts) == 1:
            return self.parts[0].live_table
        return (
            pa.concat_tables([part.live_table for part in self.parts])
            .sort_by("key")
            .combine_chunks()
        )

    @property
    def all_vectors(self) -> ItemVectors:
        """Vectors of all items in the order of keys."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if len(self.parts) == 1:
            return self.parts[0].live_vectors
        keys = pa.chunked_array(
            [chunk for part in self.parts for chunk in part.live_table["key"].chunks]
        )
        return concatenate_vectors([part.live_vectors for part in self.parts])[
            pc.sort_indices(keys).to_numpy()
        ]

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items, see ``VectorStore.count``."""
        masks = [(part, part.mask(item_filter)) for part in self.parts]
        return sum(len(part.table) if mask is None else int(mask.sum()) for part, mask in masks)

    @cached_property
    def digest(self) -> StoreDigest:
        """Number of items, and the sum of their checksums."""
        return self._digest or StoreDigest.from_checksums(self.table[CHECKSUM].to_numpy())
