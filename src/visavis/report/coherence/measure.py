"""How coherent the lists of runs are: how much in the top of a list is totally irrelevant, and CS@K against K.

What is totally irrelevant the Ladder paper, whose figure 2 marks it, does not say. Degrees differ in scale from estimator
to estimator and, with word vectors, from query to query: here an item is judged among all candidates of the same query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.errors import DataError, VisavisError
from visavis.metrics.coherent import coherent_scores
from visavis.models import Matcher
from visavis.supervision.graded import Degrees, ImageBy, ImageDegrees
from visavis.types import Encoded
from visavis.watch import Watch

Way = Literal["t2i", "i2t"]
WAYS: dict[Way, str] = {"t2i": "text to image", "i2t": "image to text"}
CUTS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Where CS@K is measured, besides the whole list."""

TAILS = (1.0, 0.5, 0.2, 0.02)
"""Of the candidates that are not irrelevant, how many reach each band of relevance."""

QUERIES = 128


@dataclass(frozen=True)
class Scale:
    """How relevant an item is among all candidates of its query, in bands 0 to 4; band 0 is totally irrelevant.

    irrelevant: the share of its candidates that a query has in band 0. A random list has that share of them.
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
        """The highest degree below each band, query by query: ``[Q, 4]`` of ``[Q, C]``."""
        places = [math.ceil(share * relevance.shape[1] - 1e-9) - 1 for share in self.shares]
        return relevance.sort(dim=1).values[:, places]

    def bands(self, relevance: Tensor) -> Tensor:
        """The band of every candidate ``[Q, C]``. Equal degrees share the lower band, but the highest of a query is never irrelevant."""
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
        """values ``[Q]``, NaN where undefined. images ``[Q]``: captions of one image stand or fall together in the interval."""
        numbers, defined = values.double().numpy(), ~np.isnan(values.numpy())
        mean = float(numbers[defined].mean()) if defined.any() else float("nan")
        apart = np.bincount(images[defined], numbers[defined] - mean)
        return cls(mean, 1.96 * float(np.sqrt((apart**2).sum())) / max(int(defined.sum()), 1), int((~defined).sum()))

    def to_json(self) -> dict[str, float | int | None]:
        return {**asdict(self), "mean": None if math.isnan(self.mean) else self.mean}


class Ranker(Protocol):
    """What orders candidates: a run, or the lot. name: of the run's folder. objective: what it was trained with."""

    @property
    def name(self) -> str: ...

    @property
    def objective(self) -> str: ...

    def scores(self, way: Way, queries: Tensor, candidates: Tensor) -> Tensor:
        """The scores of queries with candidates, by index: ``[Q, C]``."""


@dataclass(frozen=True, eq=False)
class Ranked:
    """A run's best model with all images and texts of a split, encoded."""

    name: str
    objective: str
    matcher: Matcher
    images: Encoded
    texts: Encoded

    @torch.inference_mode()
    def scores(self, way: Way, queries: Tensor, candidates: Tensor) -> Tensor:
        device = next(self.matcher.parameters()).device
        images, texts = (candidates, queries) if way == "t2i" else (queries, candidates)
        scores = self.matcher.score(self.images[images].to(device), self.texts[texts].to(device)).float().cpu()
        return scores.T if way == "t2i" else scores


class Lot:
    """A random order."""

    name, objective = "random", "by lot"

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def scores(self, way: Way, queries: Tensor, candidates: Tensor) -> Tensor:
        return torch.rand(len(queries), len(candidates), generator=self.generator)


@dataclass(frozen=True)
class Coherence:
    """How coherent the lists of one ranker are, one way.

    irrelevant: how many items among the first are totally irrelevant. more: how many more than in the lists of the first
    ranker, query by query. scores: CS@K by K.
    """

    irrelevant: Mean
    more: Mean
    scores: dict[int, Mean]

    @property
    def whole(self) -> Mean:
        """CS of the whole list."""
        return self.scores[max(self.scores)]

    def to_json(self) -> dict[str, Any]:
        curve = [{"k": k, **score.to_json()} for k, score in self.scores.items()]
        return {"irrelevant": self.irrelevant.to_json(), "more_than_first": self.more.to_json(), "coherent_score": curve}


def measure(
    rankers: Sequence[Ranker], way: Way, degrees: Degrees, image: ImageBy, data: Dataset, scale: Scale, top: int, watch: Watch
) -> list[Coherence]:
    """One way, with every ranker. Items are counted in the lists of all queries; CS@K is of the first caption of each image."""
    image_of = data.image_of if way == "t2i" else np.arange(len(data.images))
    counts = count_irrelevant(rankers, way, degrees.between(data, image), data, scale, top, watch)
    scores = score_lists(rankers, way, degrees.between(data), data, watch)
    return [
        Coherence(
            Mean.of(own, image_of),
            Mean.of(own - counts[0], image_of),
            {k: Mean.of(values, np.arange(len(values))) for k, values in by_k.items()},
        )
        for own, by_k in zip(counts, scores, strict=True)
    ]


def count_irrelevant(
    rankers: Sequence[Ranker], way: Way, degrees: ImageDegrees, data: Dataset, scale: Scale, top: int, watch: Watch
) -> list[Tensor]:
    """How many of the first ``top`` items are totally irrelevant, for every query ``[Q]`` of each ranker."""
    everything = both(data)
    asked, candidates = everything if way == "t2i" else everything[::-1]
    counts: list[list[Tensor]] = [[] for _ in rankers]
    for queries in asked.split(QUERIES):
        irrelevant = scale.bands(relevance_of(degrees, way, queries, candidates)) == 0
        for ranker, numbers in zip(rankers, counts, strict=True):
            first = in_order(ranker.scores(way, queries, candidates))[:, :top]
            numbers.append(irrelevant.gather(1, first).sum(1).double())
        watch.work(f"lists, {WAYS[way]}", int(queries[-1]) + 1, len(asked), 0.0)
    return [torch.cat(numbers) for numbers in counts]


def score_lists(rankers: Sequence[Ranker], way: Way, degrees: ImageDegrees, data: Dataset, watch: Watch) -> list[dict[int, Tensor]]:
    """CS@K by K, for every query ``[Q]`` of each ranker, with the first caption of each image alone, as the released code counts."""
    firsts, images = torch.tensor([own[0] for own in data.captions_of]), torch.arange(len(data.images))
    asked, candidates = (firsts, images) if way == "t2i" else (images, firsts)
    cuts = [*(k for k in CUTS if k < len(images)), len(images)]
    scores: list[dict[int, list[Tensor]]] = [{k: [] for k in cuts} for _ in rankers]
    for number, queries in enumerate(asked.split(QUERIES), 1):
        relevance = relevance_of(degrees, way, queries, candidates)
        for ranker, values in zip(rankers, scores, strict=True):
            given = ranker.scores(way, queries, candidates)
            for k in cuts:
                values[k].append(coherent_scores(given, relevance, k=k))
        watch.work(f"CS@K, {WAYS[way]}", min(number * QUERIES, len(asked)), len(asked), 0.0)
    return [{k: torch.cat(values) for k, values in by_k.items()} for by_k in scores]


def both(data: Dataset) -> tuple[Tensor, Tensor]:
    """The indices of all captions, and of all images."""
    return torch.arange(len(data.captions)), torch.arange(len(data.images))


def relevance_of(degrees: ImageDegrees, way: Way, queries: Tensor, candidates: Tensor) -> Tensor:
    """The degrees of queries with candidates ``[Q, C]``."""
    return degrees(candidates, queries).T if way == "t2i" else degrees(queries, candidates)


def check(degrees: ImageDegrees, data: Dataset) -> None:
    """Raises DataError for degrees that are constant or NaN, as the first captions show."""
    captions, images = both(data)
    shown = relevance_of(degrees, "t2i", captions[:QUERIES], images)
    if not shown.min() < shown.max():
        raise DataError(
            f"the degrees of images and captions of {data.name} run from {shown.min():g} to {shown.max():g}, so that nothing is "
            "more relevant than anything else: choose other --degrees."
        )


def in_order(scores: Tensor) -> Tensor:
    """Candidates of each query, best first; equal ones in the order of the data."""
    return scores.argsort(dim=1, descending=True, stable=True)
