"""Base of stores that keep rows in any database, and search them in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from visavis.core.errors import ShapeError
from visavis.core.memory_budget import MemoryLimit
from visavis.retrieval.items import CHECKSUM, NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores.base import (
    ItemVectors,
    Neighbor,
    Queries,
    StoreDigest,
    row_checksum,
    validated_items,
    verify_rows,
)
from visavis.retrieval.stores.exact_search import ExactSearch
from visavis.retrieval.stores.item_snapshot import ItemSnapshot, SearchedRows
from visavis.retrieval.stores.item_table import ItemTable


class RowStore(ABC):
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
        self._snapshot: ItemSnapshot | None = None

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

    def snapshot(self) -> ItemSnapshot:
        """Return all items, which are read and verified after each change of this object."""
        if self._snapshot is None:
            rows = sorted(self.read_rows(), key=lambda row: row["key"])
            vectors = self.verified_vectors(rows)
            search = ExactSearch(vectors, memory=self.memory)
            self._snapshot = ItemSnapshot(
                self.uri,
                self.index_id,
                ItemTable.in_memory(rows),
                vectors,
                [SearchedRows(0, search)],
            )
        return self._snapshot

    def search(
        self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[list[Neighbor]]:
        """Find the items with the highest inner products, see ``VectorStore.search``."""
        return self.snapshot().search(queries, top, item_filter)

    def get(self, keys: Sequence[str]) -> dict[str, IndexItem]:
        """Read some items, see ``VectorStore.get``."""
        return self.snapshot().get(keys)

    def one_version(self) -> AbstractContextManager[None]:
        """Read the rows in memory, see ``VectorStore.one_version``."""
        return nullcontext()

    def table(self) -> ItemTable:
        """Return the items, see ``VectorStore.table``."""
        return self.snapshot().table

    def vectors(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items, see ``VectorStore.vectors``."""
        return self.snapshot().vectors_of(keys)

    def all_vectors(self) -> ItemVectors:
        """Read the vectors of all items, see ``VectorStore.all_vectors``."""
        return self.snapshot().all_vectors()

    def all_items(self) -> tuple[list[IndexItem], ItemVectors]:
        """Read all items and their vectors, see ``VectorStore.all_items``."""
        return self.table().items(), self.all_vectors()

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items, see ``VectorStore.count``."""
        return self.table().count(item_filter)

    def digest(self) -> StoreDigest:
        """Summarize all items and vectors, see ``VectorStore.digest``."""
        return StoreDigest.from_checksums(self.table().all_checksums())

    def prepare_search(self) -> None:  # noqa: B027 - a subclass may have something to write
        """Write what makes searches faster, see ``VectorStore.prepare_search``."""

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

    def close(self) -> None:  # noqa: B027 - a subclass may have nothing to close
        """Close files and connections, if the subclass keeps some open."""
