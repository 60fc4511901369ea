"""Metrics of ranked items that people judged relevant or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from visavis.core.result import Result
from visavis.core.table import Table

KS = (1, 5, 10)
"""Cutoffs of recall."""
PAIRWISE_ACCURACY_KEY = "judged_ordered"
"""Metric key of the pairwise accuracy."""


@dataclass(frozen=True)
class JudgedQueryResult:
    """Result of a model for one text query that has a relevant item.

    Attributes:
        rank: Rank of the best relevant item among the items that are not judged relevant, starting
            at 1. Ties count against the model.
        num_pairs: Number of pairs of a relevant and a not relevant item.
        num_ordered: Number of these pairs in which the relevant item has the higher score.
    """

    rank: int
    num_pairs: int
    num_ordered: int

    @classmethod
    def from_scores(
        cls, scores: np.ndarray, relevant: Sequence[int], not_relevant: Sequence[int]
    ) -> JudgedQueryResult:
        """Evaluate the scores of one query.

        Args:
            scores: Scores of all items, shape ``[C]``.
            relevant: Indices of the items that were judged relevant, at least one.
            not_relevant: Indices of the items that were judged not relevant.

        Returns:
            Rank and pair counts.

        Example:
            >>> JudgedQueryResult.from_scores(np.array([0.9, 0.8, 0.7, 0.6]), relevant=[1, 3], not_relevant=[0])
            JudgedQueryResult(rank=2, num_pairs=2, num_ordered=0)
        """
        positives = scores[list(relevant)]
        above = np.delete(scores, relevant) >= positives.max()  # ties count against the model
        ordered = positives[:, None] > scores[list(not_relevant)]  # [relevant, not relevant]
        return cls(1 + int(above.sum()), len(relevant) * len(not_relevant), int(ordered.sum()))


def recall_by_k(results: Sequence[JudgedQueryResult]) -> dict[int, float]:
    """Compute recall at 1, 5 and 10: the share of queries whose best relevant item has a rank of at
    most k.

    Args:
        results: Result of each query.

    Returns:
        Recall in percent, by k.

    Example:
        >>> recall_by_k([JudgedQueryResult(rank=2, num_pairs=2, num_ordered=0)])
        {1: 0.0, 5: 100.0, 10: 100.0}
    """
    return {k: 100 * float(np.mean([result.rank <= k for result in results])) for k in KS}


def pairwise_accuracy(results: Sequence[JudgedQueryResult]) -> float | None:
    """Compute the share of judged pairs in which the relevant item scores higher.

    Args:
        results: Result of each query.

    Returns:
        Share in percent, or None without pairs.

    Example:
        >>> pairwise_accuracy([JudgedQueryResult(rank=2, num_pairs=2, num_ordered=1)])
        50.0
    """
    pairs = sum(result.num_pairs for result in results)
    return 100 * sum(result.num_ordered for result in results) / pairs if pairs else None


def feedback_metrics(results: Sequence[JudgedQueryResult]) -> dict[str, float | None]:
    """Compute recall and pairwise accuracy."""
    return {f"judged_r{k}": value for k, value in recall_by_k(results).items()} | {
        PAIRWISE_ACCURACY_KEY: pairwise_accuracy(results)
    }


@dataclass(frozen=True)
class FeedbackEvaluation(Result):
    """Evaluation of an index with relevance judgments.

    Attributes:
        queries: Number of judged text queries with a relevant item.
        candidates: Number of items that each query ranks.
        recall: Recall by k, in percent: the share of queries with a relevant item among the top k.
            Ties count against the model.
        pairs: Number of pairs of a relevant and a not relevant item of the same query.
        pairwise_accuracy: Share of these pairs whose relevant item ranks higher, in percent. None
            without pairs.
        skipped: Number of judgments that cannot be evaluated: image queries, queries with excluded
            words, items that are missing.
        correction: Correction of the scores with its bank. Empty: none.
    """

    queries: int
    candidates: int
    recall: dict[int, float]
    pairs: int
    pairwise_accuracy: float | None
    skipped: int
    correction: str = ""

    def tables(self) -> list[Table]:
        """Return recall and pairwise accuracy in sentences."""
        recalls = ", ".join(f"R@{k} {value:.1f} %" for k, value in self.recall.items())
        notes = [f"{self.queries:,} judged queries, {self.candidates:,} items: {recalls}."]
        if self.pairwise_accuracy is not None:
            notes.append(
                f"{self.pairwise_accuracy:.1f} % of {self.pairs:,} pairs of a relevant and an "
                "irrelevant item are in the correct order."
            )
        if self.correction:
            notes.append(f"Scores are corrected: {self.correction}.")
        if self.skipped:
            notes.append(
                f"Left out: {self.skipped:,} judgments of image queries, of queries with excluded "
                "texts, or of missing items."
            )
        return [Table(notes=tuple(notes))]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with recall by metric key, and without an empty correction."""
        recalls = {f"t2i_r{k}": value for k, value in self.recall.items()}
        left_out = {"recall", *([] if self.correction else ["correction"])}
        return {key: value for key, value in asdict(self).items() if key not in left_out} | recalls
