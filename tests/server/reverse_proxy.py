"""A reverse proxy that serves another server below a path, with the standard library."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PREFIX = "/photos"


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, target: str, keeps_prefix: bool):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.keeps_prefix, self.outside = urlsplit(target), keeps_prefix, list[str]()


class _Handler(BaseHTTPRequestHandler):
    server: _Proxy

    def do_GET(self) -> None:
        path = self.path if self.server.keeps_prefix else self.path.removeprefix(PREFIX)
        if not self.path.startswith(PREFIX) or not path:
            self.server.outside.append(self.path)
            self.send_error(404, "another application")
            return
        target = http.client.HTTPConnection(
            str(self.server.target.hostname), self.server.target.port, timeout=60
        )
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("connection", "content-length")
        }
        target.request(
            self.command,
            path,
            body or None,
            {**headers, "X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"},
        )
        response = target.getresponse()
        content = response.read()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        target.close()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def behind_proxy(target: str, *, keeps_prefix: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Serve a server below ``PREFIX``.

    Args:
        target: Address of the server.
        keeps_prefix: Whether the server gets the path with the prefix.

    Yields:
        The address, and the requested paths outside the prefix, which belong to other applications.
    """
    with _Proxy(target, keeps_prefix) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://photos.localhost:{proxy.server_port}{PREFIX}/", proxy.outside
        proxy.shutdown()
