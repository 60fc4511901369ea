"""A search reads the items of its results, and no others, in every store and in the server."""

from __future__ import annotations

import heapq
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from tests.platforms import MILVUS
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import DataError, RunError
from visavis.core.progress import NoProgress
from visavis.data.feedback.records import QueryKey
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.items import NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.open_index import check_index, open_index
from visavis.retrieval.search import SearchQuery, search_collection

pytest.importorskip("fastapi")
from visavis.retrieval.server.search_service import (
    MAX_FOLDERS,
    MAX_METADATA_VALUES,
    ServedIndex,
    item_values,
)
from visavis.retrieval.stores.item_table import ItemTable
from visavis.training.runs.run_splits import RunSplits

TOP, DEPTH = 3, 2 * 3 + 10
"""Number of results, and of those that a search groups."""


@pytest.fixture(scope="module", params=["sqlite", MILVUS])
def index_folder(request, run, scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("result-rows") / "index"
    store = str(folder / "items.db") if request.param == "milvus" else None
    build_index(
        run, scenes / "images", folder, store=store, open_data=RunSplits, progress=NoProgress()
    )
    return folder


@pytest.fixture
def read_items(monkeypatch):
    """Keys of the items that are made."""
    keys = list[str]()
    made = IndexItem.__init__

    def make(self, *arguments, **options):
        made(self, *arguments, **options)
        keys.append(self.key)

    monkeypatch.setattr(IndexItem, "__init__", make)
    return keys


def test_search_reads_only_items_of_results(index_folder, read_items):
    index = open_index(index_folder)
    with closing(index.store):
        assert index.store.count() == 70
        key = search_collection(index, SearchQuery.from_text("a red circle"), 1)[0].key
        queries = [
            SearchQuery.from_text("a red circle"),
            SearchQuery(like=((1.0, key),)),
            SearchQuery(((1.0, "a square"),), like=((0.5, key),)),
        ]
        for query in queries:
            for where in (NO_FILTER, ItemFilter(path="*1*"), ItemFilter(path="none")):
                for grouped in (True, False):
                    read_items.clear()
                    results = search_collection(index, query, TOP, where, group_duplicates=grouped)
                    likes = [liked for _, liked in query.like]
                    assert {result.key for result in results} <= set(read_items)
                    assert len(set(read_items) - set(likes)) <= DEPTH
        assert index.match_scale(None) == index.manifest.calibration
        with pytest.raises(DataError, match="the items have no metadata"):
            search_collection(index, queries[0], TOP, ItemFilter(metadata={"split": "test"}))
    visavis.search(index_folder, "a red circle", top=TOP)
    read_items.clear()
    assert (
        CliRunner()
        .invoke(app, ["search", str(index_folder), "a red circle", "--top", str(TOP), "--json"])
        .exit_code
        == 0
    )
    assert TOP <= len(read_items) <= DEPTH


def test_server_reads_only_items_of_results(index_folder, read_items):
    served = ServedIndex(open_index(index_folder))
    with closing(served.index.store):
        served.warm_up()
        assert served.count == 70
        assert sum(served.facets.kinds.values()) == 70
        assert len(read_items) <= 2 * (2 + 10) + 1
        for key in (QueryKey(), QueryKey("a red circle")):
            read_items.clear()
            assert len(served.search(key, None, TOP, NO_FILTER)) == TOP
            assert len(read_items) <= DEPTH


def test_empty_query_returns_newest_items(index_folder):
    served = ServedIndex(open_index(index_folder))
    with closing(served.index.store):
        items = served.index.store.table().items()
        for where in (NO_FILTER, ItemFilter(path="*1*")):
            newest = heapq.nlargest(
                9, filter(where.matches, items), key=lambda item: (item.modified_ns, item.key)
            )
            assert [hit.item for hit in served.search(QueryKey(), None, 9, where)] == newest


def test_facets_count_all_items():
    generator = np.random.default_rng(0)
    folders, years = (
        ["", "a/", "a/b/", "é\n/", "x"],
        [-(10**18), 0, 10**9 - 1, 1_577_836_799_999_999_999, 1_577_836_800_000_000_000, 2**63 - 1],
    )
    items = []
    for number in range(200):
        metadata = {
            "caption": f"{number}",
            "f=": f"{number % 30}",
            "many": f"{number % 31}",
            "one": "1",
            "x": "a=b\nc" if number % 2 else "",
        }
        path = f"{folders[generator.integers(5)]}{number:03d}.png"
        kind, modified = ("image", "video")[generator.integers(2)], years[generator.integers(6)]
        items.append(
            IndexItem(path, path, kind, "", 0, modified, metadata=metadata if number % 3 else {})
        )
    items.sort(key=lambda item: item.key)
    facets = ItemTable.in_memory([item.to_row() | {"checksum": 0} for item in items]).facets(
        max_folders=MAX_FOLDERS, max_values=MAX_METADATA_VALUES, hidden=()
    )
    values = {
        name: Counter(item.metadata[name] for item in items if item.metadata)
        for name in ("f=", "x")
    }
    assert len(values["f="]) <= MAX_METADATA_VALUES
    assert facets.kinds == Counter(item.kind for item in items)
    assert facets.years == Counter(item_values(item)["modified"].year for item in items)
    assert facets.folders == Counter(
        folder for item in items if (folder := item.path.rpartition("/")[0])
    )
    assert facets.metadata == values
    assert list(facets.years) == sorted(facets.years)


def test_confirmed_store_must_be_that_of_the_index(run, scenes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_index(run, scenes / "images", tmp_path / "index", progress=NoProgress())
    inside = tmp_path / "index"
    for own in (inside, "index/."):
        assert visavis.search("index", "a red circle", store=own).hits
    (tmp_path / "votes.jsonl").touch()
    for other in ("elsewhere", "photos.db", "http://host/x", "index/vectors"):
        problem = rf"--store: expected {inside}, the store of index, got {other}\. Remove --store, or correct it\."
        with pytest.raises(RunError, match=problem):
            visavis.search("index", "a red circle", store=other)
        with pytest.raises(RunError, match=problem):
            visavis.indexes_evaluate("index", "votes.jsonl", store=other)
        with pytest.raises(RunError, match=problem):
            visavis.serve("index", port=0, store=[other])


def test_doctor_verifies_index(index_folder, run, scenes, tmp_path):
    check = visavis.doctor(index_folder)[-1]
    assert (check.name, check.ok) == (f"index {index_folder}", True)
    assert check.value.startswith("70 items, verified by their checksums. The model encodes texts")
    build_index(run, scenes / "images", tmp_path / "index", progress=NoProgress())
    file = tmp_path / "index" / "vectors" / "1.npy"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    check = check_index(tmp_path / "index")
    assert not check.ok
    assert "run visavis index again" in check.value
