"""One history: an index, its writers, two servers and their clients, chosen by a seed, and the plain
model that states what each may see.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import random
import shutil
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from starlette.exceptions import HTTPException
from tests.histories.simulation import Client, Scheduler, SimulatedDisk, current_client
from tests.histories.vote_model import VoteHistory

from visavis.core import storage
from visavis.core.errors import RunError
from visavis.core.progress import NoProgress
from visavis.data.feedback.records import Judgment, QueryKey
from visavis.retrieval import open_index as opening
from visavis.retrieval.build import index_queries
from visavis.retrieval.calibrate.calibration import SCALE, ScoreScale
from visavis.retrieval.index_folder import (
    MANIFEST,
    IndexManifest,
    IndexModel,
    index_lock,
    is_free_folder,
    is_index,
    open_index_store,
    read_manifest,
    write_manifest,
)
from visavis.retrieval.items import NO_FILTER, IndexItem
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server import vote_store
from visavis.retrieval.server.search_service import ServedIndex
from visavis.retrieval.server.vote_store import VoteStore, open_votes
from visavis.retrieval.stores import exact_search, sqlite_store
from visavis.retrieval.stores.index_database import IndexDatabase
from visavis.retrieval.stores.sqlite_store import VECTORS_FOLDER

DIM = 8
KEYS = [f"{folder}/{number}.jpg" for folder in "ab" for number in range(6)]
QUERIES = [QueryKey(f"query {number}") for number in range(2)]
FINGERPRINTS = ["0" * 16, "1" * 16, "2" * 16]
TOP = 4
State = Mapping[str, int]
"""The content of an index: the number of the content of each key."""


@functools.cache
def unit_vector(name: str) -> np.ndarray:
    """The vector of a text or of a content."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))
    vector = rng.standard_normal(DIM)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


@functools.cache
def make_item(key: str, number: int) -> IndexItem:
    """The item of a content under a key."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return IndexItem(key, key, "image", digest[:32], 1000 + number, number, dhash=digest[32:48])


def vectors_of(numbers: Sequence[int]) -> np.ndarray:
    """The vectors of some contents."""
    return np.stack([unit_vector(f"content {number}") for number in numbers])


class QueryModel:
    """A model of queries: its vector of a text depends on its fingerprint."""

    def __init__(self, fingerprint: str):
        self.fingerprint = fingerprint

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts."""
        return [unit_vector(f"{self.fingerprint} {text}") for text in texts]

    def unknown_words(self, text: str) -> list[str]:
        """It knows all words."""
        return []


def expected_results(state: State, fingerprint: str, text: str) -> list[tuple[str, str, tuple]]:
    """Key, content and duplicates of the results of a search."""
    if not state:
        return []
    [query] = QueryModel(fingerprint).encode_texts([text])
    keys = sorted(state)
    vectors = vectors_of([state[key] for key in keys]).astype(np.float64)
    scores = (vectors @ query.astype(np.float64)).astype(np.float32).tolist()
    ranked = sorted(zip(scores, keys, strict=True), key=lambda each: (-round(each[0], 5), each[1]))
    groups = dict[int, list[str]]()
    for _, key in ranked:
        groups.setdefault(state[key], []).append(key)
    return [
        (first, make_item(first, number).content, tuple(others))
        for number, (first, *others) in groups.items()
    ][:TOP]


@dataclass
class _Version:
    content: Any
    born: int
    died: float = float("inf")
    is_dropped: bool = False


class Versions:
    """The versions of a value that one writer at a time changes. A read sees one that was current
    during the read, and never an older one than an earlier read.
    """

    def __init__(self, content: Any):
        self.versions = [_Version(content, 0)]
        self.floors = list[tuple[int, int]]()
        self.is_open = False

    @property
    def current(self) -> Any:
        """The newest content."""
        return self.versions[-1].content

    def begin(self, content: Any, now: int) -> None:
        """A change begins."""
        assert not self.is_open
        self.versions.append(_Version(content, now))
        self.is_open = True

    def end(self, now: int) -> None:
        """The change is acknowledged."""
        self.is_open = False
        self.versions[-2].died = now

    def resolve(self, content: Any, now: int) -> str | None:
        """The next writer reads the value, after a change that was not acknowledged."""
        if not self.is_open:
            return None if content == self.current else f"{content} instead of {self.current}"
        was_seen = any(seen == len(self.versions) - 1 for _, seen in self.floors)
        if content == self.current:
            self.end(now)
            return None
        before = self.versions[-2]
        if content != before.content or was_seen:
            return f"{content} instead of {before.content} or {self.current}"
        self.versions.pop()
        self.is_open = False
        return None

    def check_read(self, start: int, end: int, matches: Callable[[Any], bool]) -> str | None:
        """Check a read that began and ended at these steps."""
        floor = max((seen for ended, seen in self.floors if ended < start), default=0)
        for number, version in enumerate(self.versions):
            is_current = version.born <= end and version.died >= start
            if number >= floor and is_current and matches(version.content):
                self.floors.append((end, number))
                return None
        allowed = [
            version.content
            for number, version in enumerate(self.versions)
            if number >= floor and version.born <= end and version.died >= start
        ]
        return f"expected one of {allowed}"


@dataclass
class History:
    """A history of a seed.

    Attributes:
        seed: The seed.
        log: Receives each step.
    """

    seed: int
    log: Callable[[str], None] | None = None
    crashes: bool = True
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.seed, crashes=self.crashes)
        self.scheduler.log = self.log
        # The choices of clients are independent of the interleaving.
        self.random = random.Random(f"clients {self.seed}")
        self.items = Versions({})
        self.active = Versions(FINGERPRINTS[0])
        self.votes = VoteHistory()
        self.numbers = iter(range(1, 10**6))
        self.is_created = False
        self.num_updates = 0
        self.counts = dict[str, int]()
        # The last state of each server, by the choices of its client.
        self.served = dict[random.Random, ServedIndex]()

    def fail(self, what: str, problem: str | None) -> None:
        """Record a violation, if there is one."""
        if problem is not None:
            self.scheduler.fail(f"step {self.scheduler.steps}: {what}: {problem}")

    def count(self, what: str) -> None:
        """Count an operation."""
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def now(self) -> int:
        """The number of steps so far."""
        return self.scheduler.steps

    def run(self) -> list[str]:
        """Run the history. Returns its violations."""
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        root = Path(tempfile.mkdtemp(prefix="visavis-history-", dir=memory))
        self.folder = root / "index"
        disk = SimulatedDisk(self.scheduler)
        try:
            with storage.replaced_disk(disk), _small_limits(self):
                if self.random.random() < 0.7:
                    self._update_once(self.random)
                self._add_clients()
                self.scheduler.run_all()
                if not self.scheduler.problems:
                    self._check_end()
        except Exception:  # noqa: BLE001 - a violation
            self.scheduler.fail(f"at the end: {traceback.format_exc()}")
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return self.scheduler.problems

    def _add_clients(self) -> None:
        choose = self.random
        for number in range(choose.choice([1, 1, 2])):
            self._add_client(f"index{number}", self._update_once, choose.randrange(1, 4))
        for name in "AB":
            self._add_client(f"server{name}", self._serve, choose.randrange(2, 6))
        for number in range(choose.randrange(0, 5)):
            self._add_client(f"voter{number}", self._vote, choose.randrange(1, 6))
        if choose.random() < 0.7:
            self._add_client("switch", self._switch_queries, choose.randrange(1, 5))

    def _add_client(self, name: str, work: Callable[..., None], count: int) -> None:
        """A client that does some work several times, over all of its lives."""
        choose = random.Random(f"{name} {self.seed}")
        left = [count]

        # A life may hold what it opened.
        def run(client: Client) -> None:
            opened = dict[str, Any]()
            while left[0]:
                left[0] -= 1
                if work == self._serve:
                    work(choose, opened)
                else:
                    work(choose)

        self.scheduler.add(name, run)

    # Writers

    def _update_once(self, choose: random.Random) -> None:
        """One update of the index, in the order of ``build_index``."""
        folder = self.folder
        if not is_index(folder) and not is_free_folder(folder) and not is_index(folder):
            self.fail("an update is refused", f"{sorted(os.listdir(folder))}")
        try:
            with index_lock(folder):
                self._update(choose)
        except RunError as error:
            if "is locked by another process" not in str(error):
                raise
            self.count("refused update")

    def _update(self, choose: random.Random) -> None:
        folder = self.folder
        if not is_index(folder):
            write_manifest(folder, _new_manifest())
        self.is_created = True
        manifest = read_manifest(folder)
        with closing(open_index_store(folder, manifest, create=True)) as store:
            found = _state(*store.all_items())
            self.fail("content before an update", self.items.resolve(found, self.now))
            store.verify()
            write_manifest(folder, replace(manifest, digest=None))
            for _ in range(choose.randrange(1, 4)):
                self._change(store, choose)
            store.prepare_search()
            digest = store.digest()
            write_manifest(folder, replace(manifest, digest=digest))
            self.num_updates += 1
            self.count("update")

    def _change(self, store: Any, choose: random.Random) -> None:
        state = dict(self.items.current)
        kind = choose.choice(["add", "add", "replace", "delete", "move"] if state else ["add"])
        known = sorted(state)
        if kind == "delete":
            keys = choose.sample(known, choose.randrange(1, len(known) + 1))
            after = {key: number for key, number in state.items() if key not in keys}
            self._apply(lambda: store.delete(keys), after)
        elif kind == "move":
            source = choose.choice(known)
            target = choose.choice(KEYS)
            if target == source:
                return
            number = state[source]
            vectors = store.vectors([source])
            self._apply(
                lambda: store.add([make_item(target, number)], vectors), state | {target: number}
            )
            self._apply(
                lambda: store.delete([source]),
                {key: value for key, value in self.items.current.items() if key != source},
            )
        else:
            count = choose.randrange(1, 5)
            keys = choose.sample(
                known if kind == "replace" else KEYS,
                min(count, len(known) if kind == "replace" else count),
            )
            numbers = [next(self.numbers) for _ in keys]
            items = [make_item(key, number) for key, number in zip(keys, numbers, strict=True)]
            self._apply(
                lambda: store.add(items, vectors_of(numbers)),
                state | dict(zip(keys, numbers, strict=True)),
            )
        self.count(kind)

    def _apply(self, change: Callable[[], None], after: State) -> None:
        self.items.begin(after, self.now)
        change()
        self.items.end(self.now)

    def _switch_queries(self, choose: random.Random) -> None:
        """Let another model encode the queries, or the previous one again."""
        if not self.is_created:
            return
        try:
            if choose.random() < 0.8:
                index_queries.use_queries(self.folder, choose.choice(FINGERPRINTS), NoProgress())
            else:
                index_queries.restore_queries(self.folder, NoProgress())
            self.active.end(self.now)
            self.count("switch")
        except RunError as error:
            allowed = (
                "is locked by another process",
                "expected an index",
                "a previous query model",
            )
            if not any(each in str(error) for each in allowed):
                raise
            self.count("refused switch")

    def _begin_switch(self, new: IndexManifest) -> None:
        """A switch has the lock of the index, and will write a manifest."""
        found = read_manifest(self.folder).query_model.fingerprint
        self.fail("query model before a switch", self.active.resolve(found, self.now))
        self.active.begin(new.query_model.fingerprint, self.now)

    # Servers

    def _serve(self, choose: random.Random, opened: dict[str, Any]) -> None:
        """One request to a server, which looks for a new version first."""
        if not self.is_created:
            return
        try:
            if "served" not in opened:
                index = open_index(self.folder, encoder=QueryModel(FINGERPRINTS[0]))  # type: ignore[arg-type]
                opened["served"] = ServedIndex(index, "index")
                self.count("open")
            served = opened["served"]
            self.served[choose] = served
            newer = served.newer() if choose.random() < 0.6 else None
            if newer is not None:
                served.index.close()
                self.served[choose] = opened["served"] = served = newer
                self.count("newer")
        except RunError as error:
            # Before the first update has ended.
            problems = ["expected an index", "expected a store of items, got none"]
            if self.num_updates or not any(problem in str(error) for problem in problems):
                raise
            return
        kind = choose.choice(["search", "search", "search", "items", "verify", "model"])
        start = self.now
        store = served.index.store
        if kind == "search":
            query = choose.choice(QUERIES)
            results = served.search(query, None, TOP, NO_FILTER)
            found = [(each.key, each.item.content, each.duplicates) for each in results]
            fingerprint = served.index.manifest.query_model.fingerprint
            problem = self.items.check_read(
                start,
                self.now,
                lambda state: expected_results(state, fingerprint, query.text) == found,
            )
            self.fail(f"search {query.text} of {fingerprint}: {found}", problem)
        elif kind == "items":
            state = _state(*store.all_items())
            problem = self.items.check_read(start, self.now, lambda expected: expected == state)
            self.fail(f"items {state}", problem)
        elif kind == "verify":
            store.verify()
        else:
            active = self._check_query_model()
            problem = self.active.check_read(start, self.now, active.__eq__)
            self.fail(f"query model {active}", problem)
        self.count(kind)

    def _check_query_model(self) -> str:
        """The fingerprint of the query model, which was written together with its scale."""
        with closing(IndexDatabase(self.folder)) as database, database.reading():
            content = (database.value(MANIFEST) or "").encode()
            scale = database.value(SCALE)
        manifest: IndexManifest = storage.parse_json(content, IndexManifest, "manifest")
        active = manifest.query_model.fingerprint
        found = ""
        if scale is not None:
            found = storage.parse_json(scale.encode(), ScoreScale, "scale").fingerprint
        # Only the first model has no scale.
        if found != active and (scale is not None or active != FINGERPRINTS[0]):
            self.fail("scale", f"of {found!r}, and the query model is {active}")
        return active

    # Votes

    def _vote(self, choose: random.Random) -> None:
        """One vote, undo or read of a client of one of the servers."""
        if not self.is_created:
            return
        store = VoteStore([self.folder], _METRICS)
        query = choose.choice(QUERIES)
        votes = self.votes
        kind = choose.choice(["vote", "vote", "undo", "read", "read"])
        known = votes.names(query.text)
        if kind == "undo" and known:
            name = choose.choice(known)
            operation = votes.begin("undo", query.text, self.now, name)
            try:
                operation.result = store.undo(name)
                operation.found = True
            except HTTPException as error:
                if error.status_code != 404:
                    raise
                operation.found = False
        elif kind == "read":
            operation = votes.begin("read", query.text, self.now)
            operation.result = dict(store.of_query(0, query))
        else:
            key = choose.choice(KEYS[:3])
            relevant = choose.choice([True, False, None])
            operation = votes.begin("vote", query.text, self.now, None, key, relevant)
            client = current_client()
            assert client is not None
            client.vote = operation  # type: ignore[attr-defined]
            store.record_vote("index", query, make_item(key, 0), relevant)
        operation.end = self.now
        self.count(kind)

    # The end

    def _check_servers(self) -> None:
        """Each server finds the last update, if it was completed."""
        for served in self.served.values():
            final = read_manifest(self.folder)
            newer = None if final.digest is None else served.newer()
            if newer is not None:
                newer.index.close()
            elif final.digest is not None and served.index.manifest != final:
                self.fail("server at the end", "it does not find the last update")

    def _check_end(self) -> None:
        """One more update, then compare all with the model."""
        folder = self.folder
        self._check_servers()
        self._update_once(random.Random(self.seed))
        with closing(open_index(folder, encoder=QueryModel(FINGERPRINTS[0]))) as index:  # type: ignore[arg-type]
            index.store.verify()
            state = _state(*index.store.all_items())
            if state != self.items.current:
                self.fail("items at the end", f"{state} instead of {self.items.current}")
            if index.manifest.digest != index.store.digest():
                self.fail("digest at the end", f"{index.manifest.digest}")
            active = self._check_query_model()
            problem = self.active.check_read(self.now, self.now, active.__eq__)
            self.fail(f"query model {active} at the end", problem)
        with open_votes(folder) as table:
            records = [each for each in table.records() if isinstance(each, Judgment)]
        names = [each.vote for each in records]
        if len(set(names)) != len(names):
            self.fail("votes at the end", f"a name twice in {names}")
        for query in QUERIES:
            own = [each for each in records if each.query == query]
            last = self.votes.begin("records", query.text, self.now + 1)
            last.result = [(each.vote, each.item, each.relevant) for each in own]
            last.end = self.now + 1
            self.fail(f"votes of {query.text}", self.votes.check(query.text))
        stored = sqlite_store.SqliteStore(folder, index_id=_INDEX_ID)
        with closing(stored):
            current = stored._current()
        named = {f"{current.part}.npy", current.coarse} - {""}
        found = set(os.listdir(folder / VECTORS_FOLDER)) if current.num_rows else named
        if found - named:
            self.fail("files at the end", f"{sorted(found)}, and the version names {sorted(named)}")
        left = [name for name in os.listdir(folder) if name.endswith(".part")]
        if left:
            self.fail("files at the end", f"{left}")


_INDEX_ID = "ab" * 16


class _Metric:
    def labels(self, *_: str) -> _Metric:
        return self

    def inc(self) -> None:
        pass


_METRICS: Any = types.SimpleNamespace(votes=_Metric())


def _new_manifest() -> IndexManifest:
    return IndexManifest(
        model="runs/items",
        fingerprint=FINGERPRINTS[0],
        embedding_dim=DIM,
        source="photos",
        store=".",
        moment_seconds=4.0,
        index_id=_INDEX_ID,
        # Its files are not on a disk.
        is_dataset=True,
        queries=tuple(IndexModel(f"runs/{each}", each) for each in FINGERPRINTS[1:]),
    )


def _state(items: Sequence[IndexItem], vectors: Any) -> State:
    """The content of an index. Each item must have its own vector."""
    state = {}
    for item, vector in zip(items, vectors, strict=True):
        number = item.modified_ns
        expected = make_item(item.key, number)
        if item != expected or not np.array_equal(vector, unit_vector(f"content {number}")):
            raise AssertionError(f"{item.key}: another item or vector than {number}")
        state[item.key] = number
    return state


def _new_name(_: int) -> str:
    client = current_client()
    assert client is not None
    operation = client.vote  # type: ignore[attr-defined]
    operation.name = f"{client.name}-{len(operation.history.operations)}"
    return str(operation.name)


@contextmanager
def _small_limits(history: History) -> Iterator[None]:
    """Limits that an index of a few items reaches, and models that are made at once."""

    def open_encoder(folder: Path, manifest: IndexManifest, *_: Any) -> QueryModel:
        return QueryModel(manifest.query_model.fingerprint)

    def scale(folder: Path, manifest: IndexManifest, _: Any) -> tuple[ScoreScale, None]:
        history._begin_switch(manifest)
        return ScoreScale(manifest.query_model.fingerprint, reason="none"), None

    with (
        mock.patch.object(logging.getLogger(opening.__name__), "disabled", True),
        mock.patch.object(sqlite_store, "MIN_REMOVED_ROWS", 1),
        mock.patch.object(exact_search, "MIN_ROWS", 6),
        mock.patch.object(exact_search, "MIN_DIM", DIM),
        mock.patch.object(opening, "open_query_encoder", open_encoder),
        mock.patch.object(index_queries, "open_query_encoder", open_encoder),
        mock.patch.object(index_queries, "_missing_scale", scale),
        mock.patch.object(index_queries, "add_query_tower"),
        mock.patch.object(vote_store, "secrets", types.SimpleNamespace(token_hex=_new_name)),
    ):
        yield


def run_history(seed: int, **options: Any) -> History:
    """Run the history of a seed."""
    history = History(seed, **options)
    history.run()
    return history
