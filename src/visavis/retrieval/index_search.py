"""Search an index: queries of texts, images and items with weights, near-duplicate grouping,
re-ranking and match probabilities.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from visavis.core.errors import DataError, ShapeError, VisavisError
from visavis.core.notebook import NotebookTable
from visavis.core.spec import validate_int
from visavis.data.dataset import Image
from visavis.data.images import MAX_HAMMING_DISTANCE, decode_image, hamming_distances
from visavis.models.retriever import Retriever
from visavis.retrieval.index_folder import Index
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores.arrow_tables import metadata_names
from visavis.retrieval.stores.vector_sets import MaxSimQuery, Queries, VectorSets

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

MIN_DUPLICATE_COSINE = 0.95
"""Smallest cosine of near-duplicates, which also have similar perceptual hashes."""
RERANK_DEPTH = 50
"""Number of results that another model scores again."""
# Vectors of texts have much in common. With a full weight of -1 an excluded text would also cancel
# what all texts share.
EXCLUDED_WEIGHT = -0.5
"""Weight of a text that a query excludes."""
# Below this length the direction of a weighted sum is rounding noise.
MIN_QUERY_NORM = 1e-6
_EXCLUDED = re.compile(r"""(?:^|(?<=\s))-(?:"([^"]*)"|([^\s"-]\S*))""")


def parse_query(text: str) -> tuple[tuple[float, str], ...]:
    """Split a text query into what to search for and each excluded ``-word`` or ``-"several
    words"``.

    A dash within a word, before a space or before another dash does not exclude.

    Args:
        text: Text query.

    Returns:
        Weights and texts.

    Example:
        >>> parse_query('a beach -people -"red umbrella"')
        ((1.0, 'a beach'), (-0.5, 'people'), (-0.5, 'red umbrella'))
        >>> parse_query("black-and-white dog - running")
        ((1.0, 'black-and-white dog - running'),)
    """
    excluded = [(quoted or word).strip() for quoted, word in _EXCLUDED.findall(text)]
    included = " ".join(_EXCLUDED.sub(" ", text).split())
    return tuple(
        ([(1.0, included)] if included else [])
        + [(EXCLUDED_WEIGHT, words) for words in excluded if words]
    )


@dataclass(frozen=True)
class SearchQuery:
    """Texts, images and items of the index to search for, each with a weight. A negative weight
    excludes.

    The vector of a query is the weighted sum of the unit vectors of its parts, normalized to length 1. The scores of a query
    with one part are cosine similarities. With a late-interaction model, the score is the mean of the MaxSim scores of the parts,
    by the absolute values of their weights.

    Attributes:
        texts: Weights and texts.
        images: Weights and images, as paths or Pillow images.
        like: Weights and keys of items.
    """

    texts: tuple[tuple[float, str], ...] = ()
    images: tuple[tuple[float, str | Path | PILImage], ...] = ()
    like: tuple[tuple[float, str], ...] = ()

    @classmethod
    def from_text(cls, text: str) -> SearchQuery:
        """Make a query of one text.

        Args:
            text: Text query.

        Returns:
            The query.
        """
        return cls(texts=((1.0, text),))

    @property
    def is_single_text(self) -> bool:
        """Whether the query is one text, the only kind of query whose scores are calibrated."""
        return len(self.texts) == 1 and self.texts[0][0] > 0 and not self.images and not self.like


@dataclass(frozen=True)
class SearchResult:
    """A result of a search.

    Attributes:
        item: The item.
        score: Score of the item.
        match_probability: Probability that the item is relevant, 0 to 1. None if the scores are not
            calibrated.
        duplicates: Keys of lower-ranked near-duplicates and of other moments of the same clip.
        image: The image or clip. None if it was not requested or no longer exists.
    """

    item: IndexItem
    score: float
    match_probability: float | None = None
    duplicates: tuple[str, ...] = ()
    image: Image | None = None

    @property
    def key(self) -> str:
        """Key of the item."""
        return self.item.key

    @property
    def name(self) -> str:
        """Path of the item below the source, or its name in a data set."""
        return self.item.path

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            A JSON object.
        """
        moment = {} if self.item.start is None else {"start": self.item.start, "end": self.item.end}
        return {
            "key": self.key,
            "name": self.name,
            "path": None
            if self.image is None or self.image.location is None
            else str(self.image.location.path),
            "kind": self.item.kind,
            **moment,
            "score": self.score,
            "match_probability": self.match_probability,
            "duplicates": list(self.duplicates),
            "metadata": dict(self.item.metadata),
        }


@dataclass(frozen=True)
class SearchResults(Sequence[SearchResult], NotebookTable):
    """A sequence of results, best first.

    Attributes:
        hits: The results.
        no_match: Whether even the best result is probably irrelevant. None if the scores are not
            calibrated.
        message: Why nothing was found. Empty with results.
    """

    ROWS: ClassVar[str] = "hits"

    hits: tuple[SearchResult, ...]
    no_match: bool | None = None
    message: str = ""

    def __len__(self) -> int:
        return len(self.hits)

    @overload
    def __getitem__(self, index: int) -> SearchResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SearchResult]: ...
    def __getitem__(self, index: int | slice) -> SearchResult | Sequence[SearchResult]:
        return self.hits[index]

    def table_notes(self) -> list[str]:
        """Return why nothing was found."""
        return (
            ["Probably no match. These are the nearest results."]
            if self.no_match
            else [self.message]
            if self.message
            else []
        )

    def table_images(self) -> list[PILImage | None]:
        """Return the image of each result, or nothing without images."""
        images = [hit.image for hit in self.hits]
        return (
            [None if image is None else image.preview() for image in images] if any(images) else []
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            A JSON object.
        """
        message = {"message": self.message} if self.message else {}
        return {"no_match": self.no_match, "hits": [hit.to_json() for hit in self.hits], **message}


def search_index(
    index: Index,
    query: SearchQuery,
    top: int = 20,
    item_filter: ItemFilter = NO_FILTER,
    *,
    group_duplicates: bool = True,
    rerank: Retriever | None = None,
    encode_texts: Callable[[Sequence[str]], Sequence[Tensor]] | None = None,
) -> SearchResults:
    """Find the items of an index that match a query best.

    Args:
        index: The index.
        query: The query.
        top: Maximum number of results.
        item_filter: Conditions on the items.
        group_duplicates: Whether to return near-duplicates, and moments of one clip, as one result.
        rerank: A model of any kind that scores the first ``RERANK_DEPTH`` results again for the
            texts of the query.
        encode_texts: Returns the unit vectors of texts, see ``Index.encode_texts``. None: the model
            of the index encodes them.

    Returns:
        Results, best first.

    Raises:
        VisavisError: If the query is empty or ``top`` is below 1.
        DataError: If an item or image of the query does not exist, or no item has a metadata name
            of the filter.
    """
    validate_int(top, "top", 1)
    queries = store_queries(index, query, encode_texts)
    results = _find_results(
        index, queries, max(top, RERANK_DEPTH) if rerank else top, item_filter, group_duplicates
    )
    if not results:
        check_filter_names(index, item_filter)
        return SearchResults((), message=_explain_no_results(index, item_filter))
    if rerank is not None:
        return SearchResults(tuple(_rerank(index, rerank, query, results)[:top]))
    calibration = index.calibration
    if calibration is None or not query.is_single_text:
        return SearchResults(tuple(results))
    hits = tuple(
        replace(result, match_probability=calibration.match_probability(result.score))
        for result in results
    )
    return SearchResults(hits, results[0].score < calibration.min_score)


def check_filter_names(index: Index, item_filter: ItemFilter) -> None:
    """Check the metadata names of a filter that no item passes.

    Args:
        index: The index.
        item_filter: Conditions on the items.

    Raises:
        DataError: If no item has a name of the filter.
    """
    if not item_filter.metadata or not index.store.count():
        return
    names = metadata_names(index.store.table())
    unknown = next((name for name in item_filter.metadata if name not in names), None)
    if unknown is not None:
        known = (
            f"one of the names {', '.join(sorted(names))}"
            if names
            else "no filter, because the items have no metadata"
        )
        raise DataError(f"metadata: expected {known}, got {unknown!r}. Correct the filter.")


def _explain_no_results(index: Index, item_filter: ItemFilter) -> str:
    if item_filter and index.store.count():
        return f"No item of the index passes the filters.{' The index is unfinished, so items are missing.' if index.is_unfinished else ''}"
    if index.is_unfinished:
        return (
            "The index is unfinished and has no items yet. Run visavis index again to complete it."
        )
    return "The index has no items. Add images to its source, and run visavis index again."


def store_queries(
    index: Index,
    query: SearchQuery,
    encode_texts: Callable[[Sequence[str]], Sequence[Tensor]] | None = None,
) -> np.ndarray | list[MaxSimQuery]:
    """Encode a query for the store of an index.

    Args:
        index: The index.
        query: The query.
        encode_texts: Returns the unit vectors of texts, see ``Index.encode_texts``. None: the model
            of the index encodes them.

    Returns:
        Unit vector, shape ``[1, D]``, or one query of late interaction.

    Raises:
        VisavisError: If the query is empty, has only negative weights, or its parts cancel out.
        DataError: If an item or image of the query does not exist.
    """
    texts, parts = _known_texts(index.model, query), list[tuple[float, Tensor]]()
    if texts:
        vectors = (encode_texts or index.encode_texts)([text for _, text in texts])
        parts += zip((weight for weight, _ in texts), vectors, strict=True)
    if query.images:
        images = index.model.item_vectors(
            index.model.encode_visual([image for _, image in query.images])
        )
        parts += zip((weight for weight, _ in query.images), images, strict=True)
    for weight, key in query.like:
        if not index.store.get([key]):
            raise DataError(
                f"like: expected the key of an item of {index.folder}, got {key!r}. Copy a key "
                "from search results."
            )
        parts.append((weight, torch.from_numpy(next(iter(index.store.vectors([key]))))))
    if not any(weight > 0 for weight, _ in parts):
        raise VisavisError(
            "query: expected a text, image or item to search for, got only exclusions. Add one, "
            "such as 'beach -people'."
        )
    if index.manifest.late_interaction is not None:
        return [MaxSimQuery.from_vectors(*((weight, rows.numpy()) for weight, rows in parts))]
    total = torch.stack([weight * row for weight, row in parts]).sum(0)
    norm = total.norm()
    if not norm.isfinite() or norm < MIN_QUERY_NORM:
        raise VisavisError(
            "query: expected parts that do not cancel out, got opposite vectors. Remove one, or "
            "change a weight."
        )
    vector: np.ndarray = (total / norm).numpy()
    return vector[None]


def _known_texts(model: Retriever, query: SearchQuery) -> list[tuple[float, str]]:
    """The texts of a query. An excluded text of unknown words only is left out, as an unknown word
    of another text has no effect.
    """
    texts = list[tuple[float, str]]()
    for weight, text in query.texts:
        validate_text_query(text)
        try:
            model.processor.unknown_words(text)
        except VisavisError:
            if weight > 0:
                raise
        else:
            texts.append((weight, text))
    return texts


def validate_text_query(text: str) -> None:
    """Check a text query.

    Args:
        text: Text query.

    Raises:
        VisavisError: If the query is empty.
    """
    if not text.strip():
        raise VisavisError(
            "query: expected text, got an empty query. Describe the image, such as 'a dog runs on "
            "the beach'."
        )


def _find_results(
    index: Index, queries: Queries, count: int, item_filter: ItemFilter, group_duplicates: bool
) -> list[SearchResult]:
    """At most ``count`` results. The depth grows until grouping leaves enough."""
    depth = 2 * count + 10 if group_duplicates else count
    while True:
        [neighbors] = index.store.search(queries, depth, item_filter)
        # Only the items of the results are read. A shared store may have lost an item since.
        items = index.store.get([key for key, _ in neighbors])
        results = [SearchResult(items[key], score) for key, score in neighbors if key in items]
        if group_duplicates:
            results = _group_duplicates(index, results)
        if len(results) >= count or len(neighbors) < depth:
            return results[:count]
        depth *= 4


def _group_duplicates(index: Index, results: Sequence[SearchResult]) -> list[SearchResult]:
    """The first result of each group of near-duplicates, with the keys of the others."""
    if not results:
        return []
    items = [result.item for result in results]
    vectors = index.store.vectors([item.key for item in items])
    if isinstance(vectors, VectorSets):
        vectors = vectors.mean_vectors()
    paths, contents = (
        np.unique(values, return_inverse=True)[1]
        for values in (
            [item.path for item in items],
            [f"{item.content} {item.start}" for item in items],
        )
    )
    is_copy = (paths[:, None] == paths) | (contents[:, None] == contents)
    later, earlier = np.nonzero(np.tril(vectors @ vectors.T >= MIN_DUPLICATE_COSINE, -1))
    is_copy[later, earlier] |= (
        hamming_distances([item.dhash for item in items], later, earlier) <= MAX_HAMMING_DISTANCE
    )
    is_first, duplicates = np.zeros(len(items), bool), dict[int, list[str]]()
    for row, item in enumerate(items):
        copied = np.flatnonzero(is_copy[row] & is_first)
        if len(copied):
            duplicates[int(copied[0])].append(item.key)
        else:
            is_first[row], duplicates[row] = True, []
    return [
        replace(results[row], duplicates=tuple(keys)) if keys else results[row]
        for row, keys in duplicates.items()
    ]


def _rerank(
    index: Index, model: Retriever, query: SearchQuery, results: Sequence[SearchResult]
) -> list[SearchResult]:
    """Images in the order of another model's scores, then clips and images that cannot be read any
    more.
    """
    if query.images or query.like or not query.texts:
        raise VisavisError(
            "rerank: expected a query of texts, got images or items. Remove them, or remove "
            "--rerank."
        )
    decoded = [(result, _decode(index, result.item)) for result in results]
    readable = [result for result, image in decoded if image is not None]
    unreadable = [result for result, image in decoded if image is None]
    images = [image for _, image in decoded if image is not None]
    if not images:
        return unreadable
    texts = _known_texts(model, query)
    text_scores = model.score(images, [text for _, text in texts])
    scores = text_scores @ torch.tensor([weight for weight, _ in texts], dtype=text_scores.dtype)
    order = scores.argsort(descending=True, stable=True).tolist()
    return [replace(readable[i], score=scores[i].item()) for i in order] + unreadable


def _decode(index: Index, item: IndexItem) -> PILImage | None:
    """The image of an item. None for a clip and for an image that cannot be read any more."""
    try:
        return (
            decode_image(index.locate(item).read(), item.path, allow_animated=True)
            if item.kind == "image"
            else None
        )
    except DataError:
        return None


def attach_images(index: Index, results: SearchResults) -> SearchResults:
    """Add the images of results whose files still exist.

    Args:
        index: The index.
        results: Results of a search.

    Returns:
        Results with ``image`` set.
    """
    return replace(
        results, hits=tuple(replace(result, image=_image(index, result.item)) for result in results)
    )


def _image(index: Index, item: IndexItem) -> Image | None:
    try:
        return Image(item.path, item.metadata.get("split", "all"), index.locate(item))
    except DataError:
        return None


def rank_texts(
    model: Retriever, image: str | Path | PILImage, texts: Sequence[str]
) -> list[tuple[str, float]]:
    """Rank captions or labels for an image.

    Args:
        model: The model.
        image: A path or a Pillow image.
        texts: Captions or labels.

    Returns:
        Texts and scores, best first. Equal scores are in the given order.

    Raises:
        ShapeError: If ``texts`` is empty.
    """
    if not texts:
        raise ShapeError(
            "labels: expected at least one text, got none. Pass the texts to choose from."
        )
    scores = model.score([image], texts, direction="i2t")[0]
    return [
        (texts[i], scores[i].item()) for i in scores.argsort(descending=True, stable=True).tolist()
    ]
