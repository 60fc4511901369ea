"""Rank correlations of values of image-caption pairs, with bootstrap intervals over images, as pairs of one image are alike.

The same resamples for all values of the same images, so that they are compared on equal images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES, SEED, COVERAGE = 1000, 0, 0.95


@dataclass(frozen=True, eq=False)
class Correlation:
    """A rank correlation, and its values on resampled pairs."""

    value: float
    resampled: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        low, high = np.quantile(self.resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
        return float(low), float(high)

    @property
    def deviation(self) -> float:
        return float(self.resampled.std())

    def __sub__(self, other: Correlation) -> Correlation:
        return Correlation(self.value - other.value, self.resampled - other.resampled)

    def to_json(self) -> dict[str, float]:
        low, high = self.interval
        return {"value": self.value, "low": low, "high": high, "deviation": self.deviation}


def correlate(first: np.ndarray, second: np.ndarray, images: np.ndarray, resamples: int = RESAMPLES) -> dict[str, Correlation]:
    """Rank correlations of two rows of values ``[P]``, with those of resampled images, each with all its pairs.

    Memory grows with the square of the images, and with the images times the levels of ``second``.
    """
    from scipy.stats import kendalltau, spearmanr

    order = np.argsort(first, kind="stable")
    first, second = first[order], second[order]
    names, image = np.unique(images[order], return_inverse=True)
    random = np.random.default_rng(SEED)
    times = np.zeros((resamples, len(names)))
    for drawn in times:
        drawn += np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
    kendall, spearman = _resampled(first, second, image, times)
    return {
        "kendall": Correlation(float(kendalltau(first, second).statistic), kendall),
        "spearman": Correlation(float(spearmanr(first, second).statistic), spearman),
    }


def sampled_spearman(first: np.ndarray, second: np.ndarray, queries: np.ndarray, samples: int = RESAMPLES) -> Correlation:
    """Spearman's correlation as Parekh et al. (2021) take it: the mean over samples of half of the queries, each with one of its pairs."""
    from scipy.stats import spearmanr

    order = np.argsort(queries, kind="stable")
    _, start, number = np.unique(queries[order], return_index=True, return_counts=True)
    random = np.random.default_rng(SEED)
    found = np.empty(samples)
    for sample in range(samples):
        half = random.permutation(len(start))[: len(start) // 2]
        rows = order[start[half] + random.integers(number[half])]
        found[sample] = spearmanr(first[rows], second[rows]).statistic
    return Correlation(float(found.mean()), found)


def _resampled(first: np.ndarray, second: np.ndarray, image: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kendall's tau-b and Spearman's rho ``[R]`` of pairs that occur as often as their image, ``times [R, images]``. first: ascending.

    The pairs are ordered once; a resample only counts: ``sum_ij t_i t_j c_ij`` concordant less discordant pairs of pairs, of which
    images i and j have ``c_ij``.
    """
    x, y = (np.unique(values, return_inverse=True)[1] for values in (first, second))
    concordant = np.einsum("ri,ri->r", times @ _concordance(x, y, image), times)
    kendall, spearman = np.empty((2, len(times)))
    for draw, drawn in enumerate(times):
        weight = drawn[image]
        (number_x, rank_x), (number_y, rank_y) = _ranks(x, weight), _ranks(y, weight)
        untied_x, untied_y = (weight.sum() ** 2 - number @ number for number in (number_x, number_y))
        with np.errstate(invalid="ignore"):
            kendall[draw] = 2 * concordant[draw] / np.sqrt(untied_x * untied_y)
            spearman[draw] = (weight * rank_x[x]) @ rank_y[y] / np.sqrt((number_x @ rank_x**2) * (number_y @ rank_y**2))
    return kendall, spearman


def _concordance(x: np.ndarray, y: np.ndarray, image: np.ndarray) -> np.ndarray:
    """``[I, I]``: of the pairs of rows, the one of image i with more ``x`` than the one of j, those with more ``y`` less those with less.

    x: ascending. y: numbers of levels.
    """
    levels = np.arange(y.max() + 1)
    found = np.zeros((image.max() + 1,) * 2)
    passed = np.zeros((len(levels), len(found)))  # by level and image: the rows so far below the level, less those above
    for tied in np.split(np.arange(len(x)), np.flatnonzero(np.diff(x)) + 1):
        for row in tied:
            found[image[row]] += passed[y[row]]
        for row in tied:
            passed[:, image[row]] += np.sign(levels - y[row])
    return found


def _ranks(levels: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often each level occurs, and its rank, ties in their middle, less the mean rank."""
    number = np.bincount(levels, weight)
    return number, np.cumsum(number) - (number + weight.sum()) / 2
