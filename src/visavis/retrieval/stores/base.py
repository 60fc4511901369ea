"""Interface of vector stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from visavis.errors import ShapeError, SpecError
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter


class Neighbor(NamedTuple):
    """A search result.

    Attributes:
        key: Key of the item.
        score: Inner product of the query and the vector of the item.
    """

    key: str
    score: float


class VectorStore(Protocol):
    """Items with one unit vector each. A change is applied completely or not at all, even if the process is killed."""

    def add(self, items: Sequence[IndexItem], vectors: np.ndarray) -> None:
        """Add items, or replace those with the same key.

        Args:
            items: Items to add. If a key occurs twice, the last item counts.
            vectors: Their vectors, shape ``[N, D]``.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete items.

        Args:
            keys: Keys of the items. Unknown keys are ignored.
        """

    def search(self, queries: np.ndarray, top: int, item_filter: ItemFilter = NO_FILTER) -> list[list[Neighbor]]:
        """Find the items with the highest inner products.

        Args:
            queries: Query vectors, shape ``[Q, D]``.
            top: Maximum number of results per query.
            item_filter: Conditions on the items.

        Returns:
            Results of each query, best first. Equal scores are in the order of keys.
        """

    def items(self) -> list[IndexItem]:
        """Read all items.

        Returns:
            Items in the order of keys.
        """

    def vectors(self, keys: Sequence[str]) -> np.ndarray:
        """Read the vectors of some items.

        Args:
            keys: Keys of the items.

        Returns:
            Vectors, float32, shape ``[N, D]``.

        Raises:
            KeyError: If a key is unknown.
        """

    def all_vectors(self) -> np.ndarray:
        """Read the vectors of all items.

        Returns:
            Vectors in the order of keys, float32, shape ``[N, D]``. May be memory-mapped.
        """

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items.

        Args:
            item_filter: Conditions on the items.

        Returns:
            Number of items that match.
        """

    def close(self) -> None:
        """Close files and connections."""


def validated_items(items: Sequence[IndexItem], vectors: np.ndarray, embedding_dim: int) -> tuple[list[IndexItem], np.ndarray]:
    """Check items and vectors before they are added, and drop all but the last item of each key.

    Args:
        items: Items to add.
        vectors: Their vectors, shape ``[N, D]``.
        embedding_dim: Dimension of the vectors of the store.

    Returns:
        Items with unique keys, and their vectors in float32.

    Raises:
        ShapeError: If the shape of the vectors is wrong, or a value is not finite.
    """
    if vectors.shape != (len(items), embedding_dim):
        raise ShapeError(f"vectors: expected shape [{len(items)}, {embedding_dim}], got {list(vectors.shape)}.")
    if not np.isfinite(vectors).all():
        raise ShapeError("vectors: expected finite values, got NaN or infinity.")
    last = sorted({item.key: row for row, item in enumerate(items)}.values())
    return [items[row] for row in last], np.ascontiguousarray(vectors[last], np.float32)


def validate_queries(queries: np.ndarray, top: int, embedding_dim: int) -> None:
    """Check the arguments of a search.

    Args:
        queries: Query vectors, shape ``[Q, D]``.
        top: Maximum number of results per query.
        embedding_dim: Dimension of the vectors of the store.

    Raises:
        ShapeError: If the shape of the queries is wrong, or a value is not finite.
        SpecError: If ``top`` is below 1.
    """
    if queries.ndim != 2 or queries.shape[1] != embedding_dim:
        raise ShapeError(f"queries: expected shape [Q, {embedding_dim}], got {list(queries.shape)}.")
    if not np.isfinite(queries).all():
        raise ShapeError("queries: expected finite values, got NaN or infinity.")
    if top < 1:
        raise SpecError(f"top: expected an integer >= 1, got {top}.")
