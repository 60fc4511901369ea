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

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from visavis.core.errors import VisavisError
from visavis.retrieval.search import NO_MATCH, NullScores, count_within

if TYPE_CHECKING:
    from visavis.models.retriever import Retriever
    from visavis.retrieval.stores.base import VectorStore

COLORS = "red blue yellow green orange purple white pink black brown"
# All words of a family are exclusive: an item that fits one text of a row or column does not fit
# the others, as a rule.
FAMILIES = (
    (
        "a {} {}",
        COLORS,
        "circle star square heart triangle ring diamond crescent hexagon cross drop",
    ),
    (
        "a {} {}",
        COLORS,
        (
            "car bus train bicycle boat chair lamp clock book telephone guitar ball hat shirt umbrella "
            "bag bottle cup knife candle flower leaf mushroom key kite"
        ),
    ),
    (
        "a {} in the {}",
        "dog cat horse cow sheep rabbit mouse elephant tiger bear duck penguin fish snake butterfly",
        "beach forest desert street kitchen museum station meadow snow sea",
    ),
    (
        "a {} {}",
        "man woman boy girl baby",
        (
            "running sleeping reading cooking swimming dancing singing painting climbing jumping "
            "driving fishing eating laughing skiing writing"
        ),
    ),
    (
        "a {} with a {}",
        "plate bowl basket table hand",
        (
            "apple banana lemon strawberry tomato potato carrot bread cake pizza soup salad egg cheese "
            "fish"
        ),
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
# On validation splits, the share is 0.05 to 0.07 where lists hold 12 to 14 % irrelevant results at
# a stated level of 10 %, 0.15 or more where they hold 27 %, and 0.63 or more where they hold 71 %.
MAX_CONTRADICTED = 0.1
"""Largest share of results that fit a contradicting text better."""
# The distribution of the highest scores is an exponential law, a limit law of tails, because single
# scores vary.
_TAIL_SCORES = 30
_KNOTS = 200
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
    null = NullScores(
        scores=tuple(ordered[ranks - 1].tolist()),
        shares=tuple((ranks / len(ordered)).tolist()),
        tail_mean=float((ordered[:num_tail] - ordered[num_tail - 1]).mean()),
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
    if problem:
        return NullScores(num_texts=len(scores), contradicted=contradicted or 0.0, problem=problem)
    return replace(null, contradicted=contradicted or 0.0)


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


def _is_known(model: Retriever, text: str) -> bool:
    """Whether the model knows all words of a text."""
    try:
        return not model.unknown_words(text)
    except VisavisError:  # it knows no word
        return False
