"""Relevance judgments of people as an additional test of the runs of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from visavis.core.errors import DataError
from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.data.feedback.records import FeedbackRecord
from visavis.data.feedback.training_pairs import FeedbackPairs
from visavis.evaluation.feedback_metrics import KS, PAIRWISE_ACCURACY_KEY
from visavis.evaluation.metrics.ranking import random_recall


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
    def from_records(
        cls,
        records: Iterable[FeedbackRecord],
        source: Path | None,
        data: Dataset,
        split: str,
        progress: Progress,
    ) -> FeedbackTest:
        """Make a test of the judgments of a split, which come from an index or a file."""
        pairs = FeedbackPairs.from_records(records, data, split, progress)
        test = cls(pairs, tuple(image.name for image in data.images if image.split == split))
        if not test.labeled_queries:
            skipped = f" {pairs.skipped_summary}" if pairs.skipped else ""
            raise DataError(
                f"{source}: expected a text query with a relevant image of split {split} of "
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
        # A query without a relevant image has no recall.
        return {text: (positives, negatives) for text, positives, negatives in labels if positives}

    @property
    def labels(self) -> dict[str, str]:
        """Column heading of each metric. Pairwise accuracy is included if there are pairs."""
        has_pairs = any(not_relevant for _, not_relevant in self.labeled_queries.values())
        return {f"judged_r{k}": f"R@{k}" for k in KS} | (
            {PAIRWISE_ACCURACY_KEY: "in order"} if has_pairs else {}
        )

    def random_baseline(self, metric: str) -> float:
        """Compute the expected value of a metric in percent for a random order."""
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
