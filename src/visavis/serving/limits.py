"""How much of anything a person or a program may ask of the service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """body_bytes: of a request. text: characters of a query. pixels: of a picture that is decoded. decode_s: seconds until a picture is given
    up. body_s, header_s, send_s: seconds that a client may take to send a body, to send what comes before it, and to take a part of an
    answer. results: the furthest rank that is shown. page: results of one answer. waiting: searches that may wait for the model.
    uploads: pictures of queries that are remembered. cached_bytes: of small copies of pictures that are kept in memory.
    """

    body_bytes: int = 8 * 2**20
    text: int = 500
    pixels: int = 40_000_000
    decode_s: float = 15.0
    body_s: float = 20.0
    header_s: float = 10.0
    send_s: float = 30.0
    results: int = 1000
    page: int = 100
    waiting: int = 256
    uploads: int = 48
    cached_bytes: int = 64 * 2**20
    connections: int = 512


@dataclass(frozen=True)
class Rates:
    """A client's allowance: so many units at once, so many more a second. What costs what stands in ``cost_of``."""

    at_once: float = 400.0
    per_s: float = 80.0


def cost_of(method: str, path: str) -> float:
    """The units that a request takes off a client's allowance: a picture of a page is cheap, a search is not, guessing tokens is dear.

    >>> cost_of("GET", "/api/search") > cost_of("GET", "/api/thumbnail")
    True
    """
    if path == "/login":
        return 40.0
    if method == "POST" and path == "/api/search":
        return 20.0
    return {"/api/search": 8.0, "/api/ask": 8.0, "/api/picture": 4.0}.get(path, 1.0)
