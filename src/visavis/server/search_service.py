"""Search service: searches, votes and preferences behind the HTTP API. Searches run on a thread of their own."""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeAlias

from visavis.feedback.query_selection import RecentQueries, UncertainPair
from visavis.feedback.records import FeedbackFile, Judgment, Preference, QueryKey, latest_judgments
from visavis.retrieval.index_search import SearchResult, SearchResults
from visavis.retrieval.items import IndexItem, ItemFilter
from visavis.server.image_cache import ImageCache
from visavis.server.limits import ServerLimits
from visavis.server.prometheus import ServerMetrics
from visavis.server.schemas import HitResponse, RequestRejected
from visavis.server.served_index import ServedIndex, modified_at

RESULT_BLOCK, CACHED_QUERIES, CACHE_SECONDS = 120, 64, 300.0
"""Results of one search, so that the next page is cached, number of cached queries, and their lifetime in seconds."""

_ResultKey: TypeAlias = tuple[object, ...]


class ResultCache:
    """Results of the latest queries, for the next page."""

    def __init__(self) -> None:
        self._entries: OrderedDict[_ResultKey, tuple[float, int, SearchResults]] = OrderedDict()

    def get(self, key: _ResultKey, top: int) -> SearchResults | None:
        """Look up results that are not expired.

        Args:
            key: Index, query and filter.
            top: Number of results that are needed.

        Returns:
            Results of a search for at least ``top`` results, or None.
        """
        expires, fetched, results = self._entries.get(key, (0.0, 0, None))
        return results if fetched >= top and time.monotonic() < expires else None

    def put(self, key: _ResultKey, fetched: int, results: SearchResults) -> None:
        """Add results.

        Args:
            key: Index, query and filter.
            fetched: Number of results that were searched for.
            results: The results.
        """
        self._entries[key] = (time.monotonic() + CACHE_SECONDS, fetched, results)
        while len(self._entries) > CACHED_QUERIES:
            self._entries.popitem(last=False)


class VoteStore:
    """Votes and preferences: the current votes in memory, and all of them in the feedback file.

    Args:
        file: Feedback file. None: votes are not saved.
        metrics: Metrics of the server.
    """

    def __init__(self, file: FeedbackFile | None, metrics: ServerMetrics):
        self.file, self.metrics = file, metrics
        self._votes = latest_judgments(file.records) if file else {}

    def vote(self, key: QueryKey, item: str) -> bool | None:
        """Look up the current vote.

        Args:
            key: The query.
            item: Key of the item.

        Returns:
            Whether the item was voted relevant. None: no vote.
        """
        judgment = self._votes.get((key, item))
        return None if judgment is None else judgment.relevant

    def record_vote(self, index: str, key: QueryKey, item: IndexItem, relevant: bool | None) -> None:
        """Save a vote.

        Args:
            index: Name of the index.
            key: The query.
            item: The item.
            relevant: Whether the item is relevant. None withdraws the vote.

        Raises:
            RequestRejected: If votes are not saved.
            StorageError: If the file cannot be written.
        """
        if self.file is None:
            raise RequestRejected(409, "Votes are not saved. Start the server with --feedback FILE.")
        judgment = Judgment(_now(), index, key, item.key, item.content, relevant)
        self.file.append(judgment)
        self.metrics.votes.labels("relevant").inc()
        if relevant is None:
            self._votes.pop((key, item.key), None)
        else:
            self._votes[key, item.key] = judgment

    def record_preference(self, key: QueryKey, left: str, right: str, preferred: str | None) -> None:
        """Save a preference, if there is a feedback file.

        Args:
            key: The query.
            left: Name of the left index.
            right: Name of the right index.
            preferred: Name of the preferred index. None: neither.

        Raises:
            StorageError: If the file cannot be written.
        """
        if self.file is not None:
            self.file.append(Preference(_now(), key, left, right, preferred))
            self.metrics.votes.labels("preference").inc()


class SearchService:
    """Search and feedback for one index, or for two indexes in a blind comparison.

    Args:
        indexes: One or two indexes.
        feedback: Feedback file. None: votes are not saved.
        limits: Sizes and timeouts.
        metrics: Metrics of the server.
    """

    def __init__(self, indexes: Sequence[ServedIndex], feedback: FeedbackFile | None, limits: ServerLimits, metrics: ServerMetrics):
        self.indexes, self.limits, self.metrics = list(indexes), limits, metrics
        # The numbers of the indexes must not reveal their order on the command line.
        if len(self.indexes) > 1 and secrets.randbelow(2):
            self.indexes.reverse()
        self.votes, self.images = VoteStore(feedback, metrics), ImageCache(limits, metrics)
        self._recent, self._results = RecentQueries[SearchResult](), ResultCache()
        self._secret = secrets.token_bytes(16)
        self._model_thread = ThreadPoolExecutor(1, "model")
        self._num_waiting = 0
        for index in self.indexes:
            metrics.items.labels(index.name).set(len(index.items))

    @property
    def is_comparison(self) -> bool:
        """Whether there are two indexes, shown without their names."""
        return len(self.indexes) == 2

    def side_order(self, key: QueryKey) -> list[int]:
        """Order the indexes from left to right, at random but fixed for a query while the server runs.

        Args:
            key: The query.

        Returns:
            Numbers of the indexes.
        """
        numbers = list(range(len(self.indexes)))
        digest = hmac.digest(self._secret, repr(key).encode("utf-8", "surrogatepass"), "sha256")
        return numbers[::-1] if digest[0] & 1 else numbers

    def index(self, number: int) -> ServedIndex:
        """Look up an index.

        Args:
            number: Number of the index.

        Returns:
            The index.

        Raises:
            RequestRejected: If the number is invalid.
        """
        if number >= len(self.indexes):
            raise RequestRejected(404, f"index: expected 0{' or 1' * self.is_comparison}, got {number}.")
        return self.indexes[number]

    def item(self, number: int, key: str) -> IndexItem:
        """Look up an item.

        Args:
            number: Number of the index.
            key: Key of the item.

        Returns:
            The item.

        Raises:
            RequestRejected: If the key is unknown.
        """
        item = self.index(number).items.get(key)
        if item is None:
            raise RequestRejected(404, f"key: expected the key of an item of this index, got {key[:80]!r}.")
        return item

    async def search(self, number: int, key: QueryKey, item_filter: ItemFilter, top: int) -> SearchResults:
        """Search one index.

        Args:
            number: Number of the index.
            key: The query.
            item_filter: Conditions on the items.
            top: Number of results that are needed.

        Returns:
            At least ``top`` results, or all.

        Raises:
            RequestRejected: If too many searches are waiting, or the image of the query is no longer cached.
            VisavisError: If the query is invalid.
        """
        metadata = tuple(sorted(item_filter.metadata.items()))
        result_key = (number, key, item_filter.path, item_filter.kind, item_filter.after, item_filter.before, metadata)
        if (cached := self._results.get(result_key, top)) is not None:
            return cached
        image = self.images.uploaded(key.image_hash)
        if self._num_waiting >= self.limits.max_waiting_searches:
            raise RequestRejected(429, "Too many searches are waiting. Try again later.", retry_after=1)
        fetched = -(-top // RESULT_BLOCK) * RESULT_BLOCK

        def run_search() -> SearchResults:
            with self.metrics.search_seconds.time():
                return self.indexes[number].search(key, image, fetched, item_filter)

        self._num_waiting += 1
        self.metrics.searches_waiting.inc()
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._model_thread, run_search)
        finally:
            self._num_waiting -= 1
            self.metrics.searches_waiting.dec()
        self._results.put(result_key, fetched, results)
        self._recent.add(key, number, results)
        return results

    def record_preference(self, key: QueryKey, side: str) -> tuple[str, str]:
        """Save which side is better.

        Args:
            key: The query.
            side: ``"left"``, ``"right"`` or ``"neither"``.

        Returns:
            Names of the left and of the right index.

        Raises:
            RequestRejected: If there is only one index.
            StorageError: If the feedback file cannot be written.
        """
        if not self.is_comparison:
            raise RequestRejected(409, "Preferences need two indexes. Start the server with two.")
        left, right = (self.indexes[number].name for number in self.side_order(key))
        self.votes.record_preference(key, left, right, {"left": left, "right": right}.get(side))
        return left, right

    def uncertain_pairs(self, count: int) -> list[UncertainPair[SearchResult]]:
        """Select pairs of a recent query and an item whose vote would be most informative.

        Args:
            count: Maximum number of pairs.

        Returns:
            Pairs without a vote, the most uncertain first.
        """
        return self._recent.most_uncertain(count, lambda key, item: self.votes.vote(key, item) is not None)

    def to_hit(self, key: QueryKey, result: SearchResult) -> HitResponse:
        """Convert a result to the form of the API.

        Args:
            key: The query.
            result: The result.

        Returns:
            The result with its vote.
        """
        item, probability = result.item, result.match_probability
        return HitResponse(
            key=item.key,
            name=item.path.rpartition("/")[2],
            path=item.path,
            kind=item.kind,
            modified=modified_at(item),
            start=item.start,
            end=item.end,
            score=result.score if key and math.isfinite(result.score) else None,
            match_probability=None if probability is None or not math.isfinite(probability) else min(max(probability, 0.0), 1.0),
            vote=self.votes.vote(key, item.key),
            duplicates=list(result.duplicates),
            metadata=dict(item.metadata),
            content_version=item.content[:12],
        )

    def close(self) -> None:
        """Stop the threads."""
        self._model_thread.shutdown(wait=False, cancel_futures=True)
        self.images.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
