"""Metrics of the server in the Prometheus text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
        self.requests = Counter(
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
        self.images = Counter(
            "visavis_images", "Thumbnails and images.", ["cached"], registry=registry
        )
        self.votes = Counter("visavis_votes", "Saved votes.", ["kind"], registry=registry)
        self.rejected = Counter(
            "visavis_rejected_requests", "Rejected requests.", ["reason"], registry=registry
        )
        self.items = Gauge("visavis_items", "Items of an index.", ["index"], registry=registry)

    def text(self) -> bytes:
        """Export all metrics.

        Returns:
            Content of ``/metrics``.
        """
        return generate_latest(self.registry)
