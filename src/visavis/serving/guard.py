"""The door: every request passes it before anything else sees it, and every answer on its way out."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from visavis.serving.access import Allowances, Gate, allowed_host, from_elsewhere
from visavis.serving.figures import Figures
from visavis.serving.limits import Limits, Rates, cost_of
from visavis.serving.refusals import refusal

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), interest-cohort=()",
}
OPEN = frozenset({"/health", "/login", "/style.css", "/icon.svg", "/theme.js"})
"""What is shown without a token: that the service lives, and the page that asks for the token."""
_SAFE = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Checks host, origin, token, rate and size of a request; adds the headers of an answer; counts.

    bound_to: the address of a service on loopback, whose Host header is checked; None elsewhere. gate: knows the token; None: nobody needs one.
    rates: None: no limit.
    """

    def __init__(self, app: ASGIApp, *, bound_to: str | None, gate: Gate | None, rates: Rates | None, limits: Limits, figures: Figures):
        self.app, self.bound_to, self.gate, self.limits, self.figures = app, bound_to, gate, limits, figures
        self.allowances = None if rates is None else Allowances(rates)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _dress(message)
            await asyncio.wait_for(send(message), self.limits.send_s)

        try:
            refused = self._refused(scope)
            await (refused[0] if refused else self.app)(scope, self._patient(scope, receive), sent)
            if refused:
                self.figures.refused.labels(refused[1]).inc()
        except TimeoutError:
            self.figures.refused.labels("slow reader").inc()
        except Exception as error:  # noqa: BLE001 - the last door: what nobody foresaw is one line of the log, and the service goes on
            logging.getLogger("visavis").warning("%s %s: %s: %s", scope["method"], scope["path"], type(error).__name__, error)
            if not status:
                await refusal(500, "something went wrong here that is no fault of the request; the log of the service says what.")(
                    scope, receive, sent
                )
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.figures.requests.labels(route, scope["method"] if scope["method"] in (*_SAFE, "POST") else "other", str(status)).inc()
            self.figures.seconds.labels(route).observe(time.perf_counter() - started)

    def _refused(self, scope: Scope) -> tuple[Response, str] | None:
        """The answer to a request that may not come in, and why in a word."""
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        if self.bound_to is not None and not allowed_host(headers.get("host", ""), self.bound_to):
            return refusal(403, "the request names another host than this machine: open the address that the service printed."), "host"
        if method not in _SAFE and from_elsewhere(headers):
            return refusal(403, "the request comes from a page of another site: open the page of this service."), "origin"
        if self.allowances is not None:
            client = scope["client"][0] if scope.get("client") else "unknown"
            if wait := self.allowances.take(client, cost_of(method, path)):
                seconds = max(1, math.ceil(wait))
                return refusal(429, f"too many requests: try again in {seconds} s.", retry_after=seconds), "rate"
        if self.gate is not None and path not in OPEN and not self.gate.admits(headers):
            if path == "/" and method == "GET":
                asked = scope["query_string"].decode("latin-1")
                return RedirectResponse(f"/login?{quote(asked, safe='=&%+-._~')}" if asked else "/login", 303), "token"
            return refusal(401, "a token is needed: send it as 'Authorization: Bearer TOKEN', or open /login."), "token"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.body_bytes:
            return refusal(413, _too_large(self.limits)), "size"
        return None

    def _patient(self, scope: Scope, receive: Receive) -> Receive:
        """``receive`` for bodies of a limited size that come within a limited time."""
        until, taken, whole = time.monotonic() + self.limits.body_s, 0, False

        async def received() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()
            try:
                message: MutableMapping[str, Any] = await asyncio.wait_for(receive(), max(until - time.monotonic(), 0.001))
            except TimeoutError:
                raise HTTPException(408, f"the request did not come within {self.limits.body_s:.0f} s.") from None
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > self.limits.body_bytes:
                raise HTTPException(413, _too_large(self.limits))
            return message

        return received


def _dress(message: Message) -> None:
    """The headers that every answer has."""
    headers = MutableHeaders(scope=message)
    for name, value in HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-store")


def _too_large(limits: Limits) -> str:
    return f"the request is larger than {limits.body_bytes / 2**20:.0f} MB: send a smaller picture."
