"""Results of settings, whose runs differ only in their seeds, under one protocol."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from visavis.core.encoded import DIRECTIONS
from visavis.core.errors import RunError
from visavis.core.table import SIMILAR_MARK, Cell, Column, Row, Table
from visavis.evaluation import Evaluation
from visavis.evaluation.bootstrap import BOOTSTRAP_METRICS, BootstrapSamples
from visavis.evaluation.metrics.catalog import RECALLS, RSUM, SIX_RECALLS, own_metrics
from visavis.evaluation.metrics.ranking import TIES_IN_WORDS, random_recall, random_rsum
from visavis.evaluation.published_row import find_metric, metric_title
from visavis.evaluation.statistics import MIN_SEEDS, Interval, PairedTest, spread_over_seeds
from visavis.research.experiments.feedback_test import FeedbackTest

# min, max: the range over seeds. low, high: the 95 % interval of the mean, from four seeds on. images_low, images_high: the interval of the
# difference over test images, or over judged text queries for feedback metrics.
CSV_COLUMNS = (
    "row", "metric", "runs", "mean", "std", "min", "max", "low", "high",
    "reference", "difference", "difference_low", "difference_high", "p", "adjusted_p", "tests", "verdict", "more_seeds",
    "images_low", "images_high",
)  # fmt: skip
_TEST_COLUMNS = ("difference", "p", "adjusted_p", "tests", "verdict", "more_seeds")
UNIT_BOUNDS = {
    "percent": (0.0, 100.0),
    "fraction": (0.0, 1.0),
    "correlation": (-1.0, 1.0),
    "rank": (1.0, math.inf),
}
"""Smallest and largest possible value of the metrics of a unit."""
SIMILAR_ROWS_NOTE = (
    f"{SIMILAR_MARK}: not distinguishable from the best of its column over these seeds (paired t-tests with "
    "Holm's correction)."
)


@dataclass(frozen=True)
class ColumnGroup:
    """Columns with a common title.

    Attributes:
        title: Title.
        labels: Label of each metric, by key.
    """

    title: str
    labels: Mapping[str, str]


CAPTION_COLUMNS = (
    *(
        ColumnGroup(title, {metric.key(way): metric.label for metric in RECALLS})
        for way, title in DIRECTIONS.items()
    ),
    ColumnGroup("", {RSUM.name: RSUM.label}),
)


@dataclass(frozen=True)
class MeasurementConditions:
    """Conditions under which all values of a table were measured.

    Attributes:
        protocol: Name of the protocol.
        num_images: Number of images.
        num_texts: Number of texts.
        captions_per_image: Mean number of captions per image.
        ties: How ties are ranked.
    """

    protocol: str
    num_images: int
    num_texts: int
    captions_per_image: float
    ties: str

    @classmethod
    def from_evaluation(cls, result: Evaluation) -> MeasurementConditions:
        """Return the conditions of an evaluation.

        Args:
            result: Evaluation.

        Returns:
            The conditions.
        """
        return cls(
            result.protocol,
            result.num_images,
            result.num_texts,
            result.captions_per_image,
            result.ties,
        )

    def __str__(self) -> str:
        candidates = f"{self.num_images:,} images, {self.num_texts:,} texts, {self.captions_per_image:g} captions per image"
        return f"protocol {self.protocol}: {candidates}, {TIES_IN_WORDS[self.ties]}"

    def chance(self, metric: str) -> float:
        """Compute the expected value for a random ranking.

        Args:
            metric: Key of a recall, or "rsum".

        Returns:
            The value, in percent.
        """
        if metric == "rsum":
            return sum(self.chance(name) for name in BOOTSTRAP_METRICS if name != "rsum")
        direction, k = metric.split("_r")
        candidates, positives = (
            (self.num_texts, round(self.captions_per_image))
            if direction == "i2t"
            else (self.num_images, 1)
        )
        return 100 * random_recall(candidates, positives, int(k))

    @property
    def highest_chance_rsum(self) -> float:
        """RSUM that a random ranking hardly exceeds: its mean plus two standard deviations."""
        captions = round(self.captions_per_image)
        num_paired = min(self.num_images, round(self.num_texts / self.captions_per_image))
        mean, std = random_rsum([captions] * num_paired + [0] * (self.num_images - num_paired))
        return mean + 2 * std


def digits_of(metric: str) -> int:
    """Return the number of decimals of a metric in tables: 3 for an own metric without a unit of
    percent or ranks, else 1.

    Args:
        metric: Key of a metric.

    Returns:
        The number.
    """
    own = {one.name: one for one in own_metrics()}
    return 3 if metric in own and own[metric].unit not in ("percent", "rank") else 1


def bounds_of(metric: str) -> tuple[float, float]:
    """Return the bounds of the scale of a metric.

    Args:
        metric: Key of a metric.

    Returns:
        The smallest and the largest possible value. Infinite for an own metric with another unit.
    """
    if metric == RSUM.name:
        return 0.0, 100.0 * len(SIX_RECALLS)
    if metric.startswith("judged_"):  # a metric of feedback, which the catalog does not have
        return UNIT_BOUNDS["percent"]
    return UNIT_BOUNDS.get(find_metric(metric).unit, (-math.inf, math.inf))


@dataclass(frozen=True)
class ResultRow:
    """Runs of one setting.

    Attributes:
        name: Name of the setting.
        metrics: Metrics of each run by key.
    """

    name: str
    metrics: tuple[Mapping[str, float], ...]

    def mean(self, metric: str) -> float:
        """Compute the mean over runs.

        Args:
            metric: Key of a metric.

        Returns:
            The mean.
        """
        return statistics.fmean(run[metric] for run in self.metrics)

    def std(self, metric: str) -> float | None:
        """Compute the sample standard deviation over runs.

        Args:
            metric: Key of a metric.

        Returns:
            The standard deviation. None for a single run.
        """
        return (
            statistics.stdev(run[metric] for run in self.metrics) if len(self.metrics) > 1 else None
        )

    def describe_mean(self, metric: str) -> str:
        """Describe the spread over seeds.

        Args:
            metric: Key of a metric.

        Returns:
            The range or the 95 % t interval, or the reason why there is none.
        """
        if len(self.metrics) == 1:
            return "one seed, without a range"
        spread = self.spread(metric)
        if spread is None:
            return f"the same value for {len(self.metrics)} seeds"
        seeds = f" over {len(self.metrics)} seeds" if len(self.metrics) >= MIN_SEEDS else ""
        return f"{spread.kind} {spread}{seeds}"

    def spread(self, metric: str) -> Interval | None:
        """Compute the spread over seeds, on the scale of the metric.

        Args:
            metric: Key of a metric.

        Returns:
            The range of the runs below ``MIN_SEEDS``, else the 95 % t interval of the mean. None
            for a single run, or runs with equal values.
        """
        spread = spread_over_seeds([run[metric] for run in self.metrics])
        return None if spread is None else spread.within(*bounds_of(metric))

    def interval(self, metric: str) -> Interval | None:
        """Compute the 95 % t interval of the mean over seeds.

        Args:
            metric: Key of a metric.

        Returns:
            The interval. None below ``MIN_SEEDS``, or for runs with equal values.
        """
        return self.spread(metric) if len(self.metrics) >= MIN_SEEDS else None


@dataclass(frozen=True)
class SettingResults:
    """Results of each setting, all measured under the same conditions.

    Attributes:
        rows: Rows.
        conditions: Conditions of all values.
        note: Further sentence for readers, without a period.
        feedback: Judged text queries that all rows were evaluated on.
        extra_metrics: Keys of further metrics of the recipe that all runs have.
    """

    rows: tuple[ResultRow, ...]
    conditions: MeasurementConditions
    note: str = ""
    feedback: FeedbackTest | None = None
    extra_metrics: tuple[str, ...] = ()

    @classmethod
    def from_runs(
        cls,
        runs: Mapping[str, Sequence[tuple[Mapping[str, float], MeasurementConditions]]],
        note: str = "",
    ) -> SettingResults:
        """Collect the metrics of runs.

        Args:
            runs: Metrics and conditions of the runs of each setting.
            note: Further sentence for readers, without a period.

        Returns:
            The results.

        Raises:
            RunError: If the runs were measured under different conditions.
        """
        conditions = list(
            dict.fromkeys(measured_under for group in runs.values() for _, measured_under in group)
        )
        if len(conditions) != 1:
            actual = " / ".join(map(str, conditions)) or "nothing"
            raise RunError(
                "table: expected results with one protocol and number of candidates, got "
                f"{actual}. Evaluate all runs alike."
            )
        return cls(
            tuple(
                ResultRow(name, tuple(metrics for metrics, _ in group))
                for name, group in runs.items()
            ),
            conditions[0],
            note,
        )

    @property
    def column_groups(self) -> tuple[ColumnGroup, ...]:
        """Columns of the table in groups."""
        groups = [*CAPTION_COLUMNS]
        if self.extra_metrics:
            labels = {metric: metric_title(metric) for metric in self.extra_metrics}
            groups.append(ColumnGroup("", labels))
        if self.feedback is not None:
            groups.append(ColumnGroup("feedback", self.feedback.labels))
        return tuple(groups)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Keys of the columns."""
        return tuple(metric for group in self.column_groups for metric in group.labels)

    def chance(self, metric: str) -> float | None:
        """Compute the expected value for a random ranking.

        Args:
            metric: Key of a column.

        Returns:
            The value, in percent. None for a further metric, whose expected value is unknown.
        """
        if metric in self.extra_metrics:
            return None
        if self.feedback is not None and metric not in BOOTSTRAP_METRICS:
            return self.feedback.random_baseline(metric)
        return self.conditions.chance(metric)

    def best(self, metric: str = "rsum") -> ResultRow:
        """Return the row with the best mean.

        Args:
            metric: Key of a column.

        Returns:
            The first such row.
        """
        lower = {one.name for one in own_metrics() if not one.higher_is_better}
        select = min if metric in lower else max
        return select(self.rows, key=lambda row: row.mean(metric))

    def is_best(self, row: ResultRow, metric: str) -> bool:
        """Check whether a row has the best printed mean of a column.

        Args:
            row: Row.
            metric: Key of a column.

        Returns:
            Whether it has. Rows with equal printed means all are best.
        """
        digits = digits_of(metric)
        return f"{row.mean(metric):.{digits}f}" == f"{self.best(metric).mean(metric):.{digits}f}"

    def caption(self) -> str:
        """Describe units, spread and conditions of the values.

        Returns:
            The caption of the table.
        """
        runs = sorted({len(row.metrics) for row in self.rows})
        spread = "one seed"
        if runs[-1] > 1:
            kinds = ["range of the runs"] * (runs[0] < MIN_SEEDS)
            kinds += ["95 % interval of the mean"] * (runs[-1] >= MIN_SEEDS)
            if len(kinds) > 1:
                kinds[0] += f" below {MIN_SEEDS} seeds"
            spread = f"mean over {' to '.join(map(str, runs))} seeds ({', else '.join(kinds)})"
        caption = f"Recalls in percent, {spread}, {self.conditions}." + (
            f" {self.note}." if self.note else ""
        )
        return caption if self.feedback is None else f"{caption} Feedback: {self.feedback}"

    @property
    def spread_kinds(self) -> dict[str, str]:
        """Kind of spread of each row that has one, as row notes of ``table``."""
        return {
            row.name: "range" if len(row.metrics) < MIN_SEEDS else "95 % interval"
            for row in self.rows
            if any(row.spread(metric) for metric in self.metrics)
        }

    def table(
        self,
        heading: str = "",
        *,
        row_notes: Mapping[str, str] | None = None,
        similar: Mapping[str, Collection[str]] | None = None,
        groups: Sequence[ColumnGroup] | None = None,
    ) -> Table:
        """Make a table of the means with their spread over seeds, the best of each column marked.

        Args:
            heading: Title of the column of names.
            row_notes: Small print of rows, by name.
            similar: By metric, names of rows that are not distinguishable from the best. They are
                marked.
            groups: Columns. Default: all.

        Returns:
            The table with its caption.
        """
        row_notes = row_notes or {}
        similar = similar or {}
        groups = self.column_groups if groups is None else groups
        metrics = [metric for group in groups for metric in group.labels]
        columns = [Column(heading, is_text=True)]
        columns += [
            Column(
                label,
                format=f".{digits_of(metric)}f",
                group=group.title,
                missing="-",
                short_format=".0f" if metric in SIX_RECALLS else "",
                key=metric,
            )
            for group in groups
            for metric, label in group.labels.items()
        ]
        rows = [
            (
                Cell(row.name, note=row_notes.get(row.name, "")),
                *(self._cell(row, metric, similar.get(metric, ())) for metric in metrics),
            )
            for row in self.rows
        ]
        notes = [self.caption()]
        if any(similar.values()):
            notes.append(SIMILAR_ROWS_NOTE)
        chance = ("chance", *map(self.chance, metrics))
        return Table(tuple(columns), tuple(rows), tuple(notes), last_rows=(chance,))

    def _cell(self, row: ResultRow, metric: str, similar: Collection[str]) -> Cell:
        spread = row.spread(metric)
        return Cell(
            row.mean(metric),
            () if spread is None else (spread.low, spread.high),
            "best" if self.is_best(row, metric) else "similar" if row.name in similar else "",
        )

    def statistics_table(
        self,
        pairs: Mapping[str, Mapping[str, PairedTest]] | None = None,
        bootstraps: Sequence[BootstrapSamples] = (),
    ) -> Table:
        """Make a table with a line for each row and metric, with the columns ``CSV_COLUMNS``.

        Args:
            pairs: By metric, paired tests with a reference row, by name.
            bootstraps: Bootstrap samples of the same rows.

        Returns:
            The table, for CSV.
        """
        pairs = pairs or {}
        rows: list[Row] = []
        for row in self.rows:
            for metric in self.metrics:
                pair = pairs.get(metric, {}).get(row.name)
                values: dict[str, Any] = {
                    "row": row.name,
                    "metric": metric,
                    "runs": len(row.metrics),
                    "mean": row.mean(metric),
                    "std": row.std(metric),
                    "min": min(run[metric] for run in row.metrics),
                    "max": max(run[metric] for run in row.metrics),
                }
                values |= _bounds("", row.interval(metric))
                if pair is not None:
                    values |= _test_values(pair, metric, bootstraps)
                rows.append(tuple(values.get(name) for name in CSV_COLUMNS))
        return Table(tuple(map(Column, CSV_COLUMNS)), tuple(rows))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            Mean, its interval, range, standard deviation and every run's values of each row.
        """
        rows = [
            {
                "name": row.name,
                "mean": {metric: row.mean(metric) for metric in self.metrics},
                "std": {metric: row.std(metric) for metric in self.metrics},
                "interval": {
                    metric: [interval.low, interval.high] if interval else None
                    for metric in self.metrics
                    for interval in [row.interval(metric)]
                },
                "range": {
                    metric: [min(values), max(values)]
                    for metric in self.metrics
                    for values in [[run[metric] for run in row.metrics]]
                },
                "runs": [dict(run) for run in row.metrics],
            }
            for row in self.rows
        ]
        return {
            "conditions": asdict(self.conditions),
            "note": self.note,
            "chance": {metric: self.chance(metric) for metric in self.metrics},
            "feedback": None if self.feedback is None else str(self.feedback),
            "rows": rows,
        }


def indistinguishable_rows(against_best: Mapping[str, PairedTest]) -> list[str]:
    """Select the rows that are not distinguishable from a reference row.

    Args:
        against_best: Paired tests with the reference row, by name, from ``differences_from``.

    Returns:
        The names of the rows.
    """
    return [
        name
        for name, test in against_best.items()
        if test.verdict in ("not distinguishable", "not tested")
    ]


def _test_values(
    pair: PairedTest, metric: str, bootstraps: Sequence[BootstrapSamples]
) -> dict[str, Any]:
    """The columns of a difference to the reference row."""
    values = {"reference": pair.b, **{name: getattr(pair, name) for name in _TEST_COLUMNS}}
    values |= _bounds("difference_", pair.interval if len(pair.seeds) >= MIN_SEEDS else None)
    # Captions and judged queries are resampled apart.
    if resampled := next((samples for samples in bootstraps if metric in samples.metrics), None):
        values |= _bounds("images_", resampled.difference(pair.a, pair.b, metric).interval)
    return values


def _bounds(prefix: str, interval: Interval | None) -> dict[str, float]:
    return (
        {} if interval is None else {f"{prefix}low": interval.low, f"{prefix}high": interval.high}
    )
