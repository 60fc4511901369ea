"""Reports about vector stores: updates that cost as much as a new index, damage after a killed
process, slow opening.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from visavis.core import storage
from visavis.retrieval.items import IndexItem
from visavis.retrieval.stores.arrow_tables import items_from_table

pytest.importorskip("lancedb")
from visavis.retrieval.stores import lancedb_store, table_snapshot
from visavis.retrieval.stores.catalog import open_store

DIM, ID, COUNT = 4, "ab", 30


def make_item(number: int, content: str = "first") -> IndexItem:
    return IndexItem(f"{number:03d}", f"{number:03d}", "image", content, 0, 0, dhash="0")


def make_vectors(count: int) -> np.ndarray:
    rows = np.random.default_rng(count).standard_normal((count, DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of thirty items."""
    monkeypatch.setattr(lancedb_store, "MIN_PART_ROWS", 1)
    with closing(open_store(tmp_path, DIM, index_id=ID)) as store:
        store.add([make_item(number) for number in range(COUNT)], make_vectors(COUNT))
        assert store.count() == COUNT
    return tmp_path


@pytest.mark.report(
    "topoteretes/cognee#4684", "each update leaves a fragment, and nothing merges them"
)
def test_table_is_compacted_by_updates_of_many_processes(folder, monkeypatch):
    monkeypatch.setattr(lancedb_store, "COMPACT_EVERY", 4)
    for number in range(9):
        # A store that is opened once per change is what many short processes do.
        with closing(open_store(folder, DIM, index_id=ID)) as store:
            store.add([make_item(number, "second")], make_vectors(1))
            assert store._table.stats()["fragment_stats"]["num_fragments"] <= 4
    with closing(open_store(folder, index_id=ID)) as store:
        assert [item.content for item in items_from_table(store.table())] == ["second"] * 9 + [
            "first"
        ] * (COUNT - 9)


@pytest.mark.report("TechyNilesh/DeepImageSearch#14", "a new image builds the whole index again")
def test_new_item_writes_one_row(folder):
    [first] = (folder / "snapshot").iterdir()
    files = {path: path.stat() for path in first.iterdir()}
    with closing(open_store(folder, DIM, index_id=ID)) as store:
        store.add([make_item(COUNT)], make_vectors(1))
        assert store.count() == COUNT + 1
        assert [len(part.table) for part in store.snapshot().parts] == [COUNT, 1]
    assert {path: path.stat() for path in files} == files


@pytest.mark.report("lancedb/lancedb#3177", "rows are not updated after the table was compacted")
def test_items_are_replaced_after_compaction(folder):
    with closing(open_store(folder, DIM, index_id=ID)) as store:
        for content in ("second", "third"):
            store.optimize()
            store.add([make_item(number, content) for number in range(COUNT)], make_vectors(COUNT))
            assert {item.content for item in items_from_table(store.table())} == {content}
            assert store.count() == COUNT


@pytest.mark.report("duckdb/duckdb#6090", "opening computes the checksum of the whole file")
def test_opening_hashes_no_unchanged_file(folder, monkeypatch):
    hashed = list[Path]()
    content_hash = storage.content_hash
    monkeypatch.setattr(
        table_snapshot.storage,
        "content_hash",
        lambda path: hashed.append(path) or content_hash(path),
    )
    with closing(open_store(folder, index_id=ID)) as store:
        assert len(store.search(make_vectors(1), 3)[0]) == 3
    assert not hashed


@pytest.mark.report("chroma-core/chroma#674", "an interrupted program leaves no index")
def test_interrupted_snapshot_loses_no_item(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with closing(open_store(folder, DIM, index_id=ID)) as store, monkeypatch.context() as patch:
        store.add([make_item(COUNT)], make_vectors(1))
        patch.setattr(lancedb_store.LanceStore, "_write_part", interrupt)
        with suppress(KeyboardInterrupt):
            store.count()
    with closing(open_store(folder, index_id=ID)) as store:
        assert [item.key for item in items_from_table(store.table())] == [
            make_item(number).key for number in range(COUNT + 1)
        ]


@pytest.mark.report("acrotron/aye-chat#203", "a damaged index is not repaired")
def test_damaged_vectors_are_repaired(folder, caplog):
    [part] = (folder / "snapshot").iterdir()
    with closing(open_store(folder, index_id=ID)) as store:
        expected = store.search(make_vectors(2), COUNT)
    (part / "vectors.npy").write_bytes((part / "vectors.npy").read_bytes()[:-1])
    with closing(open_store(folder, index_id=ID)) as store:
        assert store.search(make_vectors(2), COUNT) == expected
    assert ["is damaged and is computed again" in message for message in caplog.messages] == [True]
