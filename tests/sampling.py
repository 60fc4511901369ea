"""Pairwise testing: every combination of two parameter values occurs in at least one test."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

SEED = 0
TRIES = 30


def rows_of_pairs(axes: Sequence[Sequence[Any]], seed: int = SEED) -> list[tuple[int, ...]]:
    """Rows of indices, one per axis, that contain every pair of values of two axes. A seeded greedy
    search selects them.

    >>> len(rows_of_pairs([range(4), range(3), range(2)]))
    12
    """
    pairs = itertools.combinations(range(len(axes)), 2)
    open_pairs = {
        (a, i, b, j) for a, b in pairs for i in range(len(axes[a])) for j in range(len(axes[b]))
    }
    draw, rows = random.Random(seed), []

    def closes(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {
            (a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)
        } & open_pairs

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
    """Call a test with combinations that contain every pair of values of two parameters. With two
    parameters, these are all.

    Each value of the first parameter is one test, which loops over the combinations of the others.
    """
    values = [list(axis) for axis in axes.values()]
    combinations: dict[int, list[dict[str, Any]]] = {index: [] for index in range(len(values[0]))}
    for row in rows_of_pairs(values):
        combinations[row[0]].append(
            {name: axis[index] for name, axis, index in zip(axes, values, row, strict=True)}
        )
    names = [getattr(value, "__name__", str(value)) for value in values[0]]
    return lambda test: pytest.mark.parametrize("combinations", combinations.values(), ids=names)(
        _looped(test, [*axes])
    )


def for_each(**axis: Iterable[Any]) -> Any:
    """Call a test with each value of one parameter, in one test."""
    ((name, values),) = axis.items()
    combinations = [{name: value} for value in values]
    return lambda test: pytest.mark.parametrize(
        "combinations", [combinations], ids=[f"each {name}"]
    )(_looped(test, [name]))


def _looped(test: Callable[..., None], names: Sequence[str]) -> Callable[..., None]:
    """The test as a function of ``combinations`` of the named parameters. A failure names its
    combination.
    """

    def loop(combinations: Sequence[dict[str, Any]], **fixtures: Any) -> None:
        for combination in combinations:
            try:
                test(**combination, **fixtures)
            except Exception as error:
                error.add_note(f"with {combination}")
                raise

    fixtures = [
        parameter
        for name, parameter in inspect.signature(test).parameters.items()
        if name not in names
    ]
    first = inspect.Parameter("combinations", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    loop.__signature__ = inspect.Signature([first, *fixtures])  # type: ignore[attr-defined]
    loop.__name__, loop.__doc__, loop.__module__ = test.__name__, test.__doc__, test.__module__
    return loop
