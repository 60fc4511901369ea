"""Sweep of one number: RSUM against the number, on validation and on test, as in figure 5 of the Unified paper.

The number is a recipe key, such as ``phases.0.optimizer.lr`` of a grid, or a parameter of the objective or model, such as ``margin`` of
``Unified(margin=0.1)``, ``Unified(margin=0.2)``, ... With several objectives, each has its own curve.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from visavis.experiments.grid import Setting
from visavis.experiments.jobs import RunOutcome
from visavis.experiments.statistics import Interval, t_interval
from visavis.metrics.catalog import RSUM
from visavis.objectives import parse

MIN_VALUES = 3
"""Minimum number of values of a curve."""
Column: TypeAlias = tuple[Any, ...]
"""Value of each setting for one key."""


@dataclass(frozen=True)
class SweepPoint:
    """One value of the swept number.

    Attributes:
        value: The value.
        mean: Mean RSUM over seeds.
        interval: 95 % t interval of RSUM. None if the seeds show no spread.
        seeds: Number of seeds.
    """

    value: float
    mean: float
    interval: Interval | None
    seeds: int


@dataclass(frozen=True)
class Sweep:
    """RSUM as a function of one number.

    Attributes:
        name: Name of the number.
        curves: Points on validation and on test, by what else differs between settings. The key is "" if nothing does.
    """

    name: str
    curves: Mapping[str, tuple[tuple[SweepPoint, ...], tuple[SweepPoint, ...]]]

    def to_json(self) -> dict[str, Any]:
        """Return the sweep as a JSON object.

        Returns:
            The name, and the points of each curve.
        """
        curves = [
            {"name": name, "validation": [asdict(one) for one in validation], "test": [asdict(one) for one in test]}
            for name, (validation, test) in self.curves.items()
        ]
        return {"name": self.name, "curves": curves}


def find_sweep(runs: Sequence[tuple[Setting, Sequence[RunOutcome]]]) -> Sweep | None:
    """Find the one number in which settings differ.

    Args:
        runs: Settings, each with its runs.

    Returns:
        The sweep, or None if no number, or several numbers, vary with at least three values.
    """
    facts = [_facts(setting.recipe_values) for setting, _ in runs]
    columns = {key: tuple(row.get(key) for row in facts) for key in sorted({key for row in facts for key in row})}
    differing = {
        column: key for key, column in reversed(columns.items()) if len(set(column)) > 1
    }  # keys that always vary together count as one
    swept = {column: _groups(runs, column, differing) for column in differing if all(map(_is_number, column))}
    found = [column for column, groups in swept.items() if groups]
    if len(found) != 1:
        return None
    key, groups = differing[found[0]], swept[found[0]]
    curves = {}
    for label, points in groups.items():
        by_value = sorted(points.items(), key=lambda point: point[0])
        validation, test = _curve(by_value, lambda one: one.validation_rsum), _curve(by_value, lambda one: one.measured_metrics[RSUM.name])
        curves[label if len(groups) > 1 else ""] = validation, test
    return Sweep(key.partition(".objective.")[2] or key, curves)


def _groups(
    runs: Sequence[tuple[Setting, Sequence[RunOutcome]]], column: Column, differing: Mapping[Column, str]
) -> dict[str, dict[float, Sequence[RunOutcome]]]:
    """Runs by value, grouped by what else differs. Empty if a group has too few values for a curve."""
    others = [(key.rpartition(".")[2], other) for other, key in differing.items() if other != column]
    groups: dict[str, dict[float, Sequence[RunOutcome]]] = {}
    for place, (value, (_, of_setting)) in enumerate(zip(column, runs, strict=True)):
        alike = ", ".join(f"{key}={other[place]}" for key, other in others if other[place] is not None)
        groups.setdefault(alike, {})[value] = of_setting
    return groups if all(len(points) >= MIN_VALUES for points in groups.values()) else {}


def _curve(by_value: Sequence[tuple[float, Sequence[RunOutcome]]], rsum: Callable[[RunOutcome], float]) -> tuple[SweepPoint, ...]:
    rows = [(value, [rsum(one) for one in runs]) for value, runs in by_value]
    return tuple(SweepPoint(value, statistics.fmean(row), t_interval(row), len(row)) for value, row in rows)


def _facts(content: Any, name: str = "") -> dict[str, Any]:
    """Values of a recipe by dotted key, with the parameters of objectives."""
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
