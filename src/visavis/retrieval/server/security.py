"""Security of the server: host and origin checks, access token, rate and size limits, and response
headers.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import math
import re
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from visavis.core.errors import VisavisError
from visavis.retrieval.server.limits import (
    LRUCache,
    RateLimits,
    ServerLimits,
    ServerMetrics,
    request_cost,
)
from visavis.retrieval.server.schemas import ApiError, error_response

TOKEN_COOKIE = "visavis"
MIN_TOKEN_LENGTH = 12
MAX_CLIENTS = 10_000
"""Clients whose request rate is tracked. The least recently seen ones are dropped."""
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Browsers send "Origin: null" with the form of the login page under "no-referrer", which the
    # check of the origin rejects.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), interest-cohort=()",
}
"""Headers of every response."""
PUBLIC_PATHS = frozenset({"/health", "/login", "/style.css", "/icon.svg", "/theme.js"})
"""Paths that need no token: the health check and the login page."""
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def is_loopback(host: str) -> bool:
    """Check whether an address is reachable from this machine only.

    Args:
        host: IP address or name.

    Returns:
        Whether it is a loopback address or ``localhost``.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("localhost")
        (True, True, False, True)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(header: str) -> str:
    """Read the name in a Host header.

    Args:
        header: Value of the header.

    Returns:
        Name without port. Empty if the header is invalid.

    Example:
        >>> host_name("LocalHost:8000"), host_name("[::1]:80"), host_name("a b")
        ('localhost', '::1', '')
    """
    if not header or any(letter in header for letter in "/\\@ \t?#"):
        return ""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def validate_host_name(name: str) -> str:
    """Check a name by which a proxy requests this server. Return it as browsers send it: in lower
    case, and in ASCII for an international name.
    """
    try:
        ascii_name = name.lower().encode("idna").decode()
    except UnicodeError:
        ascii_name = ""
    if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", ascii_name):
        raise VisavisError(
            f"host_name: expected a name such as photos.example, got {name!r}. Pass it without "
            "scheme, port and wildcard."
        )
    return ascii_name


def validate_root_path(path: str) -> str:
    """Check the path below which a proxy serves this server, such as ``/photos``. Return it without
    a slash at the end. Empty: no proxy, or one that serves the root of a host.
    """
    if not re.fullmatch(r"(/[\w.~-]+)*/?", path, re.ASCII) or re.search(r"/\.\.?(/|$)", path):
        raise VisavisError(
            f"root_path: expected a path such as /photos, got {path!r}. Start it with a slash, and "
            "use letters and digits."
        )
    return path.rstrip("/")


def is_cross_origin(headers: Headers) -> bool:
    """Check whether a page of another origin sent a request. It must not change anything here."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:
        return True


def validate_token(token: str) -> None:
    """Check an access token: long enough, and of characters that a header can carry."""
    problem = ""
    if len(token) < MIN_TOKEN_LENGTH:
        problem = (
            f"at least {MIN_TOKEN_LENGTH} characters, got {len(token)}. Make one with: openssl "
            "rand -hex 16"
        )
    elif not token.isascii() or not token.isprintable() or " " in token:
        problem = (
            "printable ASCII characters, got spaces or others. Use letters, digits and dashes."
        )
    if problem:
        raise VisavisError(f"token: expected {problem}")


class TokenAuth:
    """Checks an access token in a header or cookie, in constant time.

    Args:
        token: The token.

    Attributes:
        cookie: Value of the login cookie, derived from the token.
    """

    def __init__(self, token: str):
        self._token = _digest(token)
        self.cookie = hmac.digest(token.encode(), b"visavis serve", "sha256").hex()

    def is_authorized(self, headers: Headers) -> bool:
        """Check whether the headers of a request have the token or the login cookie."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_valid_token(token.strip()):
            return True
        # A browser sends the cookie of the login page. It reveals nothing about the token.
        cookie = cookie_parser(headers.get("cookie", "")).get(TOKEN_COOKIE, "")
        return hmac.compare_digest(_digest(cookie), _digest(self.cookie))

    def is_valid_token(self, token: str) -> bool:
        """Compare a token with the access token."""
        # Digests have equal lengths, so that the time reveals not even the length of the token.
        return hmac.compare_digest(_digest(token), self._token)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def client_name(scope: Scope) -> str:
    """Name the client of a request, for limits.

    Args:
        scope: Scope of the request.

    Returns:
        Its address, of IPv6 its network of 64 bits, because one household controls all of it.

    Example:
        >>> client_name({"client": ("2001:db8::1:2", 80)}), client_name({})
        ('2001:db8::/64', 'unknown')
    """
    client = scope["client"][0] if scope.get("client") else "unknown"
    with suppress(ValueError):  # a name instead of an address
        address = ipaddress.ip_address(client)
        if address.version == 6:
            client = str(ipaddress.ip_network((address, 64), strict=False))
    return str(client)


class RateLimiter:
    """Token bucket per client. The `limits` library has neither costs per route nor /64 networks as
    clients.

    Args:
        rates: Burst and refill rate.
    """

    def __init__(self, rates: RateLimits):
        self.rates = rates
        # Units of a client, and when it was last seen.
        self._buckets = LRUCache[tuple[float, float]](MAX_CLIENTS)

    def spend(self, client: str, cost: float, now: float | None = None) -> float:
        """Spend units of a client. Return 0, or the seconds until they are available."""
        now = time.monotonic() if now is None else now
        units, last_seen = self._buckets.get(client) or (self.rates.burst, now)
        # The bucket fills while the client is silent, up to the burst.
        units = min(self.rates.burst, units + (now - last_seen) * self.rates.per_s)
        is_allowed = units >= cost
        self._buckets.put(client, (units - cost if is_allowed else units, now))
        return 0.0 if is_allowed else (cost - units) / self.rates.per_s

    @staticmethod
    def error(wait_s: float) -> ApiError:
        """Make the error of a client that has to wait."""
        seconds = max(1, math.ceil(wait_s))
        return ApiError(
            429,
            f"Too many requests. Try again in {seconds} s.",
            {"Retry-After": str(seconds)},
        )


@dataclass(frozen=True)
class SecurityMiddleware:
    """Checks host, origin, rate, token and size of each request, adds response headers, and counts
    responses.

    Attributes:
        app: The application.
        host_names: Names that the Host header may have in addition to loopback ones. None: no
            check.
        root_path: Path below which a proxy serves the application. Requests with and without it are
            answered.
        auth: Access token. None: no token is needed.
        rate_limiter: Limits the request rate of a client. None: no limit.
        limits: Sizes and timeouts.
        metrics: Metrics of the server.
    """

    app: ASGIApp
    host_names: frozenset[str] | None
    root_path: str
    auth: TokenAuth | None
    rate_limiter: RateLimiter | None
    limits: ServerLimits
    metrics: ServerMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0
        # Every check and every route sees the path without the prefix, which some proxies remove
        # and others keep.
        if self.root_path and f"{scope['path']}/".startswith(f"{self.root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self.root_path)}

        async def send_checked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            # asyncio.wait_for would start a task for each message.
            async with asyncio.timeout(self.limits.send_timeout_s):
                await send(message)

        received = asyncio.Event()
        if scope["method"] in _SAFE_METHODS:
            received.set()
        try:
            rejection = self._rejection(scope)
            await _run_while_connected(
                (rejection[0] if rejection else self.app)(
                    scope, self._limited_receive(receive, received), send_checked
                ),
                receive,
                received,
            )
            if rejection:
                self.metrics.rejected.labels(rejection[1]).inc()
        except TimeoutError:
            self.metrics.rejected.labels("send_timeout").inc()
        except Exception as error:  # noqa: BLE001 - an unexpected error must not stop the server
            logging.getLogger(__name__).warning(
                "%s %s: %s: %s", scope["method"], scope["path"], type(error).__name__, error
            )
            if not status:
                message = "An internal error occurred. See the log of the server."
                await error_response(500, message, path=scope["path"])(scope, receive, send_checked)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in (*_SAFE_METHODS, "POST") else "other"
            self.metrics.requests.labels(route, method, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started)

    def _rejection(self, scope: Scope) -> tuple[Response, str] | None:
        """The response to a request that is rejected, and the reason for the metrics."""
        headers = Headers(scope=scope)
        path = scope["path"]
        method = scope["method"]
        respond = partial(error_response, path=path)
        if self.host_names is not None:
            # Protection against DNS rebinding, in which a foreign name resolves to the loopback
            # address, so that a foreign page can read the responses. TrustedHostMiddleware of
            # Starlette accepts neither every loopback address nor a literal [::1].
            name = host_name(headers.get("host", ""))
            if not is_loopback(name) and (not name or name not in self.host_names):
                return respond(
                    403,
                    "Host: expected this machine, got another host. Open the address that visavis "
                    "serve printed, or start visavis serve with "
                    "--host-name NAME for a name of your own.",
                ), "host"
        if method not in _SAFE_METHODS and is_cross_origin(headers):
            return respond(
                403,
                "Origin: expected this server, got another site. Use the web UI of this server.",
            ), "origin"
        if self.rate_limiter is not None:
            cost = request_cost(method, path)
            if wait_s := self.rate_limiter.spend(client_name(scope), cost):
                error = self.rate_limiter.error(wait_s)
                return respond(error.status_code, error.detail, error.headers), "rate"
        if (
            not path
        ):  # the prefix without the slash, from which relative URLs would leave the prefix
            return RedirectResponse(f"{self.root_path}/", 307), "path"
        if (
            self.auth is not None
            and path not in PUBLIC_PATHS
            and not self.auth.is_authorized(headers)
        ):
            if path == "/" and method == "GET":
                query = scope["query_string"].decode("latin-1")
                # Relative, because only the browser knows the path below which a proxy serves this
                # page.
                return RedirectResponse(
                    f"login?{quote(query, safe='=&%+-._~')}" if query else "login", 303
                ), "token"
            return respond(
                401,
                "An access token is required. Send it as 'Authorization: Bearer TOKEN', or open "
                "/login.",
            ), "token"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.max_body_bytes:
            return respond(413, self._too_large()), "size"
        return None

    def _limited_receive(self, receive: Receive, received: asyncio.Event) -> Receive:
        """``receive`` with a limit on the size of the body and on the time until it is complete.
        The event is set then.
        """
        deadline = time.monotonic() + self.limits.body_timeout_s
        num_bytes = 0

        async def receive_checked() -> Message:
            nonlocal num_bytes
            if received.is_set():
                return await receive()
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"The request was not complete within {self.limits.body_timeout_s:.0f} s. Send "
                    "it again.",
                ) from None
            # Counted, because a chunked request has no Content-Length.
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.limits.max_body_bytes:
                raise HTTPException(413, self._too_large())
            if not message.get("more_body", False):
                received.set()
            return message

        return receive_checked

    def _too_large(self) -> str:
        return f"The request is larger than {self.limits.max_body_bytes / 2**20:.0f} MB. Send a smaller image."


async def _run_while_connected(
    work: Awaitable[None], receive: Receive, received: asyncio.Event
) -> None:
    """Answer a request, and stop when its client disconnects after the body was received."""

    async def wait_for_disconnect() -> None:
        await received.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
