"""Counts and times of the service, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Figures:
    """The figures of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("visavis_requests", "Answered requests.", ["route", "method", "status"], registry=registry)
        self.seconds = Histogram("visavis_request_seconds", "Until the answer was sent.", ["route"], buckets=_SECONDS, registry=registry)
        self.searching = Histogram("visavis_search_seconds", "Of a search in one index.", buckets=_SECONDS, registry=registry)
        self.waiting = Gauge("visavis_searches_waiting", "Searches that wait for the model or run.", registry=registry)
        self.pictures = Counter("visavis_pictures", "Small copies of pictures.", ["from_memory"], registry=registry)
        self.votes = Counter("visavis_votes", "Votes that were kept.", ["kind"], registry=registry)
        self.refused = Counter("visavis_refused", "Requests that were refused at the door.", ["reason"], registry=registry)
        self.items = Gauge("visavis_items", "Items of an index.", ["index"], registry=registry)

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self.registry)
