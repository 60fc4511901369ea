"""What the test images say of a difference: a paired bootstrap in which an image is drawn together with all of its captions.

The models stay as they are and the images are drawn anew, with replacement, the same ones for all rows: how far would R@K and RSUM go up
and down on other test images? That variance does not shrink with more seeds, and the one over seeds (``statistics``) does not shrink with
more images: both are said, neither is added to the other.

What is drawn are the queries, each with the rank that it has among all candidates: the collection that is searched stays. A query's hits
at 1, 5 and 10, those of an image and of its captions, and those of all rows on one image depend on each other, and are drawn as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from visavis.comparison.statistics import LEVEL, ROUNDING, Interval
from visavis.errors import ShapeError, SpecError, nearest
from visavis.evaluation.ranks import QueryRanks
from visavis.metrics.recall import RECALLS, RSUM
from visavis.types import DIRECTIONS

KS = (1, 5, 10)
METRICS = (*(metric.key(way) for way in DIRECTIONS for metric in RECALLS), RSUM.name)
"""What is drawn, in this order."""
DRAWS = 2000
DRAWN_AT_ONCE = 250


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A value, or a difference of two, over images.

    value: as measured, in percent. deviation: over draws, the standard error that comes from the test images. interval: between the
    percentiles of the draws; None where every draw is the same.
    """

    value: float
    deviation: float
    interval: Interval | None
    images: int
    draws: int

    @classmethod
    def of(cls, value: float, drawn: np.ndarray, images: int, confidence: float = 1 - LEVEL) -> Drawn:
        tail = (1 - confidence) / 2
        varies = bool(np.ptp(drawn) > ROUNDING * 100)
        low, high = np.quantile(drawn, (tail, 1 - tail)).tolist()
        return cls(
            value=value,
            deviation=float(drawn.std(ddof=1)) if varies else 0.0,
            interval=Interval(low, high) if varies else None,
            images=images,
            draws=len(drawn),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class ImageDraws:
    """The metrics of each row's runs on the test images and on each draw of them.

    measured: by row and seed ``[M]``. drawn: by row and seed ``[draws, M]``; both as ``METRICS``. images: how many there are.
    """

    measured: Mapping[str, Mapping[int, np.ndarray]]
    drawn: Mapping[str, Mapping[int, np.ndarray]]
    images: int

    def value(self, row: str, metric: str = "rsum") -> Drawn:
        """A row's mean over its seeds."""
        seeds = self._of(row).keys()
        return Drawn.of(*self._mean(row, seeds, metric), self.images)

    def difference(self, a: str, b: str, metric: str = "rsum") -> Drawn:
        """Row a minus row b: the mean over the seeds that both have, or over each one's own where they have none in common."""
        of_a, of_b = self._of(a).keys(), self._of(b).keys()
        common = of_a & of_b
        (value, drawn), (other, others) = (self._mean(row, common or seeds, metric) for row, seeds in ((a, of_a), (b, of_b)))
        return Drawn.of(value - other, drawn - others, self.images)

    def _of(self, row: str) -> Mapping[int, np.ndarray]:
        if row not in self.measured:
            raise SpecError(f"{row} is no row of the comparison: {nearest(row, self.measured)}")
        return self.measured[row]

    def _mean(self, row: str, seeds: Any, metric: str) -> tuple[float, np.ndarray]:
        if metric not in METRICS:
            raise SpecError(f"{metric} is not drawn over images: {nearest(metric, METRICS)}")
        place = METRICS.index(metric)
        measured, drawn = ([rows[row][seed][..., place] for seed in sorted(seeds)] for rows in (self.measured, self.drawn))
        return float(np.mean(measured)), np.mean(drawn, axis=0)


def over_images(rows: Mapping[str, Mapping[int, QueryRanks]], *, draws: int = DRAWS, seed: int = 0) -> ImageDraws:
    """Draw the test images ``draws`` times, the same for all rows.

    rows: for each row, the ranks of its run by seed, all of the same queries. Raises ShapeError where they are not.
    """
    runs = [(name, of_seed, ranks) for name, by_seed in rows.items() for of_seed, ranks in by_seed.items()]
    if not runs:
        raise ShapeError("there are no runs whose images could be drawn.")
    name, of_seed, first = runs[0]
    for other, its_seed, ranks in runs[1:]:
        if not (np.array_equal(ranks.image_ids, first.image_ids) and np.array_equal(ranks.text_ids, first.text_ids)):
            raise ShapeError(
                f"{other}, seed {its_seed}, was asked other queries than {name}, seed {of_seed}: evaluate all runs on the same images and captions."
            )
    images = np.unique(np.concatenate([first.image_ids, first.text_ids]))
    of_images, of_texts = (np.searchsorted(images, ids) for ids in (first.image_ids, first.text_ids))
    numbers = np.stack([np.bincount(of_query, minlength=len(images)) for of_query in (of_images, of_texts)], 1)  # [N, 2]
    hits = np.stack(
        [
            [np.bincount(of_query, side <= k, minlength=len(images)) for of_query, side in sides for k in KS]
            for sides in (((of_images, ranks.image_ranks), (of_texts, ranks.text_ranks)) for *_, ranks in runs)
        ]
    )  # [runs, 6, N]
    measured = _metrics(np.ones((1, len(images))), hits, numbers)[0]
    drawn = np.concatenate([_metrics(times, hits, numbers) for times in _draw(len(images), draws, seed)])

    def by_row(values: np.ndarray) -> dict[str, dict[int, np.ndarray]]:
        """values ``[..., runs, M]``."""
        named: dict[str, dict[int, np.ndarray]] = {name: {} for name in rows}
        for place, (name, of_seed, _) in enumerate(runs):
            named[name][of_seed] = values[..., place, :]
        return named

    return ImageDraws(by_row(measured), by_row(drawn), len(images))


def _draw(images: int, draws: int, seed: int) -> Iterator[np.ndarray]:
    """How often each image is drawn ``[D, N]``, some draws after the other."""
    random = np.random.default_rng(seed)
    for start in range(0, draws, DRAWN_AT_ONCE):
        at_once = min(DRAWN_AT_ONCE, draws - start)
        places = random.integers(0, images, (at_once, images)) + images * np.arange(at_once)[:, None]
        yield np.bincount(places.ravel(), minlength=at_once * images).reshape(at_once, images).astype(float)


def _metrics(times: np.ndarray, hits: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The metrics ``[D, runs, M]`` where each image counts so many times ``[D, N]``."""
    asked = np.repeat(times @ numbers, len(KS), axis=1)  # [D, 6]
    recalls = 100 * (times @ hits.reshape(-1, hits.shape[-1]).T).reshape(len(times), *hits.shape[:2]) / asked[:, None]
    return np.concatenate([recalls, recalls.sum(-1, keepdims=True)], -1)
