"""Limits of the server: sizes, timeouts and request rates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Sizes and timeouts.

    Attributes:
        max_body_bytes: Maximum size of a request body in bytes.
        max_query_chars: Maximum length of a text query in characters.
        max_pixels: Maximum size of an uploaded image in pixels.
        decode_timeout_s: Time limit for decoding an image in seconds.
        body_timeout_s: Time limit for receiving a request body in seconds.
        header_timeout_s: Time limit for receiving request headers in seconds.
        send_timeout_s: Time limit for sending a part of a response in seconds.
        max_results: Maximum rank of a result.
        max_page_size: Maximum number of results per response.
        max_waiting_searches: Maximum number of searches that wait for the model.
        max_uploads: Number of uploaded query images that are cached.
        max_cached_bytes: Size of the cache of thumbnails in bytes.
        max_connections: Maximum number of connections.
    """

    max_body_bytes: int = 8 * 2**20
    max_query_chars: int = 500
    max_pixels: int = 40_000_000
    decode_timeout_s: float = 15.0
    body_timeout_s: float = 20.0
    header_timeout_s: float = 10.0
    send_timeout_s: float = 30.0
    max_results: int = 1000
    max_page_size: int = 100
    max_waiting_searches: int = 256
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
    """Look up the cost of a request. A thumbnail is cheap, a search is not, and guessing tokens is expensive.

    Args:
        method: HTTP method.
        path: Path of the URL.

    Returns:
        Cost in units of ``RateLimits``.

    Example:
        >>> request_cost("GET", "/api/search") > request_cost("GET", "/api/thumbnail")
        True
    """
    if path == "/login":
        return 40.0
    if method == "POST" and path == "/api/search":
        return 20.0
    return {"/api/search": 8.0, "/api/uncertain": 8.0, "/api/image": 4.0}.get(path, 1.0)
