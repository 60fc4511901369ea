"""LanceDB store: a table in a folder or in object storage, and a memory-mapped snapshot of its newest version for exact search."""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis import storage
from visavis.errors import DataError, MissingExtra, ShapeError, StorageError, VisavisError
from visavis.memory_budget import MemoryLimit
from visavis.retrieval.items import (
    ITEM_FIELDS,
    NO_FILTER,
    IndexItem,
    ItemFilter,
    matching_rows,
    sql_condition,
    sql_quoted,
    tags_to_metadata,
)
from visavis.retrieval.stores.approximate_search import (
    MEASURED_TOP,
    TARGET_RECALL,
    ApproximateIndex,
    fewest_probes,
    mean_recall,
    noisy_queries,
    sample_keys,
)
from visavis.retrieval.stores.base import Neighbor, validate_queries, validated_items
from visavis.retrieval.stores.exact_search import (
    CODES,
    ExactSearch,
    is_int8_faster,
    open_int8_codes,
    rank_by_score,
    supports_int8_matmul,
    write_int8_codes,
)

if TYPE_CHECKING:
    import pyarrow as pa

ITEMS_FILE, VECTORS_FILE, SNAPSHOT_FOLDER = "items.arrow", "vectors.npy", "snapshot"
TABLE, APPROXIMATE_TABLE = "items", "approximate_index"
BATCH_ROWS = 2**14
"""Rows that are read at once."""
COMPACT_EVERY = 64
"""Changes after which small files are merged."""
MIN_ONE_BIT_DIM = 128
"""Smallest dimension for which one bit per dimension is precise enough to select candidates for re-scoring."""
REFINE_FACTOR = 4
"""Candidates per result of the approximate index that are scored again."""
VERSION_RETENTION = timedelta(minutes=10)
"""How long old versions are kept for readers that have just opened them."""


class TableSnapshot:
    """Items and vectors of one version of a table in the order of keys, mapped from files.

    Args:
        folder: Folder that was written by ``LanceStore``.
        memory: Memory limit of a search.
    """

    def __init__(self, folder: Path, memory: MemoryLimit = None):
        import pyarrow as pa

        with pa.memory_map(str(folder / ITEMS_FILE)) as file:
            self.table = pa.ipc.open_file(file).read_all()
        self.keys = self.table["key"]
        self.vectors = storage.read_array(folder / VECTORS_FILE, dimensions=2, memory_map=True)
        self.folder, self.memory = folder, memory

    @cached_property
    def exact_search(self) -> ExactSearch:
        """Exact search in the vectors, with int8 codes if there are any."""
        coarse = open_int8_codes(self.folder) if (self.folder / CODES).exists() and supports_int8_matmul() else None
        return ExactSearch(self.vectors, coarse=coarse, memory=self.memory)

    def search(self, queries: np.ndarray, top: int, item_filter: ItemFilter) -> list[list[Neighbor]]:
        """Find the items with the highest inner products, see ``VectorStore.search``."""
        mask = matching_rows(self.table, item_filter) if item_filter else None
        scores, rows = self.exact_search.search(queries, top, mask)
        keys = iter(self.keys.take(rows.ravel()).to_pylist())
        return [[Neighbor(next(keys), score) for score in query_scores] for query_scores in scores.tolist()]

    def items(self) -> list[IndexItem]:
        """Return all items, in the order of keys."""
        return [IndexItem(**row | {"metadata": tags_to_metadata(row["metadata"])}) for row in self.table.to_pylist()]

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
            row = bisect_left(range(len(self.keys)), key, key=lambda row: self.keys[row].as_py())
            if row == len(self.keys) or self.keys[row].as_py() != key:
                raise KeyError(key)
            rows.append(row)
        return rows


class LanceStore:
    """Items in a LanceDB table in a folder or at ``s3://BUCKET/PATH`` (credentials from ``AWS_...`` variables).

    Exact search reads a snapshot of the newest version. Snapshots of a local table are in its folder, others in the cache
    folder. A missing snapshot is rebuilt. The methods of ``VectorStore`` are documented there.

    Args:
        uri: Folder or ``s3://BUCKET/PATH``.
        embedding_dim: Dimension of the vectors of a new table. None: the table must exist.
        memory: Memory limit of a search.

    Raises:
        DataError: If the table is missing and ``embedding_dim`` is None.
        ShapeError: If the table has vectors of another dimension.
        StorageError: If the table cannot be read or written.
        MissingExtra: If LanceDB is not installed.
    """

    def __init__(self, uri: str | Path, embedding_dim: int | None = None, memory: MemoryLimit = None):
        os.environ.setdefault("LANCE_LOG", "error")
        try:
            import lancedb
        except ImportError:
            raise MissingExtra("lancedb", "search", "an index") from None
        self.uri, self.memory = str(uri), memory
        self.remote = "://" in self.uri
        with self._storage_errors():
            if embedding_dim is None and not self.remote and not (Path(self.uri) / f"{TABLE}.lance").is_dir():
                raise self._no_table()
            self._database: Any = lancedb.connect(self.uri, read_consistency_interval=timedelta(0))
            self._table = self._open_table(embedding_dim)
        self.embedding_dim: int = self._table.schema.field("vector").type.list_size
        if embedding_dim not in (None, self.embedding_dim):
            raise ShapeError(f"{self.uri}: expected vectors of dimension {embedding_dim}, got {self.embedding_dim}. Pass another folder.")
        self._snapshot: tuple[str, TableSnapshot] | None = None
        self._approximate: ApproximateIndex | None = None
        self._num_changes = 0

    def _open_table(self, embedding_dim: int | None) -> Any:
        try:
            return self._database.open_table(TABLE)
        except ValueError as error:
            if "was not found" not in str(error):
                raise
            if embedding_dim is None:
                raise self._no_table() from None
            return self._database.create_table(TABLE, schema=_arrow_schema(embedding_dim), exist_ok=True)

    def _no_table(self) -> DataError:
        return DataError(f"{self.uri}: expected a table of items, got none. Build an index there first.")

    def add(self, items: Sequence[IndexItem], vectors: np.ndarray) -> None:
        """Add or replace items, see ``VectorStore.add``."""
        items, vectors = validated_items(items, vectors, self.embedding_dim)
        if items:
            with self._storage_errors():
                merge = self._table.merge_insert("key").when_matched_update_all().when_not_matched_insert_all()
                merge.execute(_arrow_table(items, vectors))
            self._compact_if_due()

    def delete(self, keys: Sequence[str]) -> None:
        """Delete items, see ``VectorStore.delete``."""
        if keys:
            with self._storage_errors():
                self._table.delete(f"key IN ({', '.join(map(sql_quoted, keys))})")
            self._compact_if_due()

    def search(
        self, queries: np.ndarray, top: int, item_filter: ItemFilter = NO_FILTER, *, approximate: bool = False
    ) -> list[list[Neighbor]]:
        """Find the items with the highest inner products, see ``VectorStore.search``.

        Args:
            queries: Query vectors, shape ``[Q, D]``.
            top: Maximum number of results per query.
            item_filter: Conditions on the items.
            approximate: Whether to use the approximate index, which needs no snapshot.

        Returns:
            Results of each query, best first.

        Raises:
            DataError: If ``approximate`` is set and the approximate index is missing.
        """
        validate_queries(queries, top, self.embedding_dim)
        if not approximate:
            return self.snapshot().search(queries, top, item_filter)
        self._approximate = self._approximate or self.approximate_index()
        if self._approximate is None:
            raise DataError(f"{self.uri}: expected an approximate index, got none. Build it first, or search exactly.")
        return self._search_approximate(queries, top, item_filter, self._approximate)

    def _search_approximate(self, queries: np.ndarray, top: int, item_filter: ItemFilter, index: ApproximateIndex) -> list[list[Neighbor]]:
        results = []
        for query in np.ascontiguousarray(queries, np.float32):
            request = self._table.search(query, vector_column_name="vector").distance_type("dot").limit(top)
            request = request.nprobes(index.probes).refine_factor(index.refine_factor).select(["key", "vector", "_distance"])
            with self._storage_errors():
                rows = (request.where(sql_condition(item_filter), prefilter=True) if item_filter else request).to_arrow()
            vectors = rows["vector"].combine_chunks().flatten().to_numpy().reshape(-1, self.embedding_dim)
            results.append(rank_by_score(query, rows["key"].to_pylist(), vectors, self.memory))
        return results

    def build_approximate_index(self, queries: np.ndarray | None = None, target_recall: float = TARGET_RECALL) -> ApproximateIndex:
        """Build the approximate index, measure its recall of the true top 10, and store the settings with the table.

        Args:
            queries: Queries to measure with, shape ``[Q, D]``. None: stored vectors with noise.
            target_recall: Recall for which the number of probes is chosen, 0 to 1. All partitions are probed at most.

        Returns:
            Settings and recall of the index.

        Raises:
            DataError: If the table is empty.
        """
        from lancedb.index import IvfRq, IvfSq

        snapshot = self.snapshot()
        num_items = len(snapshot.keys)
        if not num_items:
            raise DataError(f"{self.uri}: expected items to index, got none. Add items first.")
        if queries is None:
            queries = noisy_queries(self.vectors(sample_keys(snapshot.keys.to_pylist())))
        partitions = max(1, round(num_items**0.5 / 2))
        one_bit = self.embedding_dim >= MIN_ONE_BIT_DIM and self.embedding_dim % 8 == 0
        kind, config = ("IVF_RQ", IvfRq) if one_bit else ("IVF_SQ", IvfSq)
        with self._storage_errors():
            self._table.create_index("vector", config=config(distance_type="dot", num_partitions=partitions), replace=True)
        expected = snapshot.search(queries, MEASURED_TOP, NO_FILTER)
        index = ApproximateIndex(
            kind=kind,
            num_items=num_items,
            partitions=partitions,
            probes=0,
            refine_factor=REFINE_FACTOR,
            recall=0.0,
            num_queries=len(queries),
        )

        def measure(probes: int) -> float:
            trial = index.model_copy(update={"probes": probes})
            return mean_recall(self._search_approximate(queries, MEASURED_TOP, NO_FILTER, trial), expected)

        probes, recall = fewest_probes(measure, partitions, target_recall)
        index = index.model_copy(update={"probes": probes, "recall": recall})
        with self._storage_errors():
            mode = "overwrite" if APPROXIMATE_TABLE in self._database.list_tables().tables else "create"
            self._database.create_table(APPROXIMATE_TABLE, [{"json": index.model_dump_json()}], mode=mode)
        self._approximate = index
        return index

    def approximate_index(self) -> ApproximateIndex | None:
        """Read the settings of the approximate index.

        Returns:
            Settings and recall, or None if no index was built.
        """
        with self._storage_errors():
            if APPROXIMATE_TABLE not in self._database.list_tables().tables:
                return None
            return ApproximateIndex.model_validate_json(self._database.open_table(APPROXIMATE_TABLE).to_arrow()["json"][0].as_py())

    def items(self) -> list[IndexItem]:
        """Read all items, see ``VectorStore.items``."""
        return self.snapshot().items()

    def vectors(self, keys: Sequence[str]) -> np.ndarray:
        """Read the vectors of some items, see ``VectorStore.vectors``."""
        snapshot = self.snapshot()
        return np.array(snapshot.vectors[snapshot.rows(keys)])

    def all_vectors(self) -> np.ndarray:
        """Read the vectors of all items, see ``VectorStore.all_vectors``."""
        return self.snapshot().vectors

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items, see ``VectorStore.count``."""
        if item_filter:
            return int(matching_rows(self.snapshot().table, item_filter).sum())
        with self._storage_errors():
            return int(self._table.count_rows())

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
        """Open the snapshot of the newest version, and build it if it is missing.

        Returns:
            The snapshot.

        Raises:
            StorageError: If the snapshot cannot be written.
        """
        version = self._version()
        if self._snapshot is None or self._snapshot[0] != version:
            folder = self._snapshot_folder()
            with storage.folder_lock(folder, wait=True):
                version = self._version()
                if not (folder / version).is_dir():
                    self._build_snapshot(folder / version)
                    _remove_stale_snapshots(folder, version)
            self._snapshot = version, TableSnapshot(folder / version, self.memory)
        return self._snapshot[1]

    def _build_snapshot(self, folder: Path) -> None:
        def batches() -> Iterator[tuple[pa.Array, np.ndarray]]:
            for batch in table.search().select(["key", "vector"]).to_batches(BATCH_ROWS):
                yield batch["key"], batch["vector"].flatten().to_numpy().reshape(-1, self.embedding_dim)

        with self._storage_errors():
            version = self._table.version
            table = self._database.open_table(TABLE)
            table.checkout(version)
            _write_snapshot(folder, table.search().select(list(ITEM_FIELDS)).to_arrow(), batches(), self.embedding_dim)

    def _version(self) -> str:
        """Number and time of the newest version. The time distinguishes it from that of a deleted table, which also started at 1."""
        with self._storage_errors():
            newest = max(self._table.list_versions(), key=lambda version: version["version"])
        return f"{newest['version']}-{int(newest['timestamp'].timestamp() * 1e6)}"

    def _snapshot_folder(self) -> Path:
        """The folder of snapshots: next to the table if that is writable, else in the cache."""
        if not self.remote and os.access(self.uri, os.W_OK):
            return Path(self.uri) / SNAPSHOT_FOLDER
        name = self.uri if self.remote else str(Path(self.uri).resolve())
        return storage.cache_folder() / SNAPSHOT_FOLDER / hashlib.sha256(name.encode()).hexdigest()[:16]

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Convert errors of LanceDB to a StorageError of one sentence."""
        try:
            yield
        except VisavisError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise StorageError(f"{self.uri}: the table cannot be read or written: {_reason(error)}.") from None


def _write_snapshot(folder: Path, items: pa.Table, batches: Iterable[tuple[pa.Array, np.ndarray]], embedding_dim: int) -> None:
    """Write a snapshot atomically from all columns but the vectors, and batches of keys and vectors, both in any order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    items = items.take(pc.sort_indices(items, [("key", "ascending")])).combine_chunks()
    keys = items["key"].combine_chunks()
    with storage.atomic_folder(folder) as part:
        with pa.OSFile(str(part / ITEMS_FILE), "wb") as file, pa.ipc.new_file(file, items.schema) as writer:
            writer.write_table(items)
        storage.create_array(part / VECTORS_FILE, shape=(len(items), embedding_dim), dtype="float32")
        vectors = np.lib.format.open_memmap(part / VECTORS_FILE, mode="r+")
        for batch_keys, batch_vectors in batches:
            vectors[pc.index_in(batch_keys, keys).to_numpy()] = batch_vectors
        vectors.flush()
        if is_int8_faster(*vectors.shape):
            write_int8_codes(part, vectors)


def _remove_stale_snapshots(folder: Path, version: str) -> None:
    """Remove snapshots of other versions, and partial files of killed processes."""
    storage.remove_partial_files(folder)
    for snapshot in folder.iterdir():
        if snapshot.is_dir() and snapshot.name != version:
            storage.remove_folder(snapshot)


def _arrow_schema(embedding_dim: int) -> pa.Schema:
    import pyarrow as pa

    texts = [pa.field(name, pa.string(), nullable=False) for name in ("key", "path", "kind", "content", "dhash")]
    integers = [pa.field(name, pa.int64(), nullable=False) for name in ("size", "modified_ns")]
    times = [pa.field(name, pa.float64()) for name in ("start", "end")]
    return pa.schema([*texts, *integers, *times, ("metadata", pa.list_(pa.string())), ("vector", pa.list_(pa.float32(), embedding_dim))])


def _arrow_table(items: Sequence[IndexItem], vectors: np.ndarray) -> pa.Table:
    import pyarrow as pa

    dim = vectors.shape[1]
    columns: dict[str, Any] = {name: [getattr(item, name) for item in items] for name in ITEM_FIELDS if name != "metadata"}
    columns["metadata"] = [item.tags() for item in items]
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), dim)
    return pa.table(columns, schema=_arrow_schema(dim))


def _reason(error: Exception) -> str:
    """The essential part of an error message of LanceDB."""
    text = str(error).strip() or type(error).__name__
    message = re.search(r"<Message>(.*?)</Message>", text)
    return (message[1] if message else text.splitlines()[0].split(", location:")[0]).rstrip(".")[:200]
