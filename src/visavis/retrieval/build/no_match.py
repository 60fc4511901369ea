"""Scale of the scores of an index: moments of its items, and the scores of irrelevant items without
labels, from texts that contradict each other.

The texts of a fixed bank are scored with the items of an index. "A red star" and "a blue star"
contradict each other: an item that fits the second better is irrelevant to the first, however high it
scores. Such pairs show how high irrelevant items score that resemble matches. From the distribution of
their scores and the number of items follows how many irrelevant items reach the score of a result.

Whether this holds depends on the model. A weak model cannot distinguish matches from similar items.
A check therefore compares the probabilities with the contradictions: where many of the results that
should be matches fit a contradicting text better, no probability is shown.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, RunError, StorageError, VisavisError
from visavis.core.progress import Progress
from visavis.retrieval.calibrate.calibration import (
    MOMENTS,
    SCALE,
    Moments,
    NullScores,
    ScoreScale,
    count_within,
)
from visavis.retrieval.stores.index_database import IndexDatabase

if TYPE_CHECKING:
    from visavis.retrieval.index_folder import Index
    from visavis.retrieval.query_encoder import QueryEncoder

_COLORS = "red blue yellow green orange purple white pink black brown"
_SHAPES = "square heart triangle ring diamond crescent hexagon cross drop"
_THINGS = "bus bicycle boat chair lamp book telephone bag bottle flower"
_ANIMALS = "cat horse cow sheep rabbit mouse elephant tiger bear duck penguin fish snake butterfly"
_PLACES = "snow desert forest meadow sea sky"
# The words of a row or a column exclude each other: an item that fits one of its texts does not fit the
# others, as a rule. Most texts are unlikely, so that few collections show what they describe. A text
# has two or three properties, of which contradicting texts differ in one, because the irrelevant items
# that score highest for a text fit most of it.
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
    # Short texts, which people type, have two properties, and contradict each other in one.
    (
        "a {} {}",
        _COLORS,
        f"star circle {_SHAPES} car umbrella dog cat horse {_THINGS} bird shirt",
    ),
)
"""Texts of the bank: a pattern with two words, and the words of its rows and of its columns."""
MIN_TEXTS = 100
"""Smallest number of texts of the bank whose words the model knows."""
MAX_SAMPLED_ITEMS = 5_000
"""Number of items whose vectors give the scale. They are evenly spaced in the order of keys."""
MAX_SCORED_SETS = 256
"""Number of items with several vectors that give the scale, which each search scores."""
MAX_CHANGED = 0.1
"""Share of changed items after which an update computes the scale again."""
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
# The tail is fitted at 60 scores between one standard deviation and the 20th highest score. Higher ones
# vary too much.
_TAIL_START = 1.0
_TAIL_SCORES = 20
_TAIL_POINTS = 60


def bank_texts() -> tuple[list[str], np.ndarray]:
    """Write the texts of the bank, and the family, row and column of each, ``[texts, 3]``."""
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
    """Fit the distribution of the scores of irrelevant items. Return also the share of the results
    of texts that fit a contradicting text better, NaN if few texts have results.
    """
    return fit_standardized(Moments.of(items).standardize(texts, texts @ items.T), places)


def fit_standardized(standardized: np.ndarray, places: np.ndarray) -> tuple[NullScores, float]:
    """Fit as ``fit_null_scores`` the standardized scores of texts with items, ``[texts, items]``."""
    is_contradicted = standardized <= _best_contradicting(standardized, places)
    null = NullScores(_fit_tail(standardized[is_contradicted], standardized.size))
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
    # The logarithm of a share of n pairs varies by about 1 / sqrt(n).
    weights = np.sqrt(np.minimum(ranks, 500))
    fit = np.polynomial.polynomial.polyfit
    coefficients = fit(high[ranks - 1], shares, 2, w=weights)
    # A convex parabola would rise again at high scores. A line takes its place.
    if coefficients[2] > 0:
        coefficients = np.append(fit(high[ranks - 1], shares, 1, w=weights), 0)
    a, b, c = coefficients.tolist()
    return a, b, c


def _contradicted_share(
    null: NullScores, standardized: np.ndarray, is_contradicted: np.ndarray
) -> float:
    """The share that ``fit_null_scores`` returns."""
    order = np.argsort(-standardized, axis=1, kind="stable")[:, :_CHECKED_RESULTS]
    shares = list[float]()
    for text, items in enumerate(order):
        probabilities = null.cautious_probabilities(
            standardized[text, items], standardized.shape[1]
        )
        if length := count_within(probabilities.tolist(), CHECKED_LEVEL):
            shares.append(float(is_contradicted[text, items[:length]].mean()))
    return float(np.mean(shares)) if len(shares) >= MIN_CHECKED_TEXTS else np.nan


def calibrate_without_labels(model: QueryEncoder, items: np.ndarray) -> NullScores | str:
    """Score the bank with items, and check that the distribution holds. Else return the reason,
    which starts with a small letter.
    """
    if len(items) < MIN_ITEMS:
        return f"the index has {len(items)} items, and {MIN_ITEMS} are needed."
    texts, places = bank_texts()
    try:
        known = [number for number, text in enumerate(texts) if _is_known(model, text)]
    except RunError:
        return "the index has no model for texts."
    if len(known) < MIN_TEXTS:
        return f"the model knows the words of {len(known)} test texts only, and {MIN_TEXTS} are needed."
    queries = _encode_bank(model, [texts[number] for number in known], items.shape[1])
    null, contradicted = fit_null_scores(queries, places[known], items)
    if np.isnan(contradicted):
        return "hardly any test text finds an item of this collection."
    if contradicted > MAX_CONTRADICTED:
        return (
            f"{contradicted:.0%} of the results of test texts fit a contradicting text better. "
            "This model cannot distinguish matches from similar items."
        )
    return null


def _encode_bank(model: QueryEncoder, texts: list[str], dim: int) -> np.ndarray:
    """Encode texts of the bank, once for each model."""
    content = repr((model.fingerprint, dim, texts)).encode()
    name = f"bank-{hashlib.sha256(content).hexdigest()[:16]}.npy"
    # Without a home folder or on a full disk, nothing is cached. A damaged file is replaced.
    with suppress(StorageError, DataError):
        cached = storage.read_array(storage.cache_folder() / "checks" / name, dimensions=2)
        if cached.shape == (len(texts), dim):
            return cached
    encoded = np.stack(model.encode_texts(texts)).astype(np.float32)
    with suppress(StorageError):
        storage.write_array(storage.cache_folder() / "checks" / name, encoded)
    return encoded


def fit_scale(index: Index) -> tuple[ScoreScale, Moments | None]:
    """Compute the scale of an index, of the scores of irrelevant items, and the moments of its
    items. None: they have several vectors, or there are none.
    """
    fingerprint = index.manifest.query_model.fingerprint
    count = index.store.count()
    rows = np.linspace(0, count - 1, min(count, MAX_SAMPLED_ITEMS)).round().astype(int)
    if index.manifest.late_interaction is not None:
        keys = index.store.table().keys()
        chosen = rows[:: -(-len(rows) // MAX_SCORED_SETS)] if count else rows
        sample = tuple(keys[row] for row in chosen)
        return ScoreScale(fingerprint, sample, reason="items have several vectors."), None
    if not count:
        return ScoreScale(fingerprint, reason="the index has no items."), None
    vectors = cast("np.ndarray", index.store.all_vectors())
    items = np.asarray(vectors[rows], np.float32)
    found = calibrate_without_labels(index.model, items)
    scale = ScoreScale(
        fingerprint,
        tail=None if isinstance(found, str) else found.tail,
        reason=found if isinstance(found, str) else "",
    )
    return scale, Moments.of(items)


def renew_scale(index: Index, num_changed: int, progress: Progress) -> int:
    """Compute the scale of an index again if many items changed, and return the number of items
    that changed since.
    """
    total = index.manifest.num_changed + num_changed
    scale = None
    with suppress(DataError):  # of another version
        scale = index.scale
    if scale is not None and total <= MAX_CHANGED * index.store.count():
        return total
    write_scale(index, progress)
    return 0


def write_scale(index: Index, progress: Progress) -> None:
    """Compute the scale of an index, and record it."""
    with progress.activity("calibrating match probabilities"):
        scale, moments = fit_scale(index)
    with closing(IndexDatabase(index.folder)) as database:
        set_scale(database, scale, moments)


def set_scale(database: IndexDatabase, scale: ScoreScale, moments: Moments | None) -> None:
    """Write a scale into the database of its index."""
    with database.change():
        database.set_value(SCALE, json.dumps(asdict(scale)))
        database.set_value(MOMENTS, b"" if moments is None else moments.to_bytes())


def _is_known(model: QueryEncoder, text: str) -> bool:
    """Whether the model knows all words of a text."""
    try:
        return not model.unknown_words(text)
    except RunError:  # the index has no model
        raise
    except VisavisError:  # it knows no word
        return False
