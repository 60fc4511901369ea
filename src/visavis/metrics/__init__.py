"""Pure functions of scores and targets; what they mean is said once, in CATALOG."""

from __future__ import annotations

from dataclasses import dataclass

from visavis.metrics.coherent import coherent_scores, ndcg, ndcg_at
from visavis.metrics.ranking import average_precision, average_precision_at, average_precision_at_r, places, r_precision, ranks
from visavis.metrics.recall import (
    MAPS_AT,
    RECALLS_AT,
    both_ways,
    map_at_k,
    map_at_k_hits,
    mean_rank,
    median_rank,
    one_way,
    recall_at,
    with_sums,
)


@dataclass(frozen=True)
class Metric:
    """One metric: its key in results, what it says, its formula, and whether more is better."""

    name: str
    definition: str
    formula: str
    higher_is_better: bool = True


def _of(direction: str, query: str, candidate: str) -> tuple[Metric, ...]:
    return (
        *(
            Metric(
                f"{direction}_r{k}", f"percent of {query} with a correct {candidate} in the top {k} (success@{k})", f"100 mean[rank <= {k}]"
            )
            for k in RECALLS_AT
        ),
        Metric(f"{direction}_medr", f"median rank of the best correct {candidate}", "floor(median(rank - 1)) + 1", False),
        Metric(f"{direction}_meanr", f"mean rank of the best correct {candidate}", "mean(rank)", False),
        *(
            Metric(
                f"{direction}_map_at_{k}",
                f"mean average precision in the top {k}, a fraction",
                f"mean(sum_{{place_j <= {k}}} j/place_j / min(R, {k}))",
            )
            for k in MAPS_AT
        ),
        *(
            Metric(
                f"{direction}_map_at_{k}_hits",
                f"mAP@{k} as the COCOS code has it: divided by what was found, a fraction",
                f"mean(sum_{{place_j <= {k}}} j/place_j / #{{place_j <= {k}}})",
            )
            for k in MAPS_AT
        ),
        Metric(
            f"{direction}_r_precision", f"share of an item's R right {candidate}s in its top R, a fraction", "mean(#{place_j <= R} / R)"
        ),
        Metric(
            f"{direction}_map_at_r",
            "mean average precision in the top R, R the number of right answers, a fraction",
            "mean(sum_{place_j <= R} j/place_j / R)",
        ),
    )


def _graded(direction: str, query: str) -> tuple[Metric, ...]:
    return (
        Metric(
            f"{direction}_cs_at_K",
            f"coherent score: does the order of the top K follow the degrees of relevance, a mean over the {query} for which it is defined",
            "mean(Kendall's tau-b(scores, degrees) over the K best-scored)",
        ),
        Metric(
            f"{direction}_ndcg_at_K",
            f"how much relevance the top K hold, early ones for more, as a share of the most that can be, a mean over {query}",
            "mean(sum_{j <= K} degree_j/log2(j + 1) / the same in the order of the degrees)",
        ),
    )


CATALOG: tuple[Metric, ...] = (
    *_of("i2t", "images", "text"),
    *_of("t2i", "texts", "image"),
    Metric("rsum", "sum of the six recalls, in percent (600 is perfect)", "i2t_r1 + i2t_r5 + i2t_r10 + t2i_r1 + t2i_r5 + t2i_r10"),
    Metric("average_recall", "mean of the six recalls, in percent", "rsum / 6"),
    *_graded("i2t", "images"),
    *_graded("t2i", "texts"),
)

__all__ = [
    "CATALOG",
    "Metric",
    "average_precision",
    "average_precision_at",
    "average_precision_at_r",
    "both_ways",
    "coherent_scores",
    "map_at_k",
    "map_at_k_hits",
    "mean_rank",
    "median_rank",
    "ndcg",
    "ndcg_at",
    "one_way",
    "places",
    "r_precision",
    "ranks",
    "recall_at",
    "with_sums",
]
