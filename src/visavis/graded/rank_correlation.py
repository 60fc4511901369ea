"""Rank correlations with bootstrap intervals over images.

Pairs of one image are not independent, so images are resampled with all their pairs. All values of the same images use the same resamples, so
differences between them are paired.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
"""Default number of bootstrap resamples."""
SEED = 0
"""Seed of the resamples."""
COVERAGE = 0.95
"""Coverage of the intervals."""


@dataclass(frozen=True, eq=False)
class RankCorrelation:
    """A rank correlation and its bootstrap distribution.

    Attributes:
        value: The correlation of all pairs.
        resampled: The correlation of each resample, shape ``[R]``.
    """

    value: float
    resampled: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound of the 95 % interval."""
        low, high = np.quantile(self.resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
        return float(low), float(high)

    @property
    def std(self) -> float:
        """Standard deviation over the resamples."""
        return float(self.resampled.std())

    def __sub__(self, other: RankCorrelation) -> RankCorrelation:
        return RankCorrelation(self.value - other.value, self.resampled - other.resampled)

    def to_json(self) -> dict[str, float]:
        """Return a JSON object."""
        low, high = self.interval
        return {"value": self.value, "low": low, "high": high, "std": self.std}


def rank_correlations(first: np.ndarray, second: np.ndarray, images: np.ndarray, resamples: int = RESAMPLES) -> dict[str, RankCorrelation]:
    """Compute Kendall's tau-b and Spearman's rho of two rows of values.

    Memory grows with the square of the number of images, and with images times different values of ``second``.

    Args:
        first: Values of the pairs, shape ``[P]``.
        second: Other values of the pairs, shape ``[P]``.
        images: Image of each pair, shape ``[P]``.
        resamples: Number of bootstrap resamples.

    Returns:
        The correlations ``kendall`` and ``spearman``.
    """
    from scipy.stats import kendalltau, spearmanr

    order = np.argsort(first, kind="stable")
    first, second = first[order], second[order]
    names, image = np.unique(images[order], return_inverse=True)
    random = np.random.default_rng(SEED)
    counts = np.zeros((resamples, len(names)))
    for row in counts:
        row += np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
    kendall, spearman = _resampled(first, second, image, counts)
    return {
        "kendall": RankCorrelation(float(kendalltau(first, second).statistic), kendall),
        "spearman": RankCorrelation(float(spearmanr(first, second).statistic), spearman),
    }


def sampled_spearman(first: np.ndarray, second: np.ndarray, queries: np.ndarray, samples: int = RESAMPLES) -> RankCorrelation:
    """Compute Spearman's correlation over samples of half of the queries, each with one of its pairs.

    Args:
        first: Values of the pairs, shape ``[P]``.
        second: Other values of the pairs, shape ``[P]``.
        queries: Query of each pair, shape ``[P]``.
        samples: Number of samples.

    Returns:
        Mean over the samples, and the value of each sample.

    Source:
        Parekh et al., Crisscrossed Captions (2021).
    """
    from scipy.stats import spearmanr

    order = np.argsort(queries, kind="stable")
    _, start, number = np.unique(queries[order], return_index=True, return_counts=True)
    random = np.random.default_rng(SEED)
    values = np.empty(samples)
    for sample in range(samples):
        half = random.permutation(len(start))[: len(start) // 2]
        rows = order[start[half] + random.integers(number[half])]
        values[sample] = spearmanr(first[rows], second[rows]).statistic
    return RankCorrelation(float(values.mean()), values)


def _resampled(first: np.ndarray, second: np.ndarray, image: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kendall's tau-b and Spearman's rho ``[R]`` of resamples that contain image i ``counts[r, i]`` times. ``first`` is ascending.

    The pairs are ordered once. Each resample only counts: ``sum_ij t_i t_j c_ij`` concordant minus discordant pairs of pairs, where
    ``c_ij`` is the number for images i and j.
    """
    x, y = (np.unique(values, return_inverse=True)[1] for values in (first, second))
    concordant = np.einsum("ri,ri->r", counts @ _concordance(x, y, image), counts)
    kendall, spearman = np.empty((2, len(counts)))
    for resample, image_counts in enumerate(counts):
        weight = image_counts[image]
        (number_x, rank_x), (number_y, rank_y) = _ranks(x, weight), _ranks(y, weight)
        untied_x, untied_y = (weight.sum() ** 2 - number @ number for number in (number_x, number_y))
        with np.errstate(invalid="ignore"):
            kendall[resample] = 2 * concordant[resample] / np.sqrt(untied_x * untied_y)
            spearman[resample] = (weight * rank_x[x]) @ rank_y[y] / np.sqrt((number_x @ rank_x**2) * (number_y @ rank_y**2))
    return kendall, spearman


def _concordance(x: np.ndarray, y: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Concordant minus discordant pairs of rows of images i and j, where the row of i has the larger ``x``: ``[I, I]``.

    ``x`` is ascending. ``y`` holds level numbers.
    """
    levels = np.arange(y.max() + 1)
    concordance = np.zeros((image.max() + 1,) * 2)
    # By level and image: the number of earlier rows with a lower y minus that of rows with a higher y.
    earlier = np.zeros((len(levels), len(concordance)))
    for tied in np.split(np.arange(len(x)), np.flatnonzero(np.diff(x)) + 1):
        # Rows with equal x are neither concordant nor discordant: read all of them before any is added.
        for row in tied:
            concordance[image[row]] += earlier[y[row]]
        for row in tied:
            earlier[:, image[row]] += np.sign(levels - y[row])
    return concordance


def _ranks(levels: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often each level occurs, and its mean rank minus the mean of all ranks."""
    number = np.bincount(levels, weight)
    return number, np.cumsum(number) - (number + weight.sum()) / 2
