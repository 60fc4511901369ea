"""What every store promises, on the real engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visavis.errors import DataError, ShapeError, SpecError, StorageError
from visavis.retrieval.item import EVERYTHING, Item, Where
from visavis.retrieval.store import Near, VectorStore

pytest.importorskip("lancedb")
pytest.importorskip("pymilvus")
from visavis.retrieval.lance import LanceStore
from visavis.retrieval.milvus import MilvusStore
from visavis.retrieval.stores import open_store

WIDTH = 6
ODD = ["it's", 'say "cheese"', "a\\b", "50%_off", "dé à/東京 🐕.jpg", "x'; DROP TABLE items; --", "[a]*?", "line\nbreak", " "]


def open_again(engine: str, folder: Path) -> VectorStore:
    if engine == "milvus":
        return MilvusStore(folder / "store.db", width=WIDTH)
    return LanceStore(folder / "store", WIDTH)


@pytest.fixture(params=["lance", "milvus"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def store(engine: str, tmp_path: Path) -> Iterator[VectorStore]:
    opened = open_again(engine, tmp_path)
    yield opened
    opened.close()


def some_items(generator: np.random.Generator, number: int, name: str = "") -> list[Item]:
    """Items of all kinds, with odd texts in them."""
    kinds = ("image", "video", "moment")
    made = []
    for row in range(number):
        path = f"{name}{ODD[row % len(ODD)]}/{row:03d}.jpg"
        kind = kinds[generator.integers(3)]
        start, end = (0.5 * row, row + 1.0) if kind == "moment" else (None, None)
        metadata = {"camera": ODD[generator.integers(len(ODD))], "f=": str(generator.integers(3))}
        key = f"{path}#t={start},{end}" if kind == "moment" else path
        modified = 1_700_000_000_000_000_000 + int(generator.integers(100))
        made.append(Item(key, path, kind, f"{row:064x}", row * 2**33, modified, start, end, f"{row:064x}", metadata if row % 3 else {}))
    return made


def some_vectors(generator: np.random.Generator, number: int) -> np.ndarray:
    """Vectors of few values, so that many scores are equal."""
    return (generator.integers(-1, 2, (number, WIDTH)) / 4).astype(np.float32)


def found_by_numpy(items: list[Item], vectors: np.ndarray, queries: np.ndarray, top: int, where: Where = EVERYTHING) -> list[list[Near]]:
    """What a search must find."""
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    allowed = [row for row, item in enumerate(items) if where.allows(item)]
    return [
        [Near(items[row].key, own[row]) for row in sorted(allowed, key=lambda row: (-own[row], items[row].key))[:top]] for own in scores
    ]


def test_a_new_store_is_empty(store):
    assert store.items() == []
    assert store.count() == store.count(Where(kind="image")) == 0
    assert store.search(np.ones((2, WIDTH)), 3) == [[], []]
    assert store.search(np.ones((0, WIDTH)), 3) == []
    store.delete(["none"])
    store.add([], np.zeros((0, WIDTH)))
    assert store.vectors([]).shape == (0, WIDTH)
    with pytest.raises(KeyError, match="none"):
        store.vectors(["none"])


def test_what_was_put_in_is_there_also_when_opened_again(store, engine, tmp_path):
    generator = np.random.default_rng(1)
    items, vectors = some_items(generator, 40), some_vectors(generator, 40)
    store.add(items[:25], vectors[:25])
    store.add(items[25:], vectors[25:])
    for opened in (store, open_again(engine, tmp_path)):
        assert opened.items() == sorted(items, key=lambda item: item.key)
        assert opened.count() == 40
        np.testing.assert_array_equal(opened.vectors([item.key for item in items]), vectors)
        assert opened.vectors(["a"] and [items[3].key]).dtype == np.float32
    opened.close()


def test_search_finds_what_numpy_finds(store):
    generator = np.random.default_rng(2)
    items, vectors, queries = some_items(generator, 60), some_vectors(generator, 60), some_vectors(generator, 4)
    store.add(items, vectors)
    for top in (1, 7, 60, 100):
        assert store.search(queries, top) == found_by_numpy(items, vectors, queries, top)


texts = st.text(st.sampled_from("ab/*?_%\\'\"[東.\n"), max_size=6)
bounds = st.none() | st.integers(1_700_000_000_000_000_000, 1_700_000_000_000_000_100) | st.sampled_from([-(10**30), 10**30])


def test_filters_allow_what_where_allows(store):
    generator = np.random.default_rng(3)
    items, vectors, queries = some_items(generator, 60), some_vectors(generator, 60), some_vectors(generator, 2)
    paths = ["ab/a", "a*b", "ab?", "a_b", "a%b", "a\\b", "a'b", 'a"b', "a[b", "東b", "a.b", "a\nb", "axb", "aB", ""]
    items += [dataclasses.replace(items[0], key=f"p{path}", path=path) for path in paths]
    vectors = np.concatenate([vectors, some_vectors(generator, len(paths))])
    store.add(items, vectors)
    values = st.sampled_from(ODD)

    @settings(max_examples=40)
    @given(
        st.builds(
            Where,
            path=texts | values | st.sampled_from(["*.jpg", "*/0?1.jpg", "*東京*", "*'*", "a?b", "*\\*", "*%_*"]),
            kind=st.sampled_from([None, "image", "video", "moment"]),
            after=bounds,
            before=bounds,
            metadata=st.just({}) | st.fixed_dictionaries({"camera": values}, optional={"f=": st.sampled_from("0123"), "none": values}),
        )
    )
    def check(where: Where) -> None:
        assert store.count(where) == sum(map(where.allows, items))
        assert store.search(queries, 5, where) == found_by_numpy(items, vectors, queries, 5, where)

    check()


def test_what_has_the_key_of_another_takes_its_place(store):
    generator = np.random.default_rng(4)
    items, vectors = some_items(generator, 30), some_vectors(generator, 30)
    store.add(items, vectors)
    later = [dataclasses.replace(item, content="new", modified_ns=1, metadata={"now": "true"}) for item in items[:10]]
    others = some_vectors(generator, 20)
    store.add([*later, *later], np.concatenate([others[10:], others[:10]]))  # of a key given twice the last
    items, vectors = later + items[10:], np.concatenate([others[:10], vectors[10:]])
    assert store.items() == sorted(items, key=lambda item: item.key)
    assert store.search(others, 30) == found_by_numpy(items, vectors, others, 30)


def test_what_was_taken_out_is_found_no_more(store):
    generator = np.random.default_rng(5)
    items, vectors = some_items(generator, 30), some_vectors(generator, 30)
    store.add(items, vectors)
    store.search(vectors[:1], 1)
    store.delete([item.key for item in items[::2]] + ["none", "it's none"])
    assert store.count() == 15
    assert store.search(vectors, 30) == found_by_numpy(items[1::2], vectors[1::2], vectors, 30)
    store.delete([item.key for item in items])
    assert store.items() == []
    store.add(items[:1], vectors[:1])
    assert store.items() == items[:1]


def test_what_does_not_fit_is_said(store):
    item = Item("a", "a", "image", "", 0, 0)
    with pytest.raises(ShapeError, match=rf"1 items came with vectors of shape \[1, 3\], expected \[1, {WIDTH}\]"):
        store.add([item], np.zeros((1, 3)))
    with pytest.raises(ShapeError, match="not finite"):
        store.add([item], np.full((1, WIDTH), np.inf))
    with pytest.raises(ShapeError, match=rf"queries are of shape \[1, 3\], expected \[Q, {WIDTH}\]"):
        store.search(np.zeros((1, 3)), 1)
    with pytest.raises(SpecError, match="top is 0"):
        store.search(np.zeros((1, WIDTH)), 0)
    assert store.count() == 0


def test_a_uri_says_which_store_it_is(tmp_path):
    for uri, kind in ((tmp_path / "folder", LanceStore), (tmp_path / "file.db", MilvusStore)):
        with closing(open_store(uri, WIDTH)) as opened:
            assert isinstance(opened, kind)
        with closing(open_store(uri)) as opened:
            assert opened.width == WIDTH
        with pytest.raises(ShapeError, match=f"holds vectors of width {WIDTH}, expected 7"):
            open_store(uri, 7)
    for uri in (tmp_path / "none", tmp_path / "none.db"):
        with pytest.raises(DataError, match="build an index there first"):
            open_store(uri)
        assert not uri.exists()
    (tmp_path / "text").write_text("")
    with pytest.raises(DataError, match="is a file"):
        open_store(tmp_path / "text", WIDTH)
    for wrong in ("", "ftp://host/x", "s3://", "http://host/a/b", "gopher:///"):
        with pytest.raises(DataError, match=r"names no store: expected a folder, s3://BUCKET/PATH, FILE\.db or http"):
            open_store(wrong, WIDTH)


def test_a_server_that_does_not_answer_is_said():
    with pytest.raises(StorageError, match=r"^http://127\.0\.0\.1:9 cannot be used as a store of Milvus: .*\.$"):
        open_store("http://127.0.0.1:9", WIDTH)
