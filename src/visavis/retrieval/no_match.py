"""Match probabilities without labels: the scores of unrelated texts show how high irrelevant
items score.

The texts of a fixed bank are scored with the items of an index. Few of them describe an item, so
that their scores are those of irrelevant items. The number of irrelevant items that reach the score
of a result follows from the share of these scores that reach it, and from the number of items.

Whether this holds depends on the model. Related items score higher than unrelated ones, and a weak
model cannot distinguish them from matches. A check therefore compares texts that contradict each other:
"a red star" and "a blue star". Where items found for one of them often fit the other one better, no
probability is shown.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np

from visavis.core import storage
from visavis.core.errors import StorageError, VisavisError
from visavis.data.sequences import hash_parts
from visavis.retrieval.search import NO_MATCH, NullScores, count_within

if TYPE_CHECKING:
    from visavis.models.retriever import Retriever
    from visavis.retrieval.stores.base import VectorStore

_COLORS = "red blue yellow green orange purple white pink black brown"
_ANIMALS = (
    "dog cat horse cow sheep rabbit mouse elephant tiger bear duck penguin fish snake butterfly"
)
# The words of a row or a column exclude each other: an item that fits one of its texts does not fit the
# others, as a rule. Most texts are unlikely, so that few collections show what they describe.
FAMILIES = (
    (
        "a {} {}",
        _COLORS,
        "circle star square heart triangle ring diamond crescent hexagon cross drop",
    ),
    (
        "a {} {}",
        _COLORS,
        (
            "car bus train bicycle boat chair lamp clock book telephone guitar ball hat shirt umbrella "
            "bag bottle cup knife candle flower leaf mushroom key kite"
        ),
    ),
    (
        "a {} in the {}",
        _ANIMALS,
        "beach forest desert street kitchen museum station meadow snow sea",
    ),
    ("a {} {}", _ANIMALS, "reading cooking singing painting driving fishing skiing writing"),
    (
        "a {} {}",
        _COLORS,
        "apple banana lemon tomato potato carrot bread pizza soup salad egg cheese",
    ),
    (
        "a {} of a {}",
        "map letter poster screenshot drawing statue newspaper stamp coin chart",
        "castle bridge church airport stadium rocket ship tractor",
    ),
)
"""Texts of the bank: a pattern with two words, and the words of its rows and of its columns."""
MIN_TEXTS = 100
"""Smallest number of texts of the bank whose words the model knows."""
MAX_SAMPLED_ITEMS = 20_000
"""Number of items that are scored with the bank. They are evenly spaced in the order of keys."""
# On validation splits, the share is 0.08 to 0.12 where lists hold 12 to 18 % irrelevant results at a
# stated level of 10 %, 0.13 or more where they hold 20 %, and 0.67 or more where they hold 77 %.
MAX_CONTRADICTED = 0.125
"""Largest share of results that fit a contradicting text better."""
# Above this number of the highest scores, the distribution is an exponential law, which is a limit law
# of tails. Single scores vary too much.
_TAIL_SCORES = 30
_KNOTS = 200
# Smallest share of texts without an item above a score from which a number of items is estimated.
_MIN_EMPTY = 0.3
_CHECKED_RESULTS = 50


def bank_texts() -> tuple[list[str], np.ndarray]:
    """Write the texts of the bank.

    Returns:
        Texts, and the family, row and column of each, shape ``[texts, 3]``.
    """
    texts, places = list[str](), list[tuple[int, int, int]]()
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


def fit_null_scores(scores: np.ndarray, places: np.ndarray) -> NullScores:
    """Fit the distribution of the scores of irrelevant items, and check whether it holds.

    Args:
        scores: Scores of the texts of a bank with items, shape ``[texts, items]``.
        places: Family, row and column of each text, shape ``[texts, 3]``. Texts of a row or column
            contradict each other.

    Returns:
        The distribution, with a ``problem`` if the check fails.
    """
    ordered = np.sort(scores, axis=None)[::-1].astype(np.float64)
    num_tail = min(_TAIL_SCORES, len(ordered))
    ranks = np.unique(np.geomspace(num_tail, len(ordered), _KNOTS).round().astype(int))
    knots, shares = ordered[ranks - 1], ranks / len(ordered)
    null = NullScores(
        scores=tuple(knots.tolist()),
        shares=tuple((shares * _excess_of_matches(scores, knots, shares)).tolist()),
        tail_mean=float((ordered[:num_tail] - knots[0]).mean()),
        num_texts=len(scores),
    )
    contradicted = _contradicted_share(null, scores, places)
    problem = ""
    if contradicted is None:
        problem = "No match probabilities: hardly any test text finds an item of this collection."
    elif contradicted > MAX_CONTRADICTED:
        problem = (
            f"No match probabilities: {contradicted:.0%} of the results of test texts fit a "
            "contradicting text better, so this model cannot distinguish matches from similar items."
        )
    return replace(null, contradicted=contradicted or 0.0, problem=problem)


def _excess_of_matches(scores: np.ndarray, knots: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Factor that corrects the shares for texts of the bank that describe many items.

    A text without matches has no item above a score with the probability $exp(-n)$, with $n$ the
    expected number of items above it. The share of texts without such an item gives $n$, and does
    not depend on how many items the other texts have.
    """
    empty = np.searchsorted(np.sort(scores.max(1)), knots) / len(scores)
    is_known = empty >= _MIN_EMPTY
    expected = -np.log(np.maximum(empty, _MIN_EMPTY)) / scores.shape[1]
    factors = np.minimum(expected / shares, 1.0)
    # Below, nearly all texts have an item.
    last = factors[is_known][-1] if is_known.any() else 1.0
    return np.where(is_known, factors, last)


def _contradicted_share(null: NullScores, scores: np.ndarray, places: np.ndarray) -> float | None:
    """Share of the results of texts, to ``NO_MATCH``, that a contradicting text scores higher.
    None without such results.
    """
    shares = list[float]()
    for row, place in zip(scores, places, strict=True):
        best = np.argsort(-row, kind="stable")[:_CHECKED_RESULTS]
        listed = best[
            : count_within(null.match_probabilities(row[best].tolist(), len(row)), NO_MATCH)
        ]
        is_equal = places == place
        # The same family, and either the same row or the same column.
        contradicting = is_equal[:, 0] & (is_equal[:, 1] ^ is_equal[:, 2])
        if len(listed) and contradicting.any():
            others = scores[np.ix_(contradicting, listed)].max(0)
            shares.append(float((others > row[listed]).mean()))
    return float(np.mean(shares)) if shares else None


def calibrate_without_labels(
    model: Retriever, store: VectorStore, *, has_several_vectors: bool
) -> NullScores:
    """Score the bank with the items of an index.

    Args:
        model: Model that encodes queries, with the dimension of the index.
        store: Vectors of the items.
        has_several_vectors: Whether items have several vectors, for which there are no
            probabilities.

    Returns:
        Distribution of the scores of irrelevant items.
    """
    if has_several_vectors:
        return NullScores(
            problem="No match probabilities: they are not available for models with several "
            "vectors per item."
        )
    texts, places = bank_texts()
    known = [number for number, text in enumerate(texts) if _is_known(model, text)]
    if len(known) < MIN_TEXTS:
        return NullScores(
            num_texts=len(known),
            problem=f"No match probabilities: the model knows the words of {len(known)} test texts "
            f"only, and {MIN_TEXTS} are needed.",
        )
    vectors = store.all_vectors()
    if not len(vectors):
        return NullScores(problem="No match probabilities: the index has no items.")
    rows = np.linspace(0, len(vectors) - 1, min(len(vectors), MAX_SAMPLED_ITEMS)).round()
    items = np.asarray(vectors[rows.astype(int)], np.float32)
    queries = model.encode_texts([texts[number] for number in known]).numpy()
    return fit_null_scores(queries @ items.T, places[known])


def recall_null_scores(
    model: Retriever, store: VectorStore, owner: str, *, has_several_vectors: bool
) -> NullScores:
    """Score the bank with the items of an index, once for each content of the index.

    Args:
        model: Model that encodes queries, with the dimension of the index.
        store: Vectors of the items.
        owner: Index and model of the queries.
        has_several_vectors: Whether items have several vectors.

    Returns:
        Distribution of the scores of irrelevant items.
    """
    key = hash_parts(repr((owner, store.digest(), FAMILIES)).encode())
    # Without a home folder or on a full disk, nothing is cached.
    with suppress(StorageError):
        file = storage.cache_folder() / "checks" / f"no-match-{key}.json"
        cached: NullScores | None = storage.read_checksummed_json(file, NullScores)
        if cached is not None:
            return cached
    null_scores = calibrate_without_labels(model, store, has_several_vectors=has_several_vectors)
    with suppress(StorageError):
        file = storage.cache_folder() / "checks" / f"no-match-{key}.json"
        storage.write_checksummed_json(file, asdict(null_scores))
    return null_scores


def _is_known(model: Retriever, text: str) -> bool:
    """Whether the model knows all words of a text."""
    try:
        return not model.unknown_words(text)
    except VisavisError:  # it knows no word
        return False
