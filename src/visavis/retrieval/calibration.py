"""How likely a score is a match, learned from data with known answers: a raw cosine tells a person nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from visavis.errors import DataError, MissingExtra

TOP = 10
"""Results of each query that a calibration learns from: those that a person looks at."""
SIZE_FACTOR = 2.0
"""A collection may be so many times as large, or as small, as the one it was learned on: the more there is, the higher the best score of what is wrong."""
FALSE_ALARMS = 0.05


@dataclass(frozen=True)
class Calibration:
    """An increasing step function from scores to probabilities, and the score of the best result below which nothing fits.

    scores, probabilities ``[knots]``. candidates: items of the collection it was learned on. queries: how many. floor: of queries that
    have an answer, one in twenty has a best score below it. found: of queries whose answers were taken out, the share below it.
    """

    file: ClassVar[str] = "calibration.json"

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    candidates: int
    queries: int
    floor: float
    found: float

    def holds_for(self, count: int) -> bool:
        """Whether a collection is of about the size that this was learned on."""
        return self.candidates / SIZE_FACTOR <= count <= self.candidates * SIZE_FACTOR

    def match(self, score: float) -> float:
        """The probability that a result of this score is a match."""
        return float(np.interp(score, self.scores, self.probabilities))

    def nothing_fits(self, best: float) -> bool:
        """Whether the best result of a query scores so low that probably nothing fits."""
        return best < self.floor


def fit_calibration(scores: Tensor, relevant: Tensor) -> Calibration:
    """Isotonic regression (Zadrozny and Elkan, KDD 2002) of relevance on the scores of the first ten results of each query.

    scores, relevant ``[queries, candidates]``, relevant as bool. Raises DataError where no query has an answer or each result is one,
    MissingExtra without scikit-learn.
    """
    try:
        from sklearn.isotonic import IsotonicRegression
    except ImportError:
        raise MissingExtra("scikit-learn", "search", "telling how likely a result is a match") from None
    top = scores.topk(min(TOP, scores.shape[1]), dim=1)
    hits = relevant.gather(1, top.indices)
    if not hits.any() or hits.all():
        raise DataError(
            f"of the first {top.indices.shape[1]} results of {len(scores):,} queries {'all' if hits.all() else 'none'} fit: nothing can be "
            "learned from them of how likely a match is."
        )
    curve = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(top.values.flatten().double(), hits.flatten().double())
    floor, found = _floor(scores, relevant)
    return Calibration(
        scores=tuple(curve.X_thresholds_.tolist()),
        probabilities=tuple(curve.y_thresholds_.tolist()),
        candidates=scores.shape[1],
        queries=len(scores),
        floor=floor,
        found=found,
    )


def _floor(scores: Tensor, relevant: Tensor) -> tuple[float, float]:
    """The best score that one in twenty queries falls below, and the share that does once their answers are taken out."""
    answered = relevant.any(1) & ~relevant.all(1)
    with_answers = scores[answered].amax(1)
    without = scores[answered].masked_fill(relevant[answered], -torch.inf).amax(1)
    floor = torch.quantile(with_answers.double(), FALSE_ALARMS).item()
    return floor, (without < floor).double().mean().item()


@dataclass(frozen=True)
class Reliability:
    """How a calibration does on queries that it was not learned from. bins: for each tenth of the results by probability, the mean
    probability said, the share that fits, and how many. error: the expected calibration error, the mean distance of the two over bins.
    skill: the Brier skill score against saying the base rate each time; above 0 is better than that.
    """

    bins: tuple[tuple[float, float, int], ...]
    error: float
    skill: float
    base_rate: float


def reliability(calibration: Calibration, scores: Tensor, relevant: Tensor, bins: int = 10) -> Reliability:
    """The reliability of a calibration over the first ten results of each query, in bins of equal mass. Shapes as in ``fit_calibration``."""
    top = scores.topk(min(TOP, scores.shape[1]), dim=1)
    said = np.interp(top.values.flatten().double().numpy(), calibration.scores, calibration.probabilities)
    fits = relevant.gather(1, top.indices).flatten().double().numpy()
    order = np.argsort(said, kind="stable")
    parts: Sequence[np.ndarray] = [part for part in np.array_split(order, bins) if len(part)]
    told = tuple((float(said[part].mean()), float(fits[part].mean()), len(part)) for part in parts)
    error = sum(abs(mean - share) * count for mean, share, count in told) / len(said)
    rate = float(fits.mean())
    brier, base = float(((said - fits) ** 2).mean()), float(((rate - fits) ** 2).mean())
    return Reliability(told, error, 1 - brier / base if base else 0.0, rate)
