"""The top of the ranked lists of several runs for the same queries, item by item, as in figure 2 of the Ladder paper."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from visavis.comparison.measure import Ranker, Scale, in_order, relevance_of, sides
from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.degrees import ImageDegrees
from visavis.errors import VisavisError
from visavis.memory import Memory
from visavis.types import Direction


@dataclass(frozen=True)
class Item:
    """One item of a list: the index of its image or caption, its degree, the band of that, and whether it is the query's own."""

    index: int
    degree: float
    band: int
    own: bool

    @property
    def irrelevant(self) -> bool:
        return self.band == 0


@dataclass(frozen=True)
class TopList:
    """The top items of a run's list for a query, best first. own_rank: the rank of the query's first own item in the whole list."""

    run: str
    items: tuple[Item, ...]
    own_rank: int

    @property
    def num_irrelevant(self) -> int:
        return sum(item.irrelevant for item in self.items)


@dataclass(frozen=True)
class Query:
    """A caption as the query for images, or an image as the query for captions, by index, with the list of every run.

    bound: a candidate with a degree up to this is totally irrelevant.
    """

    way: Direction
    index: int
    bound: float
    lists: tuple[TopList, ...]

    def image(self, data: Dataset) -> int:
        """The index of the query's own image."""
        return int(data.image_of[self.index]) if self.way == "t2i" else self.index

    def to_json(self, data: Dataset) -> dict[str, Any]:
        """With names and captions instead of indices."""
        image = data.images[self.image(data)].name
        names = [image.name for image in data.images] if self.way == "t2i" else data.captions

        def list_to_json(top_list: TopList) -> dict[str, Any]:
            items = [{"item": names[i.index], "degree": i.degree, "irrelevant": i.irrelevant, "own": i.own} for i in top_list.items]
            return {"run": top_list.run, "irrelevant": top_list.num_irrelevant, "own_rank": top_list.own_rank, "items": items}

        query = data.captions[self.index] if self.way == "t2i" else image
        facts = {"way": self.way, "query": query, "own_image": image, "irrelevant_up_to": self.bound}
        return {**facts, "lists": [list_to_json(top_list) for top_list in self.lists]}


def answer(
    way: Direction,
    index: int,
    rankers: Sequence[Ranker],
    degrees: ImageDegrees,
    data: Dataset,
    scale: Scale,
    top: int,
    memory: Memory = None,
) -> Query:
    """The first ``top`` items of every ranker for one query."""
    query, candidates = torch.tensor([index]), sides(data, way)[1]
    relevance = relevance_of(degrees, way, query, candidates)
    bands, bound = scale.bands(relevance)[0], scale.bounds(relevance)[0, 0].item()
    own = torch.from_numpy(np.arange(len(data.images)) == data.image_of[index] if way == "t2i" else data.image_of == index)

    def first(ranker: Ranker) -> TopList:
        order = in_order(ranker.scores(way, query, memory))[0]
        items = (Item(i, relevance[0, i].item(), int(bands[i]), bool(own[i])) for i in order[:top].tolist())
        return TopList(ranker.name, tuple(items), int(own[order].nonzero()[0]) + 1)

    return Query(way, index, bound, tuple(map(first, rankers)))


def choose(queries: int | Sequence[str], data: Dataset, seed: int) -> list[tuple[Direction, int]]:
    """The queries to show, by direction and index. A number: so many random images, and a random caption of each.

    Texts: captions, whose case and punctuation do not matter, and names of images. Raises VisavisError for what is not in the data.
    """
    if not isinstance(queries, int):
        return [_find(text, data) for text in queries]
    if not 1 <= queries <= len(data.images):
        raise VisavisError(f"queries is {queries}, expected 1 to {len(data.images):,}, the number of images of the split.")
    rng = np.random.default_rng(seed)
    images = rng.choice(len(data.images), queries, replace=False).tolist()
    return [("t2i", int(rng.choice(data.captions_of[i]))) for i in images] + [("i2t", i) for i in images]


def _find(text: str, data: Dataset) -> tuple[Direction, int]:
    for i, image in enumerate(data.images):
        if text in (image.name, PurePath(image.name).name):
            return "i2t", i
    words = tokenize(text)
    for i, caption in enumerate(data.captions):
        if tokenize(caption) == words:
            return "t2i", i
    (close,) = difflib.get_close_matches(text, [*data.captions, *(image.name for image in data.images)], n=1, cutoff=0)
    raise VisavisError(f"split {data.images[0].split} of {data.name} has no caption and no image {text!r}: did you mean {close!r}?")
