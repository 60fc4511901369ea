"""LanceDB store: a table in a folder or in object storage, and a memory-mapped snapshot of its newest version for exact search."""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from visavis import storage
from visavis.errors import DataError, ShapeError, log_debug, requires_extra
from visavis.memory_budget import MemoryLimit
from visavis.retrieval.items import ITEM_FIELDS, NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores.arrow_tables import NUM_VECTORS, arrow_schema, arrow_table, flat_values, matching_rows
from visavis.retrieval.stores.base import (
    CHECKSUM,
    Neighbor,
    StoreDigest,
    store_errors,
    validated_items,
    validated_sets,
    verify_rows,
)
from visavis.retrieval.stores.exact_search import (
    CODES,
    ExactSearch,
    is_int8_faster,
    open_int8_codes,
    supports_int8_matmul,
    write_int8_codes,
)
from visavis.retrieval.stores.maxsim_search import MIN_ITEMS, POOLED_VECTORS, MaxSimSearch, pool_vectors
from visavis.retrieval.stores.vector_sets import ItemVectors, Queries, VectorSets
from visavis.types import MaxSimDirection

ITEMS_FILE, VECTORS_FILE, CHECKSUMS_FILE, SNAPSHOT_FOLDER = "items.arrow", "vectors.npy", "checksums.json", "snapshot"
OFFSETS_FILE, POOLED_FILE, POOLED_OFFSETS_FILE = "offsets.npy", "pooled.npy", "pooled_offsets.npy"
TABLE = "items"
BATCH_ROWS, BATCH_SETS = 2**14, 2**10
"""Rows that are read at once, with one or with several vectors each."""
COMPACT_EVERY = 64
"""Changes after which small files are merged."""
VERSION_RETENTION = timedelta(minutes=10)
"""How long old versions are kept for readers that have just opened them."""


@dataclass(frozen=True)
class SnapshotChecksums:
    """Origin of a snapshot, and the SHA-256 of each of its files.

    Attributes:
        index_id: Id of the index.
        version: Version of the table.
        files: Checksums by file name.
    """

    index_id: str
    version: str
    files: dict[str, str]


class TableSnapshot:
    """Items and vectors of one version of a table in the order of keys, mapped from files.

    Args:
        folder: Folder that was written by ``LanceStore``.
        memory: Memory limit of a search.
        late_interaction: Which means of MaxSim a score contains. None: one vector per item.
    """

    def __init__(self, folder: Path, memory: MemoryLimit = None, late_interaction: MaxSimDirection | None = None):
        import pyarrow as pa

        with pa.memory_map(str(folder / ITEMS_FILE)) as file:
            self.table = pa.ipc.open_file(file).read_all()
        self.keys = self.table["key"]
        self.vectors: ItemVectors = storage.read_array(folder / VECTORS_FILE, dimensions=2, memory_map=True)
        if late_interaction is not None:
            self.vectors = VectorSets(self.vectors, storage.read_array(folder / OFFSETS_FILE, dimensions=1, kinds="i"))
        # Opened with the vectors: another process may remove the files of this version later.
        self._vector_search = self._open_search(folder, memory, late_interaction)
        # Rows of the last results, whose vectors are usually read next.
        self._recent_rows = dict[str, int]()

    def _open_search(self, folder: Path, memory: MemoryLimit, late_interaction: MaxSimDirection | None) -> ExactSearch | MaxSimSearch:
        """Exact search in the vectors, with int8 codes if there are any, or search by late interaction, with pooled vectors."""
        if isinstance(self.vectors, VectorSets):
            assert late_interaction is not None
            pooled = None
            if os.path.exists(folder / POOLED_FILE):
                rows = storage.read_array(folder / POOLED_FILE, dimensions=2, memory_map=True)
                pooled = VectorSets(rows, storage.read_array(folder / POOLED_OFFSETS_FILE, dimensions=1, kinds="i"))
            return MaxSimSearch(self.vectors, late_interaction, pooled=pooled, memory=memory)
        coarse = open_int8_codes(folder) if os.path.exists(folder / CODES) and supports_int8_matmul() else None
        log_debug(__name__, "exact search in %d vectors, %s", len(self.vectors), "int8 codes first" if coarse else "float32")
        return ExactSearch(self.vectors, coarse=coarse, memory=memory)

    def search(self, queries: Queries, top: int, item_filter: ItemFilter) -> list[list[Neighbor]]:
        """Find the items with the highest scores, see ``VectorStore.search``."""
        mask = matching_rows(self.table, item_filter) if item_filter else None
        scores, rows = self._vector_search.search(queries, top, mask)  # type: ignore[arg-type]
        keys = self.keys.take(rows.ravel()).to_pylist()
        self._recent_rows = dict(zip(keys, rows.ravel().tolist(), strict=True))
        neighbors = list(map(Neighbor, keys, scores.ravel().tolist()))
        num_queries, num_results = rows.shape
        return [neighbors[query * num_results : (query + 1) * num_results] for query in range(num_queries)]

    def rows(self, keys: Sequence[str]) -> list[int]:
        """Find the rows of some keys.

        Args:
            keys: Keys of items.

        Returns:
            Their rows.

        Raises:
            KeyError: If a key is unknown.
        """
        rows = []
        for key in keys:
            if key in self._recent_rows:
                rows.append(self._recent_rows[key])
                continue
            row = bisect_left(range(len(self.keys)), key, key=lambda row: self.keys[row].as_py())
            if row == len(self.keys) or self.keys[row].as_py() != key:
                raise KeyError(key)
            rows.append(row)
        return rows


class LanceStore:
    """Items in a LanceDB table in a folder or at ``s3://BUCKET/PATH`` (credentials from ``AWS_...`` variables).

    Exact search reads a snapshot of the newest version. Snapshots of a local table are in its folder, others in the cache
    folder. A missing or damaged snapshot is rebuilt. The methods of ``VectorStore`` are documented there.

    Args:
        uri: Folder or ``s3://BUCKET/PATH``.
        embedding_dim: Dimension of the vectors of a new table. None: the table must exist.
        memory: Memory limit of a search.
        index_id: Id of the index in hex. A table that is opened for an index and must exist keeps its version.
        late_interaction: Which means of MaxSim a score contains, for items with several vectors. None: one vector per item.

    Raises:
        DataError: If the table is missing and ``embedding_dim`` is None.
        ShapeError: If the table has vectors of another dimension, or another number of vectors per item.
        StorageError: If the table cannot be read or written.
        MissingExtra: If LanceDB is not installed.
    """

    def __init__(
        self,
        uri: str | Path,
        embedding_dim: int | None = None,
        memory: MemoryLimit = None,
        *,
        index_id: str = "",
        late_interaction: MaxSimDirection | None = None,
    ):
        os.environ.setdefault("LANCE_LOG", "error")
        with requires_extra("search", "an index"):
            import lancedb
        self.uri, self.memory, self.index_id, self.late_interaction = str(uri), memory, index_id, late_interaction
        self._keeps_version = embedding_dim is None and bool(index_id)
        self._storage_errors = partial(store_errors, self.uri, index_id, "the table cannot be read or written", _reason)
        self.remote = "://" in self.uri
        with self._storage_errors():
            if embedding_dim is None and not self.remote and not os.path.isdir(Path(self.uri) / f"{TABLE}.lance"):
                raise self._no_table()
            self._database: Any = lancedb.connect(self.uri, read_consistency_interval=timedelta(0))
            self._table = self._open_table(embedding_dim)
        column = self._table.schema.field("vector").type
        if hasattr(column, "list_size") == (late_interaction is not None):
            one, several = "one vector", "several vectors"
            expected, stored = (one, several) if late_interaction is None else (several, one)
            raise ShapeError(f"{self.uri}: expected {expected} per item, got {stored}. Pass another folder.")
        self.embedding_dim: int = (column if late_interaction is None else column.value_type).list_size
        if embedding_dim not in (None, self.embedding_dim):
            raise ShapeError(f"{self.uri}: expected vectors of dimension {embedding_dim}, got {self.embedding_dim}. Pass another folder.")
        self._snapshot: tuple[str, TableSnapshot] | None = None
        self._num_changes = 0

    def _open_table(self, embedding_dim: int | None) -> Any:
        try:
            return self._database.open_table(TABLE)
        except ValueError as error:
            if "was not found" not in str(error):
                raise
            if embedding_dim is None:
                raise self._no_table() from None
            schema = arrow_schema(embedding_dim, several=self.late_interaction is not None)
            return self._database.create_table(TABLE, schema=schema, exist_ok=True)

    def _no_table(self) -> DataError:
        return DataError(f"{self.uri}: expected a table of items, got none. Run visavis index to create it.")

    def add(self, items: Sequence[IndexItem], vectors: ItemVectors) -> None:
        """Add or replace items, see ``VectorStore.add``."""
        validated = validated_items if self.late_interaction is None else validated_sets
        items, vectors = validated(items, vectors, self.embedding_dim)
        if items:
            with self._storage_errors():
                merge = self._table.merge_insert("key").when_matched_update_all().when_not_matched_insert_all()
                merge.execute(arrow_table(self.index_id, items, vectors))
            self._compact_if_due()

    def delete(self, keys: Sequence[str]) -> None:
        """Delete items, see ``VectorStore.delete``."""
        if keys:
            quoted = ", ".join("'" + key.replace("'", "''") + "'" for key in keys)
            with self._storage_errors():
                self._table.delete(f"key IN ({quoted})")
            self._compact_if_due()

    def search(self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER) -> list[list[Neighbor]]:
        """Find the items with the highest scores, see ``VectorStore.search``."""
        return self.snapshot().search(queries, top, item_filter)

    def items(self) -> list[IndexItem]:
        """Read all items, see ``VectorStore.items``."""
        return [IndexItem.from_row(row) for row in self.snapshot().table.to_pylist()]

    def vectors(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items, see ``VectorStore.vectors``."""
        snapshot = self.snapshot()
        # Indexing with a list copies from the map.
        return snapshot.vectors[snapshot.rows(keys)]

    def all_vectors(self) -> ItemVectors:
        """Read the vectors of all items, see ``VectorStore.all_vectors``."""
        return self.snapshot().vectors

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items, see ``VectorStore.count``."""
        return int(matching_rows(self.snapshot().table, item_filter).sum())

    def digest(self) -> StoreDigest:
        """Summarize all items and vectors, see ``VectorStore.digest``."""
        return StoreDigest.from_checksums(self.snapshot().table[CHECKSUM].to_numpy())

    def optimize(self, retention: timedelta = VERSION_RETENTION) -> None:
        """Merge small files and remove old versions.

        Args:
            retention: Age from which versions are removed.
        """
        with self._storage_errors():
            self._table.optimize(cleanup_older_than=retention)

    def _compact_if_due(self) -> None:
        self._num_changes += 1
        if self._num_changes % COMPACT_EVERY == 0:
            self.optimize()

    def close(self) -> None:
        """Close the table and the snapshot."""
        self._snapshot = None
        self._table = self._database = None

    def snapshot(self) -> TableSnapshot:
        """Open the snapshot of the newest version, and build it if it is missing or damaged.

        Returns:
            The snapshot.

        Raises:
            StorageError: If the snapshot cannot be written, or the table is damaged.
        """
        if self._snapshot is not None and (self._keeps_version or self._snapshot[0] == self._version()):
            return self._snapshot[1]
        folder = self._snapshot_folder()
        with storage.folder_lock(folder, wait=True):
            version = self._version()
            if os.path.exists(folder / version) and (reason := self._snapshot_damage(folder / version)):
                storage.remove_damaged(folder / version, [], reason)
                storage.remove_folder(folder / version)
            if not os.path.exists(folder / version):
                self._build_snapshot(folder / version)
                _remove_stale_snapshots(folder, version)
            self._snapshot = version, TableSnapshot(folder / version, self.memory, self.late_interaction)
        return self._snapshot[1]

    def _snapshot_damage(self, folder: Path) -> str:
        """How a snapshot differs from what was written for this table. Empty if it does not."""
        try:
            expected = storage.read_checksummed_json(folder / CHECKSUMS_FILE, SnapshotChecksums, error=DataError)
            files = sorted(path.name for path in folder.iterdir() if path.name != CHECKSUMS_FILE)
            if expected is None or (expected.index_id, expected.version, sorted(expected.files)) != (self.index_id, folder.name, files):
                return "it belongs to another table, or a file is missing"
            return next((f"{name} has another checksum" for name in files if _file_hash(folder / name) != expected.files[name]), "")
        except (OSError, DataError) as error:
            return str(error)

    def _build_snapshot(self, folder: Path) -> None:
        """Write items in the order of keys, their vectors, and codes or pooled vectors if these are faster."""
        import pyarrow as pa
        import pyarrow.compute as pc

        with self._storage_errors(), storage.atomic_folder(folder) as part:
            version = self._table.version
            table = self._database.open_table(TABLE)
            table.checkout(version)
            several = [] if self.late_interaction is None else [NUM_VECTORS]
            items = table.search().select([*ITEM_FIELDS, CHECKSUM, *several]).to_arrow().sort_by("key").combine_chunks()
            with pa.OSFile(str(part / ITEMS_FILE), "wb") as file, pa.ipc.new_file(file, items.schema) as writer:
                writer.write_table(items)
            counts = items[NUM_VECTORS].to_numpy() if several else np.ones(len(items), np.int64)
            offsets = np.concatenate([[0], np.cumsum(counts)])
            storage.create_array(part / VECTORS_FILE, shape=(int(offsets[-1]), self.embedding_dim), dtype="float32")
            vectors = np.lib.format.open_memmap(part / VECTORS_FILE, mode="r+")
            sets, keys = VectorSets(vectors, offsets), items["key"].combine_chunks()
            batch_rows = BATCH_SETS if several else BATCH_ROWS
            for batch in table.search().select(["key", "vector"]).to_batches(batch_rows):
                rows = sets.rows_of(pc.index_in(batch["key"], keys).to_numpy())
                vectors[rows] = flat_values(batch["vector"]).reshape(-1, self.embedding_dim)
            item_vectors: ItemVectors = sets if several else vectors
            for start in range(0, len(items), batch_rows):
                rows = items.slice(start, batch_rows).to_pylist()
                verify_rows(self.uri, self.index_id, rows, item_vectors[start : start + batch_rows])
            vectors.flush()
            if several:
                _write_sets(part, sets)
            elif is_int8_faster(*vectors.shape):
                write_int8_codes(part, vectors)
            files = {path.name: _file_hash(path) for path in part.iterdir()}
            storage.write_checksummed_json(part / CHECKSUMS_FILE, asdict(SnapshotChecksums(self.index_id, folder.name, files)))

    def _version(self) -> str:
        """Number and time of the newest version. The time distinguishes it from that of a deleted table, which also started at 1."""
        with self._storage_errors():
            newest = max(self._table.list_versions(), key=lambda version: version["version"])
        return f"{newest['version']}-{int(newest['timestamp'].timestamp() * 1e6)}"

    def _snapshot_folder(self) -> Path:
        """The folder of snapshots: next to the table if that is writable, else in the cache."""
        if not self.remote and os.access(self.uri, os.W_OK):
            return Path(self.uri) / SNAPSHOT_FOLDER
        name = self.uri if self.remote else os.path.realpath(self.uri)
        return storage.cache_folder() / SNAPSHOT_FOLDER / hashlib.sha256(name.encode()).hexdigest()[:16]


def _file_hash(path: Path) -> str:
    """SHA-256 of a file, 1 GB per second."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_stale_snapshots(folder: Path, version: str) -> None:
    """Remove snapshots of other versions, and partial files of killed processes."""
    storage.remove_partial_files(folder)
    for snapshot in folder.iterdir():
        if os.path.isdir(snapshot) and snapshot.name != version:
            storage.remove_folder(snapshot)


def _write_sets(folder: Path, sets: VectorSets) -> None:
    """Write the offsets of items with several vectors, and pooled vectors for a first pass in large collections."""
    storage.write_array(folder / OFFSETS_FILE, sets.offsets)
    if len(sets) >= MIN_ITEMS:
        pooled = pool_vectors(sets, POOLED_VECTORS)
        storage.write_array(folder / POOLED_FILE, pooled.rows)
        storage.write_array(folder / POOLED_OFFSETS_FILE, pooled.offsets)


def _reason(error: BaseException) -> str:
    """The essential part of an error message of LanceDB."""
    text = str(error).strip() or type(error).__name__
    message = re.search(r"<Message>(.*?)</Message>", text)
    return (message[1] if message else text.splitlines()[0].split(", location:")[0]).rstrip(".")[:200]
