"""Evaluation of retrieval with the relevance judgments of people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core.errors import DataError
from visavis.core.notebook import NotebookTable
from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.evaluation.feedback.records import latest_judgments, read_feedback
from visavis.evaluation.feedback.training_pairs import FeedbackPairs
from visavis.evaluation.metrics.ranking import random_recall

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
    """Compute recall and pairwise accuracy.

    Args:
        results: Result of each query.

    Returns:
        Values in percent, by the keys of `FeedbackTest.labels`.
    """
    return {f"judged_r{k}": value for k, value in recall_by_k(results).items()} | {
        PAIRWISE_ACCURACY_KEY: pairwise_accuracy(results)
    }


@dataclass(frozen=True)
class FeedbackTest:
    """Relevance judgments of a test split, as an additional test of models.

    Attributes:
        pairs: Judged pairs of text queries and images of the split.
        images: Names of all images of the split, which every query ranks.
    """

    pairs: FeedbackPairs
    images: tuple[str, ...]

    @classmethod
    def read(cls, file: Path, data: Dataset, split: str, progress: Progress) -> FeedbackTest:
        """Read the judgments of a split from a feedback file.

        Args:
            file: The feedback file of ``visavis serve``.
            data: The data set.
            split: Name of the split that is searched.
            progress: Receives the progress of matching items to images.

        Returns:
            The judged queries, and the names of all images of the split.

        Raises:
            DataError: If the file is not a feedback file, or has no text query with a relevant
                image of the split.
        """
        pairs = FeedbackPairs.from_records(read_feedback(file), data, split, progress)
        test = cls(pairs, tuple(image.name for image in data.images if image.split == split))
        if not test.labeled_queries:
            skipped = f" {pairs.skipped_summary}" if pairs.skipped else ""
            raise DataError(
                f"{file}: expected a text query with a relevant image of split {split} of "
                f"{data.name}, got none.{skipped} "
                "Judge some of these images in the web UI."
            )
        return test

    @cached_property
    def labeled_queries(self) -> dict[str, tuple[list[int], list[int]]]:
        """Indices of the relevant and of the not relevant images of each text query that has a
        relevant image.
        """
        relevant, not_relevant = (
            [pairs[pairs[:, 0] == query, 1].tolist() for query in range(len(self.pairs.queries))]
            for pairs in (self.pairs.relevant, self.pairs.not_relevant)
        )
        labels = zip(self.pairs.queries, relevant, not_relevant, strict=True)
        return {text: (positives, negatives) for text, positives, negatives in labels if positives}

    @property
    def labels(self) -> dict[str, str]:
        """Column heading of each metric. Pairwise accuracy is included if there are pairs."""
        has_pairs = any(not_relevant for _, not_relevant in self.labeled_queries.values())
        return {f"judged_r{k}": f"R@{k}" for k in KS} | (
            {PAIRWISE_ACCURACY_KEY: "in order"} if has_pairs else {}
        )

    def random_baseline(self, metric: str) -> float:
        """Compute the expected value of a metric for a random order.

        Args:
            metric: Metric key.

        Returns:
            Expected value in percent.
        """
        if metric == PAIRWISE_ACCURACY_KEY:
            return 50.0
        k = int(metric.rpartition("_r")[2])
        return 100 * float(
            np.mean(
                [
                    random_recall(len(self.images), len(relevant), k)
                    for relevant, _ in self.labeled_queries.values()
                ]
            )
        )

    def __str__(self) -> str:
        queries = self.labeled_queries.values()
        num_relevant = sum(len(relevant) for relevant, _ in queries)
        num_pairs = sum(len(relevant) * len(not_relevant) for relevant, not_relevant in queries)
        without_relevant = len(self.pairs.queries) - len(queries)
        in_order = (
            f"In order: share of {num_pairs:,} pairs whose relevant image ranks above the one that "
            "is not relevant."
        )
        sentences = (
            f"{len(queries):,} text queries with {num_relevant:,} relevant images.",
            f"Each query ranks {len(self.images):,} images of split {self.pairs.split}.",
            in_order if num_pairs else "",
            f"Not evaluated: {without_relevant:,} queries without a relevant image."
            if without_relevant
            else "",
            self.pairs.skipped_summary if self.pairs.skipped else "",
        )
        return " ".join(filter(None, sentences))


@dataclass(frozen=True)
class FeedbackEvaluation(NotebookTable):
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

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with recall by metric key, and without an empty correction."""
        recalls = {f"t2i_r{k}": value for k, value in self.recall.items()}
        left_out = {"recall", *([] if self.correction else ["correction"])}
        return {key: value for key, value in asdict(self).items() if key not in left_out} | recalls


def evaluate_feedback(
    file: Path,
    content_hashes: Mapping[str, str],
    rank: Callable[[str], Sequence[tuple[str, float]]],
    name: str,
) -> FeedbackEvaluation:
    """Rank all items of a collection for each judged text query.

    Items that nobody judged count as not relevant, so recalls are a lower bound where judgments are
    few. An item that was moved is found by its content.

    Args:
        file: The feedback file of ``visavis serve``.
        content_hashes: Content hash of each item, by its key.
        rank: Returns the key and score of every item for a text query, best first.
        name: Name of the collection, for errors.

    Returns:
        Recalls and pairwise accuracy over the judged queries.

    Raises:
        DataError: If the file holds no text query with a relevant item.
    """
    key_of = {content_hash: key for key, content_hash in content_hashes.items()}
    labels, skipped = defaultdict[str, dict[str, bool]](dict), 0
    for (query, item), judgment in latest_judgments(read_feedback(file)).items():
        # moved items are found by content
        key = item if item in content_hashes else key_of.get(judgment.content_hash)
        if key is None or not query.plain_text:
            skipped += 1
        else:
            labels[query.plain_text][key] = bool(judgment.relevant)
    answerable = {text: judgments for text, judgments in labels.items() if any(judgments.values())}
    if not answerable:
        raise DataError(
            f"{file}: expected a text query with a relevant item in {name}, got none. Judge some "
            "results in the web UI first."
        )
    results = []
    for text, judgments in answerable.items():
        keys, scores = zip(*rank(text), strict=True)
        relevant, not_relevant = (
            [index for index, key in enumerate(keys) if judgments.get(key) is value]
            for value in (True, False)
        )
        results.append(JudgedQueryResult.from_scores(np.array(scores), relevant, not_relevant))
    return FeedbackEvaluation(
        queries=len(answerable),
        candidates=len(content_hashes),
        recall=recall_by_k(results),
        pairs=sum(result.num_pairs for result in results),
        pairwise_accuracy=pairwise_accuracy(results),
        skipped=skipped,
    )
