"""Pairwise testing: every combination of two parameter values occurs in at least one test."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

SEED = 0
TRIES = 30


def rows_of_pairs(axes: Sequence[Sequence[Any]], seed: int = SEED) -> list[tuple[int, ...]]:
    """Rows of indices, one per axis, that contain every pair of values of two axes. A seeded greedy search selects them.

    >>> len(rows_of_pairs([range(4), range(3), range(2)]))
    12
    """
    pairs = itertools.combinations(range(len(axes)), 2)
    open_pairs = {(a, i, b, j) for a, b in pairs for i in range(len(axes[a])) for j in range(len(axes[b]))}
    draw, rows = random.Random(seed), []

    def closes(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)} & open_pairs

    while open_pairs:
        a, i, b, j = min(open_pairs)
        drawn = [[draw.randrange(len(axis)) for axis in axes] for _ in range(TRIES)]
        for row in drawn:
            row[a], row[b] = i, j
        best = max(drawn, key=lambda row: len(closes(row)))
        rows.append(tuple(best))
        open_pairs -= closes(best)
    return rows


def pairwise(**axes: Iterable[Any]) -> Any:
    """``pytest.mark.parametrize`` over all named parameters, with rows that contain every pair of values of two parameters."""
    values = [list(axis) for axis in axes.values()]
    rows = [tuple(axis[index] for axis, index in zip(values, row, strict=True)) for row in rows_of_pairs(values)]
    return pytest.mark.parametrize(
        tuple(axes), rows, ids=["-".join(getattr(value, "__name__", str(value)) for value in row) for row in rows]
    )
