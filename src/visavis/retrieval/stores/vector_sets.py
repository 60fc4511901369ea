"""Items with several vectors each, and queries of late interaction (MaxSim)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

MAX_NORM = 1.001
"""Maximum length of a unit vector with rounding errors."""


@dataclass(frozen=True)
class VectorSets:
    """Vectors of items with several vectors each, one item after the other. Indexing selects items.

    Attributes:
        rows: Vectors of all items, float32, shape ``[T, D]``. May be memory-mapped.
        offsets: First row of each item, and the number of rows, int64, shape ``[N + 1]``.

    Example:
        >>> sets = VectorSets.from_arrays([np.ones((2, 3)), np.zeros((1, 3))])
        >>> len(sets), [array.shape for array in sets], sets[[1]].rows.tolist()
        (2, [(2, 3), (1, 3)], [[0.0, 0.0, 0.0]])
    """

    rows: np.ndarray
    offsets: np.ndarray

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
                return VectorSets(self.rows[offsets[0] : offsets[-1]], offsets - offsets[0])
            items = range(start, stop, step)
        index = np.asarray(items, np.int64)
        offsets = np.concatenate([[0], np.cumsum(self.counts[index])])
        return VectorSets(self.rows[self.rows_of(index)], offsets)

    def rows_of(self, items: np.ndarray) -> np.ndarray:
        """Find the rows of some items.

        Args:
            items: Numbers of the items, int64, shape ``[n]``.

        Returns:
            Rows of the first item, then of the second, and so on.
        """
        counts = self.counts[items]
        ends = np.cumsum(counts)
        rows: np.ndarray = np.repeat(self.offsets[items] - (ends - counts), counts) + np.arange(
            counts.sum()
        )
        return rows

    @property
    def counts(self) -> np.ndarray:
        """Number of vectors of each item, shape ``[N]``."""
        return np.diff(self.offsets)

    def mean_vectors(self) -> np.ndarray:
        """Average the vectors of each item.

        Returns:
            Unit vectors, float32, shape ``[N, D]``.
        """
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
    counts = [part.counts for part in parts if isinstance(part, VectorSets)]
    return (
        VectorSets(rows, np.concatenate([[0], np.cumsum(np.concatenate(counts))]))
        if counts
        else rows
    )


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
