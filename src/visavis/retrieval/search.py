"""Search a collection, which is an index or the images of runs: queries of texts, images and items
with weights, near-duplicate grouping, re-ranking and match probabilities.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, overload

import numpy as np

from visavis.core.data_uris import is_data_url
from visavis.core.errors import DataError, UnknownWords, VisavisError
from visavis.core.fields import validate_int
from visavis.core.result import Result, record_table
from visavis.core.table import Table
from visavis.data.file_names import escape_name
from visavis.retrieval.calibrate.calibration import (
    MatchScale,
    NoProbabilitiesError,
    check_level,
    count_within,
    irrelevant_shares,
)
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    from visavis.core.progress import Progress
    from visavis.data.image_file import Image
    from visavis.models.retriever import Retriever
    from visavis.retrieval.calibrate.index_correction import IndexCorrection
    from visavis.retrieval.stores.base import Queries


MIN_DUPLICATE_COSINE = 0.95
"""Smallest cosine of near-duplicates, which also have similar perceptual hashes."""
MAX_NAMED = 20
"""Maximum number of results that are found by name or caption."""
RERANK_DEPTH = 50
"""Number of results that another model scores again."""
# Vectors of texts have much in common. With a full weight of -1 an excluded text would also cancel
# what all texts share.
EXCLUDED_WEIGHT = -0.5
"""Weight of a text that a query excludes."""
# Group 1 holds quoted words, group 2 one word. A dash within a word or before another dash is text.
_QUOTED = re.compile(r'"([^"]*)"')
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


def content_text(text: str) -> str:
    """Return the text that a model encodes: quotes select names and captions, and describe no image.

    Example:
        >>> content_text('"red kite" over a 15" wall')
        'red kite over a 15" wall'
    """
    return " ".join(_QUOTED.sub(r" \1 ", text).split()) if '"' in text else text


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
        irrelevant_share: Expected share of irrelevant results up to this one, 0 to 1. None if the
            scores are not calibrated.
        duplicates: Keys of lower-ranked near-duplicates and of other moments of the same clip.
        image: The image or clip. None if it was not requested or no longer exists.
    """

    item: IndexItem
    score: float
    match_probability: float | None = None
    irrelevant_share: float | None = None
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
        """Convert to plain values."""
        moment = {} if self.item.start is None else {"start": self.item.start, "end": self.item.end}
        location = None if self.image is None else self.image.location
        return {
            "key": self.key,
            "name": self.name,
            "path": None if location is None else escape_name(str(location.path)),
            "kind": self.item.kind,
            **moment,
            "score": self.score,
            "match_probability": self.match_probability,
            "irrelevant_share": self.irrelevant_share,
            "duplicates": list(self.duplicates),
            "metadata": dict(self.item.metadata),
        }


@dataclass(frozen=True)
class NamedResult:
    """An item whose file name or caption has the words of a query.

    Attributes:
        item: The item.
        found_by: What has the words.
        text: The name or caption that has them.
        image: The image or clip. None if it was not requested or no longer exists.
    """

    item: IndexItem
    found_by: Literal["name", "caption"]
    text: str
    image: Image | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        location = None if self.image is None else self.image.location
        return {
            "key": self.item.key,
            "name": self.item.path,
            "path": None if location is None else str(location.path),
            "kind": self.item.kind,
            "found_by": self.found_by,
            "text": self.text,
            "metadata": dict(self.item.metadata),
        }


@dataclass(frozen=True)
class SearchResults(Sequence[SearchResult], Result):
    """A sequence of results, best first.

    Attributes:
        hits: The results.
        no_match: Whether even the best result is probably irrelevant. None if the scores are not
            calibrated.
        message: Why nothing was found. Empty with results.
        weaker: Results after the level of irrelevant ones was reached, best first. Empty without a
            level.
        correction: Correction of the scores with its bank. Empty: none.
        unknown_words: Words of the query that are not in the vocabulary of the model. Only with a
            served index.
        named: Items whose file name or caption has the words of a text query. They are a group of
            their own, and may be among the results, too.
    """

    ROWS: ClassVar[str] = "hits"

    hits: tuple[SearchResult, ...]
    no_match: bool | None = None
    message: str = ""
    weaker: tuple[SearchResult, ...] = ()
    correction: str = ""
    unknown_words: tuple[str, ...] = ()
    named: tuple[NamedResult, ...] = ()

    def __len__(self) -> int:
        return len(self.hits)

    @overload
    def __getitem__(self, index: int) -> SearchResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SearchResult]: ...
    def __getitem__(self, index: int | slice) -> SearchResult | Sequence[SearchResult]:
        return self.hits[index]

    def tables(self) -> list[Table]:
        """Return the results with their images, or why nothing was found."""
        notes = [self.message] if self.message else []
        if self.no_match and self.hits:
            notes = ["Probably no match. These are the nearest results."]
        elif self.correction:
            notes = [f"Scores are corrected: {self.correction}."]
        found = [hit.image for hit in self.hits]
        from visavis.core.data_uris import thumbnail_uri

        images = ["" if each is None else thumbnail_uri(each.preview()) for each in found]
        images = images if any(images) else []
        table = record_table(self.records(), images)
        tables = [replace(table, notes=tuple(notes) or table.notes)]
        if self.named:
            found = [each.image for each in self.named]
            previews = ["" if each is None else thumbnail_uri(each.preview()) for each in found]
            rows = [each.to_json() for each in self.named]
            named = record_table(rows, previews if any(previews) else [])
            tables.insert(0, replace(named, title="Found by name or caption"))
        return tables

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        message: dict[str, Any] = {"message": self.message} if self.message else {}
        if self.weaker:
            message["weaker"] = [hit.to_json() for hit in self.weaker]
        message |= {"correction": self.correction} if self.correction else {}
        message |= {"named": [found.to_json() for found in self.named]} if self.named else {}
        return {"no_match": self.no_match, "hits": [hit.to_json() for hit in self.hits], **message}


@dataclass(frozen=True)
class CorrectedQuery:
    """A query whose scores are corrected.

    Attributes:
        queries: The encoded query.
        correction: The correction of the index.
    """

    queries: Queries
    correction: IndexCorrection


EncodeTexts = Callable[[Sequence[str]], Sequence[np.ndarray]]
"""Returns the unit vectors of texts, one array per text."""


class TextModel(Protocol):
    """A model that knows words: the query model of an index, or a whole model."""

    def unknown_words(self, text: str) -> list[str]:
        """Find the words of a text that the model does not know, see ``Processor.unknown_words``."""


class Collection(Protocol):
    """Items that can be searched: an index, or the images of runs."""

    @property
    def root(self) -> Path:
        """The folder or data set of the items."""

    @property
    def models(self) -> Sequence[TextModel]:
        """Models that encode the query."""

    def match_scale(self, text: str | None) -> MatchScale:
        """Find what converts the standardized scores of a single text to match probabilities. None:
        of some text. Raises a VisavisError with the reason if there is none.
        """

    def rated_scores(self, encoded: Any, item_filter: ItemFilter) -> tuple[np.ndarray, np.ndarray]:
        """Find the ``RATED_RESULTS`` highest scores of a single text, best first, and the same
        standardized.
        """

    def count(self, item_filter: ItemFilter) -> int:
        """Count the items that pass a filter."""

    def encode_query(self, query: SearchQuery, encode_texts: EncodeTexts | None = None) -> Any:
        """Encode a query once, for several calls of ``nearest``."""

    def one_version(self) -> AbstractContextManager[None]:
        """Read one version of the items in this block, for results that fit together."""

    def nearest(
        self, encoded: Any, count: int, item_filter: ItemFilter
    ) -> tuple[list[SearchResult], bool]:
        """Find the items with the highest scores, best first, and whether a larger count may find
        more.
        """

    def find_named(
        self, query: SearchQuery, count: int, item_filter: ItemFilter
    ) -> Sequence[NamedResult]:
        """Find the items whose file name or caption has the words of a query of texts."""

    def item_vectors(self, items: Sequence[IndexItem]) -> np.ndarray | None:
        """Read the unit vectors by which near-duplicates are found, ``[N, D]``. None: they are not
        found.
        """

    def image(self, item: IndexItem) -> Image | None:
        """Find the image or clip of an item. None: its file no longer exists."""

    def explain_no_results(self, item_filter: ItemFilter) -> str:
        """Explain in a sentence why a search found nothing. A metadata name that no item has is a
        DataError.
        """

    def close(self) -> None:
        """Close files and connections."""


def search_collection(
    collection: Collection,
    query: SearchQuery,
    top: int = 20,
    item_filter: ItemFilter = NO_FILTER,
    *,
    group_duplicates: bool = True,
    rerank: Retriever | None = None,
    encode_texts: EncodeTexts | None = None,
    max_irrelevant: float | None = None,
) -> SearchResults:
    """Find the items of a collection that match a query best.

    Args:
        collection: An index, or the images of runs.
        query: The query.
        top: Maximum number of results.
        item_filter: Conditions on the items.
        group_duplicates: Whether to return near-duplicates, and moments of one clip, as one result.
        rerank: A model of any kind that scores the first ``RERANK_DEPTH`` results again for the
            texts of the query.
        encode_texts: Encodes the texts of the query, such as from a cache. None: the models of the
            collection do.
        max_irrelevant: Expected share of irrelevant results, 0 to 1, at which the list ends. None:
            it does not end.

    Returns:
        Results, best first.

    Raises:
        VisavisError: If the query is empty, ``top`` is below 1, or there are no match probabilities
            for ``max_irrelevant``.
        DataError: If an item or image of the query does not exist, or no item has a metadata name
            of the filter.
    """
    validate_int(top, "top", 1)
    for _, text in query.texts:
        validate_text_query(text)
    scale = _match_scale(collection, query, max_irrelevant, rerank)
    find_named = partial(collection.find_named, query, min(top, MAX_NAMED), item_filter)
    try:
        for model in collection.models:
            known_texts(model, query)
    except VisavisError as error:
        if not (named := tuple(find_named())):
            raise
        return SearchResults((), message=_no_content(query, error), named=named)
    # The other model may find its best result far below the first search's best ones.
    count = max(top, RERANK_DEPTH) if rerank else top
    # Before the block, because models take longer than a search.
    encoded = collection.encode_query(query, encode_texts)
    with collection.one_version():
        named = tuple(find_named())
        results = _search_vectors(
            collection, encoded, scale, count, item_filter, group_duplicates, max_irrelevant
        )
    if rerank is not None and results:
        results = SearchResults(tuple(_rerank(collection, rerank, query, results)[:top]))
    return replace(results, named=named) if named else results


def _no_content(query: SearchQuery, error: VisavisError) -> str:
    """Explain in a sentence why items are found by name only."""
    if not isinstance(error, UnknownWords):
        return f"No results by content: {error}"
    texts = ", ".join(content_text(text) for weight, text in query.texts if weight > 0)
    return f"No results by content, because the model knows no word of: {texts}"


def _search_vectors(
    collection: Collection,
    encoded: Any,
    scale: MatchScale | None,
    count: int,
    item_filter: ItemFilter,
    group_duplicates: bool,
    max_irrelevant: float | None,
) -> SearchResults:
    """Results by the vectors of the items."""
    rated = None if scale is None else collection.rated_scores(encoded, item_filter)
    if group_duplicates:
        results = grouped_results(
            collection, lambda depth: collection.nearest(encoded, depth, item_filter), count
        )
    else:
        results = collection.nearest(encoded, count, item_filter)[0]
    if not results:
        return SearchResults((), message=collection.explain_no_results(item_filter))
    if isinstance(encoded, CorrectedQuery):
        return SearchResults(tuple(results), correction=str(encoded.correction.settings))
    if scale is None or rated is None:
        return SearchResults(tuple(results))
    return _assess(scale, *rated, collection.count(item_filter), results, max_irrelevant)


def _match_scale(
    collection: Collection, query: SearchQuery, level: float | None, rerank: Retriever | None
) -> MatchScale | None:
    """Find the scale of a query. None: it has no match probabilities, and no level requires them."""
    if level is not None:
        check_level(level)
    if not query.is_single_text or rerank is not None:
        if level is None:
            return None
        raise NoProbabilitiesError("they exist for one text, without other parts and --rerank.")
    try:
        return collection.match_scale(content_text(query.texts[0][1]))
    except VisavisError:
        if level is None:
            return None
        raise


def _assess(
    scale: MatchScale,
    rated_scores: np.ndarray,
    standardized: np.ndarray,
    num_items: int,
    results: Sequence[SearchResult],
    max_irrelevant: float | None,
) -> SearchResults:
    """Results of a single text with match probabilities, cut at a level of irrelevant ones."""
    no_match = scale.is_no_match(standardized, num_items)
    # Duplicates were rated, too, and are left out here.
    scores = [result.score for result in results]
    probabilities, cautious = (
        np.interp(scores, rated_scores[::-1], rate(standardized, num_items)[::-1]).tolist()
        for rate in (scale.match_probabilities, scale.cautious_probabilities)
    )
    shares = irrelevant_shares(cautious)
    hits = tuple(
        replace(result, match_probability=probability, irrelevant_share=share)
        for result, probability, share in zip(results, probabilities, shares, strict=True)
    )
    if max_irrelevant is None:
        return SearchResults(hits, no_match)
    kept = count_within(cautious, max_irrelevant)
    message = ""
    if not kept:
        verdict = "Probably no match" if no_match else "No result at this level"
        message = f"{verdict}: even the best one is irrelevant with probability {shares[0]:.2f}."
    return SearchResults(hits[:kept], no_match, message, hits[kept:])


def warn_unknown_words(model: TextModel, query: SearchQuery, progress: Progress) -> None:
    """Report the words of a query that are not in the vocabulary of a model. If it knows none of
    them, the search reports it.
    """
    for _, text in query.texts:
        with suppress(VisavisError):
            if text.strip() and (unknown := model.unknown_words(content_text(text))):
                progress.message(f"The model does not know: {', '.join(unknown)}")


def unknown_words(model: TextModel, query: SearchQuery) -> tuple[str, ...]:
    """Find the words of a query that are not in the vocabulary of a model."""
    words = dict[str, None]()
    for _, text in query.texts:
        try:
            words |= dict.fromkeys(model.unknown_words(content_text(text)))
        except VisavisError:  # a text of unknown words only
            words |= dict.fromkeys(content_text(text).split())
    return tuple(words)


def known_texts(model: TextModel, query: SearchQuery) -> list[tuple[float, str]]:
    """Select the texts of a query that a model can encode, without quotes."""
    texts = list[tuple[float, str]]()
    for weight, written in query.texts:
        validate_text_query(written)
        text = content_text(written)
        try:
            model.unknown_words(text)
        except VisavisError:
            # An excluded text of unknown words only is left out, as unknown words have no effect.
            if weight > 0:
                raise
        else:
            texts.append((weight, text))
    return texts


def validate_text_query(text: str) -> None:
    """Check a text query."""
    if is_data_url(text):
        raise VisavisError(
            "query: expected text, got a data URL. Search with the image itself, such as with "
            "--image FILE."
        )
    if not content_text(text).strip():
        raise VisavisError(
            "query: expected text, got an empty query. Describe the image, such as 'a dog runs on "
            "the beach'."
        )


def grouped_results(
    collection: Collection,
    find: Callable[[int], tuple[Sequence[SearchResult], bool]],
    count: int,
) -> list[SearchResult]:
    """Find results, of which near-duplicates and moments of one clip are one. ``find`` is
    ``Collection.nearest`` for a number of items.
    """
    # The depth grows until grouping leaves enough results.
    depth = 2 * count + 10
    while True:
        found, has_more = find(depth)
        results = _group_duplicates(collection, found)
        if len(results) >= count or not has_more:
            # Grouping may leave more results than were asked for.
            return results[:count]
        depth *= 4


def _group_duplicates(
    collection: Collection, results: Sequence[SearchResult]
) -> list[SearchResult]:
    """The first result of each group of near-duplicates, with the keys of the others."""
    items = [result.item for result in results]
    if not items or (vectors := collection.item_vectors(items)) is None:
        return list(results)
    paths, contents = (
        # Numbers of distinct values. np.unique would sort the texts.
        np.array([numbers.setdefault(value, len(numbers)) for value in values])
        for numbers, values in (
            (dict[Any, int](), [item.path for item in items]),
            (dict[Any, int](), [(item.content, item.start) for item in items]),
        )
    )
    # The same path: a clip and its moments. The same content from the same second: a copied file.
    is_copy = (paths[:, None] == paths) | (contents[:, None] == contents)
    # Below the diagonal: each item is compared with those that rank above it.
    later, earlier = np.nonzero(np.tril(vectors @ vectors.T >= MIN_DUPLICATE_COSINE, -1))
    if len(later):
        from visavis.data.image_hashes import MAX_HAMMING_DISTANCE, hamming_distances

        distances = hamming_distances([item.dhash for item in items], later, earlier)
        is_copy[later, earlier] |= distances <= MAX_HAMMING_DISTANCE
    # Only with first results of groups, so that a chain of similar items does not join strangers.
    first = list(range(len(items)))
    for later_row, row in np.argwhere(np.tril(is_copy, -1)).tolist():
        if first[later_row] == later_row and first[row] == row:
            first[later_row] = row
    duplicates = dict[int, list[str]]()
    for row, item in enumerate(items):
        if first[row] == row:
            duplicates[row] = []
        else:
            duplicates[first[row]].append(item.key)
    return [
        replace(results[row], duplicates=tuple(keys)) if keys else results[row]
        for row, keys in duplicates.items()
    ]


def _rerank(
    collection: Collection, model: Retriever, query: SearchQuery, results: Sequence[SearchResult]
) -> list[SearchResult]:
    """Images in the order of another model's scores, then clips and images that cannot be read any
    more.
    """
    if query.images or query.like or not query.texts:
        raise VisavisError(
            "rerank: expected a query of texts, got images or items. Remove them, or remove "
            "--rerank."
        )
    from visavis.data.images import decode_image

    readable: list[tuple[SearchResult, PILImage]] = []
    unreadable = list[SearchResult]()
    for result in results:
        item = result.item
        image = collection.image(item) if item.kind == "image" else None
        try:
            if image is None or image.location is None:
                unreadable.append(result)
            else:
                content = image.location.read()
                readable.append((result, decode_image(content, item.path, allow_animated=True)))
        except DataError:
            unreadable.append(result)
    if not readable:
        return unreadable
    texts = known_texts(model, query)
    text_scores = model.score([image for _, image in readable], [text for _, text in texts])
    scores = text_scores.float().numpy() @ np.array([weight for weight, _ in texts], np.float32)
    # Stable: images with equal scores keep the order of the first search.
    order = np.argsort(-scores, kind="stable").tolist()
    return [replace(readable[i][0], score=float(scores[i])) for i in order] + unreadable


def attach_images(collection: Collection, results: SearchResults) -> SearchResults:
    """Add the images of results whose files still exist."""
    hits, weaker = (
        tuple(replace(hit, image=collection.image(hit.item)) for hit in part)
        for part in (results.hits, results.weaker)
    )
    named = tuple(replace(each, image=collection.image(each.item)) for each in results.named)
    return replace(results, hits=hits, weaker=weaker, named=named)
