"""What the test images say of a difference: a paired bootstrap in which an image is drawn together with all of its captions.

The models stay as they are and the images are drawn anew, with replacement, the same ones for all rows: how far would R@K and RSUM go up
and down on other test images? That variance does not shrink with more seeds, and the one over seeds (``statistics``) does not shrink with
more images: both are said, neither is added to the other.

What is drawn are the queries, each with the rank that it has among all candidates: the collection that is searched stays. A query's hits
at 1, 5 and 10, those of an image and of its captions, and those of all rows on one image depend on each other, and are drawn as one.
Sentences that people judged are drawn in the same way, each with its pairs (``over_sentences``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from visavis.comparison.statistics import LEVEL, ROUNDING, Interval
from visavis.errors import ShapeError, SpecError, nearest
from visavis.evaluation.judged import JudgedAnswer, measured
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
    """A value, or a difference of two, over test images or judged sentences.

    value: as measured, in percent. deviation: over draws, the standard error that comes from what is drawn. interval: between the
    percentiles of the draws; None where every draw is the same. of, units: what is drawn, and how many there are. draws: those in which the
    value is defined.
    """

    value: float
    deviation: float
    interval: Interval | None
    of: str
    units: int
    draws: int

    @classmethod
    def from_draws(cls, value: float, drawn: np.ndarray, of: str, units: int, confidence: float = 1 - LEVEL) -> Drawn:
        tail, drawn = (1 - confidence) / 2, drawn[np.isfinite(drawn)]
        varies = bool(np.ptp(drawn) > ROUNDING * 100)
        low, high = np.quantile(drawn, (tail, 1 - tail)).tolist()
        return cls(
            value=value,
            deviation=float(drawn.std(ddof=1)) if varies else 0.0,
            interval=Interval(low, high) if varies else None,
            of=of,
            units=units,
            draws=len(drawn),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Draws:
    """The metrics of each row's runs on the test images, or judged sentences, and on each draw of them.

    measured: by row and seed ``[M]``. drawn: by row and seed ``[draws, M]``; both as ``metrics``. of, units: what is drawn, and how many
    there are.
    """

    measured: Mapping[str, Mapping[int, np.ndarray]]
    drawn: Mapping[str, Mapping[int, np.ndarray]]
    of: str
    units: int
    metrics: Sequence[str] = METRICS

    def value(self, row: str, metric: str = "rsum") -> Drawn:
        """A row's mean over its seeds."""
        seeds = self._of(row).keys()
        return Drawn.from_draws(*self._mean(row, seeds, metric), self.of, self.units)

    def difference(self, a: str, b: str, metric: str = "rsum") -> Drawn:
        """Row a minus row b: the mean over the seeds that both have, or over each one's own where they have none in common."""
        of_a, of_b = self._of(a).keys(), self._of(b).keys()
        common = of_a & of_b
        (value, drawn), (other, others) = (self._mean(row, common or seeds, metric) for row, seeds in ((a, of_a), (b, of_b)))
        return Drawn.from_draws(value - other, drawn - others, self.of, self.units)

    def _of(self, row: str) -> Mapping[int, np.ndarray]:
        if row not in self.measured:
            raise SpecError(f"{row} is no row of the comparison: {nearest(row, self.measured)}")
        return self.measured[row]

    def _mean(self, row: str, seeds: Any, metric: str) -> tuple[float, np.ndarray]:
        if metric not in self.metrics:
            raise SpecError(f"{metric} is not drawn over {self.of}: {nearest(metric, self.metrics)}")
        place = self.metrics.index(metric)
        measured, drawn = ([rows[row][seed][..., place] for seed in sorted(seeds)] for rows in (self.measured, self.drawn))
        return float(np.mean(measured)), np.mean(drawn, axis=0)


def over_images(rows: Mapping[str, Mapping[int, QueryRanks]], *, draws: int = DRAWS, seed: int = 0) -> Draws:
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

    def metrics(times: np.ndarray) -> np.ndarray:
        shares = _shares(times, hits, np.repeat(numbers, len(KS), axis=1))
        return np.concatenate([shares, shares.sum(-1, keepdims=True)], -1)

    drawn = np.concatenate([metrics(times) for times in _draw(len(images), draws, seed)])
    names = [(name, of_seed) for name, of_seed, _ in runs]
    return Draws(_by_row(names, metrics(np.ones((1, len(images))))[0]), _by_row(names, drawn), "test images", len(images))


def over_sentences(rows: Mapping[str, Mapping[int, Sequence[JudgedAnswer]]], *, draws: int = DRAWS, seed: int = 0) -> Draws:
    """Draw the judged sentences ``draws`` times, each with its pairs, the same for all rows.

    rows: for each row, what its run by seed answers to the same sentences. A draw without any pair says nothing of their order.
    """
    runs = [(name, of_seed, answers) for name, by_seed in rows.items() for of_seed, answers in by_seed.items()]
    first, names = runs[0][2], [(name, of_seed) for name, of_seed, _ in runs]
    numbers = np.array([[1.0, 1.0, 1.0, answer.pairs] for answer in first])  # [S, 4]
    hits = np.array(
        [[[answer.rank <= k for answer in answers] for k in KS] + [[answer.ordered for answer in answers]] for *_, answers in runs]
    )
    drawn = np.concatenate([_shares(times, hits, numbers) for times in _draw(len(first), draws, seed)])
    whole = _shares(np.ones((1, len(first))), hits, numbers)[0]
    return Draws(_by_row(names, whole), _by_row(names, drawn), "judged sentences", len(first), tuple(measured(first)))


def _by_row(names: Sequence[tuple[str, int]], values: np.ndarray) -> dict[str, dict[int, np.ndarray]]:
    """values ``[..., runs, M]``, by row and seed."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for place, (name, of_seed) in enumerate(names):
        found.setdefault(name, {})[of_seed] = values[..., place, :]
    return found


def _draw(images: int, draws: int, seed: int) -> Iterator[np.ndarray]:
    """How often each image is drawn ``[D, N]``, some draws after the other."""
    random = np.random.default_rng(seed)
    for start in range(0, draws, DRAWN_AT_ONCE):
        at_once = min(DRAWN_AT_ONCE, draws - start)
        places = random.integers(0, images, (at_once, images)) + images * np.arange(at_once)[:, None]
        yield np.bincount(places.ravel(), minlength=at_once * images).reshape(at_once, images).astype(float)


def _shares(times: np.ndarray, hits: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The shares of hits, in percent ``[D, runs, M]``, where each unit counts so many times ``[D, N]``; NaN where nothing was asked.

    hits ``[runs, M, N]``, of numbers ``[N, M]``.
    """
    found = (times @ hits.reshape(-1, hits.shape[-1]).T).reshape(len(times), *hits.shape[:2])
    asked = np.broadcast_to((times @ numbers)[:, None], found.shape)
    return 100 * np.divide(found, asked, out=np.full(found.shape, np.nan), where=asked > 0)
