"""The store of an index: every change equals a store that was written at once, a kill at any write
leaves the state before or after, and damage is found.
"""

from __future__ import annotations

import heapq
import os
import random
import shutil
import sqlite3
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.platforms import changes_open_files

from visavis.core.errors import DataError, RefusedOverwrite, StorageError
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores import sqlite_store, vector_array
from visavis.retrieval.stores.base import MaxSimQuery, VectorSets, VectorStore
from visavis.retrieval.stores.index_database import FORMAT
from visavis.retrieval.stores.item_table import ItemTable
from visavis.retrieval.stores.sqlite_store import SqliteStore

DIM, ID = 4, "ab"


def make_item(number: int, content: int = 0) -> IndexItem:
    path = f"{number % 7}/{number:03d}.png"
    return IndexItem(
        path,
        path,
        "image",
        f"{content}",
        number,
        10**18 + content,
        dhash="0",
        metadata={"n": str(number % 3)},
    )


def make_vectors(
    generator: np.random.Generator, count: int, late: str | None
) -> np.ndarray | VectorSets:
    """Vectors with few distinct values, so that many scores are equal."""
    if late is None:
        return (generator.integers(-1, 2, (count, DIM)) / 4).astype(np.float32)
    return VectorSets.from_arrays(
        [generator.integers(-1, 2, (generator.integers(1, 4), DIM)) / 4 for _ in range(count)]
    )


def everything(store: VectorStore, late: str | None = None) -> list[object]:
    """All that a store returns."""
    queries = (
        np.eye(DIM, dtype=np.float32)[:2]
        if late is None
        else [MaxSimQuery.from_vectors((1.0, np.eye(DIM, dtype=np.float32)))]
    )
    filters = [
        NO_FILTER,
        ItemFilter(path="3/*"),
        ItemFilter(metadata={"n": "1"}),
        ItemFilter(path="none"),
    ]
    items, keys = store.table().items(), store.table().keys()
    assert [item.key for item in items] == keys == sorted(keys)
    assert store.get([*keys, "none"]) == {item.key: item for item in items}
    mixed, vectors = (
        random.Random(len(keys)).sample(keys, len(keys)),
        [vector.tolist() for vector in store.all_vectors()],
    )
    by_key = dict(zip(keys, vectors, strict=True))
    for each in (mixed, mixed[:3]):
        assert [vector.tolist() for vector in store.vectors(each)] == [by_key[key] for key in each]
    searches = [
        store.search(queries, top, where)
        for top, where in [(5, NO_FILTER), *((1000, where) for where in filters)]
    ]
    return [items, vectors, searches, [store.count(where) for where in filters], store.digest()]


@pytest.mark.parametrize("late", [None, "both"])
def test_store_of_many_changes_equals_one_change(tmp_path, monkeypatch, late):
    # Small numbers, so that the array is written again and codes are renewed within 40 changes.
    monkeypatch.setattr(sqlite_store, "MIN_REMOVED_ROWS", 8)
    generator = np.random.default_rng(40)
    options = {"index_id": ID, "late_interaction": late}
    expected: dict[str, tuple[IndexItem, np.ndarray]] = {}
    with closing(SqliteStore(tmp_path / "store", DIM, **options)) as store:
        parts = set()
        for step in range(40):
            count = 60 if step == 0 else int(generator.integers(1, 8))
            numbers = (
                range(60) if step == 0 else generator.choice(80, count, replace=False).tolist()
            )
            if step % 3 == 2:
                store.delete([make_item(number).key for number in numbers])
                for number in numbers:
                    expected.pop(make_item(number).key, None)
            else:
                # The content may have occurred in an earlier step, so that a removed item comes back.
                items = [make_item(number, step % 2) for number in numbers]
                vectors = make_vectors(np.random.default_rng(step), count, late)
                store.add(items, vectors)
                expected |= {
                    item.key: (item, vector) for item, vector in zip(items, vectors, strict=True)
                }
            if step % 5 == 4:
                store.prepare_search()
            parts |= {path.name for path in (tmp_path / "store" / "vectors").iterdir()}
            with closing(SqliteStore(tmp_path / f"plain {step}", DIM, **options)) as plain:
                items = [item for item, _ in expected.values()]
                vectors = [vector for _, vector in expected.values()]
                plain.add(
                    items, np.array(vectors) if late is None else VectorSets.from_arrays(vectors)
                )
                assert everything(store, late) == everything(plain, late), step
        assert len(parts) > 1, "the array was written again"
    with closing(SqliteStore(tmp_path / "store", **options)) as reader:
        assert everything(reader, late)[0] == [expected[key][0] for key in sorted(expected)]


def test_codes_cover_most_rows_and_keep_results(tmp_path):
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((9000, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    items = [replace(make_item(0), key=f"{row:05d}", path=f"{row:05d}") for row in range(9000)]
    queries = vectors[generator.integers(9000, size=3)] + 0.1 * vectors[:3]
    with closing(SqliteStore(tmp_path, 64, index_id=ID)) as store:
        store.add(items[:8000], vectors[:8000])
        before = store.search(queries, 20)
        store.prepare_search()
        assert store.search(queries, 20) == before
        store.add(items[8000:], vectors[8000:])
        [folder] = (tmp_path / "vectors").glob("*.coarse-*")
        found = store.search(queries, 20)
        store.prepare_search()
        assert folder.exists(), "few rows are without codes"
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :20]
    assert [[near.key for near in own] for own in found] == [
        [f"{row:05d}" for row in own] for own in best.tolist()
    ]
    for file in folder.iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with closing(SqliteStore(tmp_path, index_id=ID)) as store:
        assert store.search(queries, 20) == found, "damaged codes are not used"


def test_change_of_one_item_appends_one_vector(tmp_path):
    vectors = make_vectors(np.random.default_rng(0), 500, None)
    with closing(SqliteStore(tmp_path, DIM, index_id=ID)) as store:
        store.add([make_item(number) for number in range(500)], vectors)
        file = tmp_path / "vectors" / "1.npy"
        before = file.read_bytes()
        store.add([make_item(7, 1)], vectors[:1])
        after = file.read_bytes()
        assert after[128 : len(before)] == before[128:]
        assert len(after) == len(before) + 4 * DIM
        assert np.load(file).shape == (501, DIM), "other programs can read it"
        assert len(list((tmp_path / "vectors").iterdir())) == 1


def test_reader_sees_one_version_while_another_process_writes(tmp_path):
    def add(content: int) -> None:
        store.add(
            [make_item(number, content) for number in range(50)],
            np.full((50, DIM), content, np.float32),
        )

    with closing(SqliteStore(tmp_path, DIM, index_id=ID)) as store:
        add(1)
        seen = list[set[float]]()

        def read() -> None:
            with closing(SqliteStore(tmp_path, index_id=ID)) as reader:
                for _ in range(60):
                    seen.append({near.score for near in reader.search(np.eye(DIM)[:1], 50)[0]})

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for content in range(2, 20):
            add(content)
        for reader in readers:
            reader.join()
    assert len(seen) == 180
    assert all(len(scores) == 1 for scores in seen)


@changes_open_files
def test_reader_follows_rewritten_array(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_store, "MIN_REMOVED_ROWS", 1)
    vectors = make_vectors(np.random.default_rng(0), 9, None)
    items = [make_item(number) for number in range(9)]
    with closing(SqliteStore(tmp_path, DIM)) as store, closing(SqliteStore(tmp_path)) as reader:
        store.add(items, vectors)
        everything(reader)
        store.delete([item.key for item in items[:5]])
        assert [path.name for path in (tmp_path / "vectors").iterdir()] == ["2.npy"]
        assert everything(reader) == everything(store)


@pytest.fixture
def stored(tmp_path):
    """A store of two changes, and what it returns."""
    vectors = make_vectors(np.random.default_rng(0), 50, None)
    with closing(SqliteStore(tmp_path / "store", DIM, index_id=ID)) as store:
        store.add([make_item(number) for number in range(50)], vectors)
        store.add([make_item(7, 1)], vectors[:1])
        expected = everything(store)
    return tmp_path / "store", expected


def reopened(folder: Path, **options: bool) -> list[object]:
    with closing(SqliteStore(folder, index_id=ID, **options)) as store:
        return everything(store)


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that are hashed."""
    names = list[str]()
    content_hash = vector_array.VectorArray.content_hash
    monkeypatch.setattr(
        vector_array.VectorArray,
        "content_hash",
        lambda self, *rows: names.append(self.path.name) or content_hash(self, *rows),
    )
    return names


def test_files_are_verified_by_size_and_time(stored, tmp_path, hashed):
    folder, expected = stored
    assert reopened(folder) == expected
    assert not hashed, "the files are unchanged"
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    for is_first in (True, False):
        assert reopened(tmp_path / "copy") == expected
        assert bool(hashed) == is_first, "the times of a copy are recorded once"
        hashed.clear()


def test_rest_of_a_killed_append_is_not_read(stored, hashed):
    folder, expected = stored
    with open(folder / "vectors" / "1.npy", "ab") as file:
        file.write(b"\xff" * 100)
    assert reopened(folder) == expected
    assert hashed
    with closing(SqliteStore(folder, DIM, index_id=ID)) as store:
        store.add([make_item(60)], make_vectors(np.random.default_rng(1), 1, None))
        assert store.count() == 51
        store.verify()


@pytest.mark.parametrize("lost", [False, True])
def test_damaged_vectors_are_refused_and_repaired(stored, caplog, lost):
    folder, expected = stored
    file = folder / "vectors" / "1.npy"
    content = bytearray(file.read_bytes())
    # The vector of the fourth item.
    content[128 + 3 * 4 * DIM] ^= 1
    if lost:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(StorageError, match=r"1\.npy: .*run visavis index again"):
        reopened(folder)
    assert not caplog.messages
    items, vectors = expected[0], expected[1]
    keys = [item.key for item in items]
    left = reopened(folder, repairs=True)
    removed = set(keys) - {item.key for item in left[0]}
    assert removed == (set(keys) if lost else {make_item(3).key})
    assert f"{len(removed)} of 50 items are damaged" in caplog.messages[0]
    with closing(SqliteStore(folder, DIM, index_id=ID)) as store:
        again = [keys.index(key) for key in removed]
        store.add(
            [items[row] for row in again], np.array([vectors[row] for row in again], np.float32)
        )
        assert everything(store) == expected


def test_verify_finds_damage_that_keeps_size_and_time(stored):
    folder, expected = stored
    file = folder / "vectors" / "1.npy"
    status, content = os.stat(file), bytearray(file.read_bytes())
    content[128 + 3 * 4 * DIM] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with closing(SqliteStore(folder, index_id=ID)) as store:
        assert store.count() == 50, "the damage is not visible"
        with pytest.raises(StorageError, match="checksum mismatch"):
            store.verify()
    with pytest.raises(StorageError, match="is damaged or belongs to another index"):
        reopened(folder)
    assert expected


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE items SET content = 'x' WHERE row = 3",
        "UPDATE items SET tags = '[]' WHERE row = 3",
        "DELETE FROM items WHERE row = 3",
        "DELETE FROM removed_rows",
        "UPDATE state SET value = '{}'",
    ],
)
def test_changed_database_is_refused(stored, change):
    folder, _ = stored
    with closing(sqlite3.connect(folder / "index.db")) as database, database:
        database.execute(change)
    with pytest.raises(StorageError, match=r"Run|run visavis index again"):
        reopened(folder)


def test_items_of_another_index_are_refused(stored):
    folder, _ = stored
    with pytest.raises(StorageError, match="the store belongs to another index"):
        SqliteStore(folder, index_id="cd")


def test_database_of_another_version_is_refused(stored, tmp_path):
    folder, _ = stored
    with closing(sqlite3.connect(folder / "index.db")) as database, database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(DataError, match=rf"expected an index of format {FORMAT}, got format 99\."):
        reopened(folder)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "index.db").write_text("not a database" * 100)
    with pytest.raises(StorageError, match="file is not a database"):
        reopened(tmp_path / "text")


def test_files_of_others_are_neither_removed_nor_overwritten(tmp_path, stored):
    (tmp_path / "mine" / "vectors").mkdir(parents=True)
    (tmp_path / "mine" / "vectors" / "1.npy").write_text("dear")
    with pytest.raises(RefusedOverwrite, match="expected no files before the first item"):
        SqliteStore(tmp_path / "mine", DIM)
    folder, expected = stored
    (folder / "vectors" / "notes").mkdir()
    (folder / "vectors" / "letter.npy").write_text("dear")
    with closing(SqliteStore(folder, DIM, index_id=ID)) as store:
        store.add([make_item(7, 1)], make_vectors(np.random.default_rng(0), 1, None))
        store.prepare_search()
        assert everything(store)[0] == expected[0]
    names = {path.name for path in (folder / "vectors").iterdir()}
    assert names == {"1.npy", "notes", "letter.npy"}


def test_change_next_to_damage_does_not_hide_it(stored):
    folder, _ = stored
    with closing(SqliteStore(folder, DIM, index_id=ID)) as store:
        everything(store)
        file = folder / "vectors" / "1.npy"
        content = bytearray(file.read_bytes())
        content[128] ^= 1
        file.write_bytes(content)
        store._intact_rows.clear()
        with pytest.raises(StorageError, match="checksum mismatch"):
            store.add([make_item(90)], make_vectors(np.random.default_rng(1), 1, None))
    with pytest.raises(StorageError, match="checksum mismatch"):
        reopened(folder)


def test_interrupted_begin_leaves_no_open_change(stored):
    folder, _ = stored
    with closing(SqliteStore(folder, DIM, index_id=ID)) as store:
        connection = store.database.connection

        class Interrupted(_Stopping):
            def execute(self, statement, *values):
                result = self._connection.execute(statement, *values)
                if statement == "BEGIN IMMEDIATE":
                    raise KeyboardInterrupt
                return result

        store.database.connection = Interrupted(connection, lambda: None)
        with pytest.raises(KeyboardInterrupt):
            store.delete([make_item(3).key])
        store.database.connection = connection
        store.delete([make_item(4).key])
    assert make_item(4).key not in [item.key for item in reopened(folder)[0]]


def test_damaged_codes_are_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_store, "is_int8_faster", lambda *_: True)
    vectors = make_vectors(np.random.default_rng(0), 50, None)
    with closing(SqliteStore(tmp_path, DIM, index_id=ID)) as store:
        store.add([make_item(number) for number in range(50)], vectors)
        store.prepare_search()
        expected = everything(store)
    [folder] = (tmp_path / "vectors").glob("*.coarse-*")
    (folder / "codes.npy").unlink()
    with closing(SqliteStore(tmp_path, DIM, index_id=ID)) as store:
        store.prepare_search()
        assert store._has_coarse is False
        assert everything(store) == expected
        assert store._has_coarse
    assert folder not in (tmp_path / "vectors").glob("*.coarse-*")


class KillError(BaseException):
    """Ends an update as a killed process ends: nothing is cleaned up."""


@pytest.mark.parametrize("rewrites", [False, True])
def test_store_survives_kill_at_any_write(stored, monkeypatch, rewrites):
    folder, old = stored
    shutil.copytree(folder, folder.parent / "intact")
    vectors = make_vectors(np.random.default_rng(2), 40, None)
    monkeypatch.setattr(sqlite_store, "MIN_REMOVED_ROWS", 1 if rewrites else 100)
    fsync, results = os.fsync, list[object]()
    for moment in range(80):
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / "intact", folder)
        left = iter(range(moment))

        def stop(*_, left=left):
            if next(left, None) is None:
                raise KillError

        def write(descriptor, stop=stop):
            stop()
            fsync(descriptor)

        is_done = False
        with monkeypatch.context() as patch:
            store = SqliteStore(folder, DIM, index_id=ID)
            patch.setattr(os, "fsync", write)
            store.database.connection = _Stopping(store.database.connection, stop)
            with suppress(KillError):
                store.add([make_item(number, 2) for number in range(40)], vectors)
                is_done = True
            store.database.connection.close()
        results.append(reopened(folder))
        if is_done:
            break
    assert is_done
    assert len(results) > 10
    new = results[-1]
    assert new != old
    assert [found in (old, new) for found in results] == [True] * len(results)
    assert sum(found == old for found in results) > 5


class _Stopping:
    """A connection that calls a function before each statement."""

    def __init__(self, connection, stop):
        self._connection = connection
        self._stop = stop

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, statement, *values):
        # The next process would undo the change in the same way.
        if statement != "ROLLBACK":
            self._stop()
        return self._connection.execute(statement, *values)

    def executemany(self, *arguments):
        self._stop()
        return self._connection.executemany(*arguments)


@given(
    st.lists(st.integers(0, 5), max_size=30),
    st.integers(1, 40),
    st.sampled_from(["*", "*3*", "none"]),
)
def test_newest_items_equal_sorted_items(times, count, path):
    items = sorted(
        # Times are sorted by microseconds.
        (replace(make_item(number), modified_ns=1000 * time) for number, time in enumerate(times)),
        key=lambda item: item.key,
    )
    table = ItemTable.in_memory([item.to_row() | {"checksum": 0} for item in items])
    where = ItemFilter(path=path)
    newest = heapq.nlargest(
        count, filter(where.matches, items), key=lambda item: (item.modified_ns, item.key)
    )
    assert table.newest(count, where) == newest
    assert table.items() == items


def test_damaged_table_is_one_error_in_each_reader(stored):
    """Errors of SQLite in the items are a StorageError, also outside of a search."""
    folder, _ = stored
    with closing(SqliteStore(folder, DIM, index_id=ID)) as store:
        table = store.table()
        store.database.connection.execute("ALTER TABLE items RENAME TO lost")
        for read in (
            table.keys,
            table.items,
            table.contents,
            table.undated,
            lambda: list(table.detailed_files()),
            lambda: table.plain_states("", None),
            lambda: table.newest(3, NO_FILTER),
            lambda: table.count(NO_FILTER),
            lambda: table.facets(max_folders=1, max_values=1, hidden=()),
        ):
            with pytest.raises(StorageError, match="the index cannot be read or written"):
                read()
        assert not store.database.connection.in_transaction
        store.database.connection.execute("ALTER TABLE lost RENAME TO items")


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * 5])
def test_texts_that_no_item_has_find_nothing(stored, text):
    folder, _ = stored
    with closing(SqliteStore(folder, index_id=ID)) as store:
        for where in (ItemFilter(path=text), ItemFilter(metadata={text: "1"})):
            assert store.count(where) == 0
            assert store.search(np.eye(DIM)[:1], 3, where) == [[]]
        assert store.get([text]) == {}
