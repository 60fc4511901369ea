"""Damaged indexes: every result of a search equals that of the intact index, or the error names a
fix.
"""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.platforms import MILVUS

import visavis
from visavis.cli.search_printer import print_results
from visavis.core.errors import RunError, VisavisError
from visavis.core.progress import NoProgress
from visavis.models.retriever import Retriever
from visavis.retrieval.build import encoding
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.index_folder import read_manifest, write_manifest
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.stores.sqlite_store import SqliteStore

STORES = {"sqlite": None, "milvus": "items.db"}
REMEDIES = (
    "un visavis index ",
    "make the index again",
    "Make one with: visavis index",
    "Pass another folder with --out",
    "Make another index with --out",
    "confirm its store with --store",
)
SKIPPED_NAMES = {"index.lock", "LOCK"}


@pytest.fixture(scope="module", autouse=True)
def load_models_once():
    with pytest.MonkeyPatch.context() as patch:
        original = Retriever.load
        load = cache(lambda name: original(name))
        patch.setattr(Retriever, "load", lambda name, **_: load(str(name)))
        yield


def build(run, photos, folder, store):
    build_index(run, photos, folder, store=store and str(folder / store), progress=NoProgress())


@pytest.fixture(params=["sqlite", MILVUS])
def indexes(request, run, scenes, tmp_path):
    """A folder with two indexes, ``a`` and ``b``, of different images by the same model. Their
    store, if it is not the default.
    """
    root, store = tmp_path, STORES[request.param]
    images = sorted((scenes / "images").iterdir())
    for name, part in (("a", images[:20]), ("b", images[20:44])):
        (root / f"photos-{name}").mkdir()
        for image in part:
            shutil.copy(image, root / f"photos-{name}")
        build(run, root / f"photos-{name}", root / name, store)
    return root, store


def answers(folder):
    """Everything that a user sees of an index."""
    index = open_index(folder)
    try:
        results = search_collection(
            index, SearchQuery.from_text("a red circle"), top=30, group_duplicates=False
        )
        like = tuple((1.0, key) for key in list(index.items)[:1])
        alike = search_collection(index, SearchQuery(((1.0, "a square"),), like=like), top=3)
        # A file that is encoded again alone has other rounding errors than in a batch.
        return (
            results.message,
            [
                [(hit.key, round(hit.score, 5), hit.duplicates) for hit in hits]
                for hits in (results, alike)
            ],
            index.items,
            index.manifest.calibration,
        )
    finally:
        index.store.close()


def outcome(action, folder):
    """The result of an action, or its error."""
    try:
        return action(folder), ""
    except VisavisError as error:
        return None, str(error)


def mutate(file: Path, others: list[Path], generator: random.Random) -> str:
    """Damage a file in one of several ways, and return the way."""
    content = bytearray(file.read_bytes())
    kind = generator.choice(["flip", "zero", "cut", "empty", "swap", "delete", "reorder", "append"])
    start = generator.randrange(len(content) or 1)
    if kind == "delete":
        file.unlink()
        return kind
    if kind == "swap":
        same_kind = [other for other in others if other.suffix == file.suffix]
        content[:] = generator.choice(same_kind or others).read_bytes()
    elif kind == "empty":
        content.clear()
    elif kind == "cut":
        del content[start:]
    elif kind == "append":
        content += generator.randbytes(16)
    elif kind == "zero":
        content[start : start + 64] = bytes(len(content[start : start + 64]))
    elif kind == "reorder":
        content[:] = content[start:] + content[:start]
    elif content:
        content[start] ^= 1 << generator.randrange(8)
    file.write_bytes(content)
    return f"{kind} at {start}"


@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.slow
def test_damaged_index_is_repaired_or_refused(indexes, run, caplog, count):
    root, store = indexes
    expected, others = (
        answers(root / "a"),
        [path for path in (root / "b").rglob("*") if path.is_file()],
    )
    assert expected == answers(root / "a")
    (root / "a").rename(root / "intact")
    for seed in range(count):
        # Milvus Lite may keep the content of a file that is replaced in the same process, so every
        # seed has its own folder.
        generator, folder = random.Random(seed), root / f"damaged {seed}"
        shutil.copytree(root / "intact", folder)
        files = sorted(
            path for path in folder.rglob("*") if path.is_file() and path.name not in SKIPPED_NAMES
        )
        file = generator.choice(files)
        failed = False
        change = f"seed {seed}: {file.relative_to(folder)}: {mutate(file, others, generator)}"
        for action in (
            answers,
            lambda damaged: build(run, root / "photos-a", damaged, store) or expected,
            answers,
        ):
            found, problem = outcome(action, folder)
            if any("the index is unfinished" in message for message in caplog.messages):
                assert failed, change
            else:
                assert found == (None if problem else expected), f"{change}: {problem}"
            assert not problem or any(remedy in problem for remedy in REMEDIES), (
                f"{change}: {problem}"
            )
            failed = bool(problem)
            caplog.clear()


@pytest.fixture
def small_index(run, scenes, tmp_path):
    """An index of eight images, and the images."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for image in sorted((scenes / "images").iterdir())[:8]:
        shutil.copy(image, photos)
    build(run, photos, tmp_path / "index", None)
    return tmp_path / "index", photos


@pytest.mark.parametrize("lost", ["vectors", "items"])
def test_lost_vectors_are_refused_and_encoded_again(small_index, run, lost, caplog):
    folder, photos = small_index
    expected = answers(folder)
    if lost == "vectors":
        shutil.rmtree(folder / "vectors")
    else:
        with closing(sqlite3.connect(folder / "index.db")) as database, database:
            database.execute("DELETE FROM items")
    before = sorted(folder.rglob("*"))
    with pytest.raises(RunError, match="the store of the index cannot be used"):
        answers(folder)
    assert sorted(folder.rglob("*")) == before
    report = build_index(run, photos, folder, progress=NoProgress())
    assert report.num_encoded == 8
    assert "files are encoded again" in caplog.messages[0]
    assert answers(folder) == expected


def test_only_files_of_damaged_vectors_are_encoded_again(small_index, run):
    folder, photos = small_index
    expected = answers(folder)
    file = folder / "vectors" / "1.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert build_index(run, photos, folder, progress=NoProgress()).num_encoded == 1
    assert answers(folder) == expected


def test_index_of_earlier_version_is_refused(tmp_path, run, scenes):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "index.json").write_text("{}")
    message = (
        "got one of an earlier version. Delete .* and make the index again with: visavis index"
    )
    for action in (open_index, lambda folder: build(run, scenes / "images", folder, None)):
        with pytest.raises(RunError, match=message):
            action(tmp_path / "index")


@pytest.mark.parametrize(
    ("key", "value"),
    [("active_queries", "unknown"), ("store", "\0"), ("store", ""), ("model", "\0")],
)
def test_invalid_value_with_a_right_checksum_is_one_error(small_index, key, value):
    """No traceback of the command, and the command that makes the index again."""
    folder, _ = small_index
    write_manifest(folder, replace(read_manifest(folder), **{key: value}))
    with pytest.raises(VisavisError, match=re.escape(str(folder))):
        visavis.search(folder, "a red circle")


def test_store_belongs_to_one_index(small_index, run, scenes, tmp_path):
    folder, expected = small_index[0], answers(small_index[0])
    with pytest.raises(RunError, match="the store of the index cannot be used"):
        build_index(
            run, scenes / "images", tmp_path / "other", store=str(folder), progress=NoProgress()
        )
    assert answers(folder) == expected


def test_interrupted_index_reports_that_it_is_unfinished(
    small_index, run, scenes, monkeypatch, caplog
):
    class Interruption(NoProgress):
        def update(self, *_):
            raise KeyboardInterrupt

    folder, photos = small_index
    complete = answers(folder)
    monkeypatch.setattr(encoding, "SHARD_SIZE", 4)
    for image in sorted((scenes / "images").iterdir())[8:20]:
        shutil.copy(image, photos)
    with pytest.raises(KeyboardInterrupt):
        build_index(run, photos, folder, progress=Interruption())
    assert len(answers(folder)[2]) == len(complete[2]) + 4
    assert ["the index is unfinished" in message for message in caplog.messages] == [True]
    caplog.clear()
    build(run, photos, folder, None)
    assert len(answers(folder)[2]) == 20
    assert not caplog.messages


def test_unfinished_index_without_items_reports_the_reason(
    run, scenes, tmp_path, monkeypatch, capsys
):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SqliteStore, "add", interrupt)
        build_index(run, scenes / "images", tmp_path / "index", progress=NoProgress())
    unfinished = (
        "The index is unfinished and has no items yet. Run visavis index again to complete it."
    )
    for condition in ({}, {"path": "*.gif"}):
        results = visavis.search(tmp_path / "index", "a red circle", filter=condition)
        assert (list(results), results.message, results.to_json()["message"]) == (
            [],
            unfinished,
            unfinished,
        )
    print_results(results)
    assert capsys.readouterr().out == f"{unfinished}\n"
    assert open_index(tmp_path / "index").is_unfinished
    build_index(run, scenes / "images", tmp_path / "index", progress=NoProgress())
    results = visavis.search(tmp_path / "index", "a red circle", filter={"path": "*.gif"})
    assert results.message == "No item of the index passes the filters."
    assert "message" not in visavis.search(tmp_path / "index", "a red circle").to_json()
