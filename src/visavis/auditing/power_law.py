"""What twice as much data would bring, by a power law through what was measured, with an interval; and when it cannot be told.

The law is y(n) = a - b n^-c, and its limit for c -> 0, y(n) = a + b log n: c from a grid, a and b by least squares, b >= 0. Measurements are
redrawn (Student's t with the pooled deviation over seeds); of each draw the least and the most that is predicted by any c that fits it nearly
as well as the best are taken, and the interval reaches from the 2.5 % quantile of the former to the 97.5 % quantile of the latter: it also says how
little a few sizes tell of the curve's form, and holds where the best c is the end of the grid.

Source: J. Hestness et al., "Deep Learning Scaling is Predictable, Empirically" (2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

EXPONENTS = np.concatenate([[0.0], np.geomspace(0.05, 2.0, 200)])
DRAWS, CONFIDENCE = 400, 0.95


@dataclass(frozen=True)
class Outlook:
    """What twice as much would bring: gain over the largest size measured, low to high with 95 % confidence. exponent: c of the best law.

    told: "more" where it would surely help, "little" where it would surely bring less than a hundredth of what there is, else "unclear".
    """

    size: int
    gain: float
    low: float
    high: float
    exponent: float
    told: Literal["more", "little", "unclear"]

    def __str__(self) -> str:
        interval = f"{self.gain:+.1f} RSUM (95 %: {self.low:+.1f} to {self.high:+.1f})"
        verdict = {"more": "", "little": ", next to nothing", "unclear": ": cannot be told"}[self.told]
        return f"{self.size:,} would bring {interval}{verdict}"


def outlook(sizes: np.ndarray, values: np.ndarray, seed: int = 0) -> Outlook:
    """sizes, values ``[N]``: what was measured, several times for each of three or more sizes."""
    from scipy.stats import f, t

    distinct = np.unique(sizes)
    means = np.array([values[sizes == size].mean() for size in distinct])
    counts = np.array([(sizes == size).sum() for size in distinct])
    freedom = int(counts.sum() - len(distinct))
    residuals = values - means[np.searchsorted(distinct, sizes)]
    deviation = float(np.sqrt((residuals**2).sum() / freedom))
    random = np.random.default_rng(seed)
    noise = t.rvs(freedom, size=(DRAWS, len(distinct)), random_state=random) * deviation / np.sqrt(counts)
    errors, gains = _laws(distinct, np.concatenate([means[None], means + noise]), counts)
    best = int(errors[0].argmin())
    allowed = errors[1:] <= errors[1:].min(1, keepdims=True) + deviation**2 * f.ppf(CONFIDENCE, 1, freedom)
    least, most = np.where(allowed, gains[1:], np.inf).min(1), np.where(allowed, gains[1:], -np.inf).max(1)
    gain = float(gains[0, best])
    low, high = min(float(np.quantile(least, (1 - CONFIDENCE) / 2)), gain), max(float(np.quantile(most, (1 + CONFIDENCE) / 2)), gain)
    little = 0.01 * abs(means[-1])
    told: Literal["more", "little", "unclear"] = "little" if high < little else "more" if low > 0 else "unclear"
    return Outlook(int(2 * distinct[-1]), gain, low, high, float(EXPONENTS[best]), told)


def _laws(sizes: np.ndarray, means: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The squared errors of the best law for each curve and exponent ``[M, E]``, and what it predicts twice the largest size to gain."""
    relative = sizes / sizes[-1]
    shapes = np.stack([np.log(relative) if c == 0 else (1 - relative**-c) / c for c in EXPONENTS])
    doubled = np.array([np.log(2) if c == 0 else (1 - 2.0**-c) / c for c in EXPONENTS])
    weights = counts / counts.sum()
    centered = shapes - (shapes * weights).sum(1, keepdims=True)
    around = means - (means * weights).sum(1, keepdims=True)
    slopes = np.maximum((around * weights) @ centered.T / (centered**2 * weights).sum(1), 0.0)
    errors = ((around[:, None] - slopes[..., None] * centered[None]) ** 2 * counts).sum(-1)
    return errors, slopes * doubled
