"""Metrics: pure functions of scores, ranks and targets. Each is declared once, in ``catalog``.
Metrics of user feedback are in ``visavis.evaluation.feedback_metrics``.

A new metric is one entry in ``catalog``. Results, ``visavis catalog metrics`` and the reference
then have it: in both directions, or once if it combines them.
"""

from visavis.evaluation.metrics.catalog import (
    CATALOG,
    COHERENT_SCORE,
    COMBINED,
    GRADED,
    RANKING,
    Metric,
    ranking_metrics,
)
from visavis.evaluation.metrics.graded_metrics import coherent_scores, ndcg, ndcg_at
from visavis.evaluation.metrics.ranking import (
    average_precision,
    average_precision_at,
    average_precision_at_r,
    best_ranks,
    map_at_k,
    map_at_k_hits,
    mean_rank,
    median_rank,
    positive_ranks,
    r_precision,
    recall_at,
    recall_at_mean_ties,
)

__all__ = [
    "CATALOG",
    "COHERENT_SCORE",
    "COMBINED",
    "GRADED",
    "RANKING",
    "Metric",
    "average_precision",
    "average_precision_at",
    "average_precision_at_r",
    "coherent_scores",
    "map_at_k",
    "map_at_k_hits",
    "mean_rank",
    "median_rank",
    "ndcg",
    "ndcg_at",
    "positive_ranks",
    "r_precision",
    "ranking_metrics",
    "best_ranks",
    "recall_at",
    "recall_at_mean_ties",
]
