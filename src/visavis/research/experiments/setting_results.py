"""Results of settings, whose runs differ only in their seeds, under one protocol."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from visavis.core.encoded import DIRECTIONS
from visavis.core.errors import RunError
from visavis.core.table import SIMILAR_MARK, Cell, Column, Row, Table
from visavis.evaluation import Evaluation
from visavis.evaluation.bootstrap import BootstrapSamples
from visavis.evaluation.metrics.catalog import RECALLS, RSUM, SIX_RECALLS, own_metrics
from visavis.evaluation.metrics.ranking import TIES_IN_WORDS, random_recall, random_rsum
from visavis.evaluation.published_row import find_metric, metric_title
from visavis.evaluation.statistics import MIN_SEEDS, Interval, PairedTest, spread_over_seeds
from visavis.research.experiments.feedback_test import FeedbackTest

# min, max: the range over seeds. low, high: the 95 % interval of the mean, from four seeds on.
# images_low, images_high: the interval of the difference over test images, or over judged text
# queries for feedback metrics.
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
RECALL_KEYS = tuple(metric.key(way) for way in DIRECTIONS for metric in RECALLS)
"""Keys of the recalls in tables, which may be more than the six recalls of RSUM."""


@dataclass(frozen=True)
class MeasurementConditions:
    """Conditions under which all values of a table were measured.

    Attributes:
        protocol: Name of the protocol.
        num_images: Number of images.
        num_texts: Number of texts.
        captions_per_image: Mean number of captions per image.
        ties: How ties are ranked.
        noise_index: Hash of the assignment of the training captions to images, if some of them are
            on wrong images. It differs by seed, and settings with the same seed share it.
    """

    protocol: str
    num_images: int
    num_texts: int
    captions_per_image: float
    ties: str
    noise_index: str = ""

    @classmethod
    def from_evaluation(cls, result: Evaluation, noise_index: str = "") -> MeasurementConditions:
        """Return the conditions of an evaluation."""
        return cls(
            result.protocol,
            result.num_images,
            result.num_texts,
            result.captions_per_image,
            result.ties,
            noise_index,
        )

    def __str__(self) -> str:
        candidates = f"{self.num_images:,} images, {self.num_texts:,} texts, {self.captions_per_image:g} captions per image"
        noise = f", noise index {self.noise_index}" if self.noise_index else ""
        return f"protocol {self.protocol}: {candidates}, {TIES_IN_WORDS[self.ties]}{noise}"

    def chance(self, metric: str) -> float:
        """Compute the expected value in percent for a random ranking."""
        if metric == "rsum":
            return sum(self.chance(name) for name in SIX_RECALLS)
        direction, k = metric.split("_r")
        # An image has several captions, a caption has one image.
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
    """
    own = {one.name: one for one in own_metrics()}
    return 3 if metric in own and own[metric].unit not in ("percent", "rank") else 1


def bounds_of(metric: str) -> tuple[float, float]:
    """Return the bounds of the scale of a metric, infinite for an own metric with another unit."""
    if metric == RSUM.name:
        return 0.0, 100.0 * len(SIX_RECALLS)
    # The catalog does not have the metrics of feedback.
    if metric.startswith("judged_"):
        return UNIT_BOUNDS["percent"]
    return UNIT_BOUNDS.get(find_metric(metric).unit, (-math.inf, math.inf))


def _describe_noise(noise: Mapping[str, set[str]]) -> str:
    """Describe the noise indices of settings: one list, or one for each setting if they differ. A
    setting with a failed run has some of the indices only.
    """
    largest = max(noise.values(), key=len)
    if all(indices <= largest for indices in noise.values()):
        return ", ".join(sorted(largest - {""}))
    texts = [
        f"{', '.join(sorted(part - {''})) or 'none'} of {name}" for name, part in noise.items()
    ]
    return f"differs by setting: {', '.join(texts)}"


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
        """Compute the mean over runs."""
        return statistics.fmean(run[metric] for run in self.metrics)

    def std(self, metric: str) -> float | None:
        """Compute the sample standard deviation over runs. None for a single run."""
        return (
            statistics.stdev(run[metric] for run in self.metrics) if len(self.metrics) > 1 else None
        )

    def describe_mean(self, metric: str) -> str:
        """Describe the spread over seeds, or why there is none."""
        if len(self.metrics) == 1:
            return "one seed, without a range"
        spread = self.spread(metric)
        if spread is None:
            return f"the same value for {len(self.metrics)} seeds"
        seeds = f" over {len(self.metrics)} seeds" if len(self.metrics) >= MIN_SEEDS else ""
        return f"{spread.kind} {spread}{seeds}"

    def spread(self, metric: str) -> Interval | None:
        """Compute the range of the runs below ``MIN_SEEDS``, else the 95 % t interval of the mean,
        on the scale of the metric. None for a single run, or runs with equal values.
        """
        spread = spread_over_seeds([run[metric] for run in self.metrics])
        return None if spread is None else spread.within(*bounds_of(metric))

    def interval(self, metric: str) -> Interval | None:
        """Compute the 95 % t interval of the mean over seeds. None below ``MIN_SEEDS``."""
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
        """Collect the metrics of runs."""
        noise = {
            name: {measured_under.noise_index for _, measured_under in group}
            for name, group in runs.items()
        }
        conditions = list(
            dict.fromkeys(
                replace(measured_under, noise_index="")
                for group in runs.values()
                for _, measured_under in group
            )
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
            replace(conditions[0], noise_index=_describe_noise(noise)),
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
        """Compute the expected value in percent for a random ranking. None for a further metric."""
        if metric in self.extra_metrics:
            return None
        if self.feedback is not None and metric in self.feedback.labels:
            return self.feedback.random_baseline(metric)
        return self.conditions.chance(metric)

    def best(self, metric: str = "rsum") -> ResultRow:
        """Return the first row with the best mean."""
        lower = {one.name for one in own_metrics() if not one.higher_is_better}
        select = min if metric in lower else max
        return select(self.rows, key=lambda row: row.mean(metric))

    def is_best(self, row: ResultRow, metric: str) -> bool:
        """Check whether a row has the best printed mean of a column. Several rows may have it."""
        digits = digits_of(metric)
        return f"{row.mean(metric):.{digits}f}" == f"{self.best(metric).mean(metric):.{digits}f}"

    def caption(self) -> str:
        """Describe units, spread and conditions of the values."""
        runs = sorted({len(row.metrics) for row in self.rows})
        spread = "one seed"
        if runs[-1] > 1:
            kinds = ["range of the runs"] * (runs[0] < MIN_SEEDS)
            kinds += ["95 % interval of the mean"] * (runs[-1] >= MIN_SEEDS)
            if len(kinds) > 1:
                kinds[0] += f" below {MIN_SEEDS} seeds"
            seeds = f"{runs[0]} to {runs[-1]}" if len(runs) > 1 else f"{runs[0]}"
            spread = f"mean over {seeds} seeds ({', else '.join(kinds)})"
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
        ``similar`` names rows to mark, by metric.
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
                short_format=".0f" if metric in RECALL_KEYS else "",
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
        """Make a table with a line for each row and metric, with the columns ``CSV_COLUMNS``."""
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
                # The difference to the reference row.
                if pair is not None:
                    values["reference"] = pair.b
                    values |= {name: getattr(pair, name) for name in _TEST_COLUMNS}
                    interval = pair.interval if len(pair.seeds) >= MIN_SEEDS else None
                    values |= _bounds("difference_", interval)
                    # Captions and judged queries are resampled apart.
                    resampled = next((one for one in bootstraps if metric in one.metrics), None)
                    if resampled is not None:
                        bootstrap = resampled.difference(pair.a, pair.b, metric)
                        values |= _bounds("images_", bootstrap.interval)
                rows.append(tuple(values.get(name) for name in CSV_COLUMNS))
        return Table(tuple(map(Column, CSV_COLUMNS)), tuple(rows))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
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
    """Select the rows that are not distinguishable from a reference row."""
    return [
        name
        for name, test in against_best.items()
        if test.verdict in ("not distinguishable", "not tested")
    ]


def _bounds(prefix: str, interval: Interval | None) -> dict[str, float]:
    return (
        {} if interval is None else {f"{prefix}low": interval.low, f"{prefix}high": interval.high}
    )
