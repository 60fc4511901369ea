"""Local stand-in of the Hugging Face hub: an HTTP server with folders as repositories, and faults
by name of the repository.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"


def retry_at_once() -> None:
    """Let the library of the hub retry downloads in this process without waiting."""
    from huggingface_hub import file_download

    file_download.time = SimpleNamespace(sleep=lambda _: None)


def is_large(name: str) -> bool:
    """Whether a file is stored by its SHA-256."""
    return name.endswith((WEIGHTS, ".parquet", ".tar"))


class Hub(ThreadingHTTPServer):
    """The server. ``faults``: "cut" ends a large file in the middle and then refuses it, "break" ends
    it in the middle once, "wrong" changes a byte of it. ``bytes_per_s`` limits each connection.

    Faults of every request to a repository: an HTTP status, "html" answers with a page, "stall"
    never answers.
    """

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.faults = repositories, dict[str, str | int]()
        self.ended, self.bytes_per_s = threading.Event(), math.inf
        self.downloads, self.was_cut, self.resumed = list[str](), set[str](), list[int]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of commands that use this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "NO_PROXY": "*",
        }


@contextmanager
def serving(repositories: dict[str, Path]) -> Iterator[Hub]:
    """Serve folders by name."""
    with Hub(repositories) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.ended.set()
        hub.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        api = re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(/.*?)?(?:\?.*)?", self.path)
        file = re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+?)(?:\?.*)?", self.path)
        name = (api or file or [None, ""])[1]
        fault = self.server.faults.get(name or "")
        if fault == "stall":
            self.server.ended.wait()
            self.close_connection = True
        elif fault == "html":
            self._send(200, b"<html>Log in to the network</html>", {"Content-Type": "text/html"})
        elif isinstance(fault, int):
            self._send(fault, b"{}")
        elif name not in self.server.repositories:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif api:
            self._send(
                200,
                json.dumps(
                    self._tree(name) if (api[2] or "").startswith("/tree") else self._info(name)
                ).encode(),
            )
        else:
            assert file is not None
            self._send_file(name, file[2])

    def _tree(self, name: str) -> list[dict[str, Any]]:
        def entry(file: Path) -> dict[str, Any]:
            size, sha256 = file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
            lfs = (
                {"lfs": {"oid": sha256, "size": size, "pointerSize": 134}}
                if is_large(file.name)
                else {}
            )
            return {
                "type": "file",
                "path": file.relative_to(folder).as_posix(),
                "size": size,
                "oid": sha256[:40],
                **lfs,
            }

        folder = self.server.repositories[name]
        return [entry(file) for file in sorted(folder.rglob("*")) if file.is_file()]

    def _info(self, name: str) -> dict[str, Any]:
        """Information about a repository, with the license in the first lines of its README.md."""
        readme = self.server.repositories[name] / "README.md"
        found = (
            re.search("^license: (.+)$", readme.read_text(), re.MULTILINE)
            if readme.is_file()
            else None
        )
        return {
            "id": name,
            "sha": COMMIT,
            **(
                {
                    "cardData": {
                        "license": json.loads(found[1]) if found[1].isdecimal() else found[1]
                    }
                }
                if found
                else {}
            ),
        }

    def _send_file(self, repository: str, name: str) -> None:
        content = (self.server.repositories[repository] / name).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        headers = {
            "ETag": f'"{sha256 if is_large(name) else sha256[:40]}"',
            "X-Repo-Commit": COMMIT,
        }
        fault = (
            self.server.faults.get(repository) if self.command == "GET" and is_large(name) else None
        )
        if self.command == "GET":
            self.server.downloads.append(f"{repository}/{name}")
        if fault == "wrong":
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault == "cut":
            self.close_connection = True
            if repository not in self.server.was_cut:
                self.server.was_cut.add(repository)
                self._send(200, content[: len(content) // 2], headers, length=len(content))
            return
        # A request for the rest of a file.
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.server.resumed.append(start)
        length = len(content) - start
        if fault == "break" and repository not in self.server.was_cut:
            self.server.was_cut.add(repository)
            self.close_connection = True
            content = content[: len(content) // 2]
        self._send(206 if start else 200, content[start:], headers, length=length)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Length": str(len(body) if length is None else length),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "GET":
            return
        if math.isinf(self.server.bytes_per_s):
            self.wfile.write(body)
            return
        size = math.ceil(self.server.bytes_per_s / 20)
        with suppress(ConnectionError):  # the client was interrupted
            for position in range(0, len(body), size):
                self.wfile.write(body[position : position + size])
                time.sleep(1 / 20)

    def handle(self) -> None:
        # The client was killed.
        with suppress(ConnectionResetError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Log nothing."""
