"""Mean average precision over all queries: it counts every correct item, higher ranks for more."""

from __future__ import annotations

from torch import Tensor

from visavis.metrics.arguments import checked
from visavis.metrics.declaration import Metric
from visavis.metrics.ranking import average_precision_at, average_precision_at_r, r_precision


@checked
def map_at_k(places: Tensor, k: int) -> float:
    """mAP@K, a fraction, divided by min(R, K): the standard form."""
    return float(average_precision_at(places, k).mean())


@checked
def map_at_k_hits(places: Tensor, k: int) -> float:
    """mAP@K, a fraction, divided by the number of positives found in the top K: the convention of the COCOS code."""
    return float(average_precision_at(places, k, normalize="hits").mean())


def _map(k: int) -> Metric:
    return Metric(
        name=f"map_at_{k}",
        label=f"mAP@{k}",
        definition=f"mean average precision in the top {k}, a fraction",
        formula=f"mean(sum_{{place_j <= {k}}} j/place_j / min(R, {k}))",
        unit="fraction",
        reads="places",
        function=lambda places: map_at_k(places, k),
    )


def _map_hits(k: int) -> Metric:
    return Metric(
        name=f"map_at_{k}_hits",
        label=f"mAP@{k} by hits",
        definition=f"mAP@{k} as the COCOS code computes it: divided by the number of positives in the top {k}, a fraction",
        formula=f"mean(sum_{{place_j <= {k}}} j/place_j / #{{place_j <= {k}}})",
        unit="fraction",
        reads="places",
        function=lambda places: map_at_k_hits(places, k),
    )


MAPS = tuple(_map(k) for k in (5, 10))
MAPS_BY_HITS = tuple(_map_hits(k) for k in (5, 10))
R_PRECISION = Metric(
    name="r_precision",
    label="R-Precision",
    definition="share of an item's R right {candidate}s in its top R, a fraction",
    formula="mean(#{place_j <= R} / R)",
    unit="fraction",
    reads="places",
    function=lambda places: float(r_precision(places).mean()),
)
MAP_AT_R = Metric(
    name="map_at_r",
    label="mAP@R",
    definition="mean average precision in the top R, R the number of right answers, a fraction",
    formula="mean(sum_{place_j <= R} j/place_j / R)",
    unit="fraction",
    reads="places",
    function=lambda places: float(average_precision_at_r(places).mean()),
)
