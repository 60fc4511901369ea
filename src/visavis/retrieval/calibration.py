"""Match probability: the probability that a search result with a given score is relevant, learned
from validation captions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visavis.core.errors import DataError

CALIBRATED_RESULTS = 10
"""Number of results per query that calibration uses."""
# The highest score of an irrelevant item grows with the number of items.
MAX_SIZE_RATIO = 2.0
"""Largest ratio between the sizes of the searched and of the calibration collection."""
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
