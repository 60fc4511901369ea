"""Reports about vector stores: updates that cost as much as a new index, damage after a killed
process, slow opening.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from visavis.retrieval.items import IndexItem
from visavis.retrieval.stores import sqlite_store, vector_array
from visavis.retrieval.stores.catalog import open_store

DIM, ID, COUNT = 4, "ab", 30


def make_item(number: int, content: str = "first") -> IndexItem:
    return IndexItem(f"{number:03d}", f"{number:03d}", "image", content, 0, 0, dhash="0")


def make_vectors(count: int) -> np.ndarray:
    rows = np.random.default_rng(count).standard_normal((count, DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of thirty items."""
    with closing(open_store(tmp_path, DIM, index_id=ID)) as store:
        store.add([make_item(number) for number in range(COUNT)], make_vectors(COUNT))
        assert store.count() == COUNT
    return tmp_path


@pytest.mark.report(
    "topoteretes/cognee#4684", "each update leaves a fragment, and nothing merges them"
)
def test_array_is_written_again_by_updates_of_many_processes(folder, monkeypatch):
    monkeypatch.setattr(sqlite_store, "MIN_REMOVED_ROWS", 4)
    for number in range(40):
        # A store that is opened once per change is what many short processes do.
        with closing(open_store(folder, DIM, index_id=ID)) as store:
            store.add([make_item(number % 9, "second")], make_vectors(1))
        [file] = (folder / "vectors").iterdir()
        assert len(np.load(file)) <= COUNT * 3 / 2 + 1
    with closing(open_store(folder, index_id=ID)) as store:
        assert [item.content for item in store.table().items()] == ["second"] * 9 + ["first"] * (
            COUNT - 9
        )


@pytest.mark.report("TechyNilesh/DeepImageSearch#14", "a new image builds the whole index again")
def test_new_item_writes_one_row(folder):
    [file] = (folder / "vectors").iterdir()
    before = file.stat()
    with closing(open_store(folder, DIM, index_id=ID)) as store:
        store.add([make_item(COUNT)], make_vectors(1))
        assert store.count() == COUNT + 1
    assert list((folder / "vectors").iterdir()) == [file]
    assert file.stat().st_size == before.st_size + 4 * DIM


@pytest.mark.report("lancedb/lancedb#3177", "rows are not updated after the table was compacted")
def test_items_are_replaced_after_array_is_written_again(folder):
    with closing(open_store(folder, DIM, index_id=ID)) as store:
        for content in ("second", "third"):
            with store.database.change():
                store.rewrite()
            store.add([make_item(number, content) for number in range(COUNT)], make_vectors(COUNT))
            assert {item.content for item in store.table().items()} == {content}
            assert store.count() == COUNT


@pytest.mark.report("duckdb/duckdb#6090", "opening computes the checksum of the whole file")
def test_opening_hashes_no_unchanged_file(folder, monkeypatch):
    hashed = list[Path]()
    content_hash = vector_array.VectorArray.content_hash
    monkeypatch.setattr(
        vector_array.VectorArray,
        "content_hash",
        lambda self, *rows: hashed.append(self.path) or content_hash(self, *rows),
    )
    with closing(open_store(folder, index_id=ID)) as store:
        assert len(store.search(make_vectors(1), 3)[0]) == 3
    assert not hashed


@pytest.mark.report("chroma-core/chroma#674", "an interrupted program leaves no index")
def test_interrupted_change_loses_no_item(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with closing(open_store(folder, DIM, index_id=ID)) as store, monkeypatch.context() as patch:
        patch.setattr(sqlite_store.ItemTable, "insert", interrupt)
        with suppress(KeyboardInterrupt):
            store.add([make_item(0, "second")], make_vectors(1))
        assert store.count() == COUNT
    with closing(open_store(folder, index_id=ID)) as store:
        assert [(item.key, item.content) for item in store.table().items()] == [
            (make_item(number).key, "first") for number in range(COUNT)
        ]


@pytest.mark.report("acrotron/aye-chat#203", "a damaged index is not repaired")
def test_damaged_vectors_are_repaired(folder, caplog):
    [file] = (folder / "vectors").iterdir()
    with closing(open_store(folder, index_id=ID)) as store:
        expected = store.search(make_vectors(2), COUNT)
    content = bytearray(file.read_bytes())
    content[128 + 3 * 4 * DIM] ^= 1
    file.write_bytes(content)
    with closing(open_store(folder, index_id=ID, repairs=True)) as store:
        assert store.count() == COUNT - 1
        store.add([make_item(3)], make_vectors(COUNT)[3:4])
        assert store.search(make_vectors(2), COUNT) == expected
    assert ["1 of 30 items are damaged" in message for message in caplog.messages] == [True]
