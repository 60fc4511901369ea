"""What a store of vectors can do; one suite of tests holds every store to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from visavis.errors import ShapeError, SpecError
from visavis.retrieval.item import EVERYTHING, Item, Where


class Near(NamedTuple):
    """An item that a search found, and its score."""

    key: str
    score: float


class VectorStore(Protocol):
    """Items with one unit vector each. Every change is whole or not at all, whenever the process ends."""

    def add(self, items: Sequence[Item], vectors: np.ndarray) -> None:
        """Put items in, with their vectors ``[N, D]``; those of a key that is there already take its place."""

    def delete(self, keys: Sequence[str]) -> None:
        """Take items out; keys that are not there are passed over."""

    def search(self, queries: np.ndarray, top: int, where: Where = EVERYTHING) -> list[list[Near]]:
        """For each query ``[Q, D]`` the ``top`` items of the highest inner product, best first, equal scores in the order of keys."""

    def items(self) -> list[Item]:
        """All items, in the order of keys."""

    def vectors(self, keys: Sequence[str]) -> np.ndarray:
        """The vectors ``[N, D]`` of items, in float32. Raises KeyError for one that is not there."""

    def rows(self) -> np.ndarray:
        """The vectors ``[N, D]`` of all items, in the order of keys, in float32, perhaps mapped from a file."""

    def count(self, where: Where = EVERYTHING) -> int:
        """How many items there are."""

    def close(self) -> None:
        """Let go of files and connections."""


def checked(items: Sequence[Item], vectors: np.ndarray, width: int) -> tuple[list[Item], np.ndarray]:
    """Items and vectors that may be put in: of a key that is given twice the last. Raises ShapeError."""
    if vectors.shape != (len(items), width):
        raise ShapeError(f"{len(items)} items came with vectors of shape {list(vectors.shape)}, expected [{len(items)}, {width}].")
    if not np.isfinite(vectors).all():
        raise ShapeError("vectors hold numbers that are not finite, expected finite ones.")
    last = sorted({item.key: row for row, item in enumerate(items)}.values())
    return [items[row] for row in last], np.ascontiguousarray(vectors[last], np.float32)


def check_queries(queries: np.ndarray, top: int, width: int) -> None:
    """Raises ShapeError for queries that are not ``[Q, width]``, SpecError for a ``top`` below 1."""
    if queries.ndim != 2 or queries.shape[1] != width:
        raise ShapeError(f"queries are of shape {list(queries.shape)}, expected [Q, {width}] as the store's vectors are.")
    if not np.isfinite(queries).all():
        raise ShapeError("queries hold numbers that are not finite, expected finite ones.")
    if top < 1:
        raise SpecError(f"top is {top}, expected at least 1.")
