"""Votes in the database of an index: every acknowledged vote is stored, also by several processes."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from tests.platforms import posix
from tests.server.conftest import served

import visavis
from visavis.core.errors import DataError, RefusedOverwrite
from visavis.core.progress import NoProgress
from visavis.data.dataset_reader import open_dataset
from visavis.data.feedback.records import Judgment, Preference, QueryKey, latest_judgments
from visavis.data.feedback.sources import read_feedback, write_feedback
from visavis.retrieval.items import DATABASE
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.vote_store import open_votes
from visavis.retrieval.stores.index_database import IndexDatabase
from visavis.training.recipes.open_data import read_feedback_pairs

AT = "2026-01-01T00:00:00.000+00:00"


def judgment(item, fits, text="a dog", vote=""):
    query = QueryKey(text)
    return Judgment(AT, "photos", query, item, "c0ffee", fits, vote=vote or f"{text} {item} {fits}")


@pytest.fixture
def folder(tmp_path):
    """The folder of a database without items."""
    IndexDatabase(tmp_path, create={}).close()
    return tmp_path


@pytest.fixture
def small_index(tiny_run, few_scenes, tmp_path):
    """An index of a copy of a few images."""
    images = tmp_path / "images"
    shutil.copytree(few_scenes / "images", images)
    folder = tmp_path / "index"
    visavis.index(tiny_run, images, out=folder)
    with closing(open_index(folder)) as index:
        keys = index.store.table().keys()
    return SimpleNamespace(run=tiny_run, images=images, folder=folder, keys=keys)


RECORDS = [
    judgment("a.png", True),
    judgment("b 東京.png", False),
    replace(judgment("a.png", None), query=QueryKey("", "c.png#t=0,4", "f00")),
    Preference(AT, QueryKey("a dog"), "one", "two", None),
    Preference(AT, QueryKey("a\0dog"), "two", "one", "one"),
]


def test_index_and_file_return_the_same_records(folder):
    with open_votes(folder) as votes:
        for record in RECORDS:
            (votes.add if isinstance(record, Judgment) else votes.prefer)(record)
    assert read_feedback(folder) == RECORDS
    write_feedback(folder / "votes.jsonl", RECORDS)
    assert read_feedback(folder / "votes.jsonl") == RECORDS


def test_latest_judgment_counts():
    records = [
        judgment("a", True),
        judgment("b", True),
        judgment("a", False),
        judgment("b", None),
        judgment("a", True, "a cat"),
    ]
    assert {pair: line.relevant for pair, line in latest_judgments(records).items()} == {
        (QueryKey("a dog"), "a"): False,
        (QueryKey("a cat"), "a"): True,
    }


def test_votes_of_query_are_those_in_force(folder):
    with open_votes(folder) as votes:
        for record in (judgment("a", True), judgment("b", False), judgment("a", None)):
            votes.add(record)
        votes.add(judgment("a", True, "a cat"))
        assert votes.of_query(QueryKey("a dog")) == {"a": None, "b": False}
        assert votes.undo("a dog a None", AT) == judgment("a", None)
        assert votes.of_query(QueryKey("a dog")) == {"a": True, "b": False}
        for other in ("a dog a None", "", "other"):
            assert votes.undo(other, AT) is None
        assert votes.of_query(QueryKey(similar_to="a dog")) == {}
        plan = votes.connection.execute(
            "EXPLAIN QUERY PLAN SELECT item FROM votes WHERE text = ? AND similar_to = ? AND "
            "image_hash = ? AND undone IS NULL ORDER BY number",
            ("", "", ""),
        ).fetchall()
        assert "USING INDEX votes_by_query" in plan[0][3]


def test_training_pairs_are_read_from_an_index(small_index, few_scenes):
    """The items of the index are the images of the data set, in another folder."""
    data = open_dataset(few_scenes)
    hashes = {image.location.content_hash for image in data.images if image.split == "train"}
    with closing(open_index(small_index.folder)) as index:
        items = [item for item in index.store.table().items() if item.content in hashes][:3]
    with open_votes(small_index.folder) as votes:
        for item, fits in zip(items, (True, False, True), strict=True):
            record = judgment(item.key, fits, "a wobbly gizmo")
            votes.add(replace(record, content_hash=item.content))
    pairs = read_feedback_pairs(str(small_index.folder), data, NoProgress())
    assert (pairs.queries, len(pairs.relevant), len(pairs.not_relevant)) == (
        ("a wobbly gizmo",),
        2,
        1,
    )


def test_feedback_of_a_folder_without_index_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"expected an index or a file of votes, got a folder"):
        read_feedback(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("CREATE TABLE other (value)")
    with pytest.raises(DataError, match=r"index\.db: expected the votes .* no such table"):
        read_feedback(tmp_path)
    (tmp_path / DATABASE).write_bytes(b"dear diary" * 99)
    with pytest.raises(DataError, match=r"index\.db: expected the votes .* not a database"):
        read_feedback(tmp_path)


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_feedback_file_that_was_cut_is_rejected(tmp_path, cut):
    write_feedback(tmp_path / "votes.jsonl", RECORDS)
    content = (tmp_path / "votes.jsonl").read_bytes()
    (tmp_path / "votes.jsonl").write_bytes(content[:-cut])
    with pytest.raises(DataError, match="last line without an end"):
        read_feedback(tmp_path / "votes.jsonl")


def test_export_votes_writes_a_new_file(small_index, tmp_path):
    [key, *_] = small_index.keys
    with open_votes(small_index.folder) as votes:
        votes.add(judgment(key, True))
        votes.prefer(RECORDS[3])
    out = tmp_path / "votes.jsonl"
    result = visavis.indexes_export_votes(small_index.folder, out=out)
    assert (result.num_votes, result.num_preferences) == (1, 1)
    assert read_feedback(out) == read_feedback(small_index.folder)
    with pytest.raises(RefusedOverwrite):
        visavis.indexes_export_votes(small_index.folder, out=out)
    with pytest.raises(DataError, match="expected an index"):
        visavis.indexes_export_votes(tmp_path, out=tmp_path / "other.jsonl")


def test_votes_stay_in_an_updated_index(small_index):
    """Also where all files were moved: their content identifies them."""
    items = visavis.search(small_index.folder, "a red circle", top=3).hits
    with open_votes(small_index.folder) as votes:
        for hit, fits in zip(items, (True, False, True), strict=True):
            record = replace(judgment(hit.key, fits, "a red circle"), index="index")
            votes.add(replace(record, content_hash=hit.item.content))
    before = read_feedback(small_index.folder)
    first = visavis.indexes_evaluate(small_index.folder)
    (small_index.images / "moved").mkdir()
    for hit in items:
        os.rename(small_index.images / hit.name, small_index.images / "moved" / hit.name)
    report = visavis.index(small_index.run, small_index.images, out=small_index.folder)
    assert (report.num_moved, report.num_encoded) == (3, 0)
    assert read_feedback(small_index.folder) == before
    again = visavis.indexes_evaluate(small_index.folder)
    assert (again.recall, again.pairs, again.skipped) == (first.recall, first.pairs, 0)


@posix
@pytest.mark.slow
def test_no_acknowledged_vote_is_lost_by_kills(folder):
    program = """
import sys
from pathlib import Path
from visavis.data.feedback.records import Judgment, QueryKey
from visavis.retrieval.server.vote_store import open_votes
first = int(sys.argv[2])
for number in range(first, first + 10**6):
    with open_votes(Path(sys.argv[1])) as votes:
        text = "x" * (number % 3000)
        votes.add(Judgment("2026-01-01", "i", QueryKey(text), str(number), "c", True, vote=str(number)))
    print(number, flush=True)
    if number % 3 == 0:
        with open_votes(Path(sys.argv[1])) as votes:
            votes.undo(str(number), "2026-01-02")
        print(-number, flush=True)
"""
    chooser = random.Random(0)
    acknowledged = set()
    # The last vote of each process, which may have been undone.
    unknown = set()
    for run in range(1, 26):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder), str(run * 10**6)],
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = [process.stdout.readline()]
        time.sleep(chooser.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait()
        process.stdout.close()
        acknowledged |= {int(line) for line in lines}
        # Without a manual step, also if a journal was left.
        stored = {int(record.vote) for record in read_feedback(folder)}
        voted = {number for number in acknowledged if number > 0}
        undone = {-number for number in acknowledged if number < 0}
        unknown |= {max(voted)} if max(voted) % 3 == 0 else set()
        assert voted - undone - stored <= unknown
        assert not undone & stored
        assert len(stored - voted) <= run
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("SELECT count(*) FROM votes").fetchone()[0] >= len(voted)


class _Client:
    """A client that votes and undoes, and records what the servers acknowledged."""

    def __init__(self, number, addresses, keys, count, may_end):
        self.chooser = random.Random(number)
        self.number = number
        self.addresses = addresses
        self.keys = keys
        self.count = count
        self.may_end = may_end
        self.done = 0
        self.voted = {}
        self.undone = set()
        self.unknown = set()

    def run(self):
        while self.done < self.count or not self.may_end.is_set():
            if self.voted and self.chooser.random() < 0.3:
                name = self.chooser.choice(list(self.voted))
                # Until it is acknowledged, it may have been undone.
                self.unknown.add(name)
                saved = self.post("/api/votes/undo", {"vote": name})
                if saved is not None:
                    self.undone.add(name)
                    del self.voted[name]
            else:
                text = f"query {self.number} {self.chooser.randrange(9)}"
                vote = {
                    "query": {"text": text},
                    "key": self.chooser.choice(self.keys),
                    "relevant": self.chooser.choice([True, False]),
                }
                saved = self.post("/api/votes", vote)
                if saved is not None:
                    self.voted[saved["vote"]] = vote
            self.done += saved is not None

    def post(self, path, content):
        target = urlsplit(self.chooser.choice(self.addresses))
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(content), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            # The server was killed.
            time.sleep(0.05)
            return None
        finally:
            connection.close()
        # The vote was undone by a request that a killed server did not acknowledge.
        if path.endswith("undo") and response.status == 404:
            return answer
        assert response.status == 200, answer
        return answer


@posix
@pytest.mark.slow
def test_two_servers_keep_all_acknowledged_votes(small_index):
    """Eight clients vote and undo 2,000 times at two servers, one of which is killed twice."""
    addresses = ["", ""]
    with served(small_index.folder, "--votes") as (first, _):
        addresses[0] = first
        kills_are_over = threading.Event()
        clients = [
            _Client(number, addresses, small_index.keys, 250, kills_are_over) for number in range(8)
        ]
        threads = [threading.Thread(target=client.run) for client in clients]
        for kill in range(3):
            with served(small_index.folder, "--votes") as (second, process):
                addresses[1] = second
                if not kill:
                    for thread in threads:
                        thread.start()
                if kill < 2:
                    # Not after a time: machines differ by factors.
                    before = sum(client.done for client in clients)
                    while sum(client.done for client in clients) < before + 300:
                        assert all(thread.is_alive() for thread in threads)
                        time.sleep(0.01)
                    process.send(signal.SIGKILL)
                    process.wait(15)
                else:
                    kills_are_over.set()
                    for thread in threads:
                        thread.join(240)
        assert not any(thread.is_alive() for thread in threads)
    stored = {record.vote: record for record in read_feedback(small_index.folder)}
    assert sum(len(client.voted) + len(client.undone) for client in clients) > 1000
    for client in clients:
        for name, vote in client.voted.items():
            if name in stored or name not in client.unknown:
                assert stored[name].relevant is vote["relevant"]
                assert (stored[name].query.text, stored[name].item) == (
                    vote["query"]["text"],
                    vote["key"],
                )
        assert not client.undone & stored.keys()
