"""Run the server: socket, uvicorn with timeouts for headers and bodies, and a clean shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from visavis.core.errors import VisavisError, requires_extra
from visavis.core.progress import Progress
from visavis.retrieval.run_data import OpenRunData, no_run_data

if TYPE_CHECKING:
    from visavis.retrieval.server.limits import ServerLimits


def run_service(
    indexes: Sequence[str | Path],
    *,
    host: str,
    port: int,
    token: str | None,
    root_path: str = "",
    host_names: Sequence[str] = (),
    votes: bool = False,
    store: str | Path | Sequence[str | Path] = (),
    open_browser: bool,
    max_irrelevant: float | None = None,
    model: str | Path | None = None,
    open_data: OpenRunData = no_run_data,
    progress: Progress,
) -> None:
    """Serve one or two indexes until the process is interrupted."""
    with requires_extra("serve", "visavis serve"):
        import fastapi  # noqa: F401 - only checks that it is installed
        import prometheus_client  # noqa: F401
        import uvicorn
    from visavis.retrieval.calibrate.calibration import check_level
    from visavis.retrieval.index_folder import check_confirmed_stores, is_index
    from visavis.retrieval.items import index_names
    from visavis.retrieval.open_index import open_index
    from visavis.retrieval.server.application import DEFAULT_LEVEL, create_app
    from visavis.retrieval.server.limits import RateLimits, ServerLimits
    from visavis.retrieval.server.search_service import ServedIndex
    from visavis.retrieval.server.security import (
        is_loopback,
        validate_host_name,
        validate_root_path,
        validate_token,
    )
    from visavis.retrieval.server.vote_store import check_votes_writable

    if len(indexes) not in (1, 2):
        raise VisavisError(
            f"index: expected one index, or two to compare, got {len(indexes)}. Pass one or two."
        )
    if max_irrelevant is not None:
        check_level(max_irrelevant)
    root_path = validate_root_path(root_path)
    host_names = [validate_host_name(name) for name in host_names]
    with ExitStack() as stack:
        listener = stack.enter_context(listening_socket(host, port))
        loopback = is_loopback(listener.getsockname()[0])
        if token is not None:
            validate_token(token)
        elif not loopback:
            raise VisavisError(
                f"{host}: expected a token, because other machines can reach this address. Pass "
                "--token, or omit --host."
            )
        if not all(map(is_index, indexes)):
            # Only here, because it imports torch.
            from visavis.retrieval.build.default_index import index_if_images

            indexes = [
                index_if_images(path, model, progress, open_data=open_data) for path in indexes
            ]
        named = index_names([Path(path) for path in indexes])
        stores = [store] if isinstance(store, str | Path) else list(store)
        served = [
            ServedIndex(
                open_index(path, store=stores),
                name,
                needs_probabilities=max_irrelevant is not None,
                stores=stores,
            )
            for name, path in named.items()
        ]
        check_confirmed_stores(list(named.values()), stores)
        if votes:
            for path in named.values():
                check_votes_writable(path)
        for index in served:
            index.warm_up()
        limits = ServerLimits()
        rates = None if loopback and not host_names else RateLimits()
        app = create_app(
            served,
            saves_votes=votes,
            bound_to=host if loopback else None,
            host_names=host_names,
            root_path=root_path,
            token=token,
            limits=limits,
            rates=rates,
            max_irrelevant=DEFAULT_LEVEL if max_irrelevant is None else max_irrelevant,
        )
        # SecurityMiddleware logs errors in one line.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(
            host, f"[{host}]" if ":" in host else host
        )
        url = f"http://{shown}:{listener.getsockname()[1]}"
        items = " and ".join(f"{index.count:,} items of {index.name}" for index in served)
        with suppress(KeyboardInterrupt):
            # The socket already listens. Requests that come before uvicorn is ready wait.
            progress.message(f"Serving {items} at {url} (press Ctrl-C to stop)")
            if open_browser:
                webbrowser.open(url if token is None else f"{url}/login?token={quote(token)}")
            uvicorn.Server(server_config(app, limits, behind_proxy=bool(host_names))).run(
                sockets=[listener]
            )
        progress.message("Stopped.")


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket at an address of this machine. Port 0: any free port."""
    if not 0 <= port <= 65535:
        raise VisavisError(f"port: expected 0 to 65535, got {port}. Pass 0 for any free port.")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise VisavisError(
            f"host: expected an address of this machine, got {host!r}. Use 127.0.0.1, or 0.0.0.0 "
            "for all of its addresses."
        ) from None
    dual_stack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=dual_stack)
    except OSError as error:
        system_message = os.strerror(error.errno or 0)
        problems = {
            errno.EADDRINUSE: f"{host}: port {port} is in use. Stop the program that uses it, or "
            "pass another port with --port.",
            errno.EACCES: f"{host}: port {port} is not permitted for this user. Pass a port above "
            "1023 with --port.",
        }
        other = (
            f"{host}:{port}: cannot listen: {system_message}. Use 127.0.0.1, or an address of this "
            "machine."
        )
        raise VisavisError(problems.get(error.errno or 0, other)) from None


def server_config(app: Any, limits: ServerLimits, *, behind_proxy: bool = False) -> Any:
    """Configure uvicorn. Behind a proxy on this machine, client and scheme are read from its headers
    X-Forwarded-For and X-Forwarded-Proto.
    """
    import uvicorn

    return uvicorn.Config(
        app,
        http=_request_timeout_protocol(limits),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=behind_proxy,
        forwarded_allow_ips=["127.0.0.1", "::1"],
        server_header=False,
        limit_concurrency=limits.max_connections,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
    )


def _request_timeout_protocol(limits: ServerLimits) -> type[Any]:
    """A uvicorn protocol that disconnects clients that do not send complete headers, or a complete
    body, in time.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    # SecurityMiddleware answers a slow body that a route reads. This ends the connection, also if
    # nothing reads the body.
    timeouts = {h11.IDLE: limits.header_timeout_s, h11.SEND_BODY: limits.body_timeout_s + 1}

    class RequestTimeoutProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._state: Any = None
            self._timer: asyncio.TimerHandle | None = None
            self._limit_state()

        def handle_events(self) -> None:
            super().handle_events()
            self._limit_state()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def _limit_state(self) -> None:
            """Start the timer of a new state. Further data of the same part of a request do not
            extend it.
            """
            if self.conn.their_state is not self._state:
                if self._timer is not None:
                    self._timer.cancel()
                self._state = self.conn.their_state
                self._timer = None
                if (timeout_s := timeouts.get(self._state)) is not None:
                    self._timer = self.loop.call_later(timeout_s, self.transport.close)

    return RequestTimeoutProtocol
