"""A comparison whose settings differ in one number: RSUM against that number, on validation and on test, as in figure 5 of the Unified paper.

The number is a key of the recipe, such as ``phases.0.optimizer.lr`` of a grid, or a parameter of the objective or the model, such as
``margin`` of ``Unified(margin=0.1)``, ``Unified(margin=0.2)``, ...; of several objectives each has a curve.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from visavis.comparison.jobs import Outcome
from visavis.comparison.settings import Setting
from visavis.comparison.statistics import Interval, t_interval
from visavis.metrics.recall import RSUM
from visavis.objectives import parse

FEWEST = 3
"""Values of a number that make a curve."""
Column: TypeAlias = tuple[Any, ...]
"""What each setting has for one key."""


@dataclass(frozen=True)
class Point:
    """One value of the number. mean, interval: of RSUM over seeds, by t; without an interval where seeds show no spread."""

    value: float
    mean: float
    interval: Interval | None
    seeds: int


@dataclass(frozen=True)
class Sweep:
    """What a number does. name: of the number. curves: the points on validation and on test, by what else differs; "" where nothing does."""

    name: str
    curves: Mapping[str, tuple[tuple[Point, ...], tuple[Point, ...]]]

    def to_json(self) -> dict[str, Any]:
        curves = [
            {"name": name, "validation": [asdict(one) for one in validation], "test": [asdict(one) for one in test]}
            for name, (validation, test) in self.curves.items()
        ]
        return {"name": self.name, "curves": curves}


def sweep_of(runs: Sequence[tuple[Setting, Sequence[Outcome]]]) -> Sweep | None:
    """The sweep of settings, each with its runs, that are alike in everything but one number, of at least three values; None where none or
    several vary.
    """
    facts = [_facts(setting.content) for setting, _ in runs]
    columns = {key: tuple(row.get(key) for row in facts) for key in sorted({key for row in facts for key in row})}
    differing = {column: key for key, column in reversed(columns.items()) if len(set(column)) > 1}  # what always goes together is one
    swept = {column: _groups(runs, column, differing) for column in differing if all(map(_is_number, column))}
    found = [column for column, groups in swept.items() if groups]
    if len(found) != 1:
        return None
    key, groups = differing[found[0]], swept[found[0]]
    curves = {}
    for label, points in groups.items():
        by_value = sorted(points.items(), key=lambda point: point[0])
        validation, test = _curve(by_value, lambda one: one.validation_rsum), _curve(by_value, lambda one: one.numbers[RSUM.name])
        curves[label if len(groups) > 1 else ""] = validation, test
    return Sweep(key.partition(".objective.")[2] or key, curves)


def _groups(
    runs: Sequence[tuple[Setting, Sequence[Outcome]]], column: Column, differing: Mapping[Column, str]
) -> dict[str, dict[float, Sequence[Outcome]]]:
    """The runs by value, those together that are alike in everything else; none where one of these has too few values for a curve."""
    others = [(key.rpartition(".")[2], other) for other, key in differing.items() if other != column]
    groups: dict[str, dict[float, Sequence[Outcome]]] = {}
    for place, (value, (_, of_setting)) in enumerate(zip(column, runs, strict=True)):
        alike = ", ".join(f"{key}={other[place]}" for key, other in others if other[place] is not None)
        groups.setdefault(alike, {})[value] = of_setting
    return groups if all(len(points) >= FEWEST for points in groups.values()) else {}


def _curve(by_value: Sequence[tuple[float, Sequence[Outcome]]], rsum: Callable[[Outcome], float]) -> tuple[Point, ...]:
    rows = [(value, [rsum(one) for one in runs]) for value, runs in by_value]
    return tuple(Point(value, statistics.fmean(row), t_interval(row), len(row)) for value, row in rows)


def _facts(content: Any, name: str = "") -> dict[str, Any]:
    """Every value of a recipe by its dotted key, and those of an objective by the names of its parameters."""
    if isinstance(content, Mapping):
        inner = {str(key): value for key, value in content.items()}
    elif isinstance(content, list | tuple):
        inner = {str(place): value for place, value in enumerate(content)}
    elif name.endswith(".objective"):
        objective = parse(content)
        return {name: type(objective).__name__} | {f"{name}.{key}": _plain(value) for key, value in vars(objective).items()}
    else:
        return {name: content}
    return {key: value for part, one in inner.items() for key, value in _facts(one, f"{name}.{part}".lstrip(".")).items()}


def _plain(value: Any) -> Any:
    return value if _is_number(value) else repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
