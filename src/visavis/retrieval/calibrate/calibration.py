"""Match probabilities of the results of a text, on one scale: scores that are standardized by all items
of the index. They come from captions, or from the scores of irrelevant items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from visavis.core.errors import DataError, VisavisError

SCALE = "score_scale"
"""Name of the ``ScoreScale`` in the database of an index."""
MOMENTS = "score_moments"
"""Name of the ``Moments`` of its items there. Empty: it has none."""
RATED_RESULTS = 1000
"""Number of results of a query from which match probabilities are computed, whatever is shown."""
CALIBRATED_RESULTS = 10
"""Number of results per caption that calibration uses."""
# The highest score of an irrelevant item grows with the number of items.
MAX_SIZE_RATIO = 2.0
"""Largest ratio between the sizes of the searched and of the calibration collection."""
FALSE_ALARM_RATE = 0.1
"""Share of captions with a relevant item whose best score is below ``Calibration.min_score``."""
SHORT_CAPTIONS = 0.05
"""Share of captions that are shorter than ``Calibration.min_length``."""
# Chosen on 200 to 3,000 scenes: lists that should have 10 and 30 % of irrelevant results have about as
# many. Without the factor, lists have 5 to 20 points more, because they end where scores happen to be
# high.
INFLATION = 1.5
"""Factor of the expected number of irrelevant items, because lists end at their best moment."""
MATCH_ODDS = 6.0
"""Prior odds of a match: six of seven texts describe an item of the collection."""
# Chosen on 1,400 scenes: 1 to 2 % of texts with matches get the message, and a third of texts without.
# At 0.7, these are 6 and 47 %. A wrong message hides right results.
NO_MATCH = 0.85
"""Probability of being irrelevant above which even the best result is "probably no match"."""
# Smallest variance of the scores of a query, so that rounding errors of equal scores have no weight.
MIN_VARIANCE = 1e-10


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and covariance of the vectors of the items. The mean and the variance of the scores of
    any query follow from them.

    Attributes:
        mean: Mean of the vectors, shape ``[D]``.
        covariance: Covariance of the vectors, shape ``[D, D]``.
    """

    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def of(cls, items: np.ndarray) -> Moments:
        """Compute the moments of vectors ``[N, D]``."""
        mean = items.mean(0)
        centered = items - mean
        return cls(mean, centered.T @ centered / len(items))

    def to_bytes(self) -> bytes:
        """Convert to the value of a database: the mean, and the rows of the covariance, in float32."""
        return np.concatenate([self.mean[None], self.covariance]).astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes, dim: int) -> Moments:
        """Read the moments of vectors ``[N, dim]``."""
        rows = np.frombuffer(content, "<f4").reshape(dim + 1, dim)
        return cls(rows[0], rows[1:])

    def standardize(self, queries: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Standardize the scores ``[Q, items]`` of queries ``[Q, D]``: standard deviations above
        the mean score of all items.
        """
        # Texts differ in both. Standardized scores: Auckenthaler, Carey and Lloyd-Thomas, Score
        # Normalization for Text-Independent Speaker Verification Systems, Digital Signal
        # Processing 2000.
        variances = np.einsum("qd,qd->q", queries @ self.covariance, queries)
        return _standardize(scores, (queries @ self.mean)[:, None], variances[:, None])


def standardize_by(scores: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Standardize scores ``[Q, K]`` by the scores of the same queries with reference items."""
    return _standardize(
        scores, reference.mean(1, keepdims=True), reference.var(1, keepdims=True, dtype=np.float64)
    )


def _standardize(scores: np.ndarray, means: np.ndarray, variances: np.ndarray) -> np.ndarray:
    return np.asarray((scores - means) / np.sqrt(np.maximum(variances, MIN_VARIANCE)))


@dataclass(frozen=True)
class Calibration:
    """Match probabilities from captions: an increasing step function of standardized scores, and a
    threshold for texts without a relevant item.

    Attributes:
        scores: Knots of the function.
        probabilities: Match probability at each knot.
        num_candidates: Number of items in the calibration collection.
        num_queries: Number of captions.
        min_score: 10th percentile of the best scores of captions that have a relevant item. A lower
            best score means "no match".
        detection_rate: Share of captions whose best score is below ``min_score`` once their
            relevant items are removed.
        min_length: Characters of the shortest texts that are like the captions.
    """

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    num_candidates: int
    num_queries: int
    min_score: float
    detection_rate: float
    min_length: int = 0

    def holds_for(self, text: str | None, num_items: int) -> bool:
        """Check whether a text is as long as the captions, and the collection has between half and
        twice as many items as the calibration collection.
        """
        is_like_captions = text is None or len(text.strip()) >= self.min_length
        ratio = num_items / self.num_candidates
        return is_like_captions and 1 / MAX_SIZE_RATIO <= ratio <= MAX_SIZE_RATIO

    def match_probabilities(self, standardized: np.ndarray, num_items: int) -> np.ndarray:
        """Convert standardized scores to match probabilities, 0 to 1."""
        return np.interp(standardized, self.scores, self.probabilities)

    def cautious_probabilities(self, standardized: np.ndarray, num_items: int) -> np.ndarray:
        """Convert standardized scores as ``match_probabilities``, for shares of lists."""
        return self.match_probabilities(standardized, num_items)

    def is_no_match(self, standardized: np.ndarray, num_items: int) -> bool | None:
        """Check whether even the best result is probably irrelevant. None: the threshold hardly
        distinguishes texts without a relevant item.
        """
        # Also a random threshold would find out as many as it reports wrongly.
        if self.detection_rate < 2 * FALSE_ALARM_RATE:
            return None
        return bool(standardized[0] < self.min_score)


@dataclass(frozen=True)
class NullScores:
    """Match probabilities from the scores of irrelevant items.

    Attributes:
        tail: Coefficients a, b and c. The logarithm of the share of irrelevant items that reach the
            standardized score z is a + b z + c z^2. The normal distribution is the lower limit.
    """

    tail: tuple[float, float, float]

    def share_above(self, standardized: np.ndarray) -> np.ndarray:
        """Compute the share of irrelevant items that reach standardized scores, 0 to 1."""
        fitted = np.exp(np.minimum(np.polynomial.polynomial.polyval(standardized, self.tail), 0))
        return np.maximum(fitted, normal_tail(standardized))

    def match_probabilities(self, standardized: np.ndarray, num_items: int) -> np.ndarray:
        """Convert the standardized scores of the best results of a query, best first and without
        gaps, to match probabilities.
        """
        return self._match_probabilities(standardized, num_items)

    def cautious_probabilities(self, standardized: np.ndarray, num_items: int) -> np.ndarray:
        """Match probabilities from which follow the shares of irrelevant results of lists, see
        ``INFLATION``.
        """
        return self._match_probabilities(standardized, INFLATION * num_items)

    def is_no_match(self, standardized: np.ndarray, num_items: int) -> bool:
        """Check whether even the best result is probably irrelevant."""
        return bool(1 - self.match_probabilities(standardized, num_items)[0] > NO_MATCH)

    def _match_probabilities(self, standardized: np.ndarray, num_items: float) -> np.ndarray:
        # $E_j = N F(z_j)$ is the expected number of irrelevant items that reach the score of result
        # j: $F$ is ``share_above``, and $N$ the number of items.
        expected = num_items * self.share_above(standardized)
        # Between two results, $E_j - E_(j-1)$ irrelevant items are expected, and one is found. Where
        # more are found than expected, the rest are matches: the local false discovery rate of
        # Efron, Tibshirani, Storey and Tusher, Empirical Bayes Analysis of a Microarray Experiment,
        # JASA 2001. It does not fall with the rank, so that the rates of many results are averaged.
        rates = isotonic(np.diff(expected, prepend=0.0), np.ones(len(expected)))
        # A rate of few results is uncertain. $E_j$ is also the p-value of the hypothesis that
        # result j is irrelevant, and $B_j = -e E_j log(E_j)$, which is 1 for $E_j > 1 / e$, its
        # smallest Bayes factor: Sellke, Bayarri and Berger, Calibration of p Values for Testing
        # Precise Null Hypotheses, The American Statistician 2001. For $E_j = 0$ it would be NaN.
        p_values = np.clip(expected, np.finfo(np.float64).tiny, 1 / np.e)
        factors = -np.e * p_values * np.log(p_values)
        return 1 - np.minimum(np.maximum(rates, factors / (factors + MATCH_ODDS)), 1)


MatchScale: TypeAlias = Calibration | NullScores
"""Converts the standardized scores of a text to match probabilities."""


@dataclass(frozen=True)
class ScoreScale:
    """Scale of the scores of an index and a query model, a named value of its database.

    Attributes:
        fingerprint: Fingerprint of the query model.
        sample: Keys of the items whose scores standardize a query of late interaction.
        tail: Distribution of the scores of irrelevant items, see ``NullScores``. None: there is
            none.
        reason: Why there is none. It starts with a small letter.
    """

    fingerprint: str
    sample: tuple[str, ...] = ()
    tail: tuple[float, float, float] | None = None
    reason: str = ""


def normal_tail(values: np.ndarray) -> np.ndarray:
    """Compute the share of the standard normal distribution above each value."""
    # Here and below without scipy, whose import takes longer than a search.
    tails = [math.erfc(value / math.sqrt(2)) / 2 for value in values.ravel().tolist()]
    return np.reshape(tails, values.shape)


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Find the closest values that do not fall, by weighted squares."""
    # Neighbors in the wrong order are pooled to their mean: Ayer, Brunk, Ewing, Reid and Silverman,
    # An Empirical Distribution Function for Sampling with Incomplete Information, 1955.
    blocks = list[tuple[float, float, int]]()  # mean, weight and length
    for mean, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while blocks and blocks[-1][0] >= mean:
            before, before_weight, before_length = blocks.pop()
            mean = (before * before_weight + mean * weight) / (before_weight + weight)
            weight += before_weight
            length += before_length
        blocks.append((mean, weight, length))
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])


def irrelevant_shares(probabilities: Sequence[float]) -> list[float]:
    """Compute the expected share of irrelevant results in each beginning of a list, best first."""
    irrelevant = 1 - np.asarray(probabilities, np.float64)
    return [float(share) for share in irrelevant.cumsum() / np.arange(1, len(irrelevant) + 1)]


def count_within(probabilities: Sequence[float], max_irrelevant: float) -> int:
    """Count the results up to an expected share of irrelevant ones. 0 allows no result, 1 all."""
    # Probabilities do not rise, so shares do not fall: the counted results are the first ones.
    return sum(
        max_irrelevant >= 1 or share < max_irrelevant for share in irrelevant_shares(probabilities)
    )


def check_level(level: float) -> None:
    """Check a level of irrelevant results."""
    if not 0 <= level <= 1:
        raise VisavisError(
            f"max_irrelevant: expected a share from 0 to 1, got {level:g}. Pass a share such as "
            "0.1."
        )


class NoProbabilitiesError(VisavisError):
    """A query or an index has no match probabilities.

    Args:
        reason: The reason, which starts with a small letter.
    """

    def __init__(self, reason: str):
        super().__init__(
            f"max_irrelevant: no match probabilities, because {reason} Remove --max-irrelevant."
        )
        self.reason = reason


def fit_calibration(
    captions: Sequence[str], scores: np.ndarray, relevant: np.ndarray
) -> Calibration:
    """Fit isotonic regression of relevance on the standardized scores of the first ten results of
    each caption. Scores and relevance are ``[captions, items]``.
    """
    scores = standardize_by(scores, scores)
    # Shape [captions, 10].
    top_results = np.argsort(-scores, axis=1, kind="stable")[:, :CALIBRATED_RESULTS]
    top_scores = np.take_along_axis(scores, top_results, 1)
    top_relevant = np.take_along_axis(relevant, top_results, 1)
    if not top_relevant.any() or top_relevant.all():
        raise DataError(
            "Calibration: expected relevant and irrelevant items among the first "
            f"{top_scores.shape[1]} results of {len(scores):,} "
            f"queries, got only {'relevant' if top_relevant.all() else 'irrelevant'} ones. Use a "
            "larger validation split."
        )
    knots, knot_of, counts = np.unique(top_scores.ravel(), return_inverse=True, return_counts=True)
    # Equal scores form one knot, or the fit would depend on their order.
    precisions = np.bincount(knot_of, weights=top_relevant.ravel()) / counts
    # Isotonic regression: Zadrozny and Elkan, KDD 2002.
    probabilities = isotonic(precisions, counts)
    # Of knots with the same probability, the first and the last define the function.
    changes = np.diff(probabilities) != 0
    kept = np.r_[True, changes] | np.r_[changes, True]
    # Other captions have no best score without relevant items to compare with.
    has_both = relevant.any(1) & ~relevant.all(1)
    best_with_relevant = scores[has_both].max(1)
    best_without_relevant = np.where(relevant[has_both], -np.inf, scores[has_both]).max(1)
    min_score = float(np.quantile(best_with_relevant, FALSE_ALARM_RATE))
    return Calibration(
        scores=tuple(knots[kept].tolist()),
        probabilities=tuple(probabilities[kept].tolist()),
        num_candidates=scores.shape[1],
        num_queries=len(scores),
        min_score=min_score,
        detection_rate=float((best_without_relevant < min_score).mean()),
        min_length=int(np.quantile([len(text.strip()) for text in captions], SHORT_CAPTIONS)),
    )
