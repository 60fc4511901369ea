"""Top items of the ranked lists of several models for the same queries, as in figure 2 of the
Ladder paper.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar

import numpy as np
import torch

from visavis.core.encoded import Direction
from visavis.core.errors import VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.notebook import NotebookTable
from visavis.data.dataset import Dataset
from visavis.data.vocabulary import tokenize
from visavis.evaluation.graded.estimators.base import (
    CaptionAggregation,
    ImageRelevance,
    RelevanceEstimator,
)
from visavis.evaluation.graded.list_statistics import (
    DIRECTION_ORDER,
    ListStatistics,
    Ranker,
    RelevanceBands,
    candidate_relevance,
)


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
        """Look up the query image, or the image of the query caption.

        Args:
            data: The ranked split.

        Returns:
            Index of the image.
        """
        return int(data.image_of[self.index]) if self.direction == "t2i" else self.index

    def to_json(self, data: Dataset) -> dict[str, Any]:
        """Return a JSON object with names and captions.

        Args:
            data: The ranked split.

        Returns:
            The query and its lists.
        """
        image = data.images[self.image(data)].name
        names = [image.name for image in data.images] if self.direction == "t2i" else data.captions

        def list_to_json(top_list: TopList) -> dict[str, Any]:
            return {
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

        return {
            "direction": self.direction,
            "query": data.captions[self.index] if self.direction == "t2i" else image,
            "own_image": image,
            "irrelevant_bound": self.irrelevant_bound,
            "lists": [list_to_json(top_list) for top_list in self.lists],
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
    """Collect the top items of every model for one query.

    Args:
        direction: "t2i" or "i2t".
        index: Index of the query.
        rankers: The models.
        relevance: Relevance of the captions to the images.
        data: The ranked split.
        bands: Bounds of the relevance bands.
        top: Length of the lists.
        memory: Memory for blocks of scores.

    Returns:
        The lists.
    """
    query = torch.tensor([index])
    values = candidate_relevance(relevance, direction, query, data)
    in_bands, bound = bands.bands(values)[0], bands.bounds(values)[0, 0].item()
    positive = torch.from_numpy(
        np.arange(len(data.images)) == data.image_of[index]
        if direction == "t2i"
        else data.image_of == index
    )

    def top_list(ranker: Ranker) -> TopList:
        order = ranker.order(direction, query, memory)[0]
        items = (
            ListItem(i, values[0, i].item(), int(in_bands[i]), bool(positive[i]))
            for i in order[:top].tolist()
        )
        return TopList(ranker.name, tuple(items), int(positive[order].nonzero()[0]) + 1)

    return QueryLists(direction, index, bound, tuple(map(top_list, rankers)))


def choose_queries(
    queries: int | Sequence[str], data: Dataset, seed: int
) -> list[tuple[Direction, int]]:
    """Sample queries or find them by text.

    Args:
        queries: Number of random images, each also with a random caption. Or captions (case and
            punctuation are ignored) and image names.
        data: The ranked split.
        seed: Random seed.

    Returns:
        Direction and index of each query.

    Raises:
        VisavisError: If the number is too large, or a caption or name is not in the data.
    """
    if not isinstance(queries, int):
        return [_find_query(text, data) for text in queries]
    if not 1 <= queries <= len(data.images):
        raise VisavisError(
            f"queries: expected 1 to {len(data.images):,}, the number of images of the split, got "
            f"{queries}."
        )
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
    (close,) = difflib.get_close_matches(
        text, [*data.captions, *(image.name for image in data.images)], n=1, cutoff=0
    )
    raise VisavisError(
        f"queries: expected captions or image names of split {data.images[0].split} of "
        f"{data.name}, got {text!r}. Did you mean {close!r}?"
    )


@dataclass(frozen=True)
class RankedListComparison(NotebookTable):
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
