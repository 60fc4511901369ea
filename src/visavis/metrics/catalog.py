"""Every metric, and the numbers of a result: a new metric is a file that declares it, and its name in one of these tuples."""

from __future__ import annotations

from torch import Tensor

from visavis.metrics.arguments import checked
from visavis.metrics.coherent import COHERENT_SCORE, COHERENT_SCORE_PAPER, NDCG, NDCG_PAPER
from visavis.metrics.declaration import SIDES, Metric
from visavis.metrics.mean_average_precision import MAP_AT_R, MAPS, MAPS_BY_HITS, R_PRECISION
from visavis.metrics.recall import AVERAGE_RECALL, MEAN_RANK, MEAN_RECALL, MEDIAN_RANK, RECALLS, RECALLS_BY_MEAN_TIES, RSUM

RANKING: tuple[Metric, ...] = (
    *RECALLS,
    MEAN_RECALL,
    *RECALLS_BY_MEAN_TIES,
    MEDIAN_RANK,
    MEAN_RANK,
    *MAPS,
    *MAPS_BY_HITS,
    R_PRECISION,
    MAP_AT_R,
)
"""Metrics of one direction, read from places."""

COMBINED: tuple[Metric, ...] = (RSUM, AVERAGE_RECALL)
"""Numbers made of the metrics of both directions."""

GRADED: dict[str, tuple[Metric, ...]] = {"reference": (COHERENT_SCORE, NDCG), "paper": (COHERENT_SCORE_PAPER, NDCG_PAPER)}
"""Metrics of one direction that read degrees of relevance, as the released code of the Ladder loss counts and as its text."""

CATALOG: tuple[Metric, ...] = (
    *(metric.toward(direction) for direction in SIDES for metric in RANKING),
    *COMBINED,
    *(metric.toward(direction) for metrics in GRADED.values() for direction in SIDES for metric in metrics),
)
"""All of them by their keys in results; K stands for a number."""


@checked
def direction_metrics(places: Tensor) -> dict[str, float]:
    """The metrics of one direction, by name, from its places ``[Q, M]``."""
    return {metric.name: metric.function(places) for metric in RANKING}


@checked
def ranking_metrics(image_places: Tensor, text_places: Tensor) -> dict[str, float]:
    """Every metric that needs no degrees, by its key, from the places of each image's texts and of each text's images."""
    metrics = {
        f"{direction}_{name}": value
        for direction, places in (("i2t", image_places), ("t2i", text_places))
        for name, value in direction_metrics(places).items()
    }
    return metrics | {metric.name: metric.function(metrics) for metric in COMBINED}
