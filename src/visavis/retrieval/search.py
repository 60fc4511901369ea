"""Search a collection, which is an index or the images of runs: queries of texts, images and items
with weights, near-duplicate grouping, re-ranking and match probabilities.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from visavis.core.data_uris import thumbnail_uri
from visavis.core.errors import DataError, VisavisError
from visavis.core.fields import validate_int
from visavis.core.result import Result, record_table
from visavis.core.table import Table
from visavis.data.images import (
    MAX_HAMMING_DISTANCE,
    decode_image,
    hamming_distances,
    is_data_url,
)
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage
    from torch import Tensor

    from visavis.core.progress import Progress
    from visavis.data.dataset import Image
    from visavis.models.retriever import Retriever
    from visavis.retrieval.index_correction import IndexCorrection
    from visavis.retrieval.stores.base import Queries


MIN_DUPLICATE_COSINE = 0.95
"""Smallest cosine of near-duplicates, which also have similar perceptual hashes."""
RERANK_DEPTH = 50
"""Number of results that another model scores again."""
# Vectors of texts have much in common. With a full weight of -1 an excluded text would also cancel
# what all texts share.
EXCLUDED_WEIGHT = -0.5
"""Weight of a text that a query excludes."""
# Group 1 holds quoted words, group 2 one word. A dash within a word or before another dash is text.
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
        """Convert to plain values.

        Returns:
            A JSON object.
        """
        moment = {} if self.item.start is None else {"start": self.item.start, "end": self.item.end}
        location = None if self.image is None else self.image.location
        return {
            "key": self.key,
            "name": self.name,
            "path": None if location is None else str(location.path),
            "kind": self.item.kind,
            **moment,
            "score": self.score,
            "match_probability": self.match_probability,
            "irrelevant_share": self.irrelevant_share,
            "duplicates": list(self.duplicates),
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
    """

    ROWS: ClassVar[str] = "hits"

    hits: tuple[SearchResult, ...]
    no_match: bool | None = None
    message: str = ""
    weaker: tuple[SearchResult, ...] = ()
    correction: str = ""
    unknown_words: tuple[str, ...] = ()

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
        images = ["" if each is None else thumbnail_uri(each.preview()) for each in found]
        images = images if any(images) else []
        table = record_table(self.records(), images)
        return [replace(table, notes=tuple(notes) or table.notes)]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values.

        Returns:
            A JSON object.
        """
        message: dict[str, Any] = {"message": self.message} if self.message else {}
        if self.weaker:
            message["weaker"] = [hit.to_json() for hit in self.weaker]
        message |= {"correction": self.correction} if self.correction else {}
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


EncodeTexts = Callable[[Sequence[str]], "Sequence[Tensor]"]
"""Returns the unit vectors of texts, one tensor per text."""


class Collection(Protocol):
    """Items that can be searched: an index, or the images of runs."""

    @property
    def root(self) -> Path:
        """The folder or data set of the items."""

    @property
    def models(self) -> Sequence[Retriever]:
        """Models that encode the query."""

    @property
    def calibration(self) -> Calibration | None:
        """Calibration of the scores of single texts by labels. None: there is none."""

    @property
    def null_scores(self) -> NullScores:
        """Calibration of the scores of single texts without labels.

        Raises:
            VisavisError: If there is none, with the reason.
        """

    def count(self, item_filter: ItemFilter) -> int:
        """Count the items that pass a filter.

        Args:
            item_filter: Conditions on the items.

        Returns:
            Number of items.
        """

    def encode_query(self, query: SearchQuery, encode_texts: EncodeTexts | None = None) -> Any:
        """Encode a query once, for several calls of ``nearest``.

        Args:
            query: The query.
            encode_texts: Encodes the texts. None: the models of the collection do.

        Returns:
            The encoded query.
        """

    def nearest(
        self, encoded: Any, count: int, item_filter: ItemFilter
    ) -> tuple[list[SearchResult], bool]:
        """Find the items with the highest scores.

        Args:
            encoded: The encoded query.
            count: Maximum number of items.
            item_filter: Conditions on the items.

        Returns:
            Results, best first, and whether a larger count may find more.
        """

    def item_vectors(self, items: Sequence[IndexItem]) -> np.ndarray | None:
        """Read the unit vectors by which near-duplicates are found.

        Args:
            items: The items.

        Returns:
            Vectors, float32, shape ``[N, D]``. None: near-duplicates are not found.
        """

    def image(self, item: IndexItem) -> Image | None:
        """Find the image or clip of an item.

        Args:
            item: The item.

        Returns:
            The image. None if its file no longer exists.
        """

    def explain_no_results(self, item_filter: ItemFilter) -> str:
        """Explain why a search found nothing.

        Args:
            item_filter: Conditions on the items.

        Returns:
            A sentence.

        Raises:
            DataError: If no item has a metadata name of the filter.
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
    if max_irrelevant is not None:
        _check_max_irrelevant(collection, query, max_irrelevant, rerank)
    encoded = collection.encode_query(query, encode_texts)
    # The other model may find its best result far below the first search's best ones.
    count = max(top, RERANK_DEPTH) if rerank else top
    if group_duplicates:
        results = grouped_results(
            collection, lambda depth: collection.nearest(encoded, depth, item_filter), count
        )
    else:
        results = collection.nearest(encoded, count, item_filter)[0]
    if not results:
        return SearchResults((), message=collection.explain_no_results(item_filter))
    if rerank is not None:
        return SearchResults(tuple(_rerank(collection, rerank, query, results)[:top]))
    if isinstance(encoded, CorrectedQuery):
        return SearchResults(tuple(results), correction=str(encoded.correction.settings))
    if not query.is_single_text:
        return SearchResults(tuple(results))
    return _assess(collection, encoded, results, item_filter, max_irrelevant)


def _assess(
    collection: Collection,
    encoded: Any,
    results: Sequence[SearchResult],
    item_filter: ItemFilter,
    max_irrelevant: float | None,
) -> SearchResults:
    """Results of a single text with match probabilities, cut at a level of irrelevant ones."""
    calibration = collection.calibration
    scores = [result.score for result in results]
    if calibration is not None:
        probabilities = [calibration.match_probability(score) for score in scores]
        no_match = scores[0] < calibration.min_score
    # Without labels only on request: the first time, texts have to be encoded.
    elif max_irrelevant is not None:
        null = collection.null_scores
        standardized = null.standardize(encoded, np.array([scores]))
        count = collection.count(item_filter)
        (probabilities,) = null.match_probabilities(standardized, count).tolist()
        no_match = probabilities[0] < NO_MATCH
    else:
        return SearchResults(tuple(results))
    shares = irrelevant_shares(probabilities)
    hits = tuple(
        replace(result, match_probability=probability, irrelevant_share=share)
        for result, probability, share in zip(results, probabilities, shares, strict=True)
    )
    if max_irrelevant is None:
        return SearchResults(hits, no_match)
    kept = count_within(probabilities, max_irrelevant)
    message = ""
    if not kept:
        verdict = "Probably no match" if no_match else "No result at this level"
        message = f"{verdict}: even the best one is irrelevant with probability {shares[0]:.2f}."
    return SearchResults(hits[:kept], no_match, message, hits[kept:])


def _check_max_irrelevant(
    collection: Collection, query: SearchQuery, level: float, rerank: Retriever | None
) -> None:
    """Check that a level of irrelevant results is valid and match probabilities exist."""
    check_level(level)
    if not query.is_single_text or rerank is not None:
        raise no_probabilities("they exist for one text, without other parts and --rerank.")
    if collection.calibration is None:
        _ = collection.null_scores  # may raise an error


def check_level(level: float) -> None:
    """Check a level of irrelevant results.

    Args:
        level: Share of irrelevant results.

    Raises:
        VisavisError: If it is not from 0 to 1.
    """
    if not 0 <= level <= 1:
        raise VisavisError(
            f"max_irrelevant: expected a share from 0 to 1, got {level:g}. Pass a share such as "
            "0.1."
        )


def no_probabilities(reason: str) -> VisavisError:
    """Make the error of a search that cannot have match probabilities.

    Args:
        reason: Why, as a sentence that starts with a small letter.

    Returns:
        The error.
    """
    return VisavisError(
        f"max_irrelevant: no match probabilities, because {reason} Remove --max-irrelevant."
    )


def warn_unknown_words(model: Retriever, query: SearchQuery, progress: Progress) -> None:
    """Report the words of a query that are not in the vocabulary of a model.

    Args:
        model: The model.
        query: The query.
        progress: Receives the message.

    Raises:
        VisavisError: If the vocabulary contains no word of one of the texts.
    """
    for _, text in query.texts:
        if text.strip() and (unknown := model.unknown_words(text)):
            progress.message(f"The model does not know: {', '.join(unknown)}")


def unknown_words(model: Retriever, query: SearchQuery) -> tuple[str, ...]:
    """Find the words of a query that are not in the vocabulary of a model.

    Args:
        model: The model.
        query: A query that the model can encode.

    Returns:
        The words, each once. A model with a tokenizer of subwords knows all.
    """
    words = dict[str, None]()
    for _, text in query.texts:
        try:
            words |= dict.fromkeys(model.unknown_words(text))
        except VisavisError:  # an excluded text of unknown words only
            words |= dict.fromkeys(text.split())
    return tuple(words)


def known_texts(model: Retriever, query: SearchQuery) -> list[tuple[float, str]]:
    """Select the texts of a query that a model can encode.

    Args:
        model: The model.
        query: The query.

    Returns:
        Weights and texts. An excluded text of unknown words only is left out, as an unknown word of
        another text has no effect.

    Raises:
        VisavisError: If a text is empty, or the vocabulary contains no word of one to search for.
    """
    texts = list[tuple[float, str]]()
    for weight, text in query.texts:
        validate_text_query(text)
        try:
            model.unknown_words(text)
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
        VisavisError: If the query is empty, or a data URL.
    """
    if is_data_url(text):
        raise VisavisError(
            "query: expected text, got a data URL. Search with the image itself, such as with "
            "--image FILE."
        )
    if not text.strip():
        raise VisavisError(
            "query: expected text, got an empty query. Describe the image, such as 'a dog runs on "
            "the beach'."
        )


def grouped_results(
    collection: Collection,
    find: Callable[[int], tuple[Sequence[SearchResult], bool]],
    count: int,
) -> list[SearchResult]:
    """Find results, of which near-duplicates and moments of one clip are one.

    Args:
        collection: The searched collection.
        find: Finds a number of items. It returns them, and whether a larger number may find more.
        count: Maximum number of results.

    Returns:
        The first result of each group, with the keys of the others.
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
    is_copy[later, earlier] |= (
        hamming_distances([item.dhash for item in items], later, earlier) <= MAX_HAMMING_DISTANCE
    )
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
    scores = text_scores @ torch.tensor([weight for weight, _ in texts], dtype=text_scores.dtype)
    # Stable: images with equal scores keep the order of the first search.
    order = scores.argsort(descending=True, stable=True).tolist()
    return [replace(readable[i][0], score=scores[i].item()) for i in order] + unreadable


def attach_images(collection: Collection, results: SearchResults) -> SearchResults:
    """Add the images of results whose files still exist.

    Args:
        collection: The searched collection.
        results: Results of a search.

    Returns:
        Results with ``image`` set.
    """
    hits, weaker = (
        tuple(replace(hit, image=collection.image(hit.item)) for hit in part)
        for part in (results.hits, results.weaker)
    )
    return replace(results, hits=hits, weaker=weaker)


CALIBRATED_RESULTS = 10
"""Number of results per query that calibration uses."""
# The highest score of an irrelevant item grows with the number of items.
MAX_SIZE_RATIO = 2.0
"""Largest ratio between the sizes of the searched and of the calibration collection."""
NO_MATCH = 0.5
"""Probability of being irrelevant above which even the best result is "probably no match"."""
FALSE_ALARM_RATE = 0.05
"""Share of queries with a relevant item whose best score is below ``Calibration.min_score``."""


@dataclass(frozen=True)
class Calibration:
    """Increasing step function from scores to match probabilities, and a threshold for queries
    without a relevant item.

    Attributes:
        scores: Knots of the function.
        probabilities: Match probability at each knot.
        num_candidates: Number of items in the calibration collection.
        num_queries: Number of calibration queries.
        min_score: 5th percentile of the best scores of queries that have a relevant item. A lower
            best score means "no match".
        detection_rate: Share of queries whose best score is below ``min_score`` once their relevant
            items are removed.
    """

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    num_candidates: int
    num_queries: int
    min_score: float
    detection_rate: float

    def is_valid_for(self, count: int) -> bool:
        """Check whether the calibration holds for a collection of a given size.

        Args:
            count: Number of items of the collection.

        Returns:
            Whether the size is between half and twice that of the calibration collection.
        """
        return self.num_candidates / MAX_SIZE_RATIO <= count <= self.num_candidates * MAX_SIZE_RATIO

    def match_probability(self, score: float) -> float:
        """Convert a score to a match probability.

        Args:
            score: Score of a result.

        Returns:
            Probability that the result is relevant, 0 to 1.
        """
        return float(np.interp(score, self.scores, self.probabilities))


# Prior odds of a match: three of four texts describe an item of the collection.
MATCH_ODDS = 3.0
# Smallest variance of the scores of a query, so that rounding errors of equal scores have no weight.
MIN_VARIANCE = 1e-10


@dataclass(frozen=True, eq=False)
class NullScores:
    """Distribution of the scores of irrelevant items, for one query model and one collection.

    The scores of a query are standardized by the mean and the standard deviation of its scores with
    all items, because texts differ in both. The distribution describes standardized scores.

    Attributes:
        mean: Mean of the vectors of the items, shape ``[D]``.
        covariance: Covariance of the vectors, shape ``[D, D]``.
        tail: Coefficients a, b and c. The logarithm of the share of irrelevant items that reach the
            standardized score z is a + b z + c z^2. The normal distribution is the lower limit.
    """

    mean: np.ndarray
    covariance: np.ndarray
    tail: tuple[float, float, float]

    def standardize(self, queries: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Standardize the scores of queries.

        Args:
            queries: Vectors of the queries, shape ``[Q, D]``.
            scores: Scores of items, shape ``[Q, items]``.

        Returns:
            Standard deviations above the mean score of all items, same shape.
        """
        variances = np.einsum("qd,qd->q", queries @ self.covariance, queries)
        deviations = np.sqrt(np.maximum(variances, MIN_VARIANCE))
        return np.asarray((scores - (queries @ self.mean)[:, None]) / deviations[:, None])

    def share_above(self, standardized: np.ndarray) -> np.ndarray:
        """Compute the share of irrelevant items that reach standardized scores.

        Args:
            standardized: Standardized scores, of any shape.

        Returns:
            Shares, 0 to 1, of the same shape.
        """
        from scipy.special import log_ndtr

        fitted = np.polynomial.polynomial.polyval(standardized, self.tail)
        return np.exp(np.minimum(np.maximum(fitted, log_ndtr(-standardized)), 0))

    def match_probabilities(self, standardized: np.ndarray, num_items: int) -> np.ndarray:
        """Convert the standardized scores of the first results of queries to match probabilities.

        Formula:
            $p_k = 1 - max_(j <= k) max(B_j / (B_j + 3), E_j - E_(j-1))$ with the expected number
            $E_j = N F(z_j)$ of irrelevant items that reach the score of result j, and
            $B_j = -e E_j log(E_j)$, which is 1 for $E_j > 1 / e$. $F$ is the share of irrelevant
            items that reach a score, and $N$ the number of items. $E_j$ is the p-value of the
            hypothesis that result j is irrelevant, and $B_j$ the smallest Bayes factor for it.

        Args:
            standardized: Standardized scores, falling along the last axis, without gaps from the
                best one.
            num_items: Number of searched items.

        Returns:
            Probability that each result is relevant, 0 to 1. It does not rise with the rank, and
            does not depend on later results.

        Source:
            Sellke, Bayarri and Berger, Calibration of p Values for Testing Precise Null Hypotheses,
            The American Statistician 2001, for the Bayes factor. Auckenthaler, Carey and
            Lloyd-Thomas, Score Normalization for Text-Independent Speaker Verification Systems,
            Digital Signal Processing 2000, for standardized scores.
        """
        expected = num_items * self.share_above(standardized)
        p_values = np.clip(expected, np.finfo(np.float64).tiny, 1 / np.e)
        factors = -np.e * p_values * np.log(p_values)
        irrelevant = np.maximum(
            factors / (factors + MATCH_ODDS), np.diff(expected, prepend=0.0, axis=-1)
        )
        return np.asarray(1 - np.clip(np.maximum.accumulate(irrelevant, axis=-1), 0, 1))


def irrelevant_shares(probabilities: Sequence[float]) -> list[float]:
    """Compute the expected share of irrelevant results in each beginning of a list.

    Args:
        probabilities: Match probability of each result, best first.

    Returns:
        Share of irrelevant results among the results up to each one, 0 to 1.
    """
    irrelevant = 1 - np.asarray(probabilities, np.float64)
    return [float(share) for share in irrelevant.cumsum() / np.arange(1, len(irrelevant) + 1)]


def count_within(probabilities: Sequence[float], max_irrelevant: float) -> int:
    """Count the results up to an expected share of irrelevant ones.

    Args:
        probabilities: Match probability of each result, best first, not rising.
        max_irrelevant: Level. 0 allows no result, 1 all.

    Returns:
        Length of the longest beginning whose expected share of irrelevant results is below the
        level.
    """
    return sum(
        max_irrelevant >= 1 or share < max_irrelevant for share in irrelevant_shares(probabilities)
    )


def fit_calibration(scores: Tensor, relevant: Tensor) -> Calibration:
    """Fit isotonic regression of relevance on the scores of the first ten results of each query.

    Args:
        scores: Scores, shape ``[queries, candidates]``.
        relevant: Whether a candidate is relevant to a query, bool, same shape.

    Returns:
        The calibration.

    Raises:
        DataError: If all of the first results are relevant, or none.

    Source:
        Zadrozny and Elkan, KDD 2002.
    """
    from scipy.optimize import isotonic_regression

    # Shape [queries, 10].
    top_scores, top_results = scores.topk(min(CALIBRATED_RESULTS, scores.shape[1]), dim=1)
    top_relevant = relevant.gather(1, top_results)
    if not top_relevant.any() or top_relevant.all():
        raise DataError(
            "Calibration: expected relevant and irrelevant items among the first "
            f"{top_scores.shape[1]} results of {len(scores):,} "
            f"queries, got only {'relevant' if top_relevant.all() else 'irrelevant'} ones. Use a "
            "larger validation split."
        )
    knots, knot_of, counts = np.unique(
        top_scores.flatten().double().numpy(), return_inverse=True, return_counts=True
    )
    # Equal scores form one knot, or the fit would depend on their order.
    precisions = np.bincount(knot_of, weights=top_relevant.flatten().double().numpy()) / counts
    probabilities = isotonic_regression(precisions, weights=counts).x
    # Of knots with the same probability, the first and the last define the function.
    changes = np.diff(probabilities) != 0
    kept = np.r_[True, changes] | np.r_[changes, True]
    # Other queries have no best score without relevant items to compare with.
    has_both = relevant.any(1) & ~relevant.all(1)
    best_with_relevant = scores[has_both].amax(1)
    best_without_relevant = scores[has_both].masked_fill(relevant[has_both], -torch.inf).amax(1)
    min_score = torch.quantile(best_with_relevant.double(), FALSE_ALARM_RATE).item()
    return Calibration(
        scores=tuple(knots[kept].tolist()),
        probabilities=tuple(probabilities[kept].tolist()),
        num_candidates=scores.shape[1],
        num_queries=len(scores),
        min_score=min_score,
        detection_rate=(best_without_relevant < min_score).double().mean().item(),
    )
