"""``visavis serve`` as a process: how it begins, whom it waits for, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import urllib.request
from urllib.parse import urlsplit

import pytest

import visavis
from visavis.errors import RunError, VisavisError
from visavis.serving.access import Allowances
from visavis.serving.asking import doubts
from visavis.serving.limits import Rates
from visavis.serving.pictures import Kept
from visavis.serving.running import listen
from visavis.serving.wording import parts_of

from .conftest import served


def begin(*arguments, **options):
    visavis.serve(*arguments, **{"port": 0} | options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "0.0.0.0"}, "open to everyone"),
        ({"host": "0.0.0.0", "token": "short"}, "5 characters"),
        ({"token": "with a space in it"}, "spaces"),
        ({"host": "no.such.host.example"}, "no address of this machine"),
        ({"host": "192.0.2.1"}, "cannot be used"),
        ({"port": 70_000}, "port is 70000"),
        ({"port": -1}, "port is -1"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(index_folder, options, says):
    with pytest.raises(VisavisError, match=says):
        begin(index_folder, **options)


def test_a_taken_port_is_a_sentence(index_folder):
    with listen("127.0.0.1", 0) as taken, pytest.raises(VisavisError, match="is taken"):
        begin(index_folder, port=taken.getsockname()[1])


def test_a_missing_index_is_a_sentence(tmp_path):
    with pytest.raises(RunError, match="is no index"):
        begin(tmp_path)
    with pytest.raises(VisavisError, match="3 indexes"):
        begin([tmp_path] * 3)


def test_judgements_that_are_something_else_are_refused_before_anything_is_served(index_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("dear diary")
    with pytest.raises(VisavisError, match=r"notes\.txt"):
        begin(index_folder, judgements=tmp_path / "notes.txt")


@pytest.fixture(scope="module")
def process(index_folder, tmp_path_factory):
    with served(index_folder, "--judgements", tmp_path_factory.mktemp("votes") / "votes.jsonl") as running:
        yield running


def test_it_answers_and_slow_clients_do_not_hold_it_up(process):
    address = urlsplit(process[0])
    with contextlib.ExitStack() as held:
        for begun in [b"", b"GET / HT", b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc"] * 20:
            slow = held.enter_context(socket.create_connection((address.hostname, address.port)))
            slow.sendall(begun)
        started = time.monotonic()
        for _ in range(5):
            with urllib.request.urlopen(f"{process[0]}/api/search?text=a+star") as answer:
                assert answer.status == 200
        assert time.monotonic() - started < 5


@pytest.mark.long
def test_slow_clients_are_hung_up_on(process):
    address = urlsplit(process[0])
    for begun, said in ((b"GET / HT", b""), (b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc", b"408")):
        with socket.create_connection((address.hostname, address.port), timeout=40) as slow:
            slow.sendall(begun)
            heard = b"".join(iter(lambda: slow.recv(4096), b""))
            assert said in heard


def test_what_is_no_http_is_refused(process):
    address = urlsplit(process[0])
    with socket.create_connection((address.hostname, address.port), timeout=5) as odd:
        odd.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert odd.recv(4096).startswith(b"HTTP/1.1 400")


def test_words_with_a_minus_are_what_must_not_be_there():
    assert parts_of('beach -people -"red car"') == ((1.0, "beach"), (-0.5, "people"), (-0.5, "red car"))
    assert parts_of("black-and-white") == ((1.0, "black-and-white"),)
    assert parts_of(" - -- ") == ((1.0, "- --"),)
    assert parts_of("") == ()


def test_an_allowance_fills_with_time_and_is_each_clients_own():
    allowances = Allowances(Rates(at_once=10, per_s=2))
    assert allowances.take("1.1.1.1", 10, now=0) == 0
    assert allowances.take("1.1.1.1", 4, now=0) == 2
    assert allowances.take("1.1.1.2", 4, now=0) == 0
    assert allowances.take("1.1.1.1", 4, now=2) == 0
    assert allowances.take("2001:db8::1", 10, now=0) == 0
    assert allowances.take("2001:db8::2", 1, now=0) > 0, "one household"


def test_what_is_kept_never_exceeds_its_bytes():
    kept = Kept(100)
    for number in range(50):
        kept.put((number,), bytes(30))
        assert kept.get((0,)) is not None or number > 2
        kept.get((49,))
        assert kept.num_bytes <= 100
    assert kept.get((49,)) == bytes(30)
    kept.put(("large",), bytes(101))
    assert kept.get(("large",)) is None


def test_doubt_is_largest_where_a_match_is_as_likely_as_not(collection):
    from dataclasses import replace

    from visavis.retrieval.searching import Query, search

    found = search(collection.index, Query.of("a star"), 12).hits
    assert max(doubts([replace(hit, match=value) for hit, value in zip(found, (0, 0.2, 0.5, 0.9), strict=False)])) == 1
    plain = doubts([replace(hit, match=None, score=1 - number / 12) for number, hit in enumerate(found)])
    assert plain.index(max(plain)) in (9, 10), "at the edge of the first ten"
    assert doubts([]) == []


def ends(process, by, code):
    held = socket.create_connection((urlsplit(process[0]).hostname, urlsplit(process[0]).port))
    os.kill(process[1].pid, by)
    assert process[1].wait(20) == code
    held.close()
    said = process[1].stderr.read()
    assert "Traceback" not in said
    return said


@pytest.mark.long
def test_it_ends_cleanly_when_another_program_says_so(index_folder):
    with served(index_folder) as running:
        assert "ended by SIGTERM" in ends(running, signal.SIGTERM, 128 + signal.SIGTERM)


def test_it_ends_cleanly_with_ctrl_c(process):
    """The last of this file: it ends the process of the others."""
    assert "stopped." in ends(process, signal.SIGINT, 0)
