"""Catalog of metrics. A new metric is one declaration, a `Metric` in ``RANKING``, in ``COMBINED``,
or in ``_graded_metrics``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from visavis.core.encoded import to_float64
from visavis.core.errors import SpecError
from visavis.core.own_code import CodeNotNamed, find_part, loaded_parts
from visavis.evaluation.metrics.graded_metrics import Semantics, Tau, coherent_scores_at, ndcg
from visavis.evaluation.metrics.ranking import (
    RSUM_CUTOFFS,
    average_precision_at_r,
    check_positive_ranks,
    map_at_k,
    map_at_k_hits,
    mean_rank,
    median_rank,
    r_precision,
    recall_at,
    recall_at_mean_ties,
)

DIRECTION_ROLES = {
    "i2t": {"query": "image", "candidate": "text"},
    "t2i": {"query": "text", "candidate": "image"},
}
"""Query and candidate of each direction."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, declared once. Evaluation, results, the CLI and the reference follow from its
    entry in the catalog.

    Attributes:
        name: Key in results. A metric of one direction has a key for each direction: ``r1`` becomes
            ``i2t_r1`` and ``t2i_r1``. A K in it is replaced by its value.
        label: Name in tables.
        definition: The measured quantity. ``{query}`` and ``{candidate}`` become image and text, or
            text and image.
        formula: Formula as text.
        unit: Unit of the value. It also selects the number of digits in tables.
        input: What ``function`` takes. "ranks": positive ranks of one direction ``[Q, M]``, see
            `positive_ranks`, and ``k`` if `at` sets it. It returns a number. "relevance": scores and relevance of one
            direction ``[Q, C]`` and the values of K, ascending. It returns ``[Q, len(ks)]``, NaN
            where undefined. "metrics": all metrics of ranks by key. It returns one number for both
            directions.
        function: The computation.
        higher_is_better: Whether larger values are better.
        ir_measures: Measure of ir_measures with the same value on the files of ``--trec``, up to
            the factor 100 of a percentage. Empty: none has it.
    """

    name: str
    label: str
    definition: str
    formula: str
    unit: str
    input: Literal["ranks", "relevance", "metrics"] = "ranks"
    function: Callable[..., Any] = field(repr=False)
    higher_is_better: bool = True
    ir_measures: str = ""

    def key(self, direction: str, k: int | None = None) -> str:
        """Make the key in results.

        Args:
            direction: "i2t" or "t2i".
            k: Cutoff, for a metric with a K in its name.

        Returns:
            A key such as ``i2t_r1`` or ``i2t_cs_at_100``.
        """
        return f"{direction}_{self.name if k is None else self.name.replace('K', str(k))}"

    def at(self, *ks: int) -> tuple[Metric, ...]:
        """Make the metric of each cutoff.

        Args:
            ks: Cutoffs. Each replaces the K in the texts, and is the argument ``k`` of the function.

        Returns:
            The metrics.
        """
        texts = ("name", "label", "definition", "formula", "ir_measures")
        return tuple(
            replace(
                self,
                **{text: getattr(self, text).replace("K", str(k)) for text in texts},
                function=partial(self.function, k=k),
            )
            for k in ks
        )

    def in_results(self) -> list[Metric]:
        """Return the metric under its keys in results: once, or once for each direction."""
        if self.input == "metrics":
            return [self]
        return [
            replace(self, name=self.key(direction), definition=self.definition.format(**roles))
            for direction, roles in DIRECTION_ROLES.items()
        ]


RECALL_AT_K = Metric(
    name="rK",
    label="R@K",
    definition="percent of {query}s with a correct {candidate} in the top K (success@K)",
    formula="$100 mean[rank <= K]$",
    unit="percent",
    function=lambda ranks, k: 100 * recall_at(ranks[:, 0], k),
    ir_measures="Success@K",
)
RECALLS = RECALL_AT_K.at(1, 5, 10)
"""Recalls of results and tables. Another cutoff here changes neither RSUM nor average recall."""
RSUM_RECALLS = RECALL_AT_K.at(*RSUM_CUTOFFS)
"""Recalls of one direction that RSUM and average recall sum."""

RECALLS_OF_MEAN_TIES = tuple(
    Metric(
        name=f"r{k}_mean_ties",
        label=f"R@{k} by mean ties",
        definition=f'R@{k} as the code of CE and MMT counts mean ranks of ties (ties="mean"): a hit is {hit}. '
        f"For integer ranks it equals R@{k}",
        formula=f"$100 mean[rank {condition}]$",
        unit="percent",
        function=lambda ranks, k=k: 100 * recall_at_mean_ties(ranks[:, 0], k),
    )
    for k, hit, condition in (
        (1, "only a mean rank of 1", "= 1"),
        (5, "any mean rank below 6, including 5.5", "< 6"),
        (10, "any mean rank below 11, including 10.5", "< 11"),
    )
)

RANKING: tuple[Metric, ...] = (
    *RECALLS,
    Metric(
        name="average_recall",
        label="average recall",
        definition="mean of R@1, R@5 and R@10, in percent",
        formula="$(R@1 + R@5 + R@10) / 3$",
        unit="percent",
        function=lambda ranks: (
            sum(metric.function(ranks) for metric in RSUM_RECALLS) / len(RSUM_RECALLS)
        ),
    ),
    *RECALLS_OF_MEAN_TIES,
    Metric(
        name="medr",
        label="median rank",
        definition="median rank of the best correct {candidate}",
        formula="$floor(median(rank - 1)) + 1$",
        unit="rank",
        function=lambda ranks: median_rank(ranks[:, 0]),
        higher_is_better=False,
    ),
    Metric(
        name="meanr",
        label="mean rank",
        definition="mean rank of the best correct {candidate}",
        formula="$mean(rank)$",
        unit="rank",
        function=lambda ranks: mean_rank(ranks[:, 0]),
        higher_is_better=False,
    ),
    Metric(
        name="mrr",
        label="MRR",
        definition="mean reciprocal rank of the best correct {candidate}, without a cutoff, a fraction",
        formula="mean(1 / rank)",
        unit="fraction",
        function=lambda ranks: float((1 / to_float64(ranks[:, 0])).mean()),
        ir_measures="RR",
    ),
    *Metric(
        name="map_at_K",
        label="mAP@K",
        definition="mean average precision in the top K, divided by min(R, K), a fraction. AP@K of ir_measures divides by R, so "
        "both agree for R <= K",
        formula="$mean((sum_{rank_j <= K} j / rank_j) / min(R, K))$",
        unit="fraction",
        function=map_at_k,
    ).at(5, 10),
    *Metric(
        name="map_at_K_hits",
        label="mAP@K by hits",
        definition="mAP@K as the COCOS code computes it: divided by the number of positives in the top K, a fraction",
        formula="$mean((sum_{rank_j <= K} j / rank_j) / #{rank_j <= K})$",
        unit="fraction",
        function=map_at_k_hits,
    ).at(5, 10),
    Metric(
        name="r_precision",
        label="R-Precision",
        definition="share of a {query}'s R correct {candidate}s in its top R, a fraction",
        formula="$mean(#{rank_j <= R} / R)$",
        unit="fraction",
        function=lambda ranks: float(r_precision(ranks).mean()),
        ir_measures="Rprec",
    ),
    Metric(
        name="map_at_r",
        label="mAP@R",
        definition="mean average precision in the top R, R the number of correct {candidate}s of each {query}, a fraction. The mean of AP@R "
        "of ir_measures over groups of {query}s with equal R",
        formula="$mean((sum_{rank_j <= R} j / rank_j) / R)$",
        unit="fraction",
        function=lambda ranks: float(average_precision_at_r(ranks).mean()),
    ),
)
"""Metrics of one direction that are computed from ranks."""

SIX_RECALLS = tuple(
    metric.key(direction) for direction in DIRECTION_ROLES for metric in RSUM_RECALLS
)
"""Keys of the recalls that RSUM sums: R@1, R@5 and R@10 of both directions."""

RSUM = Metric(
    name="rsum",
    label="RSUM",
    definition="sum of the six recalls, in percent (600 is perfect)",
    formula="$R@1 + R@5 + R@10$, the sum of both directions",
    unit="percent",
    input="metrics",
    function=lambda metrics: sum(metrics[key] for key in SIX_RECALLS),
)
AVERAGE_RECALL = Metric(
    name="average_recall",
    label="average recall",
    definition="mean of the six recalls, in percent",
    formula="$RSUM / 6$",
    unit="percent",
    input="metrics",
    function=lambda metrics: RSUM.function(metrics) / len(SIX_RECALLS),
)
COMBINED: tuple[Metric, ...] = (RSUM, AVERAGE_RECALL)
"""Metrics that combine both directions into one value."""

BUILT_IN_KEYS = frozenset(
    (
        *(metric.key(direction) for direction in DIRECTION_ROLES for metric in RANKING),
        *(metric.name for metric in COMBINED),
    )
)
"""Keys of the metrics of ranks in results."""


def _graded_metrics(
    suffix: str, tau: Tau, semantics: Semantics, candidates: str
) -> tuple[Metric, ...]:
    """CS@K and nDCG@K of one direction."""
    coherent_score = Metric(
        name=f"cs_at_K{suffix}",
        label="CS@K",
        definition=f"coherent score: how far the order of the top K follows graded relevance, a mean over the {{query}}s for which it is "
        f"defined. Candidates: {candidates}",
        formula=f"mean of Kendall's tau-{tau} between scores and relevance of the K best-scored",
        unit="correlation",
        input="relevance",
        function=partial(coherent_scores_at, tau=tau, semantics=semantics),
    )
    discounted_gain = Metric(
        name=f"ndcg_at_K{suffix}",
        label="nDCG@K",
        definition="discounted cumulative gain: the relevance in the top K (linear gain), discounted by log2(rank + 1), over the highest possible, "
        "a mean over {query}s. Of equal scores the less relevant comes first. "
        f"Candidates: {candidates}",
        formula="$mean((sum_{j <= K} r_j / log_2(j + 1)) / ideal)$, where ideal is the sum in the order of the relevance",
        unit="fraction",
        input="relevance",
        function=lambda scores, relevance, ks: ndcg(scores, relevance)[
            :, [min(k, scores.shape[1]) - 1 for k in ks]
        ],
        ir_measures="nDCG@K",
    )
    return coherent_score, discounted_gain


GRADED: dict[str, tuple[Metric, ...]] = {
    "reference": _graded_metrics(
        "",
        "b",
        "reference",
        "the first caption of each image, as the released code of the Ladder loss",
    ),
    "paper": _graded_metrics(
        "_paper", "a", "paper", "all captions, as the text of the Ladder loss"
    ),
}
"""Metrics of one direction that read graded relevance, as the released code of the Ladder loss and
as its paper.
"""
COHERENT_SCORE = GRADED["reference"][0]


def _by_direction(metrics: Sequence[Metric]) -> list[Metric]:
    """The metrics under their keys in results: all of one direction, then all of the other."""
    pairs = zip(*(metric.in_results() for metric in metrics), strict=True)
    return [metric for of_direction in pairs for metric in of_direction]


CATALOG: tuple[Metric, ...] = (
    *_by_direction(RANKING),
    *COMBINED,
    *(metric for metrics in GRADED.values() for metric in _by_direction(metrics)),
)
"""All metrics by their keys in results. K stands for a number."""


def equivalent_measures(keys: Iterable[str]) -> dict[str, str]:
    """Name the measures of ir_measures with the same values as metrics.

    Args:
        keys: Keys in results.

    Returns:
        The measures by key, of the metrics that have one.

    Example:
        >>> equivalent_measures(["t2i_r5", "t2i_map_at_r", "i2t_ndcg_at_10"])
        {'t2i_r5': 'Success@5', 'i2t_ndcg_at_10': 'nDCG@10'}
    """
    by_name = {metric.name: metric.ir_measures for metric in CATALOG}
    found = {}
    for key in keys:
        cutoff = re.search(r"(?<=_at_)\d+", key)
        name = key if cutoff is None else key.replace(f"_at_{cutoff[0]}", "_at_K", 1)
        if measure := by_name.get(key) or by_name.get(name):
            found[key] = measure if cutoff is None else measure.replace("K", cutoff[0])
    return found


def own_metrics() -> list[Metric]:
    """List the metrics of ranks from outside the package."""
    metrics = loaded_parts(Metric, "metrics")
    own = [one for metric in metrics if metric.input != "relevance" for one in metric.in_results()]
    for metric in own:
        if metric.name in BUILT_IN_KEYS:
            raise SpecError(
                f"{metric.name}: expected a metric with a name of its own, got the one of a metric "
                "of visavis. Rename it."
            )
    return own


def own_metric_keys(name: str) -> list[str]:
    """List the keys of an own metric such as "mrr.py:MRR" in results. Empty: its code is not named."""
    try:
        metric: Any = find_part(name, {}, Metric, "metrics")
    except CodeNotNamed:
        return []
    if metric.input == "relevance":
        raise SpecError(
            f"{name}: expected a metric of ranks or of other metrics, got one of graded relevance. "
            "Set its input."
        )
    return [one.name for one in metric.in_results()]


def ranking_metrics(image_ranks: Tensor, text_ranks: Tensor) -> dict[str, float]:
    """Compute every metric that needs no graded relevance.

    Args:
        image_ranks: Ranks of the texts of each image, shape ``[V, M]``.
        text_ranks: Ranks of the images of each text, shape ``[T, M]``.

    Returns:
        Metrics by key.
    """
    check_positive_ranks(image_ranks, "image_ranks")
    check_positive_ranks(text_ranks, "text_ranks")
    by_direction = {"i2t": image_ranks, "t2i": text_ranks}
    metrics = {
        metric.key(direction): metric.function(ranks)
        for direction, ranks in by_direction.items()
        for metric in RANKING
    }
    metrics |= {metric.name: metric.function(metrics) for metric in COMBINED}
    for metric in own_metrics():
        values = metrics if metric.input == "metrics" else by_direction[metric.name[:3]]
        metrics[metric.name] = float(metric.function(values))
    return metrics
