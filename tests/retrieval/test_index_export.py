"""Items and vectors of an index in a Parquet file, and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import RefusedOverwrite
from visavis.core.progress import NoProgress
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.open_index import open_index

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def index(run, scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "index"
    build_index(run, scenes / "images", folder, progress=NoProgress())
    return folder


def test_export_has_items_and_vectors(index, tmp_path):
    file = tmp_path / "photos.parquet"
    result = CliRunner().invoke(
        app, ["indexes", "export", str(index), "--out", str(file), "--json"], catch_exceptions=False
    )
    opened = open_index(index)
    assert json.loads(result.stdout)["num_items"] == len(opened.items) == 70
    rows = pq.read_table(file).to_pylist()
    assert [row["key"] for row in rows] == list(opened.items)
    for row, item, vector in zip(
        rows, opened.items.values(), opened.store.all_vectors(), strict=True
    ):
        assert row["path"] == item.path
        assert row["content"] == item.content
        assert json.loads(row["metadata"]) == item.metadata
        np.testing.assert_array_equal(np.array(row["vector"], np.float32), vector)
    with pytest.raises(RefusedOverwrite, match="already exists"):
        visavis.indexes_export(index, out=file)


def test_index_of_an_export_finds_similar_items(index, scenes, tmp_path):
    visavis.indexes_export(index, out=tmp_path / "photos.parquet")
    visavis.index(tmp_path / "photos.parquet", scenes / "images", out=tmp_path / "index")
    key = next(iter(open_index(index).items))
    expected, found = (
        visavis.search(folder, like=key, top=10).to_json()["hits"]
        for folder in (index, tmp_path / "index")
    )
    assert [hit["key"] for hit in found] == [hit["key"] for hit in expected]
    assert [hit["score"] for hit in found] == pytest.approx(
        [hit["score"] for hit in expected], abs=1e-6
    )
