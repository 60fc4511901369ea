"""What a store of vectors can do; one suite of tests holds every store to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

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

    def count(self, where: Where = EVERYTHING) -> int:
        """How many items there are."""

    def close(self) -> None:
        """Let go of files and connections."""
