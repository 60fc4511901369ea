"""The numbers in a table of results, from ranks counted from 1.

R@K is the share of queries with *a* correct item in the top K. This is the word of the vision-language field; in
information retrieval it is called success@K or hit@K, and with several correct items it is not recall.

>>> ranks = torch.tensor([1, 1, 2, 20])
>>> recall_at(ranks, 1), recall_at(ranks, 5), median_rank(ranks), mean_rank(ranks)
(0.5, 0.75, 1.0, 6.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from visavis.metrics.ranking import average_precision_at, average_precision_at_r, best, r_precision

RECALLS_AT = (1, 5, 10)
MAPS_AT = (5, 10)


def recall_at(ranks: Tensor, k: int) -> float:
    """R@K, a fraction: the share of ranks ``[Q]`` that are at most K."""
    return float((ranks <= k).double().mean())


def median_rank(ranks: Tensor) -> float:
    """MedR as it is published: floor(median of the ranks counted from 0) + 1."""
    return math.floor(torch.quantile(ranks.double() - 1, 0.5)) + 1.0


def mean_rank(ranks: Tensor) -> float:
    return float(ranks.double().mean())


def map_at_k(places: Tensor, k: int) -> float:
    """mAP@K, a fraction, divided by min(R, K): the standard form."""
    return float(average_precision_at(places, k).mean())


def map_at_k_hits(places: Tensor, k: int) -> float:
    """mAP@K, a fraction, divided by the number of positives found in the top K: the convention of the COCOS code."""
    return float(average_precision_at(places, k, normalize="hits").mean())


def one_way(places: Tensor) -> dict[str, float]:
    """All metrics of one direction from its places ``[Q, M]``: recalls in percent, mAP as fractions."""
    ranks = best(places, "mean")
    return (
        {f"r{k}": 100 * recall_at(ranks, k) for k in RECALLS_AT}
        | {"medr": median_rank(ranks), "meanr": mean_rank(ranks)}
        | {f"map_at_{k}": map_at_k(places, k) for k in MAPS_AT}
        | {f"map_at_{k}_hits": map_at_k_hits(places, k) for k in MAPS_AT}
        | {"r_precision": float(r_precision(places).mean()), "map_at_r": float(average_precision_at_r(places).mean())}
    )


def both_ways(image_places: Tensor, text_places: Tensor) -> dict[str, float]:
    """Every metric of the CATALOG that needs no degrees, from the places of each image's texts and of each text's images."""
    named = {
        f"{direction}_{name}": value
        for direction, places in (("i2t", image_places), ("t2i", text_places))
        for name, value in one_way(places).items()
    }
    return with_sums(named)


def with_sums(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same metrics with ``rsum``, the sum of the six recalls in percent, and their mean, ``average_recall``."""
    recalls = [metrics[f"{direction}_r{k}"] for direction in ("i2t", "t2i") for k in RECALLS_AT]
    return dict(metrics) | {"rsum": sum(recalls), "average_recall": sum(recalls) / len(recalls)}
