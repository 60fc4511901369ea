"""Paired bootstrap over test images: an image is resampled together with all of its captions.

The models stay fixed and the images are resampled with replacement, the same samples for all rows.
This estimates how R@K and RSUM would vary on other test images. That variance does not shrink with
more seeds, and the variance over seeds (``statistics``) does not shrink with more images. Both are
reported, and they are not added.

The resampled units are queries, each with its rank among all candidates: the searched collection
stays. Some hits depend on each other and are resampled together: hits of a query at 1, 5 and 10, of
an image and its captions, and of all rows on one image. Judged text queries are resampled in the
same way, each with its pairs (``bootstrap_queries``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visavis.core.errors import ShapeError
from visavis.evaluation.feedback_metrics import KS, JudgedQueryResult, feedback_metrics
from visavis.evaluation.metrics.catalog import RSUM, SIX_RECALLS
from visavis.evaluation.metrics.ranking import RSUM_CUTOFFS
from visavis.evaluation.query_ranks import QueryRanks
from visavis.evaluation.statistics import CONFIDENCE, ROUNDING_TOLERANCE, Interval, format_number

BOOTSTRAP_METRICS = (*SIX_RECALLS, RSUM.name)
"""Metrics that are resampled, in this order."""
NUM_SAMPLES = 2000
SAMPLES_PER_BATCH = 250
MIN_UNITS = 20
"""Test images or judged text queries, below which bootstrap intervals are too short."""


@dataclass(frozen=True, kw_only=True)
class BootstrapEstimate:
    """A value, or a difference of two values, with its uncertainty over test images or judged
    queries.

    Attributes:
        value: Measured value, in percent.
        std_error: Standard deviation over the samples.
        interval: Percentile interval of the samples. None if all samples are equal.
        unit: Resampled unit.
        num_units: Number of resampled units.
        num_samples: Number of samples in which the value is defined.
    """

    value: float
    std_error: float
    interval: Interval | None
    unit: str
    num_units: int
    num_samples: int

    @classmethod
    def from_samples(
        cls, value: float, samples: np.ndarray, unit: str, num_units: int
    ) -> BootstrapEstimate:
        """Summarize bootstrap samples ``[S]``, NaN where the value is undefined."""
        tail = (1 - CONFIDENCE) / 2
        samples = samples[np.isfinite(samples)]
        varies = bool(
            np.ptp(samples) > ROUNDING_TOLERANCE * 100
        )  # a difference by rounding is not a spread
        low, high = np.quantile(samples, (tail, 1 - tail)).tolist()
        return cls(
            value=value,
            std_error=float(samples.std(ddof=1)) if varies else 0.0,
            interval=Interval(low, high) if varies else None,
            unit=unit,
            num_units=num_units,
            num_samples=len(samples),
        )

    def describe(self, metric: str) -> str:
        """Describe an estimate of a difference in a sentence."""
        difference = f"{format_number(self.value, signed=True)} {metric}"
        if self.interval is None:
            return (
                f"Every sample of the {self.num_units:,} {self.unit} gives the same: {difference}."
            )
        if self.num_units < MIN_UNITS:
            return f"{difference} over {self.num_units} {self.unit}. At least {MIN_UNITS} are needed for an interval."
        sign = "could have the opposite" if 0 in self.interval else "would have the same"
        return f"With other {self.unit}, the difference {sign} sign: {difference} (95 % interval {self.interval} over {self.num_units:,} {self.unit})."


@dataclass(frozen=True, eq=False)
class BootstrapSamples:
    """Metrics of each row's runs, as measured and on each bootstrap sample.

    Attributes:
        measured: Metrics by row and seed, shape ``[M]``.
        samples: Metrics by row and seed, shape ``[S, M]``.
        unit: Resampled unit.
        num_units: Number of resampled units.
        metrics: Names of the metrics.
    """

    measured: Mapping[str, Mapping[int, np.ndarray]]
    samples: Mapping[str, Mapping[int, np.ndarray]]
    unit: str
    num_units: int
    metrics: Sequence[str]

    def value(self, row: str, metric: str = "rsum") -> BootstrapEstimate:
        """Estimate the mean of a row over its seeds."""
        return BootstrapEstimate.from_samples(
            *self._mean(row, set(self.measured[row]), metric), self.unit, self.num_units
        )

    def difference(self, a: str, b: str, metric: str = "rsum") -> BootstrapEstimate:
        """Estimate the difference of two rows, a minus b."""
        seeds_a = set(self.measured[a])
        seeds_b = set(self.measured[b])
        # Paired by the common seeds where possible, which removes the spread that both rows share.
        common = seeds_a & seeds_b
        value_a, samples_a = self._mean(a, common or seeds_a, metric)
        value_b, samples_b = self._mean(b, common or seeds_b, metric)
        return BootstrapEstimate.from_samples(
            value_a - value_b, samples_a - samples_b, self.unit, self.num_units
        )

    def _mean(self, row: str, seeds: set[int], metric: str) -> tuple[float, np.ndarray]:
        """Mean of a metric over seeds, as measured and on each sample ``[S]``."""
        column = self.metrics.index(metric)
        measured = [self.measured[row][seed][column] for seed in sorted(seeds)]
        samples = [self.samples[row][seed][:, column] for seed in sorted(seeds)]
        return float(np.mean(measured)), np.mean(samples, axis=0)


def bootstrap_images(
    rows: Mapping[str, Mapping[int, QueryRanks]], *, num_samples: int = NUM_SAMPLES, seed: int = 0
) -> BootstrapSamples:
    """Resample the test images, with the same samples for all rows."""
    runs = {
        f"{name}, seed {run_seed}": ranks
        for name, by_seed in rows.items()
        for run_seed, ranks in by_seed.items()
    }
    if not runs:
        raise ShapeError("rows: expected at least one run, got none.")
    first_run, first = next(iter(runs.items()))
    for run, ranks in runs.items():
        if not (
            np.array_equal(ranks.image_ids, first.image_ids)
            and np.array_equal(ranks.text_ids, first.text_ids)
        ):
            same = ranks.image_ids.shape == first.image_ids.shape
            same &= ranks.text_ids.shape == first.text_ids.shape
            raise ShapeError(
                f"{run}: expected the {len(first.image_ids):,} images and {len(first.text_ids):,} "
                f"captions of {first_run}, got {len(ranks.image_ids):,} and "
                f"{len(ranks.text_ids):,}{' with other ids' * same}. Evaluate all runs on the same "
                "images and captions."
            )
    # A unit is an image with all its captions.
    image_ids = np.unique(np.concatenate([first.image_ids, first.text_ids]))
    num_images = len(image_ids)
    unit_of_image, unit_of_text = (
        np.searchsorted(image_ids, ids) for ids in (first.image_ids, first.text_ids)
    )

    # [runs, 6, N]
    hits = np.array(
        [
            [
                np.bincount(unit_of_query, query_ranks <= k, minlength=num_images)
                for unit_of_query, query_ranks in (
                    (unit_of_image, ranks.image_ranks),
                    (unit_of_text, ranks.text_ranks),
                )
                for k in RSUM_CUTOFFS
            ]
            for ranks in runs.values()
        ]
    )
    # [N] each: queries of each unit.
    num_queries = [
        np.bincount(unit_of_query, minlength=num_images)
        for unit_of_query in (unit_of_image, unit_of_text)
    ]
    trials = np.repeat(np.stack(num_queries, 1), len(RSUM_CUTOFFS), axis=1)  # [N, 6]

    def metrics(counts: np.ndarray) -> np.ndarray:
        recalls = _hit_percentages(counts, hits, trials)  # [B, runs, 6]
        return np.concatenate([recalls, recalls.sum(-1, keepdims=True)], -1)

    return _resample(rows, metrics, "test images", num_images, BOOTSTRAP_METRICS, num_samples, seed)


def bootstrap_queries(
    rows: Mapping[str, Mapping[int, Sequence[JudgedQueryResult]]],
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> BootstrapSamples:
    """Resample the judged text queries, each with its pairs, with the same samples for all rows."""
    runs = [queries for by_seed in rows.values() for queries in by_seed.values()]
    # [N, 4]: one query for each recall, and the judged pairs for the pairwise accuracy.
    trials = np.array([[*[1.0] * len(KS), query.num_pairs] for query in runs[0]])
    hits = np.array(
        [
            [[query.rank <= k for query in queries] for k in KS]
            + [[query.num_ordered for query in queries]]
            for queries in runs
        ]
    )
    names = tuple(feedback_metrics(runs[0]))
    return _resample(
        rows,
        lambda counts: _hit_percentages(counts, hits, trials),
        "judged queries",
        len(runs[0]),
        names,
        num_samples,
        seed,
    )


def _resample(
    rows: Mapping[str, Mapping[int, Any]],
    metrics: Callable[[np.ndarray], np.ndarray],
    unit: str,
    num_units: int,
    names: Sequence[str],
    num_samples: int,
    seed: int,
) -> BootstrapSamples:
    """Sample units with replacement, in batches of samples, and compute the metrics of each sample.
    ``metrics`` maps how often each sample contains each unit ``[B, N]`` to ``[B, runs, M]``.
    """
    random = np.random.default_rng(seed)
    samples = []
    for start in range(0, num_samples, SAMPLES_PER_BATCH):
        size = min(SAMPLES_PER_BATCH, num_samples - start)
        # Each sample has its own range of numbers, so that one bincount counts the units of all
        # samples.
        units = (
            random.integers(0, num_units, (size, num_units)) + num_units * np.arange(size)[:, None]
        )
        counts = np.bincount(units.ravel(), minlength=size * num_units).reshape(size, num_units)
        samples.append(metrics(counts.astype(float)))

    def by_row(values: np.ndarray) -> dict[str, dict[int, np.ndarray]]:
        # The order of the runs is that of the rows and their seeds.
        runs = iter(np.moveaxis(values, -2, 0))
        return {
            name: {run_seed: next(runs) for run_seed in by_seed} for name, by_seed in rows.items()
        }

    measured = metrics(np.ones((1, num_units)))[0]  # every unit once
    return BootstrapSamples(
        by_row(measured), by_row(np.concatenate(samples)), unit, num_units, names
    )


def _hit_percentages(counts: np.ndarray, hits: np.ndarray, trials: np.ndarray) -> np.ndarray:
    """Hits ``[runs, M, N]`` in percent of the trials ``[N, M]``, with unit n counted ``counts[b, n]``
    times: ``[B, runs, M]``. NaN without trials.
    """
    num_hits = (counts @ hits.reshape(-1, hits.shape[-1]).T).reshape(len(counts), *hits.shape[:2])
    num_trials = np.broadcast_to((counts @ trials)[:, None], num_hits.shape)
    return 100 * np.divide(
        num_hits, num_trials, out=np.full(num_hits.shape, np.nan), where=num_trials > 0
    )
