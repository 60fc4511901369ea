"""Catalog of metrics and the metrics of a result. A new metric is a `Metric` in one of these tuples."""

from __future__ import annotations

from torch import Tensor

from visavis.metrics.graded_metrics import COHERENT_SCORE, COHERENT_SCORE_PAPER, NDCG, NDCG_PAPER
from visavis.metrics.metric import DIRECTION_ROLES, Metric
from visavis.metrics.ranking import MAP_AT_R, MAPS, MAPS_BY_HITS, R_PRECISION
from visavis.metrics.recall import AVERAGE_RECALL, MEAN_RANK, MEAN_RECALL, MEAN_TIE_RECALLS, MEDIAN_RANK, RECALLS, RSUM
from visavis.metrics.validation import validate_positive_ranks

RANKING: tuple[Metric, ...] = (
    *RECALLS,
    MEAN_RECALL,
    *MEAN_TIE_RECALLS,
    MEDIAN_RANK,
    MEAN_RANK,
    *MAPS,
    *MAPS_BY_HITS,
    R_PRECISION,
    MAP_AT_R,
)
"""Metrics of one direction that are computed from ranks."""

COMBINED: tuple[Metric, ...] = (RSUM, AVERAGE_RECALL)
"""Metrics that combine both directions."""

GRADED: dict[str, tuple[Metric, ...]] = {"reference": (COHERENT_SCORE, NDCG), "paper": (COHERENT_SCORE_PAPER, NDCG_PAPER)}
"""Metrics of one direction that read graded relevance, as the released code of the Ladder loss and as its paper."""

CATALOG: tuple[Metric, ...] = (
    *(metric.for_direction(direction) for direction in DIRECTION_ROLES for metric in RANKING),
    *COMBINED,
    *(metric.for_direction(direction) for metrics in GRADED.values() for direction in DIRECTION_ROLES for metric in metrics),
)
"""All metrics by their keys in results. K stands for a number."""


def direction_metrics(positive_ranks: Tensor) -> dict[str, float]:
    """Compute the ranking metrics of one direction.

    Args:
        positive_ranks: Ranks of the positives, shape ``[Q, M]``. See `positive_ranks`.

    Returns:
        Metrics by name, without direction.
    """
    positive_ranks = validate_positive_ranks(positive_ranks)
    return {metric.name: metric.function(positive_ranks) for metric in RANKING}


def ranking_metrics(image_ranks: Tensor, text_ranks: Tensor) -> dict[str, float]:
    """Compute every metric that needs no graded relevance.

    Args:
        image_ranks: Ranks of the texts of each image, shape ``[V, M]``.
        text_ranks: Ranks of the images of each text, shape ``[T, M]``.

    Returns:
        Metrics by key.
    """
    sides = {"i2t": validate_positive_ranks(image_ranks, "image_ranks"), "t2i": validate_positive_ranks(text_ranks, "text_ranks")}
    metrics = {f"{direction}_{name}": value for direction, ranks in sides.items() for name, value in direction_metrics(ranks).items()}
    return metrics | {metric.name: metric.function(metrics) for metric in COMBINED}
