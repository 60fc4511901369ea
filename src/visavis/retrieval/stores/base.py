"""Interface of vector stores."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from visavis.core import storage
from visavis.core.errors import ShapeError, StorageError, VisavisError
from visavis.core.fields import validate_int
from visavis.retrieval.items import ITEM_FIELDS, NO_FILTER, IndexItem, ItemFilter

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
            # Unsigned, so that the sum wraps around modulo 2^64.
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
    except BaseException as error:
        # Damaged files raise errors of every kind. A panic of the Rust code of LanceDB is not an
        # Exception.
        is_of_database = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, VisavisError) or not is_of_database:
            raise
        remedy = f" {REMEDY}" if index_id else ""
        # LanceDB has no error class for a full disk, only the text of the system.
        is_full = os.strerror(errno.ENOSPC) in str(error)
        raise (
            storage.disk_full(uri)
            if is_full
            else StorageError(f"{uri}: {problem}: {reason(error)}.{remedy}")
        ) from None


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
) -> tuple[list[IndexItem], ItemVectors]:
    """Check items and vectors before they are added, and drop all but the last item of each key.

    Args:
        items: Items to add.
        vectors: Their vectors, shape ``[N, D]``, or several per item.
        embedding_dim: Dimension of the vectors of the store.

    Returns:
        Items with unique keys, and their vectors in float32.

    Raises:
        ShapeError: If the shape of the vectors is wrong, a value is not finite, or one of several
            vectors is longer than 1.
    """
    problem = ""
    if isinstance(vectors, VectorSets):
        shape = (len(vectors), *vectors.rows.shape[1:])
        expected = (len(items), embedding_dim)
        # A comparison with NaN is false, so that this also finds values that are not finite.
        if vectors.codec is not None:
            shape = len(vectors), vectors.codec.dim
        # Codes are bytes, which have no invalid values.
        is_unit = (
            vectors.codec is not None or (np.linalg.norm(vectors.rows, axis=1) <= MAX_NORM).all()
        )
        if not (vectors.counts > 0).all() or not is_unit:
            problem = (
                "at least one unit vector per item, got none, or longer or infinite ones. "
                "Normalize them."
            )
    else:
        shape = vectors.shape
        expected = (len(items), embedding_dim)
        if not np.isfinite(vectors).all():
            problem = "finite values, got NaN or infinity. Encode the items again."
    if items and shape != expected:
        problem = f"shape {list(expected)}, got {list(shape)}. Pass the vectors of these items."
    if problem:
        raise ShapeError(f"vectors: expected {problem}")
    # A request must not contain a key twice: which of the rows counts is undefined.
    last = sorted({item.key: row for row, item in enumerate(items)}.values())
    chosen = vectors[last]
    return [items[row] for row in last], (
        chosen if isinstance(chosen, VectorSets) else np.ascontiguousarray(chosen, np.float32)
    )


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
    problem = ""
    if queries.ndim != 2 or queries.shape[1] != embedding_dim:
        problem = f"shape [Q, {embedding_dim}], got {list(queries.shape)}"
    elif not np.isfinite(queries).all():
        # NaN compares as neither larger nor smaller, so that the ranking would be arbitrary.
        problem = "finite values, got NaN or infinity"
    if problem:
        raise ShapeError(f"queries: expected {problem}. Encode them with the model of the index.")
    validate_int(top, "top", 1)


MAX_NORM = 1.001
"""Maximum length of a unit vector with rounding errors."""


class VectorCodec(Protocol):
    """Codec of compressed vectors, see ``SetCodec``."""

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""

    def decode(self, codes: VectorSets) -> VectorSets:
        """Decode vectors.

        Args:
            codes: Codes of items.

        Returns:
            Their vectors.
        """


@dataclass(frozen=True)
class SetEncoding:
    """Settings of the compressed vectors of an index.

    Attributes:
        num_vectors: Number of vectors that an item keeps, means of similar ones. None: all.
        vector_bytes: Bytes of the difference of each vector from the mean of its item.
    """

    num_vectors: int | None
    vector_bytes: int

    def item_bytes(self, num_vectors: float, dim: int) -> float:
        """Compute the size of an item.

        Args:
            num_vectors: Its number of vectors, or the mean number of several items.
            dim: Dimension of the vectors.

        Returns:
            Bytes.
        """
        kept = num_vectors if self.num_vectors is None else min(num_vectors, self.num_vectors)
        return (-(-dim // self.vector_bytes) + kept) * self.vector_bytes


@dataclass(frozen=True)
class VectorSets:
    """Vectors of items with several vectors each, one item after the other. Indexing selects items.

    Attributes:
        rows: Vectors of all items, float32, shape ``[T, D]``. May be memory-mapped. With a codec:
            its codes, uint8.
        offsets: First row of each item, and the number of rows, int64, shape ``[N + 1]``.
        codec: Codec of compressed vectors. None: they are not compressed.

    Example:
        >>> sets = VectorSets.from_arrays([np.ones((2, 3)), np.zeros((1, 3))])
        >>> len(sets), [array.shape for array in sets], sets[[1]].rows.tolist()
        (2, [(2, 3), (1, 3)], [[0.0, 0.0, 0.0]])
    """

    rows: np.ndarray
    offsets: np.ndarray
    codec: VectorCodec | None = None

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray]) -> VectorSets:
        """Join the vectors of items.

        Args:
            arrays: Vectors of each item, shape ``[n, D]``.

        Returns:
            All items.
        """
        offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays], dtype=np.int64)])
        rows = (
            np.concatenate([np.asarray(array, np.float32) for array in arrays])
            if arrays
            else np.empty((0, 0), np.float32)
        )
        return cls(rows, offsets.astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return (
            self.rows[start:stop]
            for start, stop in zip(self.offsets, self.offsets[1:], strict=False)
        )

    def __getitem__(self, items: slice | Sequence[int] | np.ndarray) -> VectorSets:
        if isinstance(items, slice):
            start, stop, step = items.indices(len(self))
            if step == 1:
                offsets = self.offsets[start : max(start, stop) + 1]
                rows = self.rows[offsets[0] : offsets[-1]]
                return VectorSets(rows, offsets - offsets[0], self.codec)
            items = range(start, stop, step)
        index = np.asarray(items, np.int64)
        offsets = np.concatenate([[0], np.cumsum(self.counts[index])])
        return VectorSets(self.rows[self.rows_of(index)], offsets, self.codec)

    def rows_of(self, items: np.ndarray) -> np.ndarray:
        """Find the rows of some items.

        Args:
            items: Numbers of the items, int64, shape ``[n]``.

        Returns:
            Rows of the first item, then of the second, and so on.
        """
        counts = self.counts[items]
        ends = np.cumsum(counts)
        # First row of each item, minus the rows before it in the result, plus a running number.
        rows: np.ndarray = np.repeat(self.offsets[items] - (ends - counts), counts) + np.arange(
            counts.sum()
        )
        return rows

    @property
    def counts(self) -> np.ndarray:
        """Number of vectors of each item, shape ``[N]``."""
        return np.diff(self.offsets)

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return int(self.rows.shape[1]) if self.codec is None else self.codec.dim

    def decoded(self) -> VectorSets:
        """Decode compressed vectors.

        Returns:
            Vectors in float32. Without a codec, they are returned as they are.
        """
        return self if self.codec is None else self.codec.decode(self)

    def mean_vectors(self) -> np.ndarray:
        """Average the vectors of each item.

        Returns:
            Unit vectors, float32, shape ``[N, D]``.
        """
        if self.codec is not None:
            return self.decoded().mean_vectors()
        means = np.add.reduceat(self.rows, self.offsets[:-1], axis=0) if len(self) else self.rows
        norms = np.linalg.norm(means, axis=1, keepdims=True)
        unit: np.ndarray = means / np.where(norms == 0, 1, norms)
        return unit


ItemVectors: TypeAlias = np.ndarray | VectorSets
"""One vector per item, shape ``[N, D]``, or several."""


def concatenate_vectors(parts: Sequence[ItemVectors]) -> ItemVectors:
    """Join the vectors of items.

    Args:
        parts: Vectors of some items, at least one part. All parts have one vector per item, or all
            have several.

    Returns:
        The vectors of all items. A single part is returned without a copy.
    """
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([part.rows if isinstance(part, VectorSets) else part for part in parts])
    sets = [part for part in parts if isinstance(part, VectorSets)]
    if not sets:
        return rows
    counts = np.concatenate([part.counts for part in sets])
    return VectorSets(rows, np.concatenate([[0], np.cumsum(counts)]), sets[0].codec)


@dataclass(frozen=True)
class MaxSimQuery:
    """Query of late interaction: the weighted sum of the MaxSim scores of its parts.

    Attributes:
        weights: Weight of each part. The sum of their absolute values is 1.
        parts: Unit vectors of each part, such as the words of a text, float32, shape ``[n, D]``.
    """

    weights: tuple[float, ...]
    parts: tuple[np.ndarray, ...]

    @classmethod
    def from_vectors(cls, *parts: tuple[float, np.ndarray]) -> MaxSimQuery:
        """Make a query from parts with any weights.

        Args:
            *parts: Weights and unit vectors, shape ``[n, D]``.

        Returns:
            The query.
        """
        total = sum(abs(weight) for weight, _ in parts)
        return cls(
            tuple(weight / total for weight, _ in parts),
            tuple(np.ascontiguousarray(vectors, np.float32) for _, vectors in parts),
        )


Queries: TypeAlias = np.ndarray | Sequence[MaxSimQuery]
"""Query vectors of shape ``[Q, D]``, or queries of late interaction."""
