"""How many of some things are wrong, where one can make wrong ones: a mixture of which one part is known.

Every thing has a score that is larger the more it looks wrong. Of the data, the share O(t) has a score of at least t; of things that
are surely wrong (captions beside other pictures, drawn at random), W(t). If a share p of the data is wrong in this way, O(t) >= p W(t) for
every t, so p <= min O(t) / W(t), and near the end of the scores where only wrong things are, it is about that.

Source: the bound on a known component of a mixture, C. Scott, G. Blanchard, M. Handy, "Classification with Asymmetric Label Noise" (2013).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LOOKS = 20
"""About so many ends of the scores can be told apart, and the best one is chosen: the confidence allows for it."""
FEWEST = 0.05
"""The end of the scores that is looked at has at least this share of the surely wrong things."""


@dataclass(frozen=True)
class Mixture:
    """What scores say of the data. share: of wrong things, at most about; upper: of which it is at most, with 95 % confidence.

    precision ``[N]``: of the list of all things that look at least as wrong as this one, the share that is expected to be wrong.
    recall ``[N]``: of surely wrong things, the share that looks as wrong as this one.
    """

    share: float
    upper: float
    precision: np.ndarray
    recall: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, wrong: np.ndarray) -> Mixture:
        """scores ``[N]``: of the data. wrong ``[M]``: of things that are surely wrong."""
        from scipy.stats import beta

        above, recall = _at_least(scores, scores), _at_least(wrong, scores) / len(wrong)
        looked_at = recall >= FEWEST
        upper = np.where(above < len(scores), beta.ppf(1 - 0.05 / LOOKS, above + 1, np.maximum(len(scores) - above, 1)), 1.0) / np.maximum(
            recall, FEWEST
        )
        best = int(np.argmin(np.where(looked_at, upper, np.inf)))
        share = float(min(above[best] / len(scores) / recall[best], 1.0)) if looked_at[best] else 0.0
        precision = np.minimum(share * recall * len(scores) / np.maximum(above, 1), 1.0)
        return cls(share, float(min(upper[best], 1.0)), _falling(precision, scores), recall)


def _falling(precision: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Precisions that never rise with the length of a list: the shortest lists are too short to estimate theirs, and no worse than longer ones."""
    longest_first = np.argsort(scores, kind="stable")
    falling = np.empty_like(precision)
    falling[longest_first] = np.maximum.accumulate(precision[longest_first])
    return falling


def _at_least(values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """How many of the values are at least each limit."""
    count: np.ndarray = len(values) - np.searchsorted(np.sort(values), limits, side="left")
    return count


def odds(data: np.ndarray, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One score of several facts: log-odds of being a wrong thing and not one of the data, for the data ``[N, F]`` and wrong ones ``[M, F]``.

    Logistic regression, both kinds with equal weight; ridge 1. A fact that is not known counts as its mean.
    """
    from scipy.optimize import minimize

    facts = np.concatenate([data, wrong]).astype(np.float64)
    known = np.isfinite(facts)
    mean = np.where(known, facts, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    facts = np.where(known, facts - mean, 0.0)
    design = np.concatenate([np.ones((len(facts), 1)), facts / np.maximum(facts.std(0), 1e-9)], 1)
    is_wrong = np.repeat([0.0, 1.0], [len(data), len(wrong)])
    weight = np.where(is_wrong > 0, 0.5 / len(wrong), 0.5 / len(data)) * len(facts)

    def loss(coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        log_odds = design @ coefficients
        value = (weight * (np.logaddexp(0, log_odds) - is_wrong * log_odds)).sum() + 0.5 * (coefficients[1:] ** 2).sum()
        error = weight * (0.5 * (1 + np.tanh(log_odds / 2)) - is_wrong)
        return value, design.T @ error + np.r_[0.0, coefficients[1:]]

    fitted = minimize(loss, np.zeros(design.shape[1]), jac=True, method="L-BFGS-B")
    scores: np.ndarray = design @ fitted.x
    return scores[: len(data)], scores[len(data) :]
