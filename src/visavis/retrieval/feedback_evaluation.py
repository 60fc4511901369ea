"""Evaluation of searches with the relevance judgments of people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from visavis.core.errors import DataError
from visavis.data.feedback.records import latest_judgments, read_feedback
from visavis.evaluation.feedback_metrics import (
    FeedbackEvaluation,
    JudgedQueryResult,
    pairwise_accuracy,
    recall_by_k,
)


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
    labels = defaultdict[str, dict[str, bool]](dict)
    skipped = 0
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
