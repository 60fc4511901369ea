"""Evaluation of searches with the relevance judgments of people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from visavis.core.errors import DataError
from visavis.data.feedback.records import latest_judgments
from visavis.data.feedback.sources import read_feedback
from visavis.evaluation.feedback_metrics import (
    FeedbackEvaluation,
    JudgedQueryResult,
    pairwise_accuracy,
    recall_by_k,
)


def evaluate_feedback(
    source: Path,
    content_hashes: Mapping[str, str],
    rank: Callable[[str], Sequence[tuple[str, float]]],
    name: str,
) -> FeedbackEvaluation:
    """Rank all items of a collection for each judged text query. ``rank`` returns the key and score
    of every item, best first.
    """
    key_of = {content_hash: key for key, content_hash in content_hashes.items()}
    labels = defaultdict[str, dict[str, bool]](dict)
    skipped = 0
    for (query, item), judgment in latest_judgments(read_feedback(source)).items():
        # moved items are found by content
        key = item if item in content_hashes else key_of.get(judgment.content_hash)
        if key is None or not query.plain_text:
            skipped += 1
        else:
            labels[query.plain_text][key] = bool(judgment.relevant)
    answerable = {text: judgments for text, judgments in labels.items() if any(judgments.values())}
    if not answerable:
        raise DataError(
            f"{source}: expected a text query with a relevant item in {name}, got none. Judge some "
            "results in the web UI first."
        )
    results = []
    for text, judgments in answerable.items():
        keys, scores = zip(*rank(text), strict=True)
        # Items that nobody judged are in neither list. For recall they count as not relevant, so
        # that it is a lower bound where judgments are few.
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
