"""Recall at k, median and mean rank, and RSUM, from ranks that start at 1.

R@K is the share of queries with a correct item in the top K, as the vision-language literature
defines it. Information retrieval calls this success@K or hit@K. With several correct items it is
not recall.

>>> ranks = torch.tensor([1, 1, 2, 20])
>>> recall_at(ranks, 1), recall_at(ranks, 5), median_rank(ranks), mean_rank(ranks)
(0.5, 0.75, 1.0, 6.0)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from visavis.core.errors import DataError, ShapeError
from visavis.core.spec import validate_int


def recall_at(ranks: Tensor, k: int) -> float:
    """Compute R@K: the share of queries whose best positive is among the top K.

    Args:
        ranks: Rank of the best positive of each query, shape ``[Q]``, starting at 1.
        k: Cutoff.

    Returns:
        A fraction.
    """
    _check_ranks(ranks)
    k = validate_int(k, "k", minimum=1)
    return float((ranks <= k).double().mean())


def recall_at_mean_ties(ranks: Tensor, k: int) -> float:
    """Compute R@K as the code of CE and MMT counts ranks that are means over ties, ``ties="mean"``.

    Args:
        ranks: Rank of the best positive of each query, shape ``[Q]``, starting at 1.
        k: Cutoff.

    Returns:
        A fraction.

    Formula:
        With ranks from 0, a hit is 0 at K = 1, and anything below K at K > 1. A mean rank of 4.5 is
        therefore a hit at K = 5, whereas `recall_at` requires at most K - 1. For integer ranks both
        are equal.

    Source:
        Liu et al., Use what you have (collaborative experts, 2019), its released code. Gabeur et
        al., Multi-modal Transformer (2020).
    """
    _check_ranks(ranks)
    k = validate_int(k, "k", minimum=1)
    return float((ranks == 1 if k == 1 else ranks < k + 1).double().mean())


def median_rank(ranks: Tensor) -> float:
    """Compute MedR as published results define it: floor(median of the ranks from 0) + 1.

    Args:
        ranks: Rank of the best positive of each query, shape ``[Q]``, starting at 1.

    Returns:
        The median rank.
    """
    _check_ranks(ranks)
    return math.floor(torch.quantile(ranks.double() - 1, 0.5)) + 1.0


def mean_rank(ranks: Tensor) -> float:
    """Compute the mean rank.

    Args:
        ranks: Rank of the best positive of each query, shape ``[Q]``, starting at 1.

    Returns:
        The mean rank.
    """
    _check_ranks(ranks)
    return float(ranks.double().mean())


def _check_ranks(ranks: Tensor) -> None:
    """Check that there is one rank for each of at least one query. A mean over anything else is a
    number, but no metric.
    """
    if ranks.dim() != 1 or not len(ranks):
        raise ShapeError(
            f"ranks: expected the rank of the best positive of each query, shape [Q], got shape "
            f"{list(ranks.shape)}. Compute them with best_ranks."
        )
    for query in (~((ranks >= 1) & ranks.isfinite())).nonzero()[:1, 0].tolist():
        raise DataError(
            f"ranks of query {query}: expected a rank >= 1, got {ranks[query].item()}. Compute "
            "them with best_ranks."
        )


def random_recall(num_candidates: int, num_positives: int, k: int) -> float:
    """Compute the probability that a random order has a positive in its top K: ``1 - C(n - c, K) /
    C(n, K)``.

    Args:
        num_candidates: Number of candidates n.
        num_positives: Number of positives c.
        k: Cutoff.

    Returns:
        The probability.
    """
    return (
        1 - math.comb(num_candidates - num_positives, k) / math.comb(num_candidates, k)
        if k < num_candidates
        else 1.0
    )


def random_rsum(captions_per_image: Sequence[int]) -> tuple[float, float]:
    """Compute the RSUM of a random order.

    A query counts 1 for each K of 1, 5, 10 with a hit in its top K. Queries of one direction are
    independent. The correlation of the two directions is at most 1, so the sum of their standard
    deviations is an upper bound.

    Args:
        captions_per_image: Number of captions of each image.

    Returns:
        Mean of the RSUM in percent, and an upper bound of its standard deviation.
    """
    images, captions = len(captions_per_image), sum(captions_per_image)
    # Number of candidates, of positives, and of the queries that have as many.
    image_queries = [
        (captions, positives, count) for positives, count in Counter(captions_per_image).items()
    ]
    text_queries = [(images, 1, captions)]
    mean = std = 0.0
    for queries in (image_queries, text_queries):
        total, variance = sum(count for *_, count in queries), 0.0
        for candidates, positives, count in queries:
            r1, r5, r10 = (random_recall(candidates, positives, k) for k in (1, 5, 10))
            expected = r1 + r5 + r10
            mean += 100 * count * expected / total
            # A query counts 3 with probability r1, 2 with r5 - r1, and 1 with r10 - r5.
            variance += count * (9 * r1 + 4 * (r5 - r1) + (r10 - r5) - expected**2)
        std += 100 * math.sqrt(variance) / total
    return mean, std
