"""How coherent the ranked lists of runs are: how many top items are totally irrelevant, and CS@K against K.

The Ladder paper marks totally irrelevant items in its figure 2 but does not define them. Degrees differ in scale from
estimator to estimator and, with word vectors, from query to query: here an item is compared with all candidates of its query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.degrees import Degrees, ImageBy, ImageDegrees
from visavis.errors import DataError, VisavisError
from visavis.evaluation.coherence import Coherence, coherence_of
from visavis.memory import Memory
from visavis.metrics import COHERENT_SCORE
from visavis.models import Matcher
from visavis.models.base import vectors
from visavis.models.scoring import score_from_cpu
from visavis.progress import Progress
from visavis.scoring import Score, pick, rows_at_once, score_in_order
from visavis.types import DIRECTIONS, Direction, Encoded

SHOWN: tuple[Direction, ...] = ("t2i", "i2t")
"""The directions in the order in which they are shown."""
CUTS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""The values of K at which CS@K is measured."""

TAILS = (1.0, 0.5, 0.2, 0.02)
"""The share of the candidates that are not irrelevant that lies in each band of relevance or above."""

HELD = 48.0
"""Bytes per pair while irrelevant items are counted: scores, their order, degrees, bands."""
SHOWN_TO_CHECK = 128
"""How many captions' degrees are checked before anything is measured."""
MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Odd numbers that spread bits, of SplitMix64 (Steele et al., 2014)."""


@dataclass(frozen=True)
class Scale:
    """How relevant an item is among all candidates of its query, in bands 0 to 4; band 0 is totally irrelevant.

    irrelevant: the share of a query's candidates that is in band 0, and so its expected share in a random list.
    """

    irrelevant: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.irrelevant < 1:
            raise VisavisError(f"irrelevant is {self.irrelevant:g}, expected a share of the candidates above 0 and below 1, such as 0.5.")

    @property
    def shares(self) -> tuple[float, ...]:
        """An item of band i is more relevant than ``shares[i - 1]`` of the candidates."""
        return tuple(round(1 - (1 - self.irrelevant) * tail, 6) for tail in TAILS)

    def bounds(self, relevance: Tensor) -> Tensor:
        """The highest degree below each band of each query: ``[Q, C] -> [Q, 4]``."""
        places = [math.ceil(share * relevance.shape[1] - 1e-9) - 1 for share in self.shares]
        return relevance.sort(dim=1).values[:, places]

    def bands(self, relevance: Tensor) -> Tensor:
        """The band of every candidate ``[Q, C]``. Equal degrees share the lower band, but the highest degree of a query is never irrelevant."""
        bands = (relevance[:, :, None] > self.bounds(relevance)[:, None]).sum(2)
        return torch.where(relevance == relevance.amax(1, keepdim=True), bands.clamp(min=1), bands)


@dataclass(frozen=True)
class Mean:
    """A mean over queries with half its 95 % interval, and how many queries have no value and are left out."""

    mean: float
    half: float
    undefined: int

    @classmethod
    def of(cls, values: Tensor, images: np.ndarray) -> Mean:
        """values ``[Q]``, NaN where undefined. images ``[Q]``: the image of each query; captions of one image are a cluster in the interval."""
        numbers, defined = values.double().numpy(), ~np.isnan(values.numpy())
        mean = float(numbers[defined].mean()) if defined.any() else float("nan")
        residuals = np.bincount(images[defined], numbers[defined] - mean)
        return cls(mean, 1.96 * float(np.sqrt((residuals**2).sum())) / max(int(defined.sum()), 1), int((~defined).sum()))

    def to_json(self) -> dict[str, float | int | None]:
        return {**asdict(self), "mean": None if math.isnan(self.mean) else self.mean}


@dataclass(frozen=True, eq=False)
class Ranker:
    """What ranks candidates: a run's best model with all encoded images and texts of a split, or a random order.

    name: of the run's folder. objective: what it was trained with, or "zero-shot".
    """

    name: str
    objective: str
    images: Encoded
    texts: Encoded
    score: Score

    @classmethod
    def of_run(cls, name: str, objective: str, matcher: Matcher, images: Encoded, texts: Encoded) -> Ranker:
        return cls(name, objective, images, texts, score_from_cpu(matcher))

    @classmethod
    def random(cls, data: Dataset, seed: int) -> Ranker:
        """A random order: the score of a pair depends on the seed and the pair alone, so that blocks change nothing."""
        images, texts = (Encoded(torch.arange(len(items))) for items in (data.images, data.captions))

        def score(some: Encoded, others: Encoded) -> Tensor:
            bits = spread(vectors(some)[:, None] + spread(vectors(others) + spread(torch.tensor(seed))))
            return (bits >> 11) / 2**53 + 0.5

        return cls("random", "at random", images, texts, score)

    def scores(self, way: Direction, queries: Tensor, memory: Memory = None) -> Tensor:
        """The scores of queries, by index, with all candidates: ``[Q, C]``."""
        some = (self.images, pick(self.texts, queries)) if way == "t2i" else (pick(self.images, queries), self.texts)
        return score_in_order(self.score, *some, way, memory)


def spread(numbers: Tensor) -> Tensor:
    """A hash of integers to pseudo-random integers of 64 bits."""
    numbers = (numbers + 1) * _signed(MIXERS[0])
    for mixer in MIXERS[1:]:
        numbers = (numbers ^ (numbers >> 31)) * _signed(mixer)
    return numbers ^ (numbers >> 31)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


@dataclass(frozen=True)
class Measured:
    """How coherent the lists of one ranker are, in one direction.

    irrelevant: the number of totally irrelevant items in the top of a list. more: its difference to the list of the first ranker,
    query by query. scores: CS@K by K.
    """

    irrelevant: Mean
    more: Mean
    scores: dict[int, Mean]

    @property
    def whole(self) -> Mean:
        """CS at the largest K."""
        return self.scores[max(self.scores)]

    def to_json(self) -> dict[str, Any]:
        curve = [{"k": k, **score.to_json()} for k, score in self.scores.items()]
        return {"irrelevant": self.irrelevant.to_json(), "more_than_first": self.more.to_json(), "coherent_score": curve}


def measure(
    rankers: Sequence[Ranker],
    degrees: Degrees,
    image: ImageBy,
    data: Dataset,
    scale: Scale,
    top: int,
    progress: Progress,
    memory: Memory = None,
) -> dict[Direction, list[Measured]]:
    """Measure every ranker in both directions. Items are counted in the lists of all queries; CS@K is that of ``visavis evaluate``.

    memory: of blocks of scores.
    """
    image_degrees, scores = degrees.between(data, image), []
    for number, ranker in enumerate(rankers, 1):
        scores.append(coherence_of(ranker.images, ranker.texts, ranker.score, data, degrees, ks=CUTS, memory=memory))
        progress.work("coherent scores", number, len(rankers), 0.0)

    def one_way(way: Direction) -> list[Measured]:
        image_of = data.image_of if way == "t2i" else np.arange(len(data.images))
        counts = count_irrelevant(rankers, way, image_degrees, data, scale, top, progress, memory)
        return [
            Measured(Mean.of(own, image_of), Mean.of(own - counts[0], image_of), _curve(coherence, way))
            for own, coherence in zip(counts, scores, strict=True)
        ]

    return {way: one_way(way) for way in SHOWN}


def _curve(coherence: Coherence, way: Direction) -> dict[int, Mean]:
    by_k = {k: coherence.per_query[COHERENT_SCORE.key(way, k)] for k in coherence.ks}
    return {k: Mean.of(torch.from_numpy(values), np.arange(len(values))) for k, values in by_k.items()}


def count_irrelevant(
    rankers: Sequence[Ranker],
    way: Direction,
    degrees: ImageDegrees,
    data: Dataset,
    scale: Scale,
    top: int,
    progress: Progress,
    memory: Memory = None,
) -> list[Tensor]:
    """How many of the first ``top`` items are totally irrelevant, for every query ``[Q]`` of each ranker."""
    all_queries, candidates = sides(data, way)
    counts: list[list[Tensor]] = [[] for _ in rankers]
    for queries in all_queries.split(rows_at_once(len(candidates), HELD, memory)):
        irrelevant = scale.bands(relevance_of(degrees, way, queries, candidates)) == 0
        for ranker, numbers in zip(rankers, counts, strict=True):
            first = in_order(ranker.scores(way, queries, memory))[:, :top]
            numbers.append(irrelevant.gather(1, first).sum(1).double())
        progress.work(f"lists, {DIRECTIONS[way]}", int(queries[-1]) + 1, len(all_queries), 0.0)
    return [torch.cat(numbers) for numbers in counts]


def sides(data: Dataset, way: Direction) -> tuple[Tensor, Tensor]:
    """The indices of all queries, and of all candidates."""
    captions, images = torch.arange(len(data.captions)), torch.arange(len(data.images))
    return (captions, images) if way == "t2i" else (images, captions)


def relevance_of(degrees: ImageDegrees, way: Direction, queries: Tensor, candidates: Tensor) -> Tensor:
    """The degrees of queries with candidates ``[Q, C]``."""
    return degrees(candidates, queries).T if way == "t2i" else degrees(queries, candidates)


def check(degrees: ImageDegrees, data: Dataset) -> None:
    """Raises DataError for degrees that are constant or NaN, as the first captions show."""
    captions, images = sides(data, "t2i")
    shown = relevance_of(degrees, "t2i", captions[:SHOWN_TO_CHECK], images)
    if not shown.min() < shown.max():
        raise DataError(
            f"the degrees of images and captions of {data.name} run from {shown.min():g} to {shown.max():g}, so that nothing is "
            "more relevant than anything else: choose other --degrees."
        )


def in_order(scores: Tensor) -> Tensor:
    """Candidates of each query, best first; equal ones in the order of the data."""
    return scores.argsort(dim=1, descending=True, stable=True)
