"""R@K, median and mean rank, and RSUM, from ranks counted from 1.

R@K is the share of queries with *a* correct item in the top K, as the vision-language literature defines it. Information
retrieval calls this success@K or hit@K; with several correct items it is not recall.

>>> ranks = torch.tensor([1, 1, 2, 20])
>>> recall_at(ranks, 1), recall_at(ranks, 5), median_rank(ranks), mean_rank(ranks)
(0.5, 0.75, 1.0, 6.0)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from visavis.metrics.arguments import checked
from visavis.metrics.declaration import Metric
from visavis.metrics.ranking import best


@checked
def recall_at(ranks: Tensor, k: int) -> float:
    """R@K, a fraction: the share of ranks ``[Q]`` that are at most K."""
    return float((ranks <= k).double().mean())


@checked
def recall_at_mean_ties(ranks: Tensor, k: int) -> float:
    """R@K, a fraction, as the code of CE and MMT counts ranks that are means over ties, ``ties="mean"``.

    Formula: with the rank counted from 0, a hit is 0 at K = 1, and anything below K at K > 1, so that a mean of 4.5 is a hit at 5;
    ``recall_at`` asks for at most K - 1. Of whole ranks both are the same. ranks ``[Q]``: from 1, as everywhere here.
    Source: Liu et al., Use what you have (collaborative experts, 2019), its released code; Gabeur et al., Multi-modal Transformer (2020).
    """
    return float((ranks == 1 if k == 1 else ranks < k + 1).double().mean())


@checked
def median_rank(ranks: Tensor) -> float:
    """MedR as published results define it: floor(median of the ranks counted from 0) + 1."""
    return math.floor(torch.quantile(ranks.double() - 1, 0.5)) + 1.0


@checked
def mean_rank(ranks: Tensor) -> float:
    return float(ranks.double().mean())


def hit_by_chance(candidates: int, correct: int, k: int) -> float:
    """The probability that a random order has one of the correct candidates in its top K: ``1 - C(n - c, K) / C(n, K)``."""
    return 1 - math.comb(candidates - correct, k) / math.comb(candidates, k) if k < candidates else 1.0


def random_rsum(captions_per_image: Sequence[int]) -> tuple[float, float]:
    """RSUM in percent that a random order reaches on images with so many captions: its mean, and its standard deviation at most.

    A query counts 1 for each K of 1, 5, 10 with a hit in its top K. Queries of one direction are independent; the correlation of the
    two directions is at most 1, so the sum of their deviations is an upper bound.
    """
    images, captions = len(captions_per_image), sum(captions_per_image)
    by_image = [(captions, correct, count) for correct, count in Counter(captions_per_image).items()]
    mean = deviation = 0.0
    for queries in (by_image, [(images, 1, captions)]):
        total, variance = sum(count for *_, count in queries), 0.0
        for candidates, correct, count in queries:
            first, fifth, tenth = (hit_by_chance(candidates, correct, k) for k in (1, 5, 10))
            expected = first + fifth + tenth
            mean += 100 * count * expected / total
            variance += count * (9 * first + 4 * (fifth - first) + (tenth - fifth) - expected**2)
        deviation += 100 * math.sqrt(variance) / total
    return mean, deviation


def _recall(k: int) -> Metric:
    return Metric(
        name=f"r{k}",
        label=f"R@{k}",
        definition=f"percent of {{query}}s with a correct {{candidate}} in the top {k} (success@{k})",
        formula=f"100 mean[rank <= {k}]",
        unit="percent",
        reads="places",
        function=lambda places: 100 * recall_at(best(places, "mean"), k),
    )


def _recall_mean_ties(k: int) -> Metric:
    return Metric(
        name=f"r{k}_mean_ties",
        label=f"R@{k} by mean ties",
        definition=f'R@{k} as the code of CE and MMT counts mean ranks of ties (those of ties="mean"): a hit is '
        + ("the mean rank 1 alone" if k == 1 else f"any mean rank below {k + 1}, {k + 0.5} too")
        + f"; of whole ranks it is R@{k}",
        formula="100 mean[rank = 1]" if k == 1 else f"100 mean[rank < {k + 1}]",
        unit="percent",
        reads="places",
        function=lambda places: 100 * recall_at_mean_ties(best(places, "mean"), k),
    )


RECALLS = tuple(_recall(k) for k in (1, 5, 10))
MEAN_RECALL = Metric(
    name="average_recall",
    label="average recall",
    definition="mean of R@1, R@5 and R@10, in percent",
    formula="(R@1 + R@5 + R@10) / 3",
    unit="percent",
    reads="places",
    function=lambda places: sum(metric.function(places) for metric in RECALLS) / len(RECALLS),
)
RECALLS_BY_MEAN_TIES = tuple(_recall_mean_ties(k) for k in (1, 5, 10))
MEDIAN_RANK = Metric(
    name="medr",
    label="median rank",
    definition="median rank of the best correct {candidate}",
    formula="floor(median(rank - 1)) + 1",
    unit="rank",
    reads="places",
    function=lambda places: median_rank(best(places, "mean")),
    higher_is_better=False,
)
MEAN_RANK = Metric(
    name="meanr",
    label="mean rank",
    definition="mean rank of the best correct {candidate}",
    formula="mean(rank)",
    unit="rank",
    reads="places",
    function=lambda places: mean_rank(best(places, "mean")),
    higher_is_better=False,
)

_SIX = tuple(metric.key(direction) for direction in ("i2t", "t2i") for metric in RECALLS)


def _sum(metrics: Mapping[str, float]) -> float:
    return sum(metrics[key] for key in _SIX)


RSUM = Metric(
    name="rsum",
    label="RSUM",
    definition="sum of the six recalls, in percent (600 is perfect)",
    formula=" + ".join(_SIX),
    unit="percent",
    reads="metrics",
    function=_sum,
)
AVERAGE_RECALL = Metric(
    name="average_recall",
    label="average recall",
    definition="mean of the six recalls, in percent",
    formula="rsum / 6",
    unit="percent",
    reads="metrics",
    function=lambda metrics: _sum(metrics) / len(_SIX),
)
