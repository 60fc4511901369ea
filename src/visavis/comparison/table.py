"""A table: rows of runs that differ in their seed alone, under one protocol, as text, Markdown or JSON.

>>> table = Table.of({"Unified": [run.test for run in runs]})                  # doctest: +SKIP
>>> table.rows[0].mean("rsum"), table.rows[0].deviation("rsum")                # doctest: +SKIP
(493.0, 2.1)
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from visavis.errors import RunError
from visavis.evaluation import Evaluation
from visavis.evaluation.judged import JudgedTest
from visavis.metrics.recall import RECALLS, RSUM, hit_by_chance
from visavis.types import DIRECTIONS

METRICS = (*(metric.key(way) for way in DIRECTIONS for metric in RECALLS), RSUM.name)


@dataclass(frozen=True)
class Columns:
    """Metrics under one head, each with what stands above its column."""

    head: str
    labels: Mapping[str, str]


CAPTIONS = (
    *(Columns(title, {metric.key(way): metric.label for metric in RECALLS}) for way, title in DIRECTIONS.items()),
    Columns("", {RSUM.name: RSUM.label}),
)
"""Of ``METRICS``."""


@dataclass(frozen=True)
class Rules:
    """The conditions under which all numbers of a table were measured; see evaluation.Evaluation."""

    protocol: str
    num_images: int
    num_texts: int
    captions_per_image: float
    ties: str

    @classmethod
    def of(cls, result: Evaluation) -> Rules:
        return cls(result.protocol, result.num_images, result.num_texts, result.captions_per_image, result.ties)

    def __str__(self) -> str:
        candidates = f"{self.num_images:,} images, {self.num_texts:,} texts, {self.captions_per_image:g} captions an image"
        return f"protocol {self.protocol}: {candidates}; ties {self.ties}"

    def chance(self, metric: str) -> float:
        """What a random order reaches, in percent: the chance that one of the right candidates is among the first K."""
        if metric == "rsum":
            return sum(self.chance(name) for name in METRICS if name != "rsum")
        way, k = metric.split("_r")
        candidates, right = (self.num_texts, round(self.captions_per_image)) if way == "i2t" else (self.num_images, 1)
        return 100 * hit_by_chance(candidates, right, int(k))


@dataclass(frozen=True)
class Row:
    """The runs of one setting. metrics: for each run, its metrics by the keys of ``metrics.CATALOG``."""

    name: str
    metrics: tuple[Mapping[str, float], ...]

    def mean(self, metric: str) -> float:
        return statistics.fmean(run[metric] for run in self.metrics)

    def deviation(self, metric: str) -> float | None:
        """The sample standard deviation over runs (n - 1 in the denominator); None for a single run."""
        return statistics.stdev(run[metric] for run in self.metrics) if len(self.metrics) > 1 else None

    def cell(self, metric: str) -> str:
        deviation = self.deviation(metric)
        return f"{self.mean(metric):.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")

    def short(self, metric: str) -> str:
        """The cell in as few characters as a terminal needs."""
        deviation = self.deviation(metric)
        return f"{self.mean(metric):.1f}" + ("" if deviation is None else f"±{deviation:.{1 if deviation < 9.95 else 0}f}")


@dataclass(frozen=True)
class Table:
    """A row for each setting, all measured under the same rules. note: what else a reader must know of the rows, without a period.
    judged: what people judged, where it was another test of all rows.
    """

    rows: tuple[Row, ...]
    rules: Rules
    note: str = ""
    judged: JudgedTest | None = None

    @classmethod
    def of(cls, results: Mapping[str, Sequence[Evaluation]], note: str = "") -> Table:
        """The evaluations of each setting's runs. Raises RunError if they were not measured under the same rules."""
        rules = list(dict.fromkeys(Rules.of(result) for runs in results.values() for result in runs))
        if len(rules) != 1:
            conditions = " / ".join(map(str, rules)) or "nothing"
            raise RunError(
                f"one table needs results of one protocol on one number of candidates, found {conditions}: evaluate all runs alike."
            )
        return cls(tuple(Row(name, tuple(run.metrics for run in runs)) for name, runs in results.items()), rules[0], note)

    @property
    def columns(self) -> tuple[Columns, ...]:
        return CAPTIONS if self.judged is None else (*CAPTIONS, Columns("judged", self.judged.labels))

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(metric for group in self.columns for metric in group.labels)

    def chance(self, metric: str) -> float:
        """What a random order reaches, in percent."""
        return self.judged.chance(metric) if self.judged is not None and metric not in METRICS else self.rules.chance(metric)

    def best(self, metric: str = "rsum") -> Row:
        """The row with the highest mean; the first of equal ones."""
        return max(self.rows, key=lambda row: row.mean(metric))

    def leads(self, row: Row, metric: str) -> bool:
        """Whether a row's mean is the highest of the column as it is printed; equal ones lead together."""
        return f"{row.mean(metric):.1f}" == f"{self.best(metric).mean(metric):.1f}"

    def caption(self) -> str:
        """What is always printed with the numbers: units, spread, rules and the note."""
        runs = sorted({len(row.metrics) for row in self.rows})
        spread = f"mean ± standard deviation over {' to '.join(map(str, runs))} seeds" if runs[-1] > 1 else "one seed"
        told = f"Recalls in percent, {spread}; {self.rules}." + (f" {self.note}." if self.note else "")
        return told if self.judged is None else f"{told} Judged: {self.judged}"

    def text(self) -> str:
        """For a terminal, about 80 columns for short names; a deviation of 10 or more is printed without decimals."""
        lines = [["", *(label for group in self.columns for label in group.labels.values())]]
        lines += [[row.name, *map(row.short, self.metrics)] for row in self.rows]
        lines += [["chance", *(f"{self.chance(metric):.1f}" for metric in self.metrics)]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        gaps = ["", *(gap for group in self.columns for gap in ["   ", *[" "] * (len(group.labels) - 1)])]
        body = ["".join(f"{gap}{cell:{'>' if gap else '<'}{w}}" for gap, cell, w in zip(gaps, line, widths, strict=True)) for line in lines]
        head, place = " " * widths[0], 1
        for group in self.columns:
            end = place + len(group.labels)
            head += f"{group.head:>{sum(widths[place:end]) + sum(map(len, gaps[place:end]))}}"
            place = end
        return "\n".join([head.rstrip(), *body])

    def markdown(self) -> str:
        """A Markdown table, the best means of each column in bold, with its caption."""
        heads = [f"{group.head} {label}".lstrip() for group in self.columns for label in group.labels.values()]
        lines = [["objective", *heads], ["---", *["---:"] * len(heads)]]
        lines += [
            [row.name, *(f"**{row.cell(metric)}**" if self.leads(row, metric) else row.cell(metric) for metric in self.metrics)]
            for row in self.rows
        ]
        lines += [["chance", *(f"{self.chance(metric):.1f}" for metric in self.metrics)]]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{self.caption()}\n"

    def to_json(self) -> dict[str, Any]:
        """Numbers as numbers: for each row the mean, the deviation and every run's value of each metric."""
        rows = [
            {
                "name": row.name,
                "mean": {metric: row.mean(metric) for metric in self.metrics},
                "deviation": {metric: row.deviation(metric) for metric in self.metrics},
                "runs": [dict(run) for run in row.metrics],
            }
            for row in self.rows
        ]
        return {
            "rules": asdict(self.rules),
            "note": self.note,
            "chance": {metric: self.chance(metric) for metric in self.metrics},
            "judged": None if self.judged is None else str(self.judged),
            "rows": rows,
        }
