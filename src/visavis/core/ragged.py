"""Items with different numbers of rows: all rows in one array, and the first row of each item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Rows = TypeVar("Rows", np.ndarray, "Tensor")

MaxSimDirection = Literal["both", "t2i", "i2t"]
"""Means in a MaxSim score: over text vectors of the best image vector ("t2i"), over image vectors
("i2t"), or half of each.
"""


def offsets_from_counts(counts: np.ndarray | Sequence[int]) -> np.ndarray:
    """First row of each item, and the number of all rows, int64 ``[N + 1]``, from the number of
    rows of each item.
    """
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def are_offsets(offsets: np.ndarray, num_items: int) -> bool:
    """Return whether an array has the first row of each item and the end of the last one."""
    return len(offsets) == num_items + 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())


@dataclass(frozen=True, eq=False)
class RaggedRows(Generic[Rows]):
    """Rows of items, one item after the other. Item i is ``rows[offsets[i] : offsets[i + 1]]``.

    Indexing selects items. A slice of consecutive items is a view.

    Attributes:
        rows: Rows of all items, ``[T, ...]``. An array may be memory-mapped.
        offsets: First row of each item, and the number of rows, ``[N + 1]``. ``are_offsets`` checks
            offsets that were read from a file.

    Example:
        >>> items = RaggedRows(np.arange(5), np.array([0, 4, 5]))
        >>> [item.tolist() for item in items], items[[1]].rows.tolist()
        ([[0, 1, 2, 3], [4]], [4])
    """

    rows: Rows
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Rows]:
        return (
            self.rows[start:stop]
            for start, stop in zip(self.offsets, self.offsets[1:], strict=False)
        )

    def __getitem__(self, items: slice | Sequence[int] | np.ndarray) -> Self:
        if isinstance(items, slice):
            start, stop, step = items.indices(len(self))
            if step == 1:
                offsets = self.offsets[start : max(start, stop) + 1]
                rows = self.rows[offsets[0] : offsets[-1]]
                return replace(self, rows=rows, offsets=offsets - offsets[0])
            items = range(start, stop, step)
        index = np.asarray(items, np.int64)
        offsets = offsets_from_counts(self.counts[index])
        return replace(self, rows=self.rows[self.rows_of(index)], offsets=offsets)

    @property
    def counts(self) -> np.ndarray:
        """Number of rows of each item, ``[N]``."""
        return np.diff(self.offsets)

    def rows_of(self, items: np.ndarray) -> np.ndarray:
        """Positions in ``rows`` of the rows of some items, one item after the other."""
        counts = self.counts[items]
        ends = np.cumsum(counts)
        # First row of each item, minus the rows before it in the result, plus a running number.
        rows: np.ndarray = np.repeat(self.offsets[items] - (ends - counts), counts) + np.arange(
            counts.sum()
        )
        return rows

    def padded(
        self, items: np.ndarray, *, max_length: int = 0, min_length: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Select items as one tensor.

        Args:
            items: The items, ``[n]``.
            max_length: Number of rows that are read of a longer item, evenly spaced from its first
                one. 0: all.
            min_length: Smallest padded length.

        Returns:
            Rows ``[n, L, ...]``, padded with zeros after the last row of an item, and their mask
            ``[n, L]``.

        Example:
            >>> items = RaggedRows(np.arange(5.0), np.array([0, 4, 5]))
            >>> [part.tolist() for part in items.padded(np.array([1, 0]), max_length=2)]
            [[[4.0, 0.0], [0.0, 2.0]], [[True, False], [True, True]]]
        """
        import torch

        # [n]
        starts = self.offsets[items]
        counts = self.offsets[items + 1] - starts
        lengths = np.minimum(counts, max_length) if max_length else counts
        positions = np.arange(lengths.max(initial=min_length))
        # [n, L]
        mask = positions < lengths[:, None]
        # Position p of m reads row floor(p n / m) of n: the first one, then at equal intervals.
        spaced = positions * counts[:, None] // np.maximum(lengths, 1)[:, None]
        # Padding reads row 0 and is overwritten, so that rows are copied once. Without any row in
        # the selection, there may be no row 0.
        index = np.where(mask, starts[:, None] + spaced, 0) if mask.any() else np.empty(0, np.int64)
        padded = (
            torch.from_numpy(self.rows[index])
            if isinstance(self.rows, np.ndarray)
            else self.rows[torch.from_numpy(index)]
        )
        valid = torch.from_numpy(mask)
        if not len(index):
            return padded.new_zeros(*mask.shape, *padded.shape[1:]), valid
        padded[~valid] = 0
        return padded, valid
