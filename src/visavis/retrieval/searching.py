"""Search an index: a query of sentences, pictures and items, with weights; results with near-duplicates folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Image
from visavis.data.looks import SAME_LOOK, bits_apart
from visavis.data.pictures import open_picture
from visavis.errors import DataError, ShapeError, VisavisError
from visavis.models.retriever import Retriever
from visavis.retrieval.index import Index
from visavis.retrieval.item import EVERYTHING, Item, Where
from visavis.retrieval.query import Hit

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SAME_VECTOR = 0.95
"""Near-duplicates have at least this cosine, and the same look."""
RERANKED = 50


@dataclass(frozen=True)
class Query:
    """What to look for: sentences, pictures and items of the index, each with a weight; a negative weight says what not.

    A query's vector is the weighted sum of their unit vectors, scaled to length 1: with one part its scores are plain cosines.
    """

    texts: tuple[tuple[float, str], ...] = ()
    images: tuple[tuple[float, str | Path | Picture], ...] = ()
    like: tuple[tuple[float, str], ...] = ()

    @classmethod
    def of(cls, text: str) -> Query:
        """A sentence."""
        return cls(texts=((1.0, text),))

    @property
    def is_one_sentence(self) -> bool:
        """Whether scores are cosines of one sentence, of which it is known how likely they are a match."""
        return len(self.texts) == 1 and self.texts[0][0] > 0 and not self.images and not self.like


@dataclass(frozen=True)
class Result:
    """An item that was found. match: how likely it fits, 0 to 1; None where that is not known. duplicates: keys of items that show the same,
    and of other moments of the same clip, that would have come later. image: where its pixels lie; None where that was not asked.
    """

    item: Item
    score: float
    match: float | None = None
    duplicates: tuple[str, ...] = ()
    image: Image | None = None

    @property
    def name(self) -> str:
        """Its path below the root, or its name in a data set."""
        return self.item.path

    def to_json(self) -> dict[str, Any]:
        item = self.item
        moment = {} if item.start is None else {"start": item.start, "end": item.end}
        return {
            "key": item.key,
            "name": self.name,
            "path": None if self.image is None or self.image.bytes is None else str(self.image.bytes.path),
            "kind": item.kind,
            **moment,
            "score": self.score,
            "match": self.match,
            "duplicates": list(self.duplicates),
            "metadata": dict(item.metadata),
        }


@dataclass(frozen=True)
class Results(Sequence[Result]):
    """Results, best first: a sequence of them. nothing_fits: whether even the best one probably does not fit; None where that is not known."""

    hits: tuple[Result, ...]
    nothing_fits: bool | None = None

    def __len__(self) -> int:
        return len(self.hits)

    @overload
    def __getitem__(self, place: int) -> Result: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Result]: ...
    def __getitem__(self, place: int | slice) -> Result | Sequence[Result]:
        return self.hits[place]

    def to_json(self) -> dict[str, Any]:
        return {"nothing_fits": self.nothing_fits, "hits": [hit.to_json() for hit in self.hits]}


def search(
    index: Index, query: Query, top: int = 20, where: Where = EVERYTHING, *, fold: bool = True, rerank: Retriever | None = None
) -> Results:
    """The items of an index that fit a query best.

    fold: near-duplicates, and several moments of one clip, as one result. rerank: a model of any kind that scores the first fifty anew
    for the query's sentences. Raises VisavisError for an empty query, DataError for an item or picture that is not there.
    """
    if top < 1:
        raise VisavisError(f"top is {top}, expected at least 1.")
    return search_many(index, [query], top, where, fold=fold, rerank=rerank)[0]


def search_many(
    index: Index, queries: Sequence[Query], top: int = 20, where: Where = EVERYTHING, *, fold: bool = True, rerank: Retriever | None = None
) -> list[Results]:
    """``search`` for several queries at once."""
    vectors = np.stack([query_vector(index, query) for query in queries])
    wanted = max(top, RERANKED) if rerank else top
    depth = 2 * wanted + 10 if fold else wanted
    while True:
        near = index.store.search(vectors, depth, where)
        found = [[Result(index.items[key], score) for key, score in row if key in index.items] for row in near]
        folded = [_fold(index, row) if fold else row for row in found]
        if all(len(row) >= wanted or len(there) < depth for row, there in zip(folded, near, strict=True)):
            break
        depth *= 4
    if rerank is not None:
        folded = [_reranked(index, rerank, query, row[:wanted]) for query, row in zip(queries, folded, strict=True)]
    return [_told(index, query, row[:top], reranked=rerank is not None) for query, row in zip(queries, folded, strict=True)]


def query_vector(index: Index, query: Query) -> np.ndarray:
    """The unit vector ``[D]`` of a query. Raises as ``search``."""
    parts = list[tuple[float, Tensor]]()
    if query.texts:
        for _, text in query.texts:
            if not text.strip():
                raise VisavisError("the query is empty: write what to look for, such as 'a dog runs on the beach'.")
            index.model.processor.unknown_words(text)  # raises where no word is known
        rows = index.model.encode_texts([text for _, text in query.texts])
        parts += [(weight, row) for (weight, _), row in zip(query.texts, rows, strict=True)]
    if query.images:
        rows = index.model.encode_images([image for _, image in query.images])
        parts += [(weight, row) for (weight, _), row in zip(query.images, rows, strict=True)]
    for weight, key in query.like:
        if key not in index.items:
            raise DataError(f"{key!r} is no item of the index {index.folder}: name one as its results do.")
        parts.append((weight, torch.from_numpy(index.store.vectors([key])[0])))
    if not any(weight > 0 for weight, _ in parts):
        raise VisavisError("the query says only what not to look for: add a sentence, a picture, or an item that fits.")
    total = torch.stack([weight * row for weight, row in parts]).sum(0)
    if not (length := total.norm()).isfinite() or length < 1e-6:
        raise VisavisError("the parts of the query cancel one another: leave one out, or change a weight.")
    vector: np.ndarray = (total / length).numpy()
    return vector


def with_images(index: Index, results: Results) -> Results:
    """Results that know where their pixels lie, as far as they are still there."""
    return replace(results, hits=tuple(replace(one, image=_image(index, one.item)) for one in results))


def found_images(hits: Sequence[Hit]) -> Results:
    """What was found without an index, in the same words."""

    def item(hit: Hit) -> Item:
        return Item(hit.name, hit.name, "video" if hit.image.is_clip else "image", content="", size=0, modified_ns=0)

    return Results(tuple(Result(item(hit), hit.score, image=hit.image) for hit in hits))


def fitting_texts(model: Retriever, image: str | Path | Picture, texts: Sequence[str]) -> list[tuple[str, float]]:
    """Which of some captions or labels fit a picture, best first, with their scores; equal scores in the order given."""
    if not texts:
        raise ShapeError("there is no text to choose from: give at least one.")
    scores = model.score([image], list(texts), way="i2t")[0]
    return [(texts[i], scores[i].item()) for i in scores.argsort(descending=True, stable=True).tolist()]


def _fold(index: Index, results: Sequence[Result]) -> list[Result]:
    """Each result that shows something new, with the keys of later ones that show the same."""
    kept, folded = list[Result](), list[list[str]]()
    vectors = index.store.vectors([result.item.key for result in results]) if results else np.empty((0, 0))
    cosines, rows = vectors @ vectors.T, list[int]()
    by_path, by_content = dict[str, int](), dict[tuple[str, float | None], int]()
    for number, result in enumerate(results):
        item = result.item
        near = np.flatnonzero(cosines[number, rows] >= SAME_VECTOR).tolist()
        known = {by_path.get(item.path), by_content.get((item.content, item.start))} - {None}
        alike = [place for place in near if bits_apart(kept[place].item.look, item.look) <= SAME_LOOK] + [
            place for place in known if place is not None
        ]
        if alike:
            folded[min(alike)].append(item.key)
            continue
        by_path.setdefault(item.path, len(kept))
        by_content.setdefault((item.content, item.start), len(kept))
        kept.append(result)
        folded.append([])
        rows.append(number)
    return [Result(result.item, result.score, result.match, tuple(keys)) for result, keys in zip(kept, folded, strict=True)]


def _reranked(index: Index, model: Retriever, query: Query, results: Sequence[Result]) -> list[Result]:
    """Results in the order of another model's scores for the query's sentences; then clips, and pictures that cannot be read any more."""
    if query.images or query.like or not query.texts:
        raise VisavisError("only sentences can be ranked anew by another model: leave out the pictures and items, or --rerank.")
    stills, pictures, others = list[Result](), list["Picture"](), list[Result]()
    for result in results:
        picture = _picture(index, result.item)
        if picture is None:
            others.append(result)
        else:
            stills.append(result)
            pictures.append(picture)
    if not stills:
        return list(results)
    scores = model.score(pictures, [text for _, text in query.texts])
    values = scores @ torch.tensor([weight for weight, _ in query.texts], dtype=scores.dtype)
    order = values.argsort(descending=True, stable=True).tolist()
    return [Result(stills[i].item, values[i].item(), None, stills[i].duplicates) for i in order] + others


def _picture(index: Index, item: Item) -> Picture | None:
    """What another model looks at; None for a clip, and for a picture that cannot be read any more."""
    try:
        return open_picture(index.locate(item).read(), item.path) if item.kind == "image" else None
    except DataError:
        return None


def _told(index: Index, query: Query, results: Sequence[Result], *, reranked: bool) -> Results:
    """Results, with how likely they are a match where that is known."""
    known = index.calibration
    if known is None or reranked or not query.is_one_sentence or not results:
        return Results(tuple(results))
    return Results(tuple(replace(one, match=known.match(one.score)) for one in results), known.nothing_fits(results[0].score))


def _image(index: Index, item: Item) -> Image | None:
    try:
        return Image(item.path, item.metadata.get("split", "all"), index.locate(item))
    except DataError:
        return None
