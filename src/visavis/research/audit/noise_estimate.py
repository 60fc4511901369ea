"""Estimate of the share of wrong items from scores, given scores of items that are known to be
wrong.

Higher scores look more wrong. Let O(t) be the share of the data with a score of at least t, and
W(t) the same share of known wrong items, such as captions next to random images. If a share p of
the data is wrong in the same way, O(t) >= p W(t) for each t, so p <= min O(t) / W(t). Near the
highest scores, which only wrong items reach, this bound is about p.

Source: C. Scott, G. Blanchard, M. Handy, "Classification with Asymmetric Label Noise" (2013): the
bound on a known mixture component.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Thresholds whose bounds can be distinguished, roughly. The bound with the best threshold is
# corrected for this choice (Bonferroni).
NUM_TAILS = 20
# A threshold is used only if at least this share of the known wrong items reaches it.
MIN_TAIL = 0.05
# Items are listed as long as at least this share of the list is expected to be wrong.
MIN_LIST_PRECISION = 0.5


@dataclass(frozen=True)
class NoiseEstimate:
    """Estimated noise of a data set.

    Attributes:
        noise_ratio: Estimated share of wrong items.
        min_noise_ratio: Lower bound of this share with 95 % confidence, if no correct item scores
            as high as the best threshold. Otherwise it is too high.
        max_noise_ratio: Upper bound of this share with 95 % confidence.
        precision: For each item, the expected share of wrong items among all items that look at
            least as wrong, shape ``[N]``.
        recall: For each item, the share of known wrong items that look at least as wrong, shape
            ``[N]``.
        listed: Indices of the items that are likely wrong, the most suspicious first.
    """

    noise_ratio: float
    min_noise_ratio: float
    max_noise_ratio: float
    precision: np.ndarray
    recall: np.ndarray
    listed: np.ndarray

    @classmethod
    def from_scores(cls, scores: np.ndarray, wrong: np.ndarray) -> NoiseEstimate:
        """Estimate the noise from scores.

        Args:
            scores: Scores of the data, shape ``[N]``. Higher looks more wrong. An item with -inf is
                never listed.
            wrong: Scores of known wrong items, shape ``[M]``.

        Returns:
            The estimate.
        """
        from scipy.stats import beta

        above, recall = _count_at_least(scores, scores), _count_at_least(wrong, scores) / len(wrong)
        usable = recall >= MIN_TAIL
        upper = np.where(
            above < len(scores),
            beta.ppf(1 - 0.05 / NUM_TAILS, above + 1, np.maximum(len(scores) - above, 1)),
            1.0,
        ) / np.maximum(recall, MIN_TAIL)
        best = int(np.argmin(np.where(usable, upper, np.inf)))
        noise_ratio = (
            float(min(above[best] / len(scores) / recall[best], 1.0)) if usable[best] else 0.0
        )
        lower = beta.ppf(
            0.05, above[best], len(scores) - above[best] + 1
        )  # an item reaches its own score
        precision = np.minimum(noise_ratio * recall * len(scores) / np.maximum(above, 1), 1.0)
        # The best precision of all lists that are at least as long: estimates of very short lists
        # are too noisy.
        longest_first = np.argsort(scores, kind="stable")
        precision[longest_first] = np.maximum.accumulate(precision[longest_first])
        order = np.argsort(-scores, kind="stable")
        precise = np.flatnonzero(
            (precision[order] >= MIN_LIST_PRECISION) & np.isfinite(scores[order])
        )
        listed = order[: precise[-1] + 1] if len(precise) else order[:0]
        bounds = (
            float(min(lower / max(recall[best], MIN_TAIL), noise_ratio)),
            float(min(upper[best], 1.0)),
        )
        return cls(noise_ratio, *bounds, precision, recall, listed)


def _count_at_least(values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Count the values that are at least each limit."""
    count: np.ndarray = len(values) - np.searchsorted(np.sort(values), limits, side="left")
    return count


def mismatch_log_odds(data: np.ndarray, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Combine several features into one score with logistic regression: the log-odds of being
    wrong.

    Both classes have equal weight, and the ridge penalty is 1. A missing feature (NaN) is replaced
    by its mean.

    Args:
        data: Features of the data, shape ``[N, F]``.
        wrong: Features of known wrong items, shape ``[M, F]``.

    Returns:
        The log-odds of the data ``[N]`` and of the wrong items ``[M]``.
    """
    from scipy.optimize import minimize

    features = np.concatenate([data, wrong]).astype(np.float64)
    is_known = np.isfinite(features)
    mean = np.where(is_known, features, 0.0).sum(0) / np.maximum(is_known.sum(0), 1)
    features = np.where(is_known, features - mean, 0.0)
    design = np.concatenate(
        [np.ones((len(features), 1)), features / np.maximum(features.std(0), 1e-9)], 1
    )
    is_wrong = np.repeat([0.0, 1.0], [len(data), len(wrong)])
    weight = np.where(is_wrong > 0, 0.5 / len(wrong), 0.5 / len(data)) * len(features)

    def loss(coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        log_odds = design @ coefficients
        value = (weight * (np.logaddexp(0, log_odds) - is_wrong * log_odds)).sum() + 0.5 * (
            coefficients[1:] ** 2
        ).sum()
        error = weight * (0.5 * (1 + np.tanh(log_odds / 2)) - is_wrong)
        return value, design.T @ error + np.r_[0.0, coefficients[1:]]

    fit = minimize(loss, np.zeros(design.shape[1]), jac=True, method="L-BFGS-B")
    scores: np.ndarray = design @ fit.x
    return scores[: len(data)], scores[len(data) :]
