"""What became of a paper's table: figure by figure, and whether the order of its rows holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visavis.comparison.jobs import Outcome
from visavis.errors import RunError
from visavis.evaluation.published import Published, label_of, metric_of
from visavis.training.recipe_files import read_recipe
from visavis.types import DIRECTIONS

FEWEST = 4
"""Rows from which on an order is worth a word."""
POPULATION = ("cocos",)
"""Papers whose deviations are of the population (n in the denominator); the others have n - 1."""


@dataclass(frozen=True)
class Figure:
    """One figure of a row, published and reached: means, and deviations over runs where there are some."""

    row: Published
    key: str
    published: float
    published_deviation: float | None
    reached: float | None
    deviation: float | None

    @property
    def difference(self) -> float | None:
        return None if self.reached is None else self.reached - self.published

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.row.address,
            "key": self.key,
            "published": self.published,
            "published_std": self.published_deviation,
            "reached": self.reached,
            "reached_std": self.deviation,
            "difference": self.difference,
        }


@dataclass(frozen=True)
class Order:
    """Whether rows that were published with a higher figure reached a higher one. rho: Spearman's. p: of no relation at all, by permutation."""

    key: str
    rows: int
    rho: float
    p: float

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "rows": self.rows, "rho": self.rho, "p": self.p}


@dataclass(frozen=True)
class Reproduction:
    """The rows of a table with their runs. base: the recipe that stood for theirs, in words; "" for their own. outcomes: by row, by seed."""

    folder: Path
    table: str
    base: str
    outcomes: Mapping[str, Sequence[Outcome]]
    published: Mapping[str, Published]

    @classmethod
    def of(cls, folder: Path, table: str, base: str, runs: Mapping[str, tuple[Published, Sequence[Outcome]]]) -> Reproduction:
        """runs: by the address of a row. Raises RunError where no run succeeded."""
        if all(one.failure for _, outcomes in runs.values() for one in outcomes):
            raise RunError(
                f"no run of {folder} succeeded; the first one: {next(one.failure for _, found in runs.values() for one in found)}"
            )
        return cls(
            folder,
            table,
            base,
            {address: outcomes for address, (_, outcomes) in runs.items()},
            {address: row for address, (row, _) in runs.items()},
        )

    @property
    def substitution(self) -> str:
        """What was used instead of what the paper has; "" where nothing was."""
        if not self.base:
            return ""
        recipes = [read_recipe(address) for address in self.published]
        needs = dict.fromkeys(recipe.data.needs or recipe.data.path for recipe in recipes)
        return (
            f"Not the paper's setting: each row's objective and supervision on {self.base}, instead of {'; '.join(needs)}. Figures are not "
            "comparable in size; their order may be."
        )

    @property
    def figures(self) -> list[Figure]:
        """All figures, row by row."""
        return [
            Figure(row, key, mean, deviation, *self._reached(address, row, key))
            for address, row in self.published.items()
            for key, (mean, deviation) in row.values.items()
        ]

    def _reached(self, address: str, row: Published, key: str) -> tuple[float | None, float | None]:
        values = [one.numbers[key] for one in self.outcomes[address] if key in one.numbers]
        if not values:
            return None, None
        spread = statistics.pstdev if row.paper in POPULATION else statistics.stdev
        return statistics.fmean(values), spread(values) if len(values) > 1 else None

    @property
    def orders(self) -> list[Order]:
        """For each key that enough rows have: the rank correlation of published and reached; of rows that share their runs the first one."""
        from scipy.stats import permutation_test, rankdata, spearmanr

        orders, first = [], {runs[0].folder: address for address, runs in reversed([*self.outcomes.items()]) if runs}
        for key in dict.fromkeys(figure.key for figure in self.figures):
            figures = [one for one in self.figures if one.key == key and one.row.address in first.values()]
            pairs = [(one.published, one.reached) for one in figures if one.reached is not None]
            if len(pairs) >= FEWEST:
                published, reached = rankdata(list(zip(*pairs, strict=True)), axis=1)
                rho = float(spearmanr(published, reached).statistic)
                if not math.isnan(rho):
                    mixed = permutation_test(
                        (published,), lambda drawn, axis, fixed=reached: (drawn * fixed).sum(axis), permutation_type="pairings", rng=0
                    )
                    orders.append(Order(key, len(pairs), rho, float(mixed.pvalue)))
        return orders

    @property
    def seeds(self) -> int:
        return max(len(runs) for runs in self.outcomes.values())

    @property
    def sentences(self) -> list[str]:
        """What is to be read with the figures."""
        first = next(iter(self.published.values()))
        runs = (
            "one run"
            if self.seeds == 1
            else f"mean ± {'population' if first.paper in POPULATION else 'sample'} deviation of {self.seeds} runs"
        )
        told = [f"Published: {first.source}. Reached: {runs}, each row's best model on validation."]
        told += [
            f"Order of the {order.rows} rows with runs of their own by {title_of(order.key)}: Spearman's rho {order.rho:.2f} between published and "
            f"reached (p = {order.p:.2g})."
            for order in self.orders
        ]
        told += [f"{row.address}: published nowhere: {row.unstated}." for row in _first_of_each(self.published.values(), "unstated")]
        told += [f"{row.address}: misprint of the paper: {row.misprint}." for row in _first_of_each(self.published.values(), "misprint")]
        told += [
            f"{one.setting}, seed {one.seed} failed: {one.failure}" for runs_ in self.outcomes.values() for one in runs_ if one.failure
        ]
        return told

    def markdown(self) -> str:
        """The substitution, the figures and the sentences."""
        lines = [["row", "metric", "published", "reached", "difference"], ["---", "---", "---:", "---:", "---:"], *map(cells, self.figures)]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        above = f"**{self.substitution}**\n\n" if self.base else ""
        return f"# {self.table}\n\n{above}{table}\n" + "".join(f"- {sentence}\n" for sentence in self.sentences)

    def to_json(self) -> dict[str, Any]:
        return {
            "reproduction": str(self.folder),
            "table": self.table,
            "base": self.base,
            "substitution": self.substitution,
            "figures": [figure.to_json() for figure in self.figures],
            "orders": [order.to_json() for order in self.orders],
            "runs": {address: [one.to_json() for one in runs] for address, runs in self.outcomes.items()},
        }


def cells(figure: Figure) -> list[str]:
    """A line of the table."""
    reached = "-" if figure.reached is None else _figure(figure.key, figure.reached, figure.deviation)
    difference = "-" if figure.difference is None else _figure(figure.key, figure.difference, None, signed=True)
    return [figure.row.row, title_of(figure.key), _figure(figure.key, figure.published, figure.published_deviation), reached, difference]


def title_of(key: str) -> str:
    """A metric with its direction, as a person says it."""
    return f"{DIRECTIONS.get(key.partition('_')[0], '')} {label_of(key)}".strip()


def _figure(key: str, value: float, deviation: float | None, *, signed: bool = False) -> str:
    digits = 1 if metric_of(key).unit in ("percent", "rank") else 3
    return f"{value:{'+' if signed else ''}.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def _first_of_each(rows: Iterable[Published], fact: str) -> list[Published]:
    """The first row that says something, of those that say the same."""
    said: dict[str, Published] = {}
    for row in rows:
        if text := getattr(row, fact):
            said.setdefault(text, row)
    return list(said.values())
