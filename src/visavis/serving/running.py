"""Runs the service: a socket of its own, a server that slow clients cannot hold up, and an end without noise."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from visavis.data.judgements import open_judgements
from visavis.errors import MissingExtra, VisavisError
from visavis.progress import Progress
from visavis.serving.limits import Limits, Rates


def run_service(
    indexes: Sequence[str | Path],
    *,
    host: str,
    port: int,
    token: str | None,
    judgements: str | Path | None,
    open_page: bool,
    progress: Progress,
    started: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve one index or two until the process is told to end. started: is told the address once it answers.

    Raises VisavisError for a port that is taken, a token that is missing or weak, and what ``Index.open`` and ``open_judgements`` refuse.
    """
    try:
        import fastapi  # noqa: F401 - whether it is there
        import prometheus_client  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise MissingExtra(error.name or "fastapi", "serve", "visavis serve") from None
    from visavis.retrieval.index import Index
    from visavis.serving.access import check_token, is_loopback
    from visavis.serving.application import make_app
    from visavis.serving.collection import Collection

    if len(indexes) not in (1, 2):
        raise VisavisError(f"{len(indexes)} indexes are named, expected one, or two to compare.")
    with ExitStack() as held:
        listening = held.enter_context(listen(host, port))
        loopback = is_loopback(listening.getsockname()[0])
        if token is not None:
            check_token(token)
        elif not loopback:
            raise VisavisError(f"the service would be open to everyone who reaches {host}: give a --token, or leave out --host.")
        collections = [Collection(Index.open(path), name) for path, name in zip(indexes, _names(indexes), strict=True)]
        file = None if judgements is None else held.enter_context(open_judgements(judgements))
        for collection in collections:
            collection.warm_up()
        limits, rates = Limits(), None if loopback else Rates()
        app = make_app(collections, file, bound_to=host if loopback else None, token=token, limits=limits, rates=rates)
        config = uvicorn.Config(
            app,
            http=patient_protocol(limits.header_s),
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=5,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what goes wrong is said by the door, in one line
        items = " and ".join(f"{len(one.items):,} items of {one.name}" for one in collections)
        url = _url(host, listening)

        def ready() -> None:
            progress.say(f"{items} at {url} (Ctrl-C ends it)")
            started(url)
            if open_page:
                webbrowser.open(url if token is None else f"{url}/login?token={quote(token)}")

        with suppress(KeyboardInterrupt):
            server_of(config, ready).run(sockets=[listening])
        progress.say("stopped.")


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for connections. Raises VisavisError for a port that is taken or may not be used, and for an unknown host."""
    if not 0 <= port <= 65535:
        raise VisavisError(f"port is {port}, expected 0 to 65535; 0 takes any that is free.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise VisavisError(f"{host!r} is no address of this machine: take 127.0.0.1, or 0.0.0.0 for all of its addresses.") from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise VisavisError(f"port {port} of {host} is taken: end the program that uses it, or choose another with --port.") from None
        if error.errno == errno.EACCES:
            raise VisavisError(f"port {port} may not be used by this user: choose one above 1023 with --port.") from None
        raise VisavisError(f"{host}:{port} cannot be used: {error.strerror}; take 127.0.0.1, or an address of this machine.") from None
    return listening


def patient_protocol(header_s: float) -> type[Any]:
    """A protocol of uvicorn that hangs up on a client that has not sent the head of a request after so many seconds."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Patient(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(header_s, self._hang_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_waiting()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(header_s, self._hang_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _hang_up(self) -> None:
            self._deadline = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.close()

    return Patient


def server_of(config: Any, when_ready: Callable[[], None]) -> Any:
    """A server of uvicorn that calls ``when_ready`` once it answers."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                when_ready()

    return Server(config)


def _url(host: str, listening: socket.socket) -> str:
    port = listening.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _names(indexes: Sequence[str | Path]) -> list[str]:
    """What to call indexes: their folders, with the folder above where both are called the same."""
    paths = [Path(path).absolute() for path in indexes]
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else ["/".join(path.parts[-2:]) for path in paths]
