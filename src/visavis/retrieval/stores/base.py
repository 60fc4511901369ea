"""Interface of vector stores."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from visavis.core import storage
from visavis.core.errors import ShapeError, StorageError, VisavisError
from visavis.core.spec import validate_int
from visavis.retrieval.items import ITEM_FIELDS, NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores.vector_sets import MAX_NORM, ItemVectors, Queries, VectorSets

if TYPE_CHECKING:
    import pyarrow as pa

CHECKSUM = "checksum"
"""Column of the checksums of the rows."""
REMEDY = (
    "If the store is damaged, delete it and run visavis index again, which encodes all files again."
)
"""Fix that errors of the store of an index name."""


class Neighbor(NamedTuple):
    """A search result.

    Attributes:
        key: Key of the item.
        score: Inner product of the query and the vector of the item, or the score of late
            interaction.
    """

    key: str
    score: float


@dataclass(frozen=True)
class StoreDigest:
    """Identity of the content of a store.

    Attributes:
        num_items: Number of items.
        digest: Sum of the checksums of all rows modulo 2^64, in hex.
    """

    num_items: int
    digest: str

    @classmethod
    def from_checksums(cls, checksums: Sequence[int] | np.ndarray) -> StoreDigest:
        """Combine the checksums of all rows.

        Args:
            checksums: Values of ``row_checksum``.

        Returns:
            The digest, which does not depend on the order.
        """
        return cls(
            len(checksums),
            f"{np.asarray(checksums, np.int64).view(np.uint64).sum(dtype=np.uint64):016x}",
        )


class VectorStore(Protocol):
    """Items with one unit vector each, or with several. A change is applied completely or not at
    all, even if the process is killed.

    Each row has a checksum over the id of its index, the item and the vector. A damaged or foreign
    row raises a StorageError.
    """

    embedding_dim: int

    def add(self, items: Sequence[IndexItem], vectors: ItemVectors) -> None:
        """Add items, or replace those with the same key.

        Args:
            items: Items to add. If a key occurs twice, the last item counts.
            vectors: Their vectors, shape ``[N, D]``, or several per item.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete items.

        Args:
            keys: Keys of the items. Unknown keys are ignored.
        """

    def search(
        self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[list[Neighbor]]:
        """Find the items with the highest inner products, or the highest scores of late
        interaction.

        Args:
            queries: Query vectors, shape ``[Q, D]``, or queries of late interaction.
            top: Maximum number of results per query.
            item_filter: Conditions on the items.

        Returns:
            Results of each query, best first. Equal scores are in the order of keys.
        """

    def get(self, keys: Sequence[str]) -> dict[str, IndexItem]:
        """Read some items.

        Args:
            keys: Keys of the items.

        Returns:
            Items by key, in the order of ``keys``. Unknown keys are left out.
        """

    def table(self) -> pa.Table:
        """Read all items as columns.

        Returns:
            ``ITEM_FIELDS`` in the order of keys, and possibly other columns. May be memory-mapped.
        """

    def items(self) -> list[IndexItem]:
        """Read all items.

        Returns:
            Items in the order of keys.
        """

    def vectors(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items.

        Args:
            keys: Keys of the items.

        Returns:
            Vectors, float32, shape ``[N, D]``, or several per item.

        Raises:
            KeyError: If a key is unknown.
        """

    def all_vectors(self) -> ItemVectors:
        """Read the vectors of all items.

        Returns:
            Vectors in the order of keys, float32, shape ``[N, D]``, or several per item. May be
            memory-mapped.
        """

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items.

        Args:
            item_filter: Conditions on the items.

        Returns:
            Number of items that match.
        """

    def digest(self) -> StoreDigest:
        """Summarize all items and vectors.

        Returns:
            Number of items, and the sum of their checksums.
        """

    def verify(self) -> None:
        """Read everything, and compare all items and vectors with their checksums.

        Raises:
            StorageError: If a row is damaged or belongs to another index.
        """

    def close(self) -> None:
        """Close files and connections."""


@contextmanager
def store_errors(
    uri: str, index_id: str, problem: str, reason: Callable[[BaseException], str]
) -> Iterator[None]:
    """Convert errors of a database in this block to a StorageError of one sentence.

    Args:
        uri: Location of the store.
        index_id: Id of its index. Empty: it has none, and the error names no fix.
        problem: Middle of the sentence.
        reason: Returns the essential part of an error message.

    Yields:
        Nothing.

    Raises:
        StorageError: If the block raises an error that is not one of visavis.
    """
    try:
        yield
    except VisavisError:
        raise
    except BaseException as error:
        # Damaged files raise errors of every kind. A panic of the Rust code of LanceDB is not an
        # Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        # LanceDB has no error class for a full disk, only the text of the system.
        if os.strerror(errno.ENOSPC) in str(error):
            raise storage.disk_full(uri) from None
        remedy = f" {REMEDY}" if index_id else ""
        raise StorageError(f"{uri}: {problem}: {reason(error)}.{remedy}") from None


def row_checksum(index_id: str, row: Mapping[str, Any], vector: np.ndarray) -> int:
    """Compute the checksum of a row of a store.

    Args:
        index_id: Id of the index in hex.
        row: Values of ``ITEM_FIELDS``, see ``IndexItem.to_row``.
        vector: Vector, float32, shape ``[D]``, or several, ``[n, D]``.

    Returns:
        Signed integer of 64 bits.
    """
    # Stores return 4 or 4.0 for the same time, which JSON writes differently.
    times = [None if row[name] is None else float(row[name]) for name in ("start", "end")]
    values = (
        [row[name] for name in ITEM_FIELDS if name not in ("start", "end", "metadata")]
        + times
        + list(row["metadata"] or [])
    )
    content = json.dumps(values).encode() + vector.tobytes()
    return int.from_bytes(
        hashlib.blake2b(content, digest_size=8, key=index_id.encode()).digest(), "big", signed=True
    )


def verify_rows(
    uri: str, index_id: str, rows: Iterable[Mapping[str, Any]], vectors: ItemVectors
) -> list[int]:
    """Check the rows of a store against their checksums.

    Args:
        uri: Location of the store, for the error.
        index_id: Id of the index in hex.
        rows: Values of ``ITEM_FIELDS`` and ``CHECKSUM``.
        vectors: Vectors, float32, shape ``[N, D]``, or several per item.

    Returns:
        The checksums.

    Raises:
        StorageError: If a row is damaged, or belongs to another index.
    """
    checksums = list[int]()
    for row, vector in zip(rows, vectors, strict=True):
        checksums.append(row[CHECKSUM])
        if row_checksum(index_id, row, vector) != row[CHECKSUM]:
            raise StorageError(
                f"{uri}: the item {str(row['key'])[:80]!r} is damaged or belongs to another index. "
                f"{REMEDY}"
            )
    return checksums


def validated_items(
    items: Sequence[IndexItem], vectors: ItemVectors, embedding_dim: int
) -> tuple[list[IndexItem], np.ndarray]:
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
    if isinstance(vectors, VectorSets):
        raise ShapeError(
            "vectors: expected one vector per item, got several. Use the store of an index of a "
            "late-interaction model."
        )
    if vectors.shape != (len(items), embedding_dim):
        raise ShapeError(
            f"vectors: expected shape [{len(items)}, {embedding_dim}], got {list(vectors.shape)}. "
            "Pass one vector per item."
        )
    if not np.isfinite(vectors).all():
        raise ShapeError(
            "vectors: expected finite values, got NaN or infinity. Encode the items again."
        )
    # A request must not contain a key twice: which of the rows counts is undefined.
    last = _last_rows(items)
    return [items[row] for row in last], np.ascontiguousarray(vectors[last], np.float32)


def validated_sets(
    items: Sequence[IndexItem], vectors: ItemVectors, embedding_dim: int
) -> tuple[list[IndexItem], VectorSets]:
    """Check items with several vectors each, as ``validated_items`` does.

    Args:
        items: Items to add.
        vectors: Their vectors.
        embedding_dim: Dimension of the vectors of the store.

    Returns:
        Items with unique keys, and their vectors in float32.

    Raises:
        ShapeError: If there are not several vectors per item, their dimension is wrong, or a vector
            is longer than 1 or not finite.
    """
    if not isinstance(vectors, VectorSets):
        raise ShapeError(
            f"vectors: expected several vectors per item, got one, of shape {list(vectors.shape)}. "
            "Pass a VectorSets."
        )
    if len(vectors) != len(items) or (len(items) and vectors.rows.shape[1] != embedding_dim):
        raise ShapeError(
            f"vectors: expected {len(items)} items of dimension {embedding_dim}, got "
            f"{len(vectors)} of {vectors.rows.shape[1]}. "
            "Pass the vectors of these items."
        )
    if (
        not (vectors.counts > 0).all()
        or not (np.linalg.norm(vectors.rows, axis=1) <= MAX_NORM).all()
    ):
        raise ShapeError(
            "vectors: expected at least one unit vector per item, got none, or longer or infinite "
            "ones. Normalize them."
        )
    last = _last_rows(items)
    return [items[row] for row in last], vectors[last]


def _last_rows(items: Sequence[IndexItem]) -> list[int]:
    """The last row of each key."""
    return sorted({item.key: row for row, item in enumerate(items)}.values())


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
        raise ShapeError(
            f"queries: expected shape [Q, {embedding_dim}], got {list(queries.shape)}. Encode them "
            "with the model of the index."
        )
    if not np.isfinite(queries).all():
        raise ShapeError(
            "queries: expected finite values, got NaN or infinity. Encode the queries again."
        )
    validate_int(top, "top", 1)
