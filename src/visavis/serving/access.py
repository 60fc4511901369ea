"""Who may come in: by the Host header, by where a request comes from, by a token, and by how much was asked already."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from visavis.errors import VisavisError
from visavis.serving.limits import Rates

COOKIE = "visavis"
MIN_TOKEN = 12
_CLIENTS = 10_000


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("localhost")
    (True, True, False, True)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(header: str) -> str:
    """The name in a Host header, without its port; empty where it cannot be read.

    >>> host_of("LocalHost:8000"), host_of("[::1]:80"), host_of("a b")
    ('localhost', '::1', '')
    """
    if not header or any(letter in header for letter in "/\\@ \t?#"):
        return ""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def allowed_host(header: str, bound_to: str) -> bool:
    """Whether a request to a service on loopback names it as such: a name of elsewhere that leads here is DNS rebinding."""
    name = host_of(header)
    return is_loopback(name) or (name != "" and name == bound_to.lower())


def from_elsewhere(headers: Headers) -> bool:
    """Whether a page of another origin sends a request, which it may not read but which would change something here."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit_netloc(origin) != headers.get("host", "").lower()


def urlsplit_netloc(origin: str) -> str:
    """The host and port of an origin; empty for "null" and for what cannot be read."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def check_token(token: str) -> str:
    """A token that may be used. Raises VisavisError for one that is short, or that no header can carry."""
    if len(token) < MIN_TOKEN:
        raise VisavisError(f"the token has {len(token)} characters, expected at least {MIN_TOKEN}: openssl rand -hex 16 makes one.")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise VisavisError("the token holds spaces or letters that no header can carry: take letters, digits and dashes.")
    return token


class Gate:
    """Knows a token, in a header or as a cookie; every comparison takes the same time."""

    def __init__(self, token: str):
        self._token = _digest(token.encode())
        self.cookie = hmac.digest(token.encode(), b"visavis serve", "sha256").hex()

    def admits(self, headers: Headers) -> bool:
        """Whether a request carries the token."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.knows(given.strip()):
            return True
        return hmac.compare_digest(_digest(_cookie(headers)), _digest(self.cookie.encode()))

    def knows(self, token: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(_digest(token.encode("utf-8", "surrogatepass")), self._token)


def _cookie(headers: Headers) -> bytes:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return b""
    return b"" if morsel is None else morsel.value.encode("utf-8", "surrogatepass")


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


class Allowances:
    """What each client may still ask for: a bucket that fills with time, the least recently seen forgotten beyond ten thousand clients."""

    def __init__(self, rates: Rates):
        self.rates = rates
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, cost: float, now: float | None = None) -> float:
        """0 where the cost was taken off, else the seconds until it can be."""
        now, client = time.monotonic() if now is None else now, _network(client)
        left, at = self._left.pop(client, (self.rates.at_once, now))
        left = min(self.rates.at_once, left + (now - at) * self.rates.per_s)
        enough = left >= cost
        self._left[client] = (left - cost if enough else left, now)
        while len(self._left) > _CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if enough else (cost - left) / self.rates.per_s


def _network(client: str) -> str:
    """Who counts as one client: an address, of IPv6 the network of 64 bits that one household has."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else client
