"""Statistics of the ranked lists of models: irrelevant items among the top, and CS@K by K.

The Ladder paper marks totally irrelevant items in its figure 2 but does not define them. Relevance values differ in scale between estimators and,
with word vectors, between queries. An item is therefore compared with all candidates of its query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.blocking import Score
from visavis.data.dataset import Dataset
from visavis.errors import DataError, VisavisError
from visavis.graded.estimators.base import CaptionAggregation, ImageRelevance, RelevanceEstimator
from visavis.graded.ranking_coherence import RankingCoherence, ranking_coherence
from visavis.memory_budget import MemoryLimit
from visavis.metrics import COHERENT_SCORE
from visavis.models import Matcher
from visavis.models.base import get_vectors
from visavis.models.inference import device_score
from visavis.progress import Progress
from visavis.scoring import max_query_rows, score_direction, select_items
from visavis.types import DIRECTIONS, Direction, Encoded

DIRECTION_ORDER: tuple[Direction, ...] = ("t2i", "i2t")
"""The directions in the order in which reports show them."""
COHERENCE_CUTOFFS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Values of K at which CS@K is measured."""

BAND_SHARES = (1.0, 0.5, 0.2, 0.02)
"""Share of the candidates that are not irrelevant in each relevance band or above."""

COUNTING_BYTES_PER_PAIR = 48.0
"""Bytes per pair while irrelevant items are counted: scores, their order, relevance and bands."""
CHECKED_QUERIES = 128
"""Number of captions whose relevance values are checked before the measurement."""
MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Odd multipliers of SplitMix64 (Steele et al., 2014)."""


@dataclass(frozen=True)
class RelevanceBands:
    """Relevance of an item among all candidates of its query, in bands 0 (irrelevant) to 4 (most relevant).

    Attributes:
        irrelevant_share: Share of a query's candidates in band 0, which is its expected share in a random list.
    """

    irrelevant_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.irrelevant_share < 1:
            raise VisavisError(f"irrelevant_share: expected a number between 0 and 1 such as 0.5, got {self.irrelevant_share:g}.")

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Share of the candidates below each of the bands 1 to 4."""
        return tuple(round(1 - (1 - self.irrelevant_share) * tail, 6) for tail in BAND_SHARES)

    def bounds(self, relevance: Tensor) -> Tensor:
        """Compute the highest relevance below each band.

        Args:
            relevance: Relevance of all candidates, shape ``[Q, C]``.

        Returns:
            Bound of bands 1 to 4 of each query, shape ``[Q, 4]``.
        """
        positions = [math.ceil(share * relevance.shape[1] - 1e-9) - 1 for share in self.quantiles]
        return relevance.sort(dim=1).values[:, positions]

    def bands(self, relevance: Tensor) -> Tensor:
        """Assign candidates to bands. Equal values share the lower band, but the highest relevance of a query is never in band 0.

        Args:
            relevance: Relevance of all candidates, shape ``[Q, C]``.

        Returns:
            Band of each candidate, shape ``[Q, C]``.
        """
        bands = (relevance[:, :, None] > self.bounds(relevance)[:, None]).sum(2)
        return torch.where(relevance == relevance.amax(1, keepdim=True), bands.clamp(min=1), bands)


@dataclass(frozen=True)
class ClusteredMean:
    """Mean over queries with a 95 % interval, in which the captions of an image form a cluster.

    Attributes:
        mean: Mean of the defined values, NaN if there are none.
        half_width: Half of the width of the interval.
        undefined: Number of queries without a value.
    """

    mean: float
    half_width: float
    undefined: int

    @classmethod
    def from_values(cls, values: Tensor, images: np.ndarray) -> ClusteredMean:
        """Average the values of queries.

        Args:
            values: Value of each query, NaN where undefined, shape ``[Q]``.
            images: Image of each query, shape ``[Q]``.

        Returns:
            The mean and its interval.
        """
        numbers, defined = values.double().numpy(), ~np.isnan(values.numpy())
        mean = float(numbers[defined].mean()) if defined.any() else float("nan")
        residuals = np.bincount(images[defined], numbers[defined] - mean)
        return cls(mean, 1.96 * float(np.sqrt((residuals**2).sum())) / max(int(defined.sum()), 1), int((~defined).sum()))

    def to_json(self) -> dict[str, float | int | None]:
        """Return a JSON object."""
        return {**asdict(self), "mean": None if math.isnan(self.mean) else self.mean}


@dataclass(frozen=True, eq=False)
class Ranker:
    """A model with the encoded images and texts of a split, or a random order.

    Attributes:
        name: Name of the run's folder.
        objective: Objective of the training, or "zero-shot".
        images: Encoded images.
        texts: Encoded captions.
        score: Score function.
    """

    name: str
    objective: str
    images: Encoded
    texts: Encoded
    score: Score

    @classmethod
    def from_model(cls, name: str, objective: str, matcher: Matcher, images: Encoded, texts: Encoded) -> Ranker:
        """Create a ranker from a model.

        Args:
            name: Name of the run's folder.
            objective: Objective of the training, or "zero-shot".
            matcher: The model.
            images: Encoded images.
            texts: Encoded captions.

        Returns:
            The ranker.
        """
        return cls(name, objective, images, texts, device_score(matcher))

    @classmethod
    def random(cls, data: Dataset, seed: int) -> Ranker:
        """Create a ranker with a random order, as a baseline.

        The score of a pair depends only on the seed and the pair, so block sizes do not change the order.

        Args:
            data: The ranked split.
            seed: Random seed.

        Returns:
            The ranker.
        """
        images, texts = (Encoded(torch.arange(len(items))) for items in (data.images, data.captions))

        def score(visual: Encoded, text: Encoded) -> Tensor:
            bits = _hash(get_vectors(visual)[:, None] + _hash(get_vectors(text) + _hash(torch.tensor(seed))))
            return (bits >> 11) / 2**53 + 0.5

        return cls("random", "at random", images, texts, score)

    def scores(self, direction: Direction, queries: Tensor, memory: MemoryLimit = None) -> Tensor:
        """Score queries against all candidates.

        Args:
            direction: "i2t" or "t2i".
            queries: Indices of the queries, shape ``[Q]``.
            memory: Memory for blocks of scores.

        Returns:
            Scores, shape ``[Q, C]``.
        """
        items = (self.images, select_items(self.texts, queries)) if direction == "t2i" else (select_items(self.images, queries), self.texts)
        return score_direction(self.score, *items, direction, memory)


def _hash(numbers: Tensor) -> Tensor:
    """Pseudo-random 64-bit integers from integers."""
    numbers = (numbers + 1) * _signed(MIXERS[0])
    for mixer in MIXERS[1:]:
        numbers = (numbers ^ (numbers >> 31)) * _signed(mixer)
    return numbers ^ (numbers >> 31)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


@dataclass(frozen=True)
class ListStatistics:
    """Statistics of the lists of one ranker in one direction.

    Attributes:
        irrelevant: Number of irrelevant items among the top of a list.
        irrelevant_difference: Difference of this number to the first ranker, query by query.
        coherence_by_k: CS@K by K.
    """

    irrelevant: ClusteredMean
    irrelevant_difference: ClusteredMean
    coherence_by_k: dict[int, ClusteredMean]

    @property
    def full_list_coherence(self) -> ClusteredMean:
        """CS at the largest K."""
        return self.coherence_by_k[max(self.coherence_by_k)]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "irrelevant": self.irrelevant.to_json(),
            "irrelevant_difference": self.irrelevant_difference.to_json(),
            "coherent_score": [{"k": k, **score.to_json()} for k, score in self.coherence_by_k.items()],
        }


def measure_lists(
    rankers: Sequence[Ranker],
    estimator: RelevanceEstimator,
    caption_aggregation: CaptionAggregation,
    data: Dataset,
    bands: RelevanceBands,
    top: int,
    progress: Progress,
    memory: MemoryLimit = None,
) -> dict[Direction, list[ListStatistics]]:
    """Measure the ranked lists of several models in both directions.

    Irrelevant items are counted in the lists of all queries. CS@K is that of ``visavis evaluate``.

    Args:
        rankers: The models.
        estimator: The relevance estimator.
        caption_aggregation: How the captions of an image are combined.
        data: The ranked split.
        bands: Bounds of the relevance bands.
        top: Length of the lists.
        progress: Receives the progress.
        memory: Memory for blocks of scores.

    Returns:
        Statistics of each ranker, by direction.
    """
    relevance, coherences = estimator.for_dataset(data, caption_aggregation), []
    for number, ranker in enumerate(rankers, 1):
        coherences.append(
            ranking_coherence(ranker.images, ranker.texts, ranker.score, data, estimator, ks=COHERENCE_CUTOFFS, memory=memory)
        )
        progress.update("coherent scores", number, len(rankers), 0.0)

    def measure(direction: Direction) -> list[ListStatistics]:
        image_of = data.image_of if direction == "t2i" else np.arange(len(data.images))
        counts = _count_irrelevant(rankers, direction, relevance, data, bands, top, progress, memory)
        return [
            ListStatistics(
                ClusteredMean.from_values(count, image_of),
                ClusteredMean.from_values(count - counts[0], image_of),
                _coherence_by_k(coherence, direction),
            )
            for count, coherence in zip(counts, coherences, strict=True)
        ]

    return {direction: measure(direction) for direction in DIRECTION_ORDER}


def _coherence_by_k(coherence: RankingCoherence, direction: Direction) -> dict[int, ClusteredMean]:
    by_k = {k: coherence.per_query[COHERENT_SCORE.key(direction, k)] for k in coherence.ks}
    return {k: ClusteredMean.from_values(torch.from_numpy(values), np.arange(len(values))) for k, values in by_k.items()}


def _count_irrelevant(
    rankers: Sequence[Ranker],
    direction: Direction,
    relevance: ImageRelevance,
    data: Dataset,
    bands: RelevanceBands,
    top: int,
    progress: Progress,
    memory: MemoryLimit = None,
) -> list[Tensor]:
    """Number of irrelevant items among the top of each query ``[Q]``, for each ranker."""
    all_queries, candidates = query_and_candidate_indices(data, direction)
    counts: list[list[Tensor]] = [[] for _ in rankers]
    for queries in all_queries.split(max_query_rows(len(candidates), COUNTING_BYTES_PER_PAIR, memory)):
        irrelevant = bands.bands(relevance_block(relevance, direction, queries, candidates)) == 0
        for ranker, numbers in zip(rankers, counts, strict=True):
            first = rank_order(ranker.scores(direction, queries, memory))[:, :top]
            numbers.append(irrelevant.gather(1, first).sum(1).double())
        progress.update(f"lists, {DIRECTIONS[direction]}", int(queries[-1]) + 1, len(all_queries), 0.0)
    return [torch.cat(numbers) for numbers in counts]


def query_and_candidate_indices(data: Dataset, direction: Direction) -> tuple[Tensor, Tensor]:
    """List the indices of all queries and candidates of a direction.

    Args:
        data: The ranked split.
        direction: "i2t" or "t2i".

    Returns:
        Indices of queries, shape ``[Q]``, and of candidates, shape ``[C]``.
    """
    captions, images = torch.arange(len(data.captions)), torch.arange(len(data.images))
    return (captions, images) if direction == "t2i" else (images, captions)


def relevance_block(relevance: ImageRelevance, direction: Direction, queries: Tensor, candidates: Tensor) -> Tensor:
    """Compute the relevance of candidates to queries.

    Args:
        relevance: Relevance of the captions to the images.
        direction: "i2t" or "t2i".
        queries: Indices of queries, shape ``[Q]``.
        candidates: Indices of candidates, shape ``[C]``.

    Returns:
        Relevance, shape ``[Q, C]``.
    """
    return relevance(candidates, queries).T if direction == "t2i" else relevance(queries, candidates)


def check_relevance_varies(relevance: ImageRelevance, data: Dataset) -> None:
    """Check that relevance values of the first captions differ.

    Args:
        relevance: Relevance of the captions to the images.
        data: The ranked split.

    Raises:
        DataError: If all values are equal or NaN.
    """
    captions, images = query_and_candidate_indices(data, "t2i")
    values = relevance_block(relevance, "t2i", captions[:CHECKED_QUERIES], images)
    if not values.min() < values.max():
        raise DataError(
            f"relevance of the captions of {data.name}: expected different values, got only values from {values.min():g} to {values.max():g}. "
            "Choose another estimator with --relevance."
        )


def rank_order(scores: Tensor) -> Tensor:
    """Sort the candidates of each query, best first. Ties keep the order of the data.

    Args:
        scores: Scores, shape ``[Q, C]``.

    Returns:
        Indices of candidates, shape ``[Q, C]``.
    """
    return scores.argsort(dim=1, descending=True, stable=True)
