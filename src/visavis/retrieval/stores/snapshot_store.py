"""Bases of stores that search a snapshot of their items, among them stores that keep rows in any
database.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from visavis.core.errors import ShapeError
from visavis.core.memory_budget import MemoryLimit
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores.arrow_tables import table_from_rows
from visavis.retrieval.stores.base import (
    CHECKSUM,
    ItemVectors,
    Neighbor,
    Queries,
    StoreDigest,
    row_checksum,
    validated_items,
    verify_rows,
)
from visavis.retrieval.stores.exact_search import ExactSearch
from visavis.retrieval.stores.table_snapshot import SnapshotPart, TableSnapshot

if TYPE_CHECKING:
    import pyarrow as pa


class SnapshotStore(ABC):
    """Base of stores that search a snapshot of their newest version. The methods of ``VectorStore``
    are documented there.
    """

    @abstractmethod
    def snapshot(self) -> TableSnapshot:
        """Open the snapshot of the newest version.

        Returns:
            The snapshot.
        """

    def search(
        self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[list[Neighbor]]:
        """Find the items with the highest inner products, see ``VectorStore.search``."""
        return self.snapshot().search(queries, top, item_filter)

    def get(self, keys: Sequence[str]) -> dict[str, IndexItem]:
        """Read some items, see ``VectorStore.get``."""
        return self.snapshot().get(keys)

    def table(self) -> pa.Table:
        """Read all items as columns, see ``VectorStore.table``."""
        return self.snapshot().table

    def vectors(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items, see ``VectorStore.vectors``."""
        return self.snapshot().vectors(keys)

    def all_vectors(self) -> ItemVectors:
        """Read the vectors of all items, see ``VectorStore.all_vectors``."""
        return self.snapshot().all_vectors

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items, see ``VectorStore.count``."""
        return self.snapshot().count(item_filter)

    def digest(self) -> StoreDigest:
        """Summarize all items and vectors, see ``VectorStore.digest``."""
        return self.snapshot().digest


class RowStore(SnapshotStore):
    """Items with one unit vector each, which are read and verified as a whole.

    A subclass reads, writes and deletes rows. A ``StoreKind`` names its locations: in ``CATALOG`` of
    ``visavis.retrieval.stores.catalog``, or in your own file.
    A row has the fields ``ITEM_FIELDS``, ``CHECKSUM`` and ``vector``, float32, shape ``[D]``. Its
    ``key`` is unique. The methods of ``VectorStore`` are documented there.

    Args:
        uri: Location of the store.
        embedding_dim: Dimension of the vectors.
        expected_dim: Dimension that the caller expects. None: any.
        memory: Memory limit of a search.
        index_id: Id of the index in hex.

    Raises:
        ShapeError: If the dimensions differ.
    """

    def __init__(
        self,
        uri: str,
        embedding_dim: int,
        expected_dim: int | None = None,
        memory: MemoryLimit = None,
        index_id: str = "",
    ):
        if expected_dim not in (None, embedding_dim):
            raise ShapeError(
                f"{uri}: expected vectors of dimension {expected_dim}, got {embedding_dim}. Pass "
                "another store."
            )
        self.uri = uri
        self.embedding_dim = embedding_dim
        self.memory = memory
        self.index_id = index_id
        self._snapshot: TableSnapshot | None = None

    @abstractmethod
    def read_rows(self) -> Iterable[Mapping[str, Any]]:
        """Read all rows.

        Returns:
            Rows in any order.
        """

    @abstractmethod
    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, or replace those with the same key, completely or not at all.

        Args:
            rows: Rows with unique keys.
        """

    @abstractmethod
    def delete_rows(self, keys: Sequence[str]) -> None:
        """Delete rows, completely or not at all.

        Args:
            keys: Their keys. Unknown keys are ignored.
        """

    def add(self, items: Sequence[IndexItem], vectors: ItemVectors) -> None:
        """Add or replace items, see ``VectorStore.add``."""
        items, vectors = validated_items(items, vectors, self.embedding_dim)
        rows = [
            row | {CHECKSUM: row_checksum(self.index_id, row, vector), "vector": vector}
            for row, vector in zip((item.to_row() for item in items), vectors, strict=True)
        ]
        # Also if writing fails, because a part of the rows may have been written.
        self._snapshot = None
        self.write_rows(rows)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete items, see ``VectorStore.delete``."""
        self._snapshot = None
        self.delete_rows(keys)

    def snapshot(self) -> TableSnapshot:
        """Read and verify all items, or return them as of the last change of this object."""
        if self._snapshot is None:
            rows = sorted(self.read_rows(), key=lambda row: row["key"])
            vectors = self.verified_vectors(rows)
            search = ExactSearch(vectors, memory=self.memory)
            self._snapshot = TableSnapshot([SnapshotPart(table_from_rows(rows), vectors, search)])
        return self._snapshot

    def verified_vectors(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Check the checksums of rows.

        Args:
            rows: Rows of the store.

        Returns:
            Their vectors, float32, shape ``[N, D]``.

        Raises:
            StorageError: If a row is damaged, or belongs to another index.
        """
        vectors = np.array([row["vector"] for row in rows], np.float32).reshape(
            -1, self.embedding_dim
        )
        verify_rows(self.uri, self.index_id, rows, vectors)
        return vectors

    def verify(self) -> None:
        """Verify all rows, see ``VectorStore.verify``."""
        self._snapshot = None
        self.snapshot()

    def close(self) -> None:
        """Close files and connections, if the subclass keeps some open."""
