"""Requests of the HTTP API, and messages of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests import photos
from tests.inputs.cases import Case, Kind, Refused
from tests.inputs.state_inputs import make_run
from tests.mutation import changed, damaged

import visavis
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.mcp_server import OpenedIndexes, _StdinLines, create_server
from visavis.retrieval.server.search_service import ServedIndex

TEXTS = [
    *("a red circle", "", " ", "é 東京 🌸", "-red", '-"a b" c', "\u202e", "\x00", "a\nb", "\ud800"),
    *("x" * 501, "x" * 5000, "<script>", "' OR 1=1 --", "%", "*", "[", "\\", "../..", "null"),
]
NUMBERS = [
    "0",
    "-1",
    "1",
    "40",
    "1001",
    "9" * 30,
    "1.5",
    "nan",
    "",
    "٣",
    "0x10",
    "1e3",
    "true",
    " 1",
]
DATES = [
    "2024-05-31",
    "0001-01-01",
    "9999-12-31",
    "2024-13-01",
    "yesterday",
    "",
    "1e9",
    "-1",
    "2024",
]
KEYS = ["000001.png", "../run/run.toml", "/etc/passwd", "", "\x00", "x" * 5000, "é", "\ud800"]
HEADERS: list[tuple[bytes, bytes]] = [
    (b"host", b"evil.example"),
    (b"host", b"\xff\xfe"),
    (b"host", b"localhost:99999999"),
    (b"origin", b"http://evil.example"),
    (b"origin", b"null"),
    (b"origin", b"\xff"),
    (b"content-length", b"-1"),
    (b"content-length", b"99999999999999999999"),
    (b"content-length", b"abc"),
    (b"content-type", b"text/plain"),
    (b"content-type", b"application/json; charset=utf-16"),
    (b"content-type", b"multipart/form-data; boundary="),
    (b"content-type", b"\xff"),
    (b"range", b"bytes=0-"),
    (b"range", b"bytes=9-1,,-"),
    (b"range", b"bytes=" + b"0-1," * 5000),
    (b"range", b"bytes=99999999999999999999-"),
    (b"if-none-match", b'"\xff"'),
    (b"if-range", b"Thu, 99 Xxx 9999"),
    (b"cookie", b"visavis=\xff; =; ;;;"),
    (b"authorization", b"Bearer \xff"),
    (b"accept-encoding", b"gzip, br, \xff"),
    (b"x-forwarded-for", b"1.2.3.4, \xff"),
    (b"transfer-encoding", b"chunked"),
    (b"expect", b"100-continue"),
]
IMAGE = photos.encode(photos.scene(0, (24, 16)), "PNG")
DATA_URL = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
SEARCH: dict[str, list[str]] = {
    "text": TEXTS,
    "like": KEYS,
    "image": ["", "0" * 64, "0" * 63, "é", "Z" * 64],
    "path": TEXTS,
    "kind": ["", "image", "video", "x", "\x00"],
    "since": DATES,
    "until": DATES,
    "tag": ["a=b", "=", "a", "x=\x00", "a=" + "b" * 600],
    "offset": NUMBERS,
    "limit": NUMBERS,
    "other": ["1"],
}
ITEM = {"key": KEYS, "index": NUMBERS, "content_version": ["", "x", "x" * 100]}
GETS: dict[str, tuple[dict[str, str], dict[str, list[str]]]] = {
    "/api/search": ({"text": "a red circle", "limit": "3"}, SEARCH),
    "/api/thumbnail": ({"key": "000001.png"}, ITEM),
    "/api/image": ({"key": "000001.png"}, ITEM),
    "/api/video": ({"key": "000001.png"}, ITEM),
    "/api/info": ({}, {"x": TEXTS}),
    "/api/facets": ({}, {"index": NUMBERS}),
    "/api/uncertain": ({"count": "2"}, {"count": NUMBERS}),
    "/v1/models": ({}, {"x": TEXTS}),
    "/health": ({}, {"x": TEXTS}),
    "/metrics": ({}, {"x": TEXTS}),
    "/": ({}, {"x": TEXTS}),
    "/docs": ({}, {"x": TEXTS}),
    "/openapi.json": ({}, {"x": TEXTS}),
}
POSTS: dict[str, Any] = {
    "/api/votes": {
        "query": {"text": "a red circle"},
        "index": 0,
        "key": "000001.png",
        "relevant": True,
    },
    "/api/votes/undo": {"vote": "unknown"},
    "/api/preferences": {"query": {"text": "a"}, "preferred": "left"},
    "/v1/embeddings": {"input": ["a red circle", {"image": DATA_URL}], "encoding_format": "float"},
    "/v1/rerank": {
        "query": "a red circle",
        "documents": [
            "a blue square",
            {"content": [{"type": "image_url", "image_url": {"url": DATA_URL}}]},
        ],
        "top_n": 1,
        "return_documents": True,
    },
}
RIGHT_POSTS = ("/api/votes", "/v1/embeddings", "/v1/rerank")
WRONG_VALUES: dict[str, list[Any]] = {
    "/api/votes": [
        {"key": "unknown.png"}, {"index": 2}, {"index": -1}, {"query": {}}, {"query": {"text": "\x00"}},
        {"relevant": "maybe"}, {"other": 1}, {"key": None}, {"query": {"text": "a", "x": 1}},
    ],
    "/v1/embeddings": [
        {"input": []}, {"input": [1, 2]}, {"input": ""}, {"input": None}, {"model": "other"},
        {"dimensions": 0}, {"dimensions": 10**9}, {"encoding_format": "hex"}, {"messages": "a"},
        {"input": {"image": "http://example.org/a.png"}}, {"input": {"image": "!"}},
        {"input": [{"image": DATA_URL[:-100]}]}, {"input": "a" * 40_000}, {"modality": "sound"},
    ],
    "/v1/rerank": [
        {"query": None}, {"documents": []}, {"documents": None}, {"top_n": -1}, {"query": ""},
        {"documents": [{"text": 3}]}, {"model": ""}, {"query": {"content": []}},
    ],
}  # fmt: skip


class Server:
    """The ASGI application, called without a socket, so that a request may have any bytes."""

    def __init__(self, index: Path, *, saves_votes: bool = False):
        self.loop = asyncio.new_event_loop()
        self.index = ServedIndex(open_index(index))
        self.app = create_app([self.index], saves_votes=saves_votes)

    def close(self) -> None:
        """Close the index and the event loop."""
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.index.index.close()

    @classmethod
    def prepare(cls, folder: Path) -> Server:
        """Serve a new index."""
        scenes, run = make_run(folder)
        visavis.index(run, scenes / "images", out=folder / "index")
        return cls(folder / "index", saves_votes=True)

    def request(
        self,
        method: str,
        path: bytes,
        query: bytes = b"",
        body: bytes = b"",
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and body of the response."""
        names = {name for name, _ in headers or []}
        defaults = [(b"host", b"localhost"), (b"content-length", b"%d" % len(body))]
        if body:
            defaults.append((b"content-type", b"application/json"))
        sent = [pair for pair in defaults if pair[0] not in names] + (headers or [])
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path.decode("utf-8", "replace"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "scheme": "http",
            "headers": sent,
            "client": ("127.0.0.1", 1234),
            "server": ("127.0.0.1", 80),
        }
        return self.loop.run_until_complete(asyncio.wait_for(self._call(scope, body), 15))

    async def _call(
        self, scope: dict[str, Any], body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        parts = [body[:10], body[10:]] if len(body) > 10 else [body]
        answers: list[dict[str, Any]] = []
        done = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            answers.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                done.set()

        await self.app(scope, receive, send)  # type: ignore[arg-type]
        started = answers[0]
        content = b"".join(each.get("body", b"") for each in answers[1:])
        return started["status"], dict(started["headers"]), content


def no_constant(name: str) -> Any:
    """NaN and infinity are not JSON."""
    raise AssertionError(f"the response has {name}, which is not JSON")


def answer(server: Server, arguments: tuple[Any, ...]) -> Any:
    """The content of a response. A refusal is one sentence of an error below 500."""
    status, headers, content = server.request(*arguments)
    kind = headers.get(b"content-type", b"")
    value = content
    if kind.startswith(b"application/json"):
        value = json.loads(content.decode(), parse_constant=no_constant)
    if status < 400:
        return value
    assert status < 500, f"status {status}: {content[:500]!r}"
    if status == 416:
        raise Refused("The file has no such range.")
    if kind.startswith(b"text/html"):
        raise Refused("The token is not correct.")
    assert isinstance(value, dict), f"status {status} without a JSON object: {content[:200]!r}"
    error: Any = value["error"]
    raise Refused(error if isinstance(error, str) else error["message"])


def encode_query(parameters: dict[str, str]) -> bytes:
    """A query string."""
    return urlencode(parameters, errors="surrogatepass").encode()


@dataclass
class Request:
    """A request, and what is known of it."""

    method: str
    path: bytes
    note: str
    known: Any = "unknown"
    query: bytes = b""
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of ``Server.request``."""
        return (self.method, self.path, self.query, self.body, self.headers)


def get_request(rng: random.Random) -> Request:
    """A request without a body, with odd parameters."""
    path = rng.choice(list(GETS))
    valid, odd = GETS[path]
    parameters = dict(valid)
    request = Request("GET", path.encode(), path)
    way = rng.random()
    if way < 0.2:
        request.known = "wrong" if path == "/api/video" else "right"
    elif way < 0.8:
        for name in rng.sample(list(odd), min(len(odd), rng.choice([1, 1, 2, 4]))):
            parameters[name] = rng.choice(odd[name])
    request.query = encode_query(parameters)
    if way >= 0.8:
        query = damaged(request.query or b"a=b", rng)
        request.query = query.replace(b" ", b"+").replace(b"\n", b"")
    if rng.random() < 0.1:
        request.known = "unknown"
        others = [b"/v1/models/" + damaged(b"run", rng), b"/api/../health", b"/%00"]
        request.path = rng.choice([damaged(request.path, rng), request.path + b"/", *others])
        methods = ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "TRACE", "x" * 50]
        request.method = rng.choice(methods)
    return request


def image_request(rng: random.Random) -> Request:
    """An image that is searched."""
    request = Request("POST", b"/api/search", "/api/search", query=encode_query({"limit": "2"}))
    content_types = [b"image/png", b"image/jpeg", b"application/octet-stream"]
    request.headers.append((b"content-type", rng.choice(content_types)))
    kind = rng.choice(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
    request.body = photos.encode(photos.scene(rng.getrandbits(4), (16, 16)), kind)
    way = rng.random()
    if way < 0.3:
        request.known = "right"
    elif way < 0.4:
        request.known = "wrong"
        wrong = [b"", b"{}", b"\xff\xd8\xff", bytes(1000), b"\x89PNG\r\n\x1a\n"]
        request.body = rng.choice(wrong)
    else:
        request.body = damaged(request.body, rng)
    return request


def json_request(rng: random.Random) -> Request:
    """A request with JSON."""
    path = rng.choice(list(POSTS))
    request = Request("POST", path.encode(), path)
    content = copy.deepcopy(POSTS[path])
    way = rng.random()
    if way < 0.2 and path in RIGHT_POSTS:
        request.known = "right"
    elif way < 0.45 and path in WRONG_VALUES:
        request.known = "wrong"
        wrong = rng.choice(WRONG_VALUES[path])
        content.update(wrong)
        request.note = f"{path} {next(iter(wrong))}"
    elif way < 0.75:
        content = changed({"": content}, rng).get("")
    request.body = json.dumps(content, default=str).encode()
    if way >= 0.75:
        request.body = damaged(request.body, rng)
    return request


def make_request(rng: random.Random, folder: Path, server: Server) -> Case:
    """A request to any route."""
    request = rng.choice([get_request, get_request, image_request, json_request, json_request])(rng)
    if request.known == "unknown" and rng.random() < 0.15:
        request.headers += rng.sample(HEADERS, rng.choice([1, 1, 2]))
    (folder / "request.txt").write_text("\n".join(map(repr, request.arguments)))
    checks: dict[bool, Callable[[Any], str]] = {
        True: lambda _: "a wrong request was answered",
        False: lambda _: "",
    }
    return Case(
        partial(answer, server, request.arguments),
        request.known,
        checks[request.known == "wrong"],
        f"{request.method} {request.note}",
    )


class Output:
    """Stdout of the server."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.changed = asyncio.Event()

    async def write(self, text: str) -> None:
        """Keep a message."""
        self.messages.append(json.loads(text, parse_constant=no_constant))
        self.changed.set()

    async def flush(self) -> None:
        """Nothing is buffered."""


class Lines(_StdinLines):
    """Lines of a client, which closes stdin when it has all answers, or after some seconds."""

    def __init__(self, lines: list[bytes], output: Output, numbers: set[Any]):
        self.answers = asyncio.Future[Any]()
        self._lines = asyncio.Queue[bytes | None]()
        for line in lines:
            self._lines.put_nowait(line)
        self._waiting = asyncio.create_task(self._close(output, numbers))

    async def _close(self, output: Output, numbers: set[Any]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not numbers <= {str(message.get("id")) for message in output.messages}:
                    output.changed.clear()
                    await output.changed.wait()
        self._lines.put_nowait(None)


ANSWER_S = 8.0


def prepare_mcp(folder: Path) -> OpenedIndexes:
    """An opened index that saves votes."""
    scenes, run = make_run(folder)
    visavis.index(run, scenes / "images", out=folder / "index")
    opened = OpenedIndexes({"index": folder / "index"}, saves_votes=True)
    opened["index"]
    return opened


def session(opened: OpenedIndexes, lines: list[bytes], numbers: set[Any]) -> list[Any]:
    """The messages that a server sends for the lines of a client."""
    import anyio
    from mcp.server.stdio import stdio_server

    async def serve() -> list[Any]:
        output: Any = Output()
        server = create_server(opened)
        source: Any = Lines(lines, output, numbers)
        async with stdio_server(stdin=source, stdout=output) as (messages, sent):
            source.answers.set_result(sent)
            await server.run(messages, sent, server.create_initialization_options())
        return list(output.messages)

    return anyio.run(serve)


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": "first",
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
CALLS: dict[str, dict[str, Any]] = {
    "search": {"query": "a red circle", "limit": 3},
    "similar": {"item": "000001.png", "limit": 2},
    "details": {"item": "000001.png", "thumbnail": True},
    "vote": {"query": "a red circle", "item": "000001.png", "relevant": False},
}
WRONG_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("search", {}), ("search", {"query": 3}), ("search", {"query": "a", "limit": 0}),
    ("search", {"query": "a", "x": 1}), ("search", {"query": "a", "after": "yesterday"}),
    ("search", {"query": "a", "kind": "sound"}), ("search", {"query": "a" * 501}),
    ("similar", {"item": "unknown.png"}), ("similar", {"item": "/etc/passwd"}), ("details", {}),
    ("details", {"item": ""}), ("vote", {"query": " ", "item": "000001.png", "relevant": True}),
    ("vote", {"query": "a", "item": "000001.png"}), ("unknown", {}), ("search", {"query": None}),
]  # fmt: skip


def exchange(opened: OpenedIndexes, line: bytes, number: Any) -> Any:
    """The answer to a line, in a session that must continue after it."""
    lines = [
        json.dumps(INITIALIZE).encode(),
        b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
    ]
    ping = b'{"jsonrpc":"2.0","id":"last","method":"ping"}'
    numbers = {"first", "last"} | ({str(number)} if number is not None else set())
    sent = session(opened, [each + b"\n" for each in (*lines, line, ping)], numbers)
    by_id = {
        message.get("id"): message for message in sent if not isinstance(message.get("id"), list)
    }
    assert "result" in by_id.get("first", {}), "no answer to initialize"
    assert "last" in by_id, "no answer after the line"
    others = [message for message in sent if message.get("id") not in ("first", "last")]
    if number is not None:
        assert any(message.get("id") == number for message in others), f"no answer to {number!r}"
    for message in others:
        if "error" in message:
            raise Refused(message["error"]["message"])
        if message.get("result", {}).get("isError"):
            text = message["result"]["content"][0]["text"]
            assert "internal error" not in text, f"{text} {line[:300]!r}"
            raise Refused(text)
    return others


def make_message(rng: random.Random, folder: Path, opened: OpenedIndexes) -> Case:
    """A line of a client."""
    way = rng.random()
    known: Any = "unknown"
    number: Any = rng.choice([7, "a", 0])
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": number, "method": "tools/call"}
    name = note = rng.choice(list(CALLS))
    message["params"] = {"name": name, "arguments": dict(CALLS[name])}
    check: Callable[[Any], str] = lambda _: ""  # noqa: E731
    if way < 0.15:
        known = "right"
    elif way < 0.3:
        known = "wrong"
        name, arguments = rng.choice(WRONG_CALLS)
        message["params"] = {"name": name, "arguments": arguments}
        note = f"{name} {arguments}"[:60]
        check = lambda _: "a wrong call was answered"  # noqa: E731
    elif way < 0.6:
        message["params"]["arguments"] = changed({"": message["params"]["arguments"]}, rng).get("")
        note = f"{name} with a changed argument"
    elif way < 0.8:
        message = changed(message, rng)
        number, note = None, "changed message"
    else:
        note = "damaged line"
    line = json.dumps(message, default=str).encode()
    if way >= 0.8:
        number = None
        line = damaged(line, rng).replace(b"\n", b" ")
    (folder / "line.txt").write_bytes(line)
    return Case(partial(exchange, opened, line, number), known, check, note)


KINDS = [
    Kind("HTTP requests", make_request, Server.prepare, 2000),
    Kind("MCP messages", make_message, prepare_mcp, 750),
]
