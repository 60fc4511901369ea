"""Match probabilities without labels: texts that contradict each other show how high irrelevant
items score.

The texts of a fixed bank are scored with the items of an index. "A red star" and "a blue star"
contradict each other: an item that fits the second better is irrelevant to the first, however high it
scores. Such pairs show how high irrelevant items score that resemble matches. From the distribution of
their scores and the number of items follows how many irrelevant items reach the score of a result.

Whether this holds depends on the model. A weak model cannot distinguish matches from similar items.
A check therefore compares the probabilities with the contradictions: where many of the results that
should be matches fit a contradicting text better, no probability is shown.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from visavis.core import storage
from visavis.core.errors import DataError, StorageError, VisavisError
from visavis.data.sequences import hash_parts
from visavis.retrieval.search import (
    NullScores,
    count_within,
    no_probabilities,
)

if TYPE_CHECKING:
    from visavis.models.retriever import Retriever
    from visavis.retrieval.stores.base import VectorStore

_COLORS = "red blue yellow green orange purple white pink black brown"
_SHAPES = "square heart triangle ring diamond crescent hexagon cross drop"
_THINGS = "bus bicycle boat chair lamp book telephone bag bottle flower"
_ANIMALS = "cat horse cow sheep rabbit mouse elephant tiger bear duck penguin fish snake butterfly"
_PLACES = "snow desert forest meadow sea sky"
# The words of a row or a column exclude each other: an item that fits one of its texts does not fit the
# others, as a rule. Most texts are unlikely, so that few collections show what they describe. Each text
# has three properties, of which contradicting texts share two, because the irrelevant items that score
# highest for a caption fit most of it.
FAMILIES = (
    ("a {} star in the {}", _COLORS, _PLACES),
    ("a {} circle in the {}", _COLORS, _PLACES),
    ("a red {} in the {}", _SHAPES, _PLACES),
    ("a blue {} in the {}", _SHAPES, _PLACES),
    ("a {} car in the {}", _COLORS, _PLACES),
    ("a {} umbrella in the {}", _COLORS, _PLACES),
    ("a red {} in the {}", _THINGS, _PLACES),
    ("a white {} in the {}", _THINGS, _PLACES),
    ("a black {} in the {}", _ANIMALS, _PLACES),
    ("a white {} in the {}", _ANIMALS, _PLACES),
    ("a {} dog in the {}", _COLORS, _PLACES),
    (
        "a {} {} in the park",
        _ANIMALS,
        "reading cooking singing painting driving fishing skiing writing",
    ),
    (
        "a {} {} on a table",
        _COLORS,
        "apple banana lemon tomato potato carrot bread pizza soup salad egg cheese",
    ),
    (
        "a {} of a {} on a table",
        "map letter poster screenshot drawing statue newspaper stamp coin chart",
        "castle bridge church airport stadium rocket ship tractor",
    ),
)
"""Texts of the bank: a pattern with two words, and the words of its rows and of its columns."""
MIN_TEXTS = 100
"""Smallest number of texts of the bank whose words the model knows."""
MAX_SAMPLED_ITEMS = 20_000
"""Number of items that are scored with the bank. They are evenly spaced in the order of keys."""
MIN_ITEMS = 100
"""Smallest number of items. The error was measured from here on."""
CHECKED_LEVEL = 0.1
"""Expected share of irrelevant results at which the checked lists end."""
# Contradicted results are irrelevant. On 100 to 3,000 scenes, their share is 0.03 to 0.33. On Flickr8k with
# small heads, which cannot distinguish matches, it is 0.61 to 0.73.
MAX_CONTRADICTED = 0.45
"""Largest share of results that fit a contradicting text better."""
MIN_CHECKED_TEXTS = 10
"""Smallest number of texts with results for which the share of contradicted ones is known."""
_CHECKED_RESULTS = 50
FIT_VERSION = 2
"""Number of the method. A new one makes cached fits invalid."""
# The tail is fitted at 60 scores between one standard deviation and the 20th highest score. Higher ones
# vary too much.
_TAIL_START = 1.0
_TAIL_SCORES = 20
_TAIL_POINTS = 60


def bank_texts() -> tuple[list[str], np.ndarray]:
    """Write the texts of the bank.

    Returns:
        Texts, and the family, row and column of each, shape ``[texts, 3]``.
    """
    texts = list[str]()
    places = list[tuple[int, int, int]]()
    for family, (pattern, rows, columns) in enumerate(FAMILIES):
        for row, first in enumerate(rows.split()):
            for column, second in enumerate(columns.split()):
                words = pattern.format(first, second).split()
                texts.append(
                    " ".join(
                        "an" if word == "a" and after[0] in "aeiou" else word
                        for word, after in zip(words, [*words[1:], "-"], strict=True)
                    )
                )
                places.append((family, row, column))
    return texts, np.array(places)


def fit_null_scores(
    texts: np.ndarray, places: np.ndarray, items: np.ndarray
) -> tuple[NullScores, float]:
    """Fit the distribution of the scores of irrelevant items, and measure whether it holds.

    Args:
        texts: Vectors of the texts of a bank, shape ``[texts, D]``.
        places: Family, row and column of each text, shape ``[texts, 3]``. Texts of a row or column
            contradict each other.
        items: Vectors of the items, shape ``[items, D]``.

    Returns:
        The distribution, and the share of the results of texts, to ``CHECKED_LEVEL``, that fit a
        contradicting text better, 0 to 1. NaN if few texts have results.
    """
    mean = items.mean(0)
    centered = items - mean
    null = NullScores(mean, centered.T @ centered / len(items), (0.0, 0.0, 0.0))
    standardized = null.standardize(texts, texts @ items.T)
    is_contradicted = standardized <= _best_contradicting(standardized, places)
    null = replace(null, tail=_fit_tail(standardized[is_contradicted], standardized.size))
    return null, _contradicted_share(null, standardized, is_contradicted)


def _best_contradicting(standardized: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The highest score of a contradicting text for each text and item. Infinite without one."""
    best = np.full_like(standardized, np.inf)
    for number, place in enumerate(places):
        is_equal = places == place
        # The same family, and either the same row or the same column.
        contradicting = is_equal[:, 0] & (is_equal[:, 1] ^ is_equal[:, 2])
        if contradicting.any():
            best[number] = standardized[contradicting].max(0)
    return best


def _fit_tail(scores: np.ndarray, num_pairs: int) -> tuple[float, float, float]:
    """Fit the logarithm of the share of pairs that reach a score by a concave parabola."""
    high = np.sort(scores[scores > _TAIL_START])[::-1].astype(np.float64)
    if len(high) <= _TAIL_SCORES:
        return 0.0, 0.0, 0.0  # all scores are equal, so that no item can be a match
    ranks = np.unique(np.geomspace(_TAIL_SCORES, len(high), _TAIL_POINTS).astype(int))
    shares = np.log(ranks / num_pairs)
    weights = np.sqrt(np.minimum(ranks, 500))
    fit = np.polynomial.polynomial.polyfit
    coefficients = fit(high[ranks - 1], shares, 2, w=weights)
    if coefficients[2] > 0:
        coefficients = np.append(fit(high[ranks - 1], shares, 1, w=weights), 0)
    a, b, c = coefficients.tolist()
    return a, b, c


def _contradicted_share(
    null: NullScores, standardized: np.ndarray, is_contradicted: np.ndarray
) -> float:
    """The share that ``fit_null_scores`` returns."""
    order = np.argsort(-standardized, axis=1, kind="stable")[:, :_CHECKED_RESULTS]
    probabilities = null.match_probabilities(
        np.take_along_axis(standardized, order, 1), standardized.shape[1]
    )
    shares = [
        is_contradicted[text, items[:length]].mean()
        for text, items in enumerate(order)
        if (length := count_within(probabilities[text].tolist(), CHECKED_LEVEL))
    ]
    return float(np.mean(shares)) if len(shares) >= MIN_CHECKED_TEXTS else np.nan


def calibrate_without_labels(model: Retriever, store: VectorStore) -> NullScores:
    """Score the bank with the items of an index.

    Args:
        model: Model that encodes queries, with the dimension of the index.
        store: Vectors of the items, one of each.

    Returns:
        Distribution of the scores of irrelevant items.

    Raises:
        VisavisError: If it does not hold.
    """
    texts, places = bank_texts()
    known = [number for number, text in enumerate(texts) if _is_known(model, text)]
    if len(known) < MIN_TEXTS:
        raise no_probabilities(
            f"the model knows the words of {len(known)} test texts only, and {MIN_TEXTS} are needed."
        )
    vectors = store.all_vectors()
    if len(vectors) < MIN_ITEMS:
        raise no_probabilities(f"the index has {len(vectors)} items, and {MIN_ITEMS} are needed.")
    rows = np.linspace(0, len(vectors) - 1, min(len(vectors), MAX_SAMPLED_ITEMS)).round()
    items = np.asarray(vectors[rows.astype(int)], np.float32)
    queries = model.encode_texts([texts[number] for number in known]).numpy()
    null, contradicted = fit_null_scores(queries, places[known], items)
    if np.isnan(contradicted):
        raise no_probabilities("hardly any test text finds an item of this collection.")
    if contradicted > MAX_CONTRADICTED:
        raise no_probabilities(
            f"{contradicted:.0%} of the results of test texts fit a contradicting text better. "
            "This model cannot distinguish matches from similar items."
        )
    return null


def recall_null_scores(model: Retriever, store: VectorStore, owner: str) -> NullScores:
    """Score the bank with the items of an index, once for each content of the index.

    Args:
        model: Model that encodes queries, with the dimension of the index.
        store: Vectors of the items, one of each.
        owner: Index and model of the queries.

    Returns:
        Distribution of the scores of irrelevant items.

    Raises:
        VisavisError: If it does not hold.
    """
    key = hash_parts(repr((owner, store.digest(), FAMILIES, FIT_VERSION)).encode())
    # Without a home folder or on a full disk, nothing is cached. A damaged file is replaced.
    with suppress(StorageError, DataError):
        tensors = storage.read_tensors(storage.cache_folder() / "checks" / f"no-match-{key}")
        a, b, c = tensors["tail"].tolist()
        return NullScores(tensors["mean"].numpy(), tensors["covariance"].numpy(), (a, b, c))
    null = calibrate_without_labels(model, store)
    arrays = {"mean": null.mean, "covariance": null.covariance, "tail": np.array(null.tail)}
    with suppress(StorageError):
        storage.write_tensors(
            storage.cache_folder() / "checks" / f"no-match-{key}",
            {name: torch.from_numpy(array) for name, array in arrays.items()},
        )
    return null


def _is_known(model: Retriever, text: str) -> bool:
    """Whether the model knows all words of a text."""
    try:
        return not model.unknown_words(text)
    except VisavisError:  # it knows no word
        return False
