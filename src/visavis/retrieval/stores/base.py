"""Interface of vector stores."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from visavis.core import storage
from visavis.core.errors import ShapeError, StorageError, VisavisError
from visavis.core.fields import validate_int
from visavis.core.ragged import RaggedRows, offsets_from_counts
from visavis.retrieval.items import (
    CHECKSUM,
    ITEM_FIELDS,
    NO_FILTER,
    REMEDY,
    IndexItem,
    ItemFilter,
)

if TYPE_CHECKING:
    from visavis.retrieval.stores.item_table import ItemTable


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
        """Combine the checksums of all rows. The order of rows has no effect."""
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
        """Add items, or replace those with the same key. Of equal keys, the last item counts."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete items. Unknown keys are ignored."""

    def search(
        self, queries: Queries, top: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[list[Neighbor]]:
        """Find the items with the highest inner products, or scores of late interaction, for each
        query, best first. Equal scores are in the order of keys.
        """

    def get(self, keys: Sequence[str]) -> dict[str, IndexItem]:
        """Read some items, in the order of ``keys``. Unknown keys are left out."""

    def table(self) -> ItemTable:
        """Return the items, without their vectors."""

    def one_version(self) -> AbstractContextManager[None]:
        """Read one version of the store in this block, if other processes can change it."""

    def prepare_search(self) -> None:
        """Write what makes searches faster, after the last change of an update."""

    def vectors(self, keys: Sequence[str]) -> ItemVectors:
        """Read the vectors of some items. An unknown key raises a KeyError."""

    def all_items(self) -> tuple[list[IndexItem], ItemVectors]:
        """Read all items and their vectors in the order of keys, both of one version."""

    def all_vectors(self) -> ItemVectors:
        """Read the vectors of all items in the order of keys. They may be mapped from a file."""

    def count(self, item_filter: ItemFilter = NO_FILTER) -> int:
        """Count items."""

    def digest(self) -> StoreDigest:
        """Summarize all items and vectors."""

    def verify(self) -> None:
        """Read everything, and compare all items and vectors with their checksums."""

    def close(self) -> None:
        """Close files and connections."""


@contextmanager
def store_errors(
    uri: str, index_id: str, problem: str, reason: Callable[[BaseException], str]
) -> Iterator[None]:
    """Convert errors of a database in this block to a StorageError: place, problem and reason."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, VisavisError) or not isinstance(error, Exception):
            raise
        # No command repairs a store that belongs to no index.
        remedy = f" {REMEDY}" if index_id else ""
        # Databases have no error class for a full disk, only the text of the system.
        is_full = os.strerror(errno.ENOSPC) in str(error)
        raise (
            storage.disk_full(uri)
            if is_full
            else StorageError(f"{uri}: {problem}: {reason(error)}.{remedy}")
        ) from None


def row_checksum(index_id: str, row: Mapping[str, Any], vector: np.ndarray) -> int:
    """Compute the checksum of a row of a store, a signed integer of 64 bits, as databases have."""
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
    """Check the rows of a store against their checksums, and return these."""
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
    """Check items and vectors before they are added, and drop all but the last item of each key."""
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
    """Check the arguments of a search."""
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
        """Decode vectors."""


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
        """Compute the bytes of an item, or the mean of several for their mean number of vectors."""
        kept = num_vectors if self.num_vectors is None else min(num_vectors, self.num_vectors)
        # The mean of the item has a byte per dimension, in whole rows of codes.
        return (-(-dim // self.vector_bytes) + kept) * self.vector_bytes


@dataclass(frozen=True, eq=False)
class VectorSets(RaggedRows[np.ndarray]):
    """Vectors of items with several vectors each: rows ``[T, D]``, float32, or the codes of a codec,
    uint8.

    Attributes:
        codec: Codec of compressed vectors. None: they are not compressed.

    Example:
        >>> sets = VectorSets.from_arrays([np.ones((2, 3)), np.zeros((1, 3))])
        >>> len(sets), [array.shape for array in sets], sets[[1]].rows.tolist()
        (2, [(2, 3), (1, 3)], [[0.0, 0.0, 0.0]])
    """

    codec: VectorCodec | None = None

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray]) -> VectorSets:
        """Join the vectors of items."""
        rows = (
            np.concatenate([np.asarray(array, np.float32) for array in arrays])
            if arrays
            else np.empty((0, 0), np.float32)
        )
        return cls(rows, offsets_from_counts([len(array) for array in arrays]))

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return int(self.rows.shape[1]) if self.codec is None else self.codec.dim

    def decoded(self) -> VectorSets:
        """Decode compressed vectors. Others are returned as they are."""
        return self if self.codec is None else self.codec.decode(self)

    def mean_vectors(self) -> np.ndarray:
        """Average the vectors of each item to a unit vector, ``[N, D]``."""
        if self.codec is not None:
            return self.decoded().mean_vectors()
        means = np.add.reduceat(self.rows, self.offsets[:-1], axis=0) if len(self) else self.rows
        norms = np.linalg.norm(means, axis=1, keepdims=True)
        unit: np.ndarray = means / np.where(norms == 0, 1, norms)
        return unit


ItemVectors: TypeAlias = np.ndarray | VectorSets
"""One vector per item, shape ``[N, D]``, or several."""


def concatenate_vectors(parts: Sequence[ItemVectors]) -> ItemVectors:
    """Join the vectors of items, at least one part. A single part is returned without a copy."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([part.rows if isinstance(part, VectorSets) else part for part in parts])
    sets = [part for part in parts if isinstance(part, VectorSets)]
    if not sets:
        return rows
    counts = np.concatenate([part.counts for part in sets])
    return VectorSets(rows, offsets_from_counts(counts), sets[0].codec)


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
        """Make a query from parts with any weights."""
        total = sum(abs(weight) for weight, _ in parts)
        return cls(
            tuple(weight / total for weight, _ in parts),
            tuple(np.ascontiguousarray(vectors, np.float32) for _, vectors in parts),
        )


Queries: TypeAlias = np.ndarray | Sequence[MaxSimQuery]
"""Query vectors of shape ``[Q, D]``, or queries of late interaction."""
