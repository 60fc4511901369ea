"""Which pairs of a query and an item to ask about: those whose answer would teach most."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from visavis.data.judgements import Asked
from visavis.retrieval.searching import Result, Results

QUERIES, DEPTH, EDGE = 50, 40, 10
"""Queries that are remembered, results of each that are asked about, and the rank where what is shown first ends."""


@dataclass(frozen=True)
class Pair:
    """A query, an item of an index, and how doubtful it is that they belong together: 0 to 1."""

    asked: Asked
    index: int
    result: Result
    doubt: float


class RecentQueries:
    """The last queries that were asked in words, with what was found; for several threads.

    A query that goes on from an earlier one takes its place: as one types, "be" and "beac" are no questions.
    """

    def __init__(self) -> None:
        self._found: deque[tuple[Asked, int, Sequence[Result]]] = deque(maxlen=QUERIES)
        self._lock = threading.Lock()

    def add(self, asked: Asked, index: int, results: Results) -> None:
        """Remember what was found for a query; those with pictures or items are not asked about."""
        if not asked.text or asked.like or asked.picture:
            return
        with self._lock:
            kept = [
                entry for entry in self._found if not (entry[1] == index and (entry[0] == asked or asked.text.startswith(entry[0].text)))
            ]
            self._found.clear()
            self._found.extend([*kept, (asked, index, results.hits[:DEPTH])])

    def doubtful(self, count: int, judged: Callable[[Asked, str], bool]) -> list[Pair]:
        """The most doubtful pairs that nobody has judged, at most two of a query, the most doubtful first."""
        with self._lock:
            found = list(self._found)
        pairs = list[Pair]()
        for asked, index, results in found:
            of_query = [
                Pair(asked, index, result, doubt)
                for result, doubt in zip(results, doubts(results), strict=True)
                if not judged(asked, result.item.key)
            ]
            pairs += sorted(of_query, key=lambda pair: -pair.doubt)[:2]
        return sorted(pairs, key=lambda pair: -pair.doubt)[:count]


def doubts(results: Sequence[Result]) -> list[float]:
    """How doubtful each result is, 0 to 1.

    Where it is known how likely they match: ``1 - 2 |match - 0.5|``. Elsewhere by how near a score is to the edge of what is shown first, the
    middle between the tenth and the eleventh, measured in standard deviations of the scores: ``exp(-|score - edge| / deviation)``.
    """
    scores = [result.score for result in results]
    edge = sum(scores[EDGE - 1 : EDGE + 1]) / len(scores[EDGE - 1 : EDGE + 1]) if len(scores) >= EDGE else min(scores, default=0.0)
    mean = sum(scores) / max(len(scores), 1)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / max(len(scores), 1)) or 1.0
    return [
        1 - 2 * abs(result.match - 0.5) if result.match is not None else math.exp(-abs(result.score - edge) / deviation)
        for result in results
    ]
