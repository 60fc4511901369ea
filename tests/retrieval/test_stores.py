"""Every vector store behaves the same: SQLite with arrays, and Milvus."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platforms import MILVUS

from visavis.core.errors import DataError, ShapeError, SpecError, StorageError
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores.base import Neighbor, VectorStore
from visavis.retrieval.stores.catalog import open_store
from visavis.retrieval.stores.sqlite_store import SqliteStore

DIM = 6
ODD = [
    "it's",
    'the "cheese"',
    "a\\b",
    "50%_off",
    "dé à/東京 🐕.jpg",
    "x';DROP TABLE items;--",
    "[a]*?",
    "line\nbreak",
    " ",
]


def open_engine(engine: str, folder: Path) -> VectorStore:
    if engine == "milvus":
        from visavis.retrieval.stores.milvus_store import MilvusStore

        return MilvusStore(folder / "store.db", embedding_dim=DIM)
    return SqliteStore(folder / "store", DIM)


@pytest.fixture(params=["sqlite", MILVUS])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def store(engine: str, tmp_path: Path) -> Iterator[VectorStore]:
    opened = open_engine(engine, tmp_path)
    yield opened
    opened.close()


def random_items(generator: np.random.Generator, count: int) -> list[IndexItem]:
    """Items of all kinds with unusual texts."""
    kinds = ("image", "video", "moment")
    made = []
    for row in range(count):
        path = f"{ODD[row % len(ODD)]}/{row:03d}.jpg"
        kind = kinds[generator.integers(3)]
        start, end = (0.5 * row, row + 1.0) if kind == "moment" else (None, None)
        metadata = {"camera": ODD[generator.integers(len(ODD))], "f=": str(generator.integers(3))}
        key = f"{path}#t={start},{end}" if kind == "moment" else path
        modified = (1_700_000_000 + int(generator.integers(60))) * 10**9
        made.append(
            IndexItem(
                key,
                path,
                kind,
                f"{row:064x}",
                row * 2**33,
                modified,
                start,
                end,
                f"{row:064x}",
                metadata if row % 3 else {},
            )
        )
    return made


def random_vectors(generator: np.random.Generator, count: int) -> np.ndarray:
    """Vectors with few distinct values, so that many scores are equal."""
    return (generator.integers(-1, 2, (count, DIM)) / 4).astype(np.float32)


def reference_search(
    items: list[IndexItem],
    vectors: np.ndarray,
    queries: np.ndarray,
    top: int,
    where: ItemFilter = NO_FILTER,
) -> list[list[Neighbor]]:
    """Expected results."""
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    allowed = [row for row, item in enumerate(items) if where.matches(item)]
    return [
        [
            Neighbor(items[row].key, own[row])
            for row in sorted(allowed, key=lambda row: (-own[row], items[row].key))[:top]
        ]
        for own in scores
    ]


def test_store_is_empty_when_new(store):
    assert store.table().items() == []
    assert store.count() == store.count(ItemFilter(kind="image")) == 0
    assert store.search(np.ones((2, DIM)), 3) == [[], []]
    assert store.search(np.ones((0, DIM)), 3) == []
    store.delete(["none"])
    store.add([], np.zeros((0, DIM)))
    assert store.vectors([]).shape == store.all_vectors().shape == (0, DIM)
    with pytest.raises(KeyError, match="none"):
        store.vectors(["none"])


def test_store_keeps_items_when_reopened(store, engine, tmp_path):
    generator = np.random.default_rng(1)
    items, vectors = random_items(generator, 40), random_vectors(generator, 40)
    store.add(items[:25], vectors[:25])
    store.add(items[25:], vectors[25:])
    for opened in (store, open_engine(engine, tmp_path)):
        assert opened.table().items() == sorted(items, key=lambda item: item.key)
        assert opened.count() == 40
        np.testing.assert_array_equal(opened.vectors([item.key for item in items]), vectors)
        np.testing.assert_array_equal(
            opened.all_vectors(),
            opened.vectors([item.key for item in opened.table().items()]),
        )
        assert opened.vectors(["a"] and [items[3].key]).dtype == np.float32
    opened.close()


def test_store_search_equals_numpy(store):
    generator = np.random.default_rng(2)
    items, vectors, queries = (
        random_items(generator, 60),
        random_vectors(generator, 60),
        random_vectors(generator, 4),
    )
    store.add(items, vectors)
    for top in (1, 7, 60, 100):
        assert store.search(queries, top) == reference_search(items, vectors, queries, top)


texts = st.text(st.sampled_from("ab/*?_%\\'\"[東.\n"), max_size=6)
start = datetime.fromtimestamp(1_700_000_000, UTC)
# With a time zone, which compares instants, and without one, which compares clocks.
bounds = (
    st.none()
    | st.integers(-2, 60).map(lambda seconds: start + timedelta(seconds=seconds))
    | st.integers(-2, 60).map(
        lambda seconds: start.replace(tzinfo=None) + timedelta(seconds=seconds)
    )
    | st.sampled_from(["0001-01-01", "9999-12-31", "9999-12-31T23:59-14:00"]).map(
        datetime.fromisoformat
    )
)


def test_store_filters_equal_item_filter(store):
    generator = np.random.default_rng(3)
    items, vectors, queries = (
        random_items(generator, 60),
        random_vectors(generator, 60),
        random_vectors(generator, 2),
    )
    paths = [
        "ab/a",
        "a*b",
        "ab?",
        "a_b",
        "a%b",
        "a\\b",
        "a'b",
        'a"b',
        "a[b",
        "東b",
        "a.b",
        "a\nb",
        "axb",
        "aB",
        "",
        *(
            "ß",
            "ẞ",
            "ss",
            "İ",
            "i",
            "I",
            "ı",
            "K",
            "k",
            "ſ",
            "s",
            "S",
            "σ",
            "ς",
            "Σ",
            "Å",
            "å",
            "ŉ",
        ),
    ]
    items += [dataclasses.replace(items[0], key=f"p{path}", path=path) for path in paths]
    vectors = np.concatenate([vectors, random_vectors(generator, len(paths))])
    store.add(items, vectors)
    values = st.sampled_from(ODD)

    @settings(max_examples=40)
    @given(
        st.builds(
            ItemFilter,
            path=texts
            | values
            | st.sampled_from(["*.jpg", "*/0?1.jpg", "*東京*", "*'*", "a?b", "*\\*", "*%_*"])
            | st.sampled_from(paths),
            kind=st.sampled_from([None, "image", "video", "moment"]),
            after=bounds,
            before=bounds,
            metadata=st.just({})
            | st.fixed_dictionaries(
                {"camera": values}, optional={"f=": st.sampled_from("0123"), "none": values}
            ),
        )
    )
    def check(where: ItemFilter) -> None:
        assert store.count(where) == sum(map(where.matches, items))
        assert store.search(queries, 5, where) == reference_search(
            items, vectors, queries, 5, where
        )

    check()


def test_store_add_replaces_items_with_same_key(store):
    generator = np.random.default_rng(4)
    items, vectors = random_items(generator, 30), random_vectors(generator, 30)
    store.add(items, vectors)
    later = [
        dataclasses.replace(item, content="new", modified_ns=1, metadata={"now": "true"})
        for item in items[:10]
    ]
    others = random_vectors(generator, 20)
    store.add(
        [*later, *later], np.concatenate([others[10:], others[:10]])
    )  # the last item of a repeated key counts
    items, vectors = later + items[10:], np.concatenate([others[:10], vectors[10:]])
    assert store.table().items() == sorted(items, key=lambda item: item.key)
    assert store.search(others, 30) == reference_search(items, vectors, others, 30)


def test_store_delete_removes_items(store):
    generator = np.random.default_rng(5)
    items, vectors = random_items(generator, 30), random_vectors(generator, 30)
    store.add(items, vectors)
    store.search(vectors[:1], 1)
    store.delete([item.key for item in items[::2]] + ["none", "it's none"])
    assert store.count() == 15
    assert store.search(vectors, 30) == reference_search(items[1::2], vectors[1::2], vectors, 30)
    store.delete([item.key for item in items])
    assert store.table().items() == []
    store.add(items[:1], vectors[:1])
    assert store.table().items() == items[:1]


def test_store_rejects_invalid_arguments(store):
    item = IndexItem("a", "a", "image", "", 0, 0)
    with pytest.raises(ShapeError, match=rf"vectors: expected shape \[1, {DIM}\], got \[1, 3\]"):
        store.add([item], np.zeros((1, 3)))
    with pytest.raises(ShapeError, match="got NaN or infinity"):
        store.add([item], np.full((1, DIM), np.inf))
    with pytest.raises(ShapeError, match=rf"queries: expected shape \[Q, {DIM}\], got \[1, 3\]"):
        store.search(np.zeros((1, 3)), 1)
    with pytest.raises(SpecError, match="got 0"):
        store.search(np.zeros((1, DIM)), 0)
    assert store.count() == 0


@pytest.mark.slow
def test_open_store_selects_store_by_uri(tmp_path):
    from visavis.retrieval.stores.milvus_store import MilvusStore

    for uri, kind in ((tmp_path / "folder", SqliteStore), (tmp_path / "file.db", MilvusStore)):
        with closing(open_store(uri, DIM)) as opened:
            assert isinstance(opened, kind)
        with closing(open_store(uri)) as opened:
            assert opened.embedding_dim == DIM
        with pytest.raises(ShapeError, match=f"expected vectors of dimension 7, got {DIM}"):
            open_store(uri, 7)
    server_manager = pytest.importorskip("milvus_lite.server_manager").server_manager_instance
    assert not server_manager._servers, "a store that was not opened holds no file"
    for uri in (tmp_path / "none", tmp_path / "none.db"):
        with pytest.raises(DataError, match="Run visavis index to create it"):
            open_store(uri)
        assert not uri.exists()
    (tmp_path / "text").write_text("")
    with pytest.raises(DataError, match="got a file"):
        open_store(tmp_path / "text", DIM)
    for wrong in ("", "ftp://host/x", "s3://bucket/x", "http://host/a/b", "gopher:///"):
        with pytest.raises(DataError, match=r"store: expected a folder, FILE\.db or http"):
            open_store(wrong, DIM)


@pytest.mark.slow
def test_open_store_reports_unreachable_server():
    with pytest.raises(
        StorageError, match=r"^http://127\.0\.0\.1:9: the Milvus store cannot be used: .*\.$"
    ):
        open_store("http://127.0.0.1:9", DIM)


WRITER = """
import sys
from threading import Thread
import numpy as np
from visavis.retrieval.items import IndexItem
from visavis.retrieval.stores.catalog import open_store

def write(name):
    store = open_store(f"{sys.argv[1]}/{name}", 4)
    for change in range(100_000):
        print(f"{name} {change}\\n", end="", flush=True)
        store.add([IndexItem(f"{i:03d}", f"{i:03d}", "image", str(change), 0, 0) for i in range(100)], np.full((100, 4), change, np.float32))

threads = [Thread(target=write, args=(name,)) for name in sys.argv[2:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])
def test_store_changes_are_atomic_when_killed(tmp_path, rounds):
    names, moments = ["folder", "file.db"], random.Random(rounds)
    for _ in range(rounds):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path, *names], stdout=subprocess.PIPE, text=True
        ) as writer:
            started = dict.fromkeys(names, -1)
            while min(started.values()) < 2:
                name, change = writer.stdout.readline().split()
                started[name] = int(change)
            time.sleep(moments.random() * 0.1)
            writer.kill()
            started |= {
                name: int(change)
                for name, change in map(str.split, writer.stdout.read().splitlines())
            }
        for name, change in started.items():
            with closing(open_store(tmp_path / name)) as opened:
                items = opened.table().items()
                assert len(items) == opened.count() == 100
                assert {item.content for item in items} in ({str(change - 1)}, {str(change)})
                assert (opened.vectors([item.key for item in items]) == int(items[0].content)).all()
                assert [near.key for near in opened.search(np.ones((1, 4)), 3)[0]] == [
                    "000",
                    "001",
                    "002",
                ]
