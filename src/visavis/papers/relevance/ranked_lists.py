"""Ranked lists of several models for the same queries, as in figure 2 of the Ladder paper, and their
statistics: irrelevant items among the top, CS@K by K, and nDCG@10 of queries without a match.

A query without a match is the long-tail query of the Ladder paper, for which no matching candidate
exists. Here the query's own images or captions are removed from the candidates.

The Ladder paper marks totally irrelevant items in its figure 2 but does not define them. Relevance
values differ in scale between estimators and, with word vectors, between queries. An item is
therefore compared with all candidates of its query.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from visavis.core.blocking import Score
from visavis.core.encoded import DIRECTIONS, Direction, Encoded
from visavis.core.errors import VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Cell, Column, Row, Table, Value
from visavis.data.dataset import Dataset
from visavis.data.words import tokenize
from visavis.evaluation.metrics import COHERENT_SCORE, ndcg_at
from visavis.losses.scoring import max_query_rows, score_direction, select_items
from visavis.models.base import get_vectors
from visavis.papers.relevance.base import (
    CaptionAggregation,
    ImageRelevance,
    RelevanceEstimator,
)
from visavis.papers.relevance.ranking_coherence import ranking_coherence

DIRECTION_ORDER: tuple[Direction, ...] = ("t2i", "i2t")
"""The directions in the order in which reports show them."""
COHERENCE_CUTOFFS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Values of K at which CS@K is measured."""

BAND_SHARES = (1.0, 0.5, 0.2, 0.02)
"""Share of the candidates that are not irrelevant in each relevance band or above."""

COUNTING_BYTES_PER_PAIR = 96.0
"""Bytes per pair while lists are measured: scores, their order, relevance, bands, and nDCG."""
NO_MATCH_CUTOFF = 10
"""K of the nDCG of queries without a match."""
MIXERS = tuple(
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Odd multipliers of SplitMix64 (Steele et al., 2014), as signed integers of 64 bits."""


@dataclass(frozen=True)
class RelevanceBands:
    """Relevance of an item among all candidates of its query, in bands 0 (irrelevant) to 4 (most
    relevant).

    Attributes:
        irrelevant_share: Share of a query's candidates in band 0, which is its expected share in a
            random list.
    """

    irrelevant_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.irrelevant_share < 1:
            raise VisavisError(
                "irrelevant_share: expected a number between 0 and 1 such as 0.5, got "
                f"{self.irrelevant_share:g}."
            )

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Share of the candidates below each of the bands 1 to 4."""
        return tuple(round(1 - (1 - self.irrelevant_share) * tail, 6) for tail in BAND_SHARES)

    def bounds(self, relevance: Tensor) -> Tensor:
        """Compute the highest relevance below each of the bands 1 to 4, ``[Q, C]`` to ``[Q, 4]``."""
        # Without the small number, rounding would skip a candidate at exact shares.
        positions = [math.ceil(share * relevance.shape[1] - 1e-9) - 1 for share in self.quantiles]
        return relevance.sort(dim=1).values[:, positions]

    def bands(self, relevance: Tensor) -> Tensor:
        """Assign candidates to bands. Equal values share the lower band, but the highest relevance
        of a query is never in band 0.
        """
        # [Q, C], the number of bounds that each relevance exceeds.
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
    def from_values(cls, values: ArrayLike, images: np.ndarray) -> ClusteredMean:
        """Average the values of queries ``[Q]``, NaN where undefined."""
        numbers = np.asarray(values, np.float64)
        defined = ~np.isnan(numbers)
        mean = float(numbers[defined].mean()) if defined.any() else float("nan")
        # Captions of one image are not independent: their residuals are added first.
        # The standard error of a clustered mean, times 1.96 for 95 % of a normal distribution.
        residuals = np.bincount(images[defined], numbers[defined] - mean)
        return cls(
            mean,
            1.96 * float(np.sqrt((residuals**2).sum())) / max(int(defined.sum()), 1),
            int((~defined).sum()),
        )

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
    def random(cls, data: Dataset, seed: int) -> Ranker:
        """Create a ranker with a random order, as a baseline."""
        images, texts = (
            Encoded(torch.arange(len(items))) for items in (data.images, data.captions)
        )

        # The score of a pair depends only on the seed and the pair, so block sizes do not change
        # the order.
        def score(visual: Encoded, text: Encoded) -> Tensor:
            bits = _hash(
                get_vectors(visual)[:, None] + _hash(get_vectors(text) + _hash(torch.tensor(seed)))
            )
            # 53 random bits as a number in [0, 1).
            return (bits >> 11) / 2**53 + 0.5

        return cls("random", "at random", images, texts, score)

    def order(self, direction: Direction, queries: Tensor, memory: MemoryLimit = None) -> Tensor:
        """Rank all candidates of queries, best first, ``[Q, C]``. Ties keep the order of the data."""
        items = (
            (self.images, select_items(self.texts, queries))
            if direction == "t2i"
            else (select_items(self.images, queries), self.texts)
        )
        return score_direction(self.score, *items, direction, memory).argsort(
            dim=1, descending=True, stable=True
        )


def _hash(numbers: Tensor) -> Tensor:
    """Pseudo-random 64-bit integers from integers."""
    # Overflow is part of the hash.
    numbers = (numbers + 1) * MIXERS[0]
    for mixer in MIXERS[1:]:
        numbers = (numbers ^ (numbers >> 31)) * mixer
    return numbers ^ (numbers >> 31)


@dataclass(frozen=True)
class ListStatistics:
    """Statistics of the lists of one ranker in one direction.

    Attributes:
        irrelevant: Number of irrelevant items among the top of a list.
        irrelevant_difference: Difference of this number to the first ranker, query by query.
        coherence_by_k: CS@K by K.
        no_match: nDCG@10 of all queries without their own items among the candidates.
        no_match_difference: Difference of this nDCG to the first ranker, query by query.
    """

    irrelevant: ClusteredMean
    irrelevant_difference: ClusteredMean
    coherence_by_k: dict[int, ClusteredMean]
    no_match: ClusteredMean
    no_match_difference: ClusteredMean

    @property
    def full_list_coherence(self) -> ClusteredMean:
        """CS at the largest K."""
        return self.coherence_by_k[max(self.coherence_by_k)]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "irrelevant": self.irrelevant.to_json(),
            "irrelevant_difference": self.irrelevant_difference.to_json(),
            "coherent_score": [
                {"k": k, **score.to_json()} for k, score in self.coherence_by_k.items()
            ],
            "no_match_ndcg": self.no_match.to_json(),
            "no_match_ndcg_difference": self.no_match_difference.to_json(),
        }


def measure_lists(
    rankers: Sequence[Ranker],
    estimator: RelevanceEstimator,
    relevance: ImageRelevance,
    data: Dataset,
    bands: RelevanceBands,
    top: int,
    progress: Progress,
    memory: MemoryLimit = None,
) -> dict[Direction, list[ListStatistics]]:
    """Measure the ranked lists of several models in both directions, over all queries."""
    # CS@K as in `visavis evaluate`.
    coherences = []
    for number, ranker in enumerate(rankers, 1):
        coherences.append(
            ranking_coherence(
                ranker.images,
                ranker.texts,
                ranker.score,
                data,
                estimator,
                ks=COHERENCE_CUTOFFS,
                memory=memory,
            )
        )
        progress.update("coherent scores", number, len(rankers), 0.0)

    statistics: dict[Direction, list[ListStatistics]] = {}
    own_images = torch.from_numpy(data.image_of)
    for direction in DIRECTION_ORDER:
        # For each ranker, blocks of the number of irrelevant items among the top of a query, and of
        # the nDCG@10 without the query's own items.
        counts_of: list[list[Tensor]] = [[] for _ in rankers]
        gains_of: list[list[Tensor]] = [[] for _ in rankers]
        queries, candidates = (
            (data.captions, data.images) if direction == "t2i" else (data.images, data.captions)
        )
        for block in torch.arange(len(queries)).split(
            max_query_rows(len(candidates), COUNTING_BYTES_PER_PAIR, memory)
        ):
            values = candidate_relevance(relevance, direction, block, data)  # [block, C]
            irrelevant = bands.bands(values) == 0
            positive = (
                own_images[block, None] == torch.arange(len(candidates))
                if direction == "t2i"
                else block[:, None] == own_images
            )
            for ranker, blocks, gain_blocks in zip(rankers, counts_of, gains_of, strict=True):
                order = ranker.order(direction, block, memory)
                blocks.append(irrelevant.gather(1, order[:, :top]).sum(1).double())
                gain_blocks.append(ndcg_without_match(order, values, positive))
            done = int(block[-1]) + 1
            progress.update(f"lists, {DIRECTIONS[direction]}", done, len(queries), 0.0)
        counts = [torch.cat(blocks) for blocks in counts_of]  # [Q] each
        gains = [torch.cat(blocks) for blocks in gains_of]
        images = np.arange(len(data.images))
        image_of = data.image_of if direction == "t2i" else images
        # Captions of an image form a cluster. CS@K has one value per image in both directions.
        statistics[direction] = [
            ListStatistics(
                ClusteredMean.from_values(count, image_of),
                ClusteredMean.from_values(count - counts[0], image_of),
                {
                    k: ClusteredMean.from_values(
                        coherence.per_query[COHERENT_SCORE.key(direction, k)], images
                    )
                    for k in coherence.ks
                },
                ClusteredMean.from_values(gain, image_of),
                ClusteredMean.from_values(gain - gains[0], image_of),
            )
            for count, gain, coherence in zip(counts, gains, coherences, strict=True)
        ]
    return statistics


def ndcg_without_match(
    order: Tensor, relevance: Tensor, positive: Tensor, k: int = NO_MATCH_CUTOFF
) -> Tensor:
    """Compute nDCG@K ``[Q]`` as if the positives of a query were not among the candidates. NaN
    where no other candidate has any relevance.
    """
    # Scores that give this order: the best candidate has the highest one.
    places = torch.arange(order.shape[1], 0, -1, dtype=torch.float64).expand(order.shape)
    scores = torch.empty(order.shape, dtype=torch.float64).scatter(1, order.cpu(), places)
    # Positives come last and have no relevance, so they are neither found nor expected.
    return ndcg_at(scores.masked_fill(positive, 0.0), relevance.masked_fill(positive, 0.0), k=k)


def candidate_relevance(
    relevance: ImageRelevance, direction: Direction, queries: Tensor, data: Dataset
) -> Tensor:
    """Compute the relevance of all candidates to queries, ``[Q, C]``."""
    if direction == "t2i":
        return relevance(torch.arange(len(data.images)), queries).T
    return relevance(queries, torch.arange(len(data.captions)))


@dataclass(frozen=True)
class ListItem:
    """One item of a ranked list.

    Attributes:
        index: Index of the image or caption.
        relevance: Graded relevance to the query.
        band: Relevance band. See `RelevanceBands`.
        is_positive: Whether image and caption belong together in the data set.
    """

    index: int
    relevance: float
    band: int
    is_positive: bool

    @property
    def irrelevant(self) -> bool:
        """Whether the item is in band 0."""
        return self.band == 0


@dataclass(frozen=True)
class TopList:
    """The top items of a model's ranked list for a query.

    Attributes:
        run: Name of the model.
        items: The items, best first.
        best_positive_rank: Rank of the best positive in the whole list, starting at 1.
    """

    run: str
    items: tuple[ListItem, ...]
    best_positive_rank: int

    @property
    def num_irrelevant(self) -> int:
        """Number of irrelevant items."""
        return sum(item.irrelevant for item in self.items)


@dataclass(frozen=True)
class QueryLists:
    """Top lists of every model for one query.

    Attributes:
        direction: "t2i" for a caption as the query, "i2t" for an image.
        index: Index of the caption or image.
        irrelevant_bound: Highest relevance of an irrelevant candidate.
        lists: The list of each model.
    """

    direction: Direction
    index: int
    irrelevant_bound: float
    lists: tuple[TopList, ...]

    def image(self, data: Dataset) -> int:
        """Look up the index of the query image, or of the image of the query caption."""
        return int(data.image_of[self.index]) if self.direction == "t2i" else self.index

    def to_json(self, data: Dataset) -> dict[str, Any]:
        """Return a JSON object with names and captions."""
        image = data.images[self.image(data)].name
        names = [image.name for image in data.images] if self.direction == "t2i" else data.captions
        return {
            "direction": self.direction,
            "query": data.captions[self.index] if self.direction == "t2i" else image,
            "own_image": image,
            "irrelevant_bound": self.irrelevant_bound,
            "lists": [
                {
                    "run": top_list.run,
                    "irrelevant": top_list.num_irrelevant,
                    "best_positive_rank": top_list.best_positive_rank,
                    "items": [
                        {
                            "item": names[item.index],
                            "relevance": item.relevance,
                            "irrelevant": item.irrelevant,
                            "is_positive": item.is_positive,
                        }
                        for item in top_list.items
                    ],
                }
                for top_list in self.lists
            ],
        }


def query_lists(
    direction: Direction,
    index: int,
    rankers: Sequence[Ranker],
    relevance: ImageRelevance,
    data: Dataset,
    bands: RelevanceBands,
    top: int,
    memory: MemoryLimit = None,
) -> QueryLists:
    """Collect the top items of every model for one query."""
    query = torch.tensor([index])
    values = candidate_relevance(relevance, direction, query, data)  # [1, C]
    in_bands = bands.bands(values)[0]  # [C]
    # The highest relevance in band 0.
    bound = bands.bounds(values)[0, 0].item()
    positive = torch.from_numpy(  # [C]
        np.arange(len(data.images)) == data.image_of[index]
        if direction == "t2i"
        else data.image_of == index
    )

    lists = []
    for ranker in rankers:
        order = ranker.order(direction, query, memory)[0]  # [C], best first
        items = tuple(
            ListItem(i, values[0, i].item(), int(in_bands[i]), bool(positive[i]))
            for i in order[:top].tolist()
        )
        lists.append(TopList(ranker.name, items, int(positive[order].nonzero()[0]) + 1))
    return QueryLists(direction, index, bound, tuple(lists))


def choose_queries(
    queries: int | Sequence[str], data: Dataset, seed: int
) -> list[tuple[Direction, int]]:
    """Sample a number of images, each also with a random caption, or find the queries by text."""
    if not isinstance(queries, int):
        return [_find_query(text, data) for text in queries]
    if not 1 <= queries <= len(data.images):
        raise VisavisError(
            f"queries: expected 1 to {len(data.images):,}, the number of images of the split, got "
            f"{queries}."
        )
    # Captions come first, as in the report.
    rng = np.random.default_rng(seed)
    images = rng.choice(len(data.images), queries, replace=False).tolist()
    return [("t2i", int(rng.choice(data.captions_of[i]))) for i in images] + [
        ("i2t", i) for i in images
    ]


def _find_query(text: str, data: Dataset) -> tuple[Direction, int]:
    for i, image in enumerate(data.images):
        if text in (image.name, PurePath(image.name).name):
            return "i2t", i
    words = tokenize(text)
    for i, caption in enumerate(data.captions):
        if tokenize(caption) == words:
            return "t2i", i
    # With a cutoff of 0 there is always a closest text.
    (close,) = difflib.get_close_matches(
        text, [*data.captions, *(image.name for image in data.images)], n=1, cutoff=0
    )
    raise VisavisError(
        f"queries: expected captions or image names of split {data.images[0].split} of "
        f"{data.name}, got {text!r}. Did you mean {close!r}?"
    )


def mean_column(title: str, *, digits: int = 3, group: str = "") -> Column:
    """Make a column of means over queries with their intervals."""
    # z: a rounded -0.0 is 0.0.
    return Column(title, f"z.{digits}f", group=group, missing="–", spread="±{}")


@dataclass(frozen=True)
class RankedListComparison(Result):
    """Ranked lists of several models for the same queries, and their statistics.

    Attributes:
        folder: Folder of the report.
        data: The ranked split.
        estimator: The relevance estimator.
        caption_aggregation: How the captions of an image are combined.
        top: Length of the lists.
        bands: Bounds of the relevance bands.
        rankers: The models, and last the random order.
        trained_on_estimator: Names of the models that were trained with the same estimator.
        statistics: Statistics of each ranker, by direction.
        queries: Lists of the chosen queries.
    """

    ROWS: ClassVar[str] = "runs"

    folder: Path
    data: Dataset
    estimator: RelevanceEstimator
    caption_aggregation: CaptionAggregation
    top: int
    bands: RelevanceBands
    rankers: tuple[Ranker, ...]
    trained_on_estimator: tuple[str, ...]
    statistics: Mapping[Direction, Sequence[ListStatistics]]
    queries: tuple[QueryLists, ...]

    @property
    def split(self) -> str:
        """Name of the ranked split."""
        return self.data.images[0].split

    def tables(self) -> list[Table]:
        """Return totally irrelevant items with coherence scores, and the order without a match."""
        titles = [DIRECTIONS[direction] for direction in DIRECTION_ORDER]
        first = f"minus {self.rankers[0].name}"
        irrelevant = [Column("totally irrelevant", is_text=True)]
        no_match = [Column("without a match, nDCG@10", is_text=True)]
        for title in titles:
            irrelevant += [mean_column(title, digits=2), mean_column("CS")]
            no_match += [mean_column(title), mean_column(first)]
        note = (
            f"Totally irrelevant items in the top {self.top}, mean over all queries of split "
            f"{self.split} with 95 % intervals: items no more relevant than "
            f"{100 * self.bands.irrelevant_share:.4g} % of all candidates, by {self.estimator!r}. "
            "CS: coherence score of the whole list."
        )
        order = (
            "Order by relevance where the query's own items are not among the candidates "
            "(long-tail queries)."
        )
        report = f"Report: {self.folder / 'report.html'}"
        irrelevant_rows = self.mean_rows(lambda each: [each.irrelevant, each.full_list_coherence])
        no_match_rows = self.mean_rows(lambda each: [each.no_match, each.no_match_difference])
        return [
            Table(tuple(irrelevant), irrelevant_rows, (note,)),
            Table(tuple(no_match), no_match_rows, (order, report)),
        ]

    def mean_rows(
        self,
        select: Callable[[ListStatistics], Sequence[ClusteredMean]],
        *,
        with_objective: bool = False,
    ) -> tuple[Row, ...]:
        """Select means of both directions. The difference of the first ranker to itself is missing."""
        rows: list[Row] = []
        for index, ranker in enumerate(self.rankers):
            note = ranker.objective if with_objective else ""
            row: list[Value | Cell] = [Cell(ranker.name, note=note)]
            for direction in DIRECTION_ORDER:
                result = self.statistics[direction][index]
                # Compared by identity: equal means are not the same difference.
                differences = (result.irrelevant_difference, result.no_match_difference)
                for mean in select(result):
                    is_first = index == 0 and any(mean is each for each in differences)
                    row.append(None if is_first else Cell(mean.mean, (mean.half_width,)))
            rows.append(tuple(row))
        return tuple(rows)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with all statistics, and the lists of the chosen queries with names
        and captions.
        """
        return {
            "folder": str(self.folder),
            "data": self.data.name,
            "split": self.split,
            "images": len(self.data.images),
            "captions": len(self.data.captions),
            "relevance": repr(self.estimator),
            "caption_aggregation": self.caption_aggregation,
            "top": self.top,
            "irrelevant_share": self.bands.irrelevant_share,
            "runs": [
                {
                    "name": ranker.name,
                    "objective": ranker.objective,
                    "trained_on_estimator": ranker.name in self.trained_on_estimator,
                    **{
                        direction: self.statistics[direction][number].to_json()
                        for direction in DIRECTION_ORDER
                    },
                }
                for number, ranker in enumerate(self.rankers)
            ],
            "queries": [query.to_json(self.data) for query in self.queries],
        }
