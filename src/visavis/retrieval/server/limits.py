"""Limits of the server: sizes, timeouts, request rates and caches."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector
from starlette.exceptions import HTTPException

T = TypeVar("T")
REQUEST_COSTS = {"/login": 40.0, "/api/search": 8.0, "/api/uncertain": 8.0, "/api/image": 4.0}
"""Costs of requests other than 1, by path. A thumbnail is cheap, a search is not, and guessing
tokens is expensive.
"""
IMAGE_SEARCH_COST = 20.0
TEXT_INPUT_COST, IMAGE_INPUT_COST = 0.25, 8.0
"""Costs of each text and image of a request for embeddings or a reranking, in addition to that of
the request.
"""


@dataclass(frozen=True)
class ServerLimits:
    """Sizes and timeouts.

    Attributes:
        max_body_bytes: Maximum size of a request body in bytes.
        max_query_chars: Maximum length of a text query in characters.
        max_inputs: Maximum number of texts and images of a request for embeddings or a reranking.
        max_input_chars: Maximum length of each of these texts in characters.
        max_pixels: Maximum size of an uploaded image in pixels.
        max_request_pixels: Maximum size of all images of a request in pixels.
        max_decoded_pixels: Maximum size of the images of requests in memory in pixels, at least
            ``max_pixels``.
        decode_timeout_s: Time limit for decoding an image in seconds.
        body_timeout_s: Time limit for receiving a request body in seconds.
        header_timeout_s: Time limit for receiving request headers in seconds.
        send_timeout_s: Time limit for sending a part of a response in seconds.
        max_results: Maximum rank of a result.
        max_page_size: Maximum number of results per response.
        max_waiting: Maximum number of requests of one client that wait for the model, and of those
            that wait until their images can be decoded.
        max_uploads: Number of uploaded query images that are cached.
        max_cached_bytes: Size of the cache of thumbnails in bytes.
        max_connections: Maximum number of connections.
    """

    max_body_bytes: int = 8 * 2**20
    max_query_chars: int = 500
    max_inputs: int = 2048
    max_input_chars: int = 32_768
    max_pixels: int = 40_000_000
    max_request_pixels: int = 250_000_000
    max_decoded_pixels: int = 40_000_000
    decode_timeout_s: float = 15.0
    body_timeout_s: float = 20.0
    header_timeout_s: float = 10.0
    send_timeout_s: float = 30.0
    max_results: int = 1000
    max_page_size: int = 100
    max_waiting: int = 256
    max_uploads: int = 48
    max_cached_bytes: int = 64 * 2**20
    max_connections: int = 512


@dataclass(frozen=True)
class RateLimits:
    """Request rate of one client, in units of ``request_cost``.

    Attributes:
        burst: Units that a client can spend at once.
        per_s: Units that a client regains per second.
    """

    burst: float = 400.0
    per_s: float = 80.0


def request_cost(method: str, path: str) -> float:
    """Look up the cost of a request.

    Args:
        method: HTTP method.
        path: Path of the URL.

    Returns:
        Cost in units of ``RateLimits``.

    Example:
        >>> request_cost("GET", "/api/search") > request_cost("GET", "/api/thumbnail")
        True
    """
    return (
        IMAGE_SEARCH_COST
        if (method, path) == ("POST", "/api/search")
        else REQUEST_COSTS.get(path, 1.0)
    )


class LRUCache(Generic[T]):
    """Cache that evicts the least recently used entries.

    Args:
        max_size: Maximum total size.
        size_of: Size of a value. Default: 1, so that ``max_size`` is a number of entries.

    Attributes:
        size: Total size of the entries.
    """

    def __init__(self, max_size: int, size_of: Callable[[T], int] = lambda _: 1):
        self.max_size = max_size
        self.size = 0
        self._size_of = size_of
        self._entries = OrderedDict[Hashable, T]()

    def get(self, key: Hashable) -> T | None:
        """Look up a value and mark it as used."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: Hashable, value: T) -> None:
        """Add or replace an entry, unless it is larger than the cache."""
        if self._size_of(value) > self.max_size:
            return
        if key in self._entries:
            self.size -= self._size_of(self._entries.pop(key))
        self._entries[key] = value
        self.size += self._size_of(value)
        while self.size > self.max_size:
            self.size -= self._size_of(self._entries.popitem(last=False)[1])


class WaitingLimit:
    """Limits how many requests of each client wait at once, so that one client cannot keep out the
    others.

    Args:
        max_waiting: Maximum number of waiting requests of one client.
    """

    def __init__(self, max_waiting: int):
        self.max_waiting = max_waiting
        self._num_waiting = Counter[str]()

    @contextmanager
    def waiting(self, client: str) -> Iterator[None]:
        """Count a request as waiting in this block."""
        if self._num_waiting[client] >= self.max_waiting:
            raise HTTPException(
                429,
                f"Too many requests of this client are waiting, at most {self.max_waiting:,} may. "
                "Try again later.",
                {"Retry-After": "1"},
            )
        self._num_waiting[client] += 1
        try:
            yield
        finally:
            self._num_waiting[client] -= 1
            # A server meets more and more clients. Those without a request are not stored.
            if not self._num_waiting[client]:
                del self._num_waiting[client]


@dataclass
class Turn:
    """A part of a capacity that is in use.

    Attributes:
        running: Work on a thread. It cannot be stopped, so that the turn lasts until its end, also
            if nobody waits for it any more.
    """

    running: Future[Any] | None = None


class FairTurns:
    """Shares a capacity among clients. Waiting clients take turns, also if one of them has many
    requests.

    Args:
        capacity: Capacity, in any unit.
        max_waiting: Maximum number of waiting requests of one client.

    Attributes:
        free: Capacity that is not in use.
        num_waiting: Number of requests that wait.
    """

    def __init__(self, capacity: int, max_waiting: int):
        self.capacity = self.free = capacity
        self._limit = WaitingLimit(max_waiting)
        self._waiting = OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]]()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, client: str, cost: int) -> AsyncIterator[Turn]:
        """Wait for a turn, and use a part of the capacity until the end of the block."""
        # A larger cost could never be granted.
        cost = min(cost, self.capacity)
        granted = asyncio.get_running_loop().create_future()
        turn = Turn()
        try:
            with self._limit.waiting(client):
                self._waiting.setdefault(client, deque()).append((cost, granted))
                self._grant()
                await granted
            yield turn
        finally:
            # A request that ends while it waits, because its client disconnects, used nothing.
            used = cost if granted.done() and not granted.cancelled() else 0
            if turn.running is None or turn.running.done():
                self._free(used)
            else:
                loop = asyncio.get_running_loop()
                turn.running.add_done_callback(lambda _: self._free_later(loop, used))

    def _free_later(self, loop: asyncio.AbstractEventLoop, cost: int) -> None:
        """Return a part of the capacity from another thread."""
        with suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(self._free, cost)

    def _free(self, cost: int) -> None:
        """Return a part of the capacity, and start the next requests."""
        self.free += cost
        self._grant()

    def _grant(self) -> None:
        """Start the requests whose turn it is. A large one is not overtaken, or it could wait
        forever.
        """
        while self._waiting:
            client, requests = next(iter(self._waiting.items()))
            if not requests:
                del self._waiting[client]
                continue
            cost, granted = requests[0]
            if not granted.cancelled():
                if cost > self.free:
                    return
                self.free -= cost
                granted.set_result(None)
                self._waiting.move_to_end(client)
            requests.popleft()


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ServerMetrics:
    """Metrics of one server, in their own registry.

    Attributes:
        requests: Responses by route, method and status.
        seconds: Response times by route.
        search_seconds: Times of searches in one index.
        searches_waiting: Searches that wait for the model or run.
        images: Served images, by whether they were cached.
        votes: Saved votes by kind.
        rejected: Rejected requests by reason.
        items: Number of items by index.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = prometheus_client.Counter(
            "visavis_requests", "Responses.", ["route", "method", "status"], registry=registry
        )
        self.seconds = Histogram(
            "visavis_request_seconds",
            "Time until a response is sent.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.search_seconds = Histogram(
            "visavis_search_seconds",
            "Time of a search in one index.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.searches_waiting = Gauge(
            "visavis_searches_waiting",
            "Searches that wait for the model or run.",
            registry=registry,
        )
        self.images = prometheus_client.Counter(
            "visavis_images", "Thumbnails and images.", ["cached"], registry=registry
        )
        self.votes = prometheus_client.Counter(
            "visavis_votes", "Saved votes.", ["kind"], registry=registry
        )
        self.rejected = prometheus_client.Counter(
            "visavis_rejected_requests", "Rejected requests.", ["reason"], registry=registry
        )
        self.items = Gauge("visavis_items", "Items of an index.", ["index"], registry=registry)
