"""``visavis mcp`` in a process of its own, called by the official client of the protocol."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.docs import read_blocks

import visavis
from visavis import cli
from visavis.core.errors import VisavisError
from visavis.data.feedback.records import Judgment, QueryKey
from visavis.data.feedback.sources import read_feedback
from visavis.retrieval.items import index_names
from visavis.retrieval.server import mcp_server
from visavis.retrieval.server.mcp_server import (
    Details,
    OpenedIndexes,
    list_tools,
    parse_call,
)

from .conftest import remove_votes

pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'visavis[mcp]'")
from anyio.from_thread import start_blocking_portal
from mcp import ClientSession, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client

PROGRAM = """
import atexit, sys
heavy = ("torch", "pyarrow", "visavis.retrieval.index_folder")
atexit.register(lambda: print("heavy:", *(name for name in heavy if name in sys.modules), file=sys.stderr))
from visavis.cli import main
main()
"""
OPENED = list[OpenedIndexes]()
"""An index, opened once."""
READ_TOOLS = ["search", "similar", "details"]
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


class Session:
    """A session of the official client with a server process."""

    def __init__(self, portal: Any, session: ClientSession):
        self.portal, self.session = portal, session
        self.info = portal.call(session.initialize)

    def tools(self) -> dict[str, Any]:
        return {tool.name: tool for tool in self.portal.call(self.session.list_tools).tools}

    def call(self, name: str, **arguments: Any) -> Any:
        return self.portal.call(partial(self.session.call_tool, name, arguments))

    def content(self, name: str, **arguments: Any) -> Any:
        """The structured content of a call that must succeed."""
        result = self.call(name, **arguments)
        assert not result.is_error, result.content[0].text
        return result.structured_content

    def error(self, name: str, **arguments: Any) -> str:
        """The message of a call that must fail."""
        result = self.call(name, **arguments)
        assert result.is_error
        assert result.structured_content is None
        return result.content[0].text


@contextmanager
def connected(log: Path, *arguments: str | Path) -> Iterator[Session]:
    server = StdioServerParameters(
        command=sys.executable,
        args=["-c", PROGRAM, "mcp", *map(str, arguments)],
        env=dict(os.environ),
    )
    with (
        log.open("w") as errors,
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(stdio_client(server, errors)) as streams,
        portal.wrap_async_context_manager(ClientSession(*streams)) as session,
    ):
        yield Session(portal, session)


@pytest.fixture(scope="module")
def dataset_index(runs, tmp_path_factory):
    """An index of a data set with three captions per image."""
    folder = tmp_path_factory.mktemp("data-set") / "scenes"
    visavis.index(runs[0], runs[0].parent / "scenes", out=folder)
    return folder


@pytest.fixture(scope="module")
def two_indexes(index_folder, dataset_index, tmp_path_factory):
    """A session over two indexes that saves votes."""
    remove_votes(index_folder)
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with connected(log, index_folder, dataset_index, "--votes") as session:
        yield session
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def session(index_folder, tmp_path_factory):
    """A session that may not write."""
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with connected(log, index_folder) as session:
        yield session
    assert "Traceback" not in log.read_text()


def summary(hits):
    return [(hit["key"], pytest.approx(hit["score"], abs=1e-6), hit["path"]) for hit in hits]


def expected(index_folder, query="", **options):
    """The results of ``visavis.search`` in the form of ``summary``, with filters as the tool has
    them.
    """
    names = ("path", "kind", "after", "before")
    conditions = {name: options.pop(name) for name in names if name in options}
    conditions |= options.pop("metadata", {})
    options["filter"] = conditions
    found = visavis.search(index_folder, query, top=options.pop("limit", 10), **options)
    return [(hit["key"], hit["score"], hit["path"]) for hit in found.to_json()["hits"]]


@pytest.mark.slow
def test_handshake_loads_no_index(index_folder, tmp_path):
    with connected(tmp_path / "log.txt", index_folder) as session:
        assert session.info.server_info.name == "visavis"
        assert session.info.server_info.version == visavis.__version__
        assert index_folder.name in session.info.instructions
        assert list(session.tools()) == READ_TOOLS
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[-1] == "heavy:"


@pytest.mark.slow
def test_tools_are_annotated_and_have_schemas(session, two_indexes):
    for tool in session.tools().values():
        assert tool.annotations.read_only_hint
        assert not tool.annotations.open_world_hint
        assert "index" not in tool.input_schema["properties"]
        assert tool.output_schema["type"] == "object"
    tools = two_indexes.tools()
    assert list(tools) == [*READ_TOOLS, "vote"]
    assert not tools["vote"].annotations.read_only_hint
    assert not tools["vote"].annotations.destructive_hint
    for tool in tools.values():
        assert tool.input_schema["properties"]["index"]["enum"] == ["one", "scenes"]
        assert "index" in tool.input_schema["required"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"limit": 3},
        {"path": "trips/*"},
        {"kind": "image", "after": "2020-09-20", "before": "2020-10-05"},
        {"kind": "video"},
    ],
    ids=str,
)
def test_search_equals_the_search_command(session, index_folder, filters):
    result = session.call("search", query="a red circle", **filters)
    found = result.structured_content
    assert summary(found["hits"]) == expected(index_folder, "a red circle", **filters)
    (text,) = result.content
    assert len(text.text.splitlines()) == max(len(found["hits"]), 1)
    assert all(hit["key"] in text.text for hit in found["hits"])
    assert bool(found["message"]) == (not found["hits"])


@pytest.mark.slow
def test_search_excludes_words_and_returns_newest_items(session, index_folder):
    found = session.content("search", query="a red circle -blue")
    assert summary(found["hits"]) == expected(index_folder, "a red circle", without="blue")
    times = [hit["modified"] for hit in session.content("search", query=" ")["hits"]]
    assert len(times) == 10
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_search_filters_by_metadata(two_indexes, dataset_index):
    arguments = {"query": "a red circle", "metadata": {"split": "test"}}
    found = two_indexes.content("search", index="scenes", **arguments)
    assert {hit["metadata"]["split"] for hit in found["hits"]} == {"test"}
    assert summary(found["hits"]) == expected(
        dataset_index, "a red circle", metadata={"split": "test"}
    )


@pytest.mark.slow
def test_similar_takes_keys_and_paths(session, index_folder, collection_folder):
    by_key = session.content("similar", item="trips/01.png", limit=5)
    by_path = session.content("similar", item=str(collection_folder / "trips" / "01.png"), limit=5)
    assert by_key == by_path
    assert by_key["hits"][0]["key"] == "trips/01.png"
    assert summary(by_key["hits"]) == expected(index_folder, like="trips/01.png", limit=5)


@pytest.mark.slow
def test_details_have_all_captions(two_indexes, dataset_index):
    hit = two_indexes.content("search", index="scenes", query="a star")["hits"][0]
    details = two_indexes.content("details", index="scenes", item=hit["key"])
    captions = details["captions"]
    assert len(captions) == 3
    assert captions[0] == details["metadata"]["caption"]
    assert details["size"] == Path(details["path"]).stat().st_size
    assert {name: details[name] for name in hit.keys() & details.keys()} == {
        name: hit[name] for name in hit.keys() & details.keys()
    }


@pytest.mark.slow
def test_details_have_the_capture_time(runs, tmp_path):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photos" / "one.png")
    (tmp_path / "photos" / "attributes.csv").write_text(
        "filename,taken\none.png,2024-05-31T18:30\n"
    )
    visavis.index(runs[0], tmp_path / "photos", out=tmp_path / "index")
    answer, _ = Details(item="one.png").run(OpenedIndexes({"index": tmp_path / "index"}))
    assert answer.model_dump()["taken"] == "2024-05-31T18:30"
    assert "taken: 2024-05-31T18:30" in str(answer).splitlines()


@pytest.mark.slow
def test_details_have_a_thumbnail_without_metadata(session, index_folder):
    assert len(session.call("details", item="place.jpg").content) == 1
    text, image = session.call("details", item="place.jpg", thumbnail=True).content
    assert text.text.startswith("place.jpg (image)")
    assert image.mime_type == "image/jpeg"
    content = base64.b64decode(image.data)
    assert Image.open(io.BytesIO(content)).size == (80, 160)  # upright
    assert b"Secret" not in content


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("search", {"query": "-blue"}, "query: expected a text, image or item to search for"),
        ("search", {}, "query: expected a value, got none"),
        ("search", {"query": 3}, "query: expected a text in quotes, got 3"),
        (
            "search",
            {"query": "a", "limit": 0},
            "limit: expected an integer >= 1, got 0",
        ),
        ("search", {"query": "a", "limt": 3}, "limt: .* did you mean limit"),
        ("search", {"query": "a", "after": "soon"}, "time: expected a year or date .* got 'soon'"),
        ("search", {"query": "a", "kind": "photo"}, "kind: expected 'image', 'video' or 'moment'"),
        ("search", {"query": "a", "metadata": {"x": "y"}}, "metadata: .* no metadata"),
        ("search", {"query": "a", "index": "two"}, "index: this name is unknown"),
        ("similar", {"item": "nothing.png"}, "item: expected the key of an item of one"),
        ("details", {"item": "/etc/passwd", "thumbnail": True}, "item: expected the key"),
        ("details", {"item": "../outside.png", "thumbnail": True}, "item: expected the key"),
        ("details", {"item": "leaves.png", "thumbnail": True}, "leaves.png.*outside"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else value,
)
def test_mistakes_are_tool_errors(session, name, arguments, message):
    text = session.error(name, **arguments)
    assert re.search(message, text), text
    assert "Traceback" not in text
    assert "\n" not in text


VALUES = st.one_of(
    st.sampled_from(["", "-red", "a red circle", "trips/01.png", "../outside.png", "image", "\0"]),
    st.text(max_size=5),
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates().map(str),
    st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2),
)


@pytest.mark.slow
@given(data=st.data())
def test_any_arguments_give_an_answer_or_our_error(data, index_folder):
    if not OPENED:
        OPENED.append(OpenedIndexes({"one": index_folder}))
    tools = list_tools(OPENED[0])
    tool = data.draw(st.sampled_from(sorted(tools)).map(tools.get))
    known = {"query": "a red circle", "item": "trips/01.png"}
    names = list(tool.model_fields)
    given = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=2))
    arguments = {name: value for name, value in known.items() if name in names} | given
    # Any other error fails the test.
    with suppress(VisavisError):
        answer, _ = parse_call(tool, arguments).run(OPENED[0])
        assert tool.answer.model_validate_json(answer.model_dump_json()) == answer


@pytest.mark.slow
def test_vote_needs_permission(session):
    with pytest.raises(MCPError, match="known: details, search, similar"):
        session.call("vote", query="red", item="trips/01.png", relevant=True)


@pytest.mark.slow
def test_vote_is_saved_in_the_index_of_its_item(two_indexes, index_folder, dataset_index):
    arguments = {"index": "one", "query": "a  red circle", "item": "trips/01.png"}
    saved = two_indexes.content("vote", **arguments, relevant=True)
    assert saved == {"query": "a red circle", "item": "trips/01.png", "relevant": True}
    two_indexes.content("vote", **arguments, relevant=None)
    assert "relevant" in two_indexes.error("vote", **arguments)
    first, second = read_feedback(index_folder)
    assert read_feedback(dataset_index) == []
    assert isinstance(first, Judgment)
    assert (first.index, first.query) == ("one", QueryKey("a red circle"))
    assert (first.item, first.relevant, second.relevant) == ("trips/01.png", True, None)
    assert len(first.content_hash) == 32


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "visavis", "mcp", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def send(process, *messages):
    for message in messages:
        process.stdin.write(message if isinstance(message, str) else json.dumps(message) + "\n")
    process.stdin.flush()


@pytest.mark.slow
def test_stdout_has_messages_only(index_folder):
    call = {"name": "search", "arguments": {"query": "zebra red"}}  # an unknown word
    with start(index_folder, "--verbose") as process:
        initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        request = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
        send(process, INITIALIZE, initialized, "\n", request)
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        out, err = process.communicate(timeout=60)
    assert [answer["id"] for answer in answers] == [1, 2]
    assert answers[1]["result"]["structuredContent"]["hits"]
    assert out == ""
    assert "Traceback" not in err
    assert process.returncode == 0


INVALID_LINES = [
    (b"not JSON", -32700, None),
    (b'{"jsonrpc": "2.0", "id": 7', -32700, None),
    (b'{"jsonrpc": "2.0", "id": 7, "method": "\xff\xfe"}', -32700, None),
    (b"\x80\x81", -32700, None),
    (b"[" * 100_000, -32700, None),
    (b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": {"x": "\\ud800"}}', -32700, 7),
    (b'{"jsonrpc": "2.0", "id": "\\udc00", "method": "ping"}', -32700, None),
    (b'[{"jsonrpc": "2.0", "id": 7, "method": "ping"}]', -32600, None),
    (b"{}", -32600, None),
    (b"null", -32600, None),
    (b'{"id": "a", "method": "ping"}', -32600, "a"),
    (b'{"jsonrpc": "2.0", "id": [1], "method": 3}', -32600, None),
]


def test_invalid_lines_are_errors_of_json_rpc():
    for line, code, number in INVALID_LINES:
        error = mcp_server._line_error(line + b"\n")
        assert (error.error.code, error.id) == (code, number), line
        assert error.error.message.endswith(".")
        assert json.loads(error.model_dump_json(exclude_unset=True))["id"] == number
    assert mcp_server._line_error(json.dumps(INITIALIZE).encode()) is None


@pytest.mark.slow
def test_each_invalid_line_has_an_answer(index_folder):
    with start(index_folder) as process:
        send(process, INITIALIZE)
        assert json.loads(process.stdout.readline())["id"] == 1
        for line, code, number in INVALID_LINES:
            process.stdin.buffer.write(line + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert (answer["id"], answer["error"]["code"]) == (number, code)
        send(process, {"jsonrpc": "2.0", "id": 2, "method": "ping"})
        assert json.loads(process.stdout.readline())["id"] == 2
        out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 0)
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda process: process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda process: process.send_signal(signal.SIGINT), 0),
        (lambda process: process.stdout.close(), 0),
    ],
    ids=["SIGTERM", "SIGINT", "closed"],
)
def test_server_ends_while_stdin_is_open(index_folder, end, code):
    with start(index_folder) as process:
        send(process, INITIALIZE)
        assert json.loads(process.stdout.readline())["id"] == 1
        end(process)
        send(process, {"jsonrpc": "2.0", "id": 2, "method": "ping"})
        assert process.wait(20) == code
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_folder_without_index_ends_with_one_line(collection_folder):
    with start(collection_folder, "--quiet") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"visavis: {collection_folder}: expected an index")
    assert err.count("\n") == 1


def test_missing_package_names_its_extra(tmp_path):
    program = "import sys; sys.modules['mcp'] = None; import visavis; visavis.mcp('index')"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "MissingExtra: visavis mcp needs the package mcp" in process.stderr
    assert process.stderr.rstrip().endswith("run pip install 'visavis[mcp]'.")


def test_tools_that_write_are_listed_with_votes_only(tmp_path):
    folders = {"photos": tmp_path}
    assert not any(tool.writes for tool in list_tools(OpenedIndexes(folders)).values())
    tools = list_tools(OpenedIndexes(folders, saves_votes=True))
    assert [name for name, tool in tools.items() if tool.writes] == ["vote"]


def test_configuration_of_the_guide_starts_the_server():
    (block,) = read_blocks("docs/guides/assistants.md", "json")
    (server,) = json.loads(block.text)["mcpServers"].values()
    assert Path(server["command"]).name == "visavis"
    command = typer.main.get_command(cli.app)
    context = command.make_context("visavis", list(server["args"]))
    name, found, rest = command.resolve_command(context, context._protected_args + context.args)
    assert name == "mcp"
    assert found.make_context(name, rest, parent=context).params["index"] == server["args"][1:]


def test_index_names_are_as_short_as_possible(tmp_path):
    a, b, c = tmp_path / "a" / "photos", tmp_path / "b" / "photos", tmp_path / "videos"
    assert index_names([a, c]) == {"photos": a, "videos": c}
    assert index_names([a, b, c]) == {
        "a/photos": a,
        "b/photos": b,
        f"{tmp_path.name}/videos": c,
    }
    with pytest.raises(VisavisError, match="expected different folders"):
        index_names([a, tmp_path / "b" / ".." / "a" / "photos"])
