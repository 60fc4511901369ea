"""Active learning: selects the query-item pairs whose judgment would be most informative."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from visavis.evaluation.feedback.records import QueryKey
from visavis.retrieval.search import SearchResult

MAX_QUERIES = 50
"""Number of recent queries that are stored."""
RESULTS_PER_QUERY = 40
"""Number of results per query from which pairs are selected."""
FIRST_PAGE_SIZE = 10
"""Number of results on the first page. A score at its end is the most uncertain one."""
MAX_PAIRS_PER_QUERY = 2
"""Number of pairs that one query contributes to a selection."""


@dataclass(frozen=True)
class UncertainPair:
    """A query and an item whose relevance is uncertain.

    Attributes:
        query: The query.
        index: Number of the searched index.
        result: The search result.
        uncertainty: Uncertainty of the relevance, from 0 to 1.
    """

    query: QueryKey
    index: int
    result: SearchResult
    uncertainty: float


class RecentQueries:
    """The most recent text queries with their results, for the thread of the requests.

    A query that continues an earlier one replaces it: the intermediate states of typing ("be",
    "beac") are not queries.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[QueryKey, int, Sequence[SearchResult]]] = deque(
            maxlen=MAX_QUERIES
        )

    def add(self, query: QueryKey, index: int, results: Sequence[SearchResult]) -> None:
        """Store the results of a query. Queries with images or items are ignored.

        Args:
            query: The query.
            index: Number of the searched index.
            results: Search results, best first.
        """
        if not query.text or query.similar_to or query.image_hash:
            return
        # "be", "beac" and "beach" are one query that was typed slowly.
        continued = [
            entry
            for entry in self._entries
            if entry[1] == index and query.text.startswith(entry[0].text)
        ]
        for entry in continued:
            self._entries.remove(entry)
        self._entries.append((query, index, results[:RESULTS_PER_QUERY]))

    def most_uncertain(
        self, count: int, is_labeled: Callable[[QueryKey, str], bool]
    ) -> list[UncertainPair]:
        """Select the most uncertain pairs that are not judged yet.

        Args:
            count: Maximum number of pairs.
            is_labeled: Whether the pair of a query and an item key is judged already.

        Returns:
            Pairs, most uncertain first, at most `MAX_PAIRS_PER_QUERY` per query.
        """
        pairs = list[UncertainPair]()
        for query, index, results in self._entries:
            candidates = [
                UncertainPair(query, index, result, uncertainty)
                for result, uncertainty in zip(results, uncertainties(results), strict=True)
                if not is_labeled(query, result.key)
            ]
            pairs += sorted(candidates, key=lambda pair: -pair.uncertainty)[:MAX_PAIRS_PER_QUERY]
        return sorted(pairs, key=lambda pair: -pair.uncertainty)[:count]


def uncertainties(results: Sequence[SearchResult]) -> list[float]:
    """Estimate how uncertain the relevance of each search result is.

    Formula:
        With a match probability p: ``1 - 2 |p - 0.5|``. Without: ``exp(-|score - edge| / std)``,
        where ``edge`` is the mean of the 10th and the 11th score, the end of the first page, and
        ``std`` the standard deviation of the scores.

    Args:
        results: Results of one query, best first.

    Returns:
        Uncertainty of each result, from 0 to 1.
    """
    scores = [result.score for result in results]
    around_page_end = scores[FIRST_PAGE_SIZE - 1 : FIRST_PAGE_SIZE + 1]
    edge = (
        sum(around_page_end) / len(around_page_end) if around_page_end else min(scores, default=0.0)
    )
    mean = sum(scores) / max(len(scores), 1)
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / max(len(scores), 1)) or 1.0
    return [
        math.exp(-abs(result.score - edge) / std)
        if result.match_probability is None
        else 1 - 2 * abs(result.match_probability - 0.5)
        for result in results
    ]
