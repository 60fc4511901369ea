"""Snapshots of parts: a change writes only the changed items, and every search equals that of a
snapshot in one part.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import shutil
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visavis.core import storage
from visavis.core.errors import MissingExtra, StorageError
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.stores.base import MaxSimQuery, VectorSets, VectorStore

pytest.importorskip("lancedb")
import pyarrow as pa

from visavis.retrieval.stores import lancedb_store, table_snapshot
from visavis.retrieval.stores.arrow_tables import find_keys, items_from_table, newest_rows
from visavis.retrieval.stores.catalog import open_store

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


def everything(store: VectorStore, late: str | None) -> list[object]:
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
    items, keys = items_from_table(store.table()), store.table()["key"].to_pylist()
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
@pytest.mark.parametrize("steps", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_snapshot_of_parts_equals_single_part(tmp_path, monkeypatch, late, steps):
    monkeypatch.setattr(lancedb_store, "MIN_PART_ROWS", 1)
    generator, most_parts = np.random.default_rng(steps), 0
    options = {"index_id": ID, "late_interaction": late}
    with (
        closing(open_store(tmp_path / "store", DIM, **options)) as store,
        closing(open_store(tmp_path / "plain", DIM, **options)) as plain,
    ):
        for step in range(steps):
            count = 60 if step == 0 else int(generator.integers(1, 8))
            numbers = (
                range(60) if step == 0 else generator.choice(80, count, replace=False).tolist()
            )
            if step % 3 == 2:
                for each in (store, plain):
                    each.delete([make_item(number).key for number in numbers])
            else:
                # The content may be that of an earlier step, so that a removed row comes back.
                items, vectors = (
                    [make_item(number, step % 2) for number in numbers],
                    make_vectors(np.random.default_rng(step), count, late),
                )
                for each in (store, plain):
                    each.add(items, vectors)
            shutil.rmtree(tmp_path / "plain" / "snapshot", ignore_errors=True)
            plain._snapshot = None
            assert everything(store, late) == everything(plain, late), step
            assert len(plain.snapshot().parts) == 1
            most_parts = max(most_parts, len(store.snapshot().parts))
        with closing(open_store(tmp_path / "store", **options)) as reader:
            assert everything(reader, late) == everything(plain, late)
    assert 2 <= most_parts <= 6


def test_change_of_one_item_keeps_other_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(lancedb_store, "MIN_PART_ROWS", 1)
    vectors = make_vectors(np.random.default_rng(0), 500, None)
    with closing(open_store(tmp_path, DIM, index_id=ID)) as store:
        store.add([make_item(number) for number in range(500)], vectors)
        [first] = [part.name for part in store.snapshot().parts]
        files = {path: os.stat(path) for path in (tmp_path / "snapshot" / first).iterdir()}
        for change in range(1, 4):
            store.add([make_item(7, change)], vectors[change : change + 1])
            parts = store.snapshot().parts
            assert [(len(part.table), len(part.live_table)) for part in parts] == [
                (500, 499),
                (1, 1),
            ]
        # Windows keeps the folder of a part that is still mapped.
        del parts
        store.delete([make_item(9).key])
        assert store.count() == 499
        assert {path: os.stat(path) for path in files} == files
        assert {part.name for part in store.snapshot().parts} == {
            path.name for path in (tmp_path / "snapshot").iterdir()
        }
        store.add([make_item(number, 5) for number in range(300)], vectors[:300])
        assert [len(part.live_table) for part in store.snapshot().parts] == [500]


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that are hashed."""
    names = list[str]()
    content_hash = storage.content_hash
    monkeypatch.setattr(
        table_snapshot.storage,
        "content_hash",
        lambda path: names.append(Path(path).name) or content_hash(path),
    )
    return names


@pytest.fixture
def two_parts(tmp_path, monkeypatch):
    """A store whose snapshot has two parts, and what it returns."""
    monkeypatch.setattr(lancedb_store, "MIN_PART_ROWS", 1)
    vectors = make_vectors(np.random.default_rng(0), 50, None)
    with closing(open_store(tmp_path / "store", DIM, index_id=ID)) as store:
        store.add([make_item(number) for number in range(50)], vectors)
        store.digest()
        store.add([make_item(7, 1)], vectors[:1])
        expected = everything(store, None)
        assert len(store.snapshot().parts) == 2
    return tmp_path / "store", expected


def reopened(folder: Path, **options: bool) -> list[object]:
    with closing(open_store(folder, index_id=ID, **options)) as store:
        return everything(store, None)


def test_reading_an_index_names_missing_extra(two_parts, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"reading an index needs .* 'visavis\[search\]'"):
        reopened(two_parts[0])


def test_snapshot_is_verified_by_size_and_time(two_parts, tmp_path, hashed, caplog):
    folder, expected = two_parts
    assert reopened(folder) == expected
    assert not hashed, "the files are unchanged"
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    for is_first in (True, False):
        assert reopened(tmp_path / "copy") == expected
        assert bool(hashed) == is_first, "the times of a copy are recorded once"
        hashed.clear()
    assert reopened(folder, verify_files=True) == expected
    assert hashed
    assert not caplog.messages


def test_snapshot_is_hashed_after_killed_process(two_parts, hashed, caplog):
    folder, expected = two_parts
    (folder / "snapshot" / ".9-9.x.part").mkdir()
    for is_first in (True, False):
        assert reopened(folder) == expected
        assert bool(hashed) == is_first
        hashed.clear()
    assert not caplog.messages


def test_snapshot_of_earlier_version_opens(tmp_path, hashed, caplog):
    vectors = make_vectors(np.random.default_rng(0), 50, None)
    with closing(open_store(tmp_path, DIM, index_id=ID)) as store:
        store.add([make_item(number) for number in range(50)], vectors)
        expected = everything(store, None)
    [part] = (tmp_path / "snapshot").iterdir()
    content = json.loads((part / "checksums.json").read_text())["content"]
    earlier = {name: content[name] for name in ("index_id", "version", "files")}
    storage.write_checksummed_json(part / "checksums.json", earlier)
    before = os.stat(part / "items.arrow")
    hashed.clear()
    for is_first in (True, False):
        assert reopened(tmp_path) == expected
        assert bool(hashed) == is_first, "the earlier version recorded no times"
        hashed.clear()
    assert os.stat(part / "items.arrow") == before
    assert not caplog.messages


@pytest.mark.parametrize("lost", [False, True])
def test_damaged_part_is_rebuilt(two_parts, caplog, lost):
    folder, expected = two_parts
    shutil.copytree(folder, folder.parent / "intact")
    for name in sorted(
        path.relative_to(folder) for path in (folder / "snapshot").rglob("*") if path.is_file()
    ):
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / "intact", folder)
        if lost:
            (folder / name).unlink()
        else:
            content = bytearray((folder / name).read_bytes())
            content[-9] ^= 1
            (folder / name).write_bytes(content)
        assert reopened(folder) == expected, name
        assert len(caplog.messages) == 1, name
        assert f"{(folder / name).parent} is damaged and is computed again" in caplog.messages[0]
        caplog.clear()
        assert reopened(folder) == expected
        assert not caplog.messages


def test_verify_finds_damage_that_keeps_size_and_time(two_parts, caplog):
    folder, expected = two_parts
    file = (
        max((folder / "snapshot").iterdir(), key=lambda part: os.stat(part / "vectors.npy").st_size)
        / "vectors.npy"
    )
    status, content = os.stat(file), bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert reopened(folder) != expected, "the damage is not visible"
    with closing(open_store(folder, index_id=ID)) as store:
        store.verify()
    assert ["is damaged and is computed again" in message for message in caplog.messages] == [True]
    assert reopened(folder) == expected
    with closing(open_store(folder, DIM, index_id="cd")) as store:
        store.add([make_item(99)], make_vectors(np.random.default_rng(1), 1, None))
    with (
        closing(open_store(folder, index_id=ID)) as store,
        pytest.raises(StorageError, match=r"99\.png' is damaged or belongs to another"),
    ):
        store.verify()


class KillError(BaseException):
    """Ends an update as a killed process ends: nothing is cleaned up."""


def test_snapshot_survives_kill_at_any_write(two_parts, monkeypatch):
    folder, old = two_parts
    shutil.copytree(folder, folder.parent / "intact")
    vectors = make_vectors(np.random.default_rng(2), 3, None)
    fsync, results = os.fsync, list[object]()
    for moment in range(40):
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / "intact", folder)
        with closing(open_store(folder, DIM, index_id=ID)) as store, monkeypatch.context() as patch:
            store.digest()
            left = iter(range(moment))

            def write(descriptor, left=left):
                if next(left, None) is None:
                    raise KillError
                fsync(descriptor)

            patch.setattr(os, "fsync", write)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            with suppress(KillError):
                store.add([make_item(number, 2) for number in range(3)], vectors)
                store.digest()
                results.append(None)
        found = reopened(folder)
        assert not list((folder / "snapshot").glob(".*.part"))
        if results and results[-1] is None:
            results[-1] = found
            break
        results.append(found)
    assert len(results) > 5
    assert all(found == results[-1] for found in results), (
        "the table has the change, and the snapshot follows it"
    )
    assert results[-1] != old


keys = st.lists(st.text(st.sampled_from("ab/é東"), max_size=3), unique=True, max_size=80)


@given(keys, keys)
def test_find_keys_equals_dictionary(stored, searched):
    column = pa.array(sorted(stored), pa.string())
    row_of = {key: row for row, key in enumerate(sorted(stored))}
    for each in (searched, searched[:1]):
        assert find_keys(column, each).tolist() == [row_of.get(key, -1) for key in each]


@given(
    st.lists(st.integers(0, 5), max_size=30),
    st.integers(1, 40),
    st.sampled_from(["*", "*3*", "none"]),
)
def test_newest_rows_equal_sorted_items(times, count, path):
    items = sorted(
        # Times are sorted by microseconds.
        (replace(make_item(number), modified_ns=1000 * time) for number, time in enumerate(times)),
        key=lambda item: item.key,
    )
    table = lancedb_store.arrow_table(ID, items, np.zeros((len(items), DIM), np.float32))
    where = ItemFilter(path=path)
    newest = heapq.nlargest(
        count, filter(where.matches, items), key=lambda item: (item.modified_ns, item.key)
    )
    assert items_from_table(table.take(newest_rows(table, count, where))) == newest
    assert items_from_table(table) == items
