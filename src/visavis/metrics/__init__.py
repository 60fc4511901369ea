"""Metrics: pure functions of scores and targets; what each one means is declared once, in CATALOG.

A metric is a ``Metric`` in a file of its own and one entry in a tuple of ``catalog``: results, ``visavis catalog metrics`` and the
reference then have it in both directions.
"""

from visavis.metrics.catalog import CATALOG, COMBINED, GRADED, RANKING, direction_metrics, ranking_metrics
from visavis.metrics.coherent import COHERENT_SCORE, coherent_scores, ndcg, ndcg_at
from visavis.metrics.declaration import Metric
from visavis.metrics.mean_average_precision import map_at_k, map_at_k_hits
from visavis.metrics.ranking import average_precision, average_precision_at, average_precision_at_r, places, r_precision, ranks
from visavis.metrics.recall import mean_rank, median_rank, recall_at, recall_at_mean_ties

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
    "direction_metrics",
    "map_at_k",
    "map_at_k_hits",
    "mean_rank",
    "median_rank",
    "ndcg",
    "ndcg_at",
    "places",
    "r_precision",
    "ranking_metrics",
    "ranks",
    "recall_at",
    "recall_at_mean_ties",
]
