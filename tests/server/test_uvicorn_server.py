"""``visavis serve`` as a process: arguments, slow clients, shutdown, and parts of the server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import re
import shutil
import signal
import socket
import threading
import time
import tomllib
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi.testclient import TestClient
from starlette.exceptions import HTTPException
from tests.permissions import as_ordinary_user
from tests.platforms import posix

import visavis
from visavis.core.errors import DataError, RunError, StorageError, VisavisError
from visavis.data.feedback.records import QueryKey
from visavis.retrieval.items import DATABASE, NO_FILTER
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import parse_query
from visavis.retrieval.server import image_cache
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.image_cache import MAX_SIDE, ImageCache
from visavis.retrieval.server.limits import (
    IMAGE_INPUT_COST,
    REQUEST_COSTS,
    TEXT_INPUT_COST,
    FairTurns,
    LRUCache,
    RateLimits,
    ServerLimits,
    ServerMetrics,
    request_cost,
)
from visavis.retrieval.server.search_service import SearchService, ServedIndex, uncertainties
from visavis.retrieval.server.security import MIN_TOKEN_LENGTH, RateLimiter, client_name
from visavis.retrieval.server.uvicorn_server import listening_socket, server_config

from .conftest import photo, served


def serve(*arguments, **options):
    visavis.serve(*arguments, **{"port": 0} | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"host": "0.0.0.0"}, "expected a token"),
        ({"host": "0.0.0.0", "token": "short"}, "at least 12 characters, got 5"),
        ({"token": "with a space in it"}, "spaces"),
        ({"host": "no.such.host.example"}, "expected an address of this machine"),
        ({"host": "192.0.2.1"}, "cannot listen"),
        ({"port": 70_000}, "got 70000"),
        ({"port": -1}, "got -1"),
    ],
)
def test_serve_rejects_invalid_options(index_folder, options, text):
    with pytest.raises(VisavisError, match=text):
        serve(index_folder, **options)


def test_serve_rejects_port_in_use(index_folder):
    with (
        listening_socket("127.0.0.1", 0) as listener,
        pytest.raises(VisavisError, match="is in use"),
    ):
        serve(index_folder, port=listener.getsockname()[1])


def test_serve_rejects_missing_index(tmp_path):
    with pytest.raises(RunError, match="expected an index"):
        serve(tmp_path)
    with pytest.raises(VisavisError, match="got 3"):
        serve([tmp_path] * 3)


@posix
@pytest.mark.parametrize("mode", [0o555, 0o755])
def test_votes_need_an_index_that_can_be_written(index_folder, tmp_path, mode):
    """Neither a read-only folder nor a read-only database, which SQLite reports differently."""
    folder = tmp_path / "index"
    shutil.copytree(index_folder, folder)
    folder.chmod(mode)
    (folder / DATABASE).chmod(0o444)
    before = (folder / DATABASE).read_bytes()
    with as_ordinary_user():
        with pytest.raises(StorageError, match=r"keeps the votes: .* leave out --votes\.$"):
            serve(folder, votes=True)
        with TestClient(create_app([ServedIndex(open_index(folder))])) as client:
            assert client.get("/api/search?text=red", headers={"host": "localhost"}).is_success
    folder.chmod(0o755)
    assert (folder / DATABASE).read_bytes() == before


@pytest.fixture(scope="module")
def process(index_folder):
    with served(index_folder, "--votes") as running:
        yield running


def test_server_responds_despite_slow_clients(process):
    address = urlsplit(process[0])
    with contextlib.ExitStack() as stack:
        for part in [
            b"",
            b"GET / HT",
            b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc",
        ] * 20:
            slow = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            slow.sendall(part)
        started = time.monotonic()
        for _ in range(5):
            with urllib.request.urlopen(f"{process[0]}/api/search?text=a+star") as response:
                assert response.status == 200
        assert time.monotonic() - started < 5


@pytest.mark.slow
def test_server_closes_connections_with_incomplete_bodies(collection):
    """Also those of rejected requests and of routes that read no body, even if the client sends a
    byte now and then.
    """
    limits = ServerLimits(header_timeout_s=0.3, body_timeout_s=0.3)
    server = uvicorn.Server(server_config(create_app([collection], limits=limits), limits))
    with listening_socket("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        clients = []
        paths = ("/api/search", "/api/votes", "/health", "/style.css", "/login", "/none")
        for method, path in itertools.product(("GET", "POST", "PUT"), paths):
            for header in (
                "Content-Length: 100",
                "Content-Length: 999999999",
                "Transfer-Encoding: chunked",
                "Origin: http://a\r\nContent-Length: 9",
            ):
                clients.append(
                    stack.enter_context(socket.create_connection(listener.getsockname()))
                )
                clients[-1].sendall(
                    f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n1\r\n".encode()
                )
        deadline, slow = time.monotonic() + 4, clients
        while slow and time.monotonic() < deadline:
            time.sleep(0.1)
            slow = [client for client in slow if not is_closed(client)]
            for client in slow[::2]:
                with contextlib.suppress(OSError):
                    client.sendall(b"a")
        assert not slow


def is_closed(client):
    client.settimeout(0.001)
    try:
        while client.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.long
def test_server_disconnects_slow_clients(process):
    address = urlsplit(process[0])
    for part, expected in (
        (b"GET / HT", b""),
        (b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc", b"408"),
    ):
        with socket.create_connection((address.hostname, address.port), timeout=40) as slow:
            slow.sendall(part)
            received = b"".join(iter(lambda: slow.recv(4096), b""))
            assert expected in received


def test_server_rejects_other_protocols(process):
    address = urlsplit(process[0])
    with socket.create_connection((address.hostname, address.port), timeout=5) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400")


def test_parse_query_splits_excluded_words():
    assert parse_query('beach -people -"red car"') == (
        (1.0, "beach"),
        (-0.5, "people"),
        (-0.5, "red car"),
    )
    assert parse_query("black-and-white") == ((1.0, "black-and-white"),)
    assert parse_query(" - -- ") == ((1.0, "- --"),)
    assert parse_query("") == ()


def test_rate_limiter_refills_per_client():
    limiter = RateLimiter(RateLimits(burst=10, per_s=2))
    assert limiter.spend("1.1.1.1", 10, now=0) == 0
    assert limiter.spend("1.1.1.1", 4, now=0) == 2
    assert limiter.spend("1.1.1.2", 4, now=0) == 0
    assert limiter.spend("1.1.1.1", 4, now=2) == 0
    one, other = (client_name({"client": (f"2001:db8::{end}", 80)}) for end in (1, 2))
    assert limiter.spend(one, 10, now=0) == 0
    assert limiter.spend(other, 1, now=0) > 0, "a /64 network is one client"


@pytest.mark.parametrize("capacity", [2, 5])
def test_fair_turns_alternate_between_clients(capacity):
    """Ten requests of one client and one of another: the other one waits for one turn."""
    order, largest = list[str](), 0

    async def ask(turns, client, cost):
        nonlocal largest
        async with turns.turn(client, cost):
            largest = max(largest, turns.capacity - turns.free)
            order.append(client)
            await asyncio.sleep(0)

    async def ask_all():
        turns = FairTurns(capacity, max_waiting=20)
        clients = [("a", 2)] * 10 + [("b", 1), ("c", 9)]
        await asyncio.gather(*(ask(turns, *each) for each in clients))
        assert (turns.free, turns.num_waiting) == (capacity, 0)

    asyncio.run(ask_all())
    assert order.index("b") <= 2 + capacity // 2
    assert order.index("c") <= 3 + capacity // 2
    assert largest <= capacity


def test_fair_turns_are_returned_after_disconnects():
    async def ask():
        turns = FairTurns(2, max_waiting=20)

        async def work(client):
            async with turns.turn(client, 2):
                await asyncio.sleep(60)

        running, waiting, last = (asyncio.ensure_future(work(client)) for client in "aab")
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert turns.num_waiting == 1
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert (turns.free, turns.num_waiting) == (0, 0), "the last one works"
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        assert turns.free == 2

    asyncio.run(ask())


def test_each_client_has_its_own_limit_of_waiting_requests(collection):
    limits = ServerLimits(max_waiting=2, max_decoded_pixels=64 * 48)
    service = SearchService([collection], limits, ServerMetrics())
    started = threading.Event()
    service._model_thread.submit(started.wait, 60)

    async def upload(client, number):
        content = io.BytesIO()
        photo("red", size=(60 + number, 48)).save(content, "PNG")
        return await service.images.upload(content.getvalue(), client)

    def search(client, number):
        return service.search(0, QueryKey(f"a star {number}"), NO_FILTER, 5, client)

    async def ask(send):
        sending = [asyncio.ensure_future(send("one", number)) for number in range(4)]
        sending += [asyncio.ensure_future(send("other", number)) for number in range(4, 6)]
        return sending

    async def ask_all():
        searching = await ask(search)
        async with service.images.turns.turn("third", 64 * 48):
            uploading = await ask(upload)
            while service.images.turns.num_waiting < 4 or sum(map(is_done, uploading)) < 2:
                await asyncio.sleep(0.001)
        started.set()
        for sent in (searching, uploading):
            answers = await asyncio.gather(*sent, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, HTTPException)]
            assert [error.status_code for error in refused] == [429, 429]
            assert not any(isinstance(answer, Exception) for answer in answers[4:])

    def is_done(task):
        return task.done()

    asyncio.run(ask_all())
    service.close()


def test_turn_lasts_until_a_slow_decoder_ends(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(image_cache, "make_thumbnail", lambda *arguments, **options: ended.wait(60))
    images = ImageCache(ServerLimits(decode_timeout_s=0.2), ServerMetrics())
    content = io.BytesIO()
    photo("red", size=(64, 48)).save(content, "PNG")

    async def ask():
        capacity = images.turns.capacity
        with pytest.raises(DataError, match="takes longer than"):
            await images.upload(content.getvalue(), "one")
        assert images.turns.free == capacity - 64 * 48, "the thread is still decoding"
        leaving = asyncio.ensure_future(images.upload(content.getvalue(), "one"))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert images.turns.free == capacity - 2 * 64 * 48, "also if the client left"
        ended.set()
        while images.turns.free < capacity:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(ask(), 30))
    images.close()


def test_lru_cache_respects_max_size():
    cache = LRUCache[bytes](100, len)
    for number in range(50):
        cache.put(number, bytes(30))
        assert cache.get(0) is not None or number > 2
        cache.get(49)
        assert cache.size <= 100
    assert cache.get(49) == bytes(30)
    cache.put("large", bytes(101))
    assert cache.get("large") is None


def test_uncertainties_peak_at_even_probability(collection):
    from dataclasses import replace

    from visavis.retrieval.search import SearchQuery, search_collection

    found = search_collection(collection.index, SearchQuery.from_text("a star"), 12).hits
    assert (
        max(
            uncertainties(
                [
                    replace(hit, match_probability=value)
                    for hit, value in zip(found, (0, 0.2, 0.5, 0.9), strict=False)
                ]
            )
        )
        == 1
    )
    plain = uncertainties(
        [
            replace(hit, match_probability=None, score=1 - number / 12)
            for number, hit in enumerate(found)
        ]
    )
    assert plain.index(max(plain)) in (9, 10), "at the boundary of the first page"
    assert uncertainties([]) == []


def stop(process, signal_number, code):
    connection = socket.create_connection(
        (urlsplit(process[0]).hostname, urlsplit(process[0]).port)
    )
    process[1].send(signal_number)
    assert process[1].wait(20) == code
    connection.close()
    output = process[1].output_text
    assert "Traceback" not in output
    return output


@posix
@pytest.mark.long
def test_server_stops_on_sigterm(index_folder):
    with served(index_folder) as running:
        assert "ended by SIGTERM" in stop(running, signal.SIGTERM, 128 + signal.SIGTERM)


def test_server_stops_on_ctrl_c(process):
    """Last in this file, because it stops the process of the other tests."""
    assert "Stopped." in stop(process, signal.SIGINT, 0)


GUIDE = (Path(__file__).parents[2] / "docs/guides/serve.md").read_text()


def test_guide_lists_the_costs_of_requests():
    rows = dict(re.findall(r"^\| `((?:GET |POST )?/[\w/]+)`[^|]* \| (\d+) \|", GUIDE, re.MULTILINE))
    login = rows.pop("/login")
    rows |= {"GET /login": login, "POST /login": login}
    documented = {request: float(units) for request, units in rows.items()}
    assert documented == {request: request_cost(*request.split()) for request in documented}
    assert {request.split()[1] for request in documented} >= REQUEST_COSTS.keys()
    assert "| all others | 1 |" in GUIDE
    assert request_cost("GET", "/api/facets") == 1
    assert f"below `/v1` | {TEXT_INPUT_COST} more" in GUIDE
    assert f"below `/v1` | {IMAGE_INPUT_COST:g} more" in GUIDE


def test_guide_has_the_limits_of_the_server():
    limits, rates = ServerLimits(), RateLimits()
    for sentence in (
        f"Requests over {limits.max_body_bytes >> 20} MB and queries over {limits.max_query_chars} ch",
        f"{limits.max_inputs:,} inputs of up to {limits.max_input_chars:,} characters",
        f"Uploaded images over {limits.max_pixels // 10**6} million pixels",
        f"more than {limits.decode_timeout_s:.0f} s to decode",
        f"one request may have {limits.max_request_pixels // 10**6} million pixels",
        f"have at most {limits.max_decoded_pixels // 10**6} million pixels. Clients take turns",
        f"headers of a request within {limits.header_timeout_s:.0f} s",
        f"the body within {limits.body_timeout_s:.0f} s",
        f"up to {limits.max_results:,} results",
        f"keeps the last {limits.max_uploads} images",
        f"{rates.burst:.0f} units per client, plus {rates.per_s:.0f} per second",
        f"at most {MAX_SIDE['image']:,} pixels per side",
        f"at least {MIN_TOKEN_LENGTH} characters",
    ):
        assert sentence in " ".join(GUIDE.split()), sentence


def test_dockerfile_of_the_guide_has_known_extras_and_options():
    (recipe,) = re.findall("```dockerfile\n(.*?)```", GUIDE, re.DOTALL)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", recipe)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (command,) = re.findall(r"^CMD (.*)$", recipe, re.MULTILINE)
    name, index, *options = json.loads(command)
    assert (name, options) == ("serve", ["--host", "0.0.0.0"])
    with pytest.raises(VisavisError, match=f"^{options[1]}: expected a token"):
        serve(index, host=options[1])
