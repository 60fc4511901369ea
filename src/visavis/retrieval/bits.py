"""Vectors as one bit a number: whether it is above the mean of all; the nearest are those with the fewest other bits than a query's signs.

``<x, q> = <m, q> + <x - m, q>`` with m the mean of the rows: the first term is the same for all rows, and signs say of the second how
small the angle is.
"""

from __future__ import annotations

import numpy as np

from visavis.memory import spans

AT_ONCE = 2**14
_COUNTS = np.array([number.bit_count() for number in range(2**16)], np.uint8)


class Bits:
    """Rows ``[N, D]`` by their signs. bytes: of a row."""

    def __init__(self, rows: np.ndarray):
        count, width = rows.shape
        self.words, self.bytes = -(-width // 64), 8 * -(-width // 64)
        self.mean = (sum((rows[some].sum(0, dtype=np.float64) for some in spans(count, AT_ONCE)), np.zeros(width)) / count).astype(
            np.float32
        )
        self.bits = np.empty((self.words, count), np.uint64)
        for some in spans(count, AT_ONCE):
            self.bits[:, some] = _packed(rows[some] > self.mean, self.words).T

    def nearest(self, query: np.ndarray, most: int) -> np.ndarray:
        """The rows of the fewest other bits, equal ones in their order."""
        signs = _packed((query > 0)[None], self.words)[0]
        apart = np.empty(self.bits.shape[1], np.uint16)
        for some in spans(len(apart), AT_ONCE):
            apart[some] = sum(map(_ones, (self.bits[word, some] ^ signs[word] for word in range(self.words))))
        bound = np.searchsorted(np.cumsum(np.bincount(apart)), min(most, len(apart)))
        rows = np.flatnonzero(apart <= bound)
        return rows[np.argsort(apart[rows], kind="stable")[:most]]


def _packed(bits: np.ndarray, words: int) -> np.ndarray:
    """``[N, D]`` bits as ``[N, words]`` numbers of 64 bits, filled up with zeros."""
    packed = np.packbits(bits, axis=1)
    return np.pad(packed, ((0, 0), (0, 8 * words - packed.shape[1]))).view(np.uint64)


def _ones(numbers: np.ndarray) -> np.ndarray:
    """How many bits of each number are set."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(numbers).astype(np.uint16)
    return _COUNTS[numbers.view(np.uint16)].reshape(-1, 4).sum(1, dtype=np.uint16)
