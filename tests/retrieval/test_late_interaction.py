"""Indexes of late-interaction models: the same results, filters, updates and repairs as any index."""

import base64
import json
import random
import shutil

import numpy as np
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import DataError, RunError, ShapeError, VisavisError
from visavis.core.progress import NoProgress
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.index_folder import read_manifest
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.search_service import ServedIndex

from .test_index_builder import kill_indexing


@pytest.fixture
def photos(scenes, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for image in sorted((scenes / "images").iterdir())[:40]:
        shutil.copy(image, folder)
    return folder


def build(run, source, out, **options):
    return build_index(run, source, out, **{"progress": NoProgress()} | options)


def content(folder):
    """Items and vectors of an index."""
    index = open_index(folder)
    items, sets = index.store.table().items(), index.store.all_vectors()
    index.store.close()
    return items, sets


def equal(first, second):
    """Equal items, and vectors up to the rounding of matrix products of other batch sizes."""
    same = first[0] == second[0] and np.array_equal(first[1].offsets, second[1].offsets)
    return same and np.abs(first[1].rows - second[1].rows).max() < 1e-5


def test_index_search_equals_model_score(late_run, photos, tmp_path):
    report = build(late_run, photos, tmp_path / "index")
    assert (report.num_items, read_manifest(tmp_path / "index").late_interaction) == (40, "both")
    files = sorted(photos.iterdir())
    model = visavis.load(late_run)
    for text in ("a red circle", "two squares"):
        scores = model.score(files, [text])[:, 0].numpy()
        found = visavis.search(tmp_path / "index", text, top=40, filter={"duplicates": "show"})
        assert [hit.score for hit in found] == pytest.approx(
            np.sort(scores)[::-1].tolist(), abs=1e-5
        )
        assert {hit.name: hit.score for hit in found} == pytest.approx(
            {file.name: score for file, score in zip(files, scores, strict=True)}, abs=1e-5
        )
    with pytest.raises(VisavisError, match=r"several vectors\. Remove --max-irrelevant"):
        open_index(tmp_path / "index").match_scale(None)
    served = ServedIndex(open_index(tmp_path / "index"))
    served.warm_up()
    assert search_collection(
        served.index,
        SearchQuery.from_text(text),
        40,
        group_duplicates=False,
        encode_texts=served.encode_texts,
    ).to_json() == (
        search_collection(
            served.index, SearchQuery.from_text(text), 40, group_duplicates=False
        ).to_json()
    )


def test_served_rerank_equals_model_score(late_run, photos, tmp_path):
    """Images for a text and texts for an image. Such a model has no single vectors."""
    build(late_run, photos, tmp_path / "index")
    contents = [path.read_bytes() for path in sorted(photos.iterdir())[:6]]
    urls = [f"data:image/png;base64,{base64.b64encode(part).decode()}" for part in contents]
    texts = ["a red circle", "two squares", "a star"]
    scores = visavis.load(late_run).score(contents, texts)
    app = create_app([ServedIndex(open_index(tmp_path / "index"))])
    with TestClient(app, "http://localhost") as client:
        for query, documents, expected in (
            (texts[0], urls, scores[:, 0]),
            (urls[0], texts, scores[0]),
        ):
            body = {"query": query, "documents": documents}
            results = client.post("/v1/rerank", json=body).json()["results"]
            found = {result["index"]: result["relevance_score"] for result in results}
            assert found == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-5)
        for path, body in (
            ("embeddings", {"input": texts}),
            ("embeddings", {"input": urls[:1]}),
            ("rerank", {"query": texts[0], "documents": texts}),
        ):
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code == 400
            assert "one vector per item" in response.json()["error"]["message"]


def test_index_search_supports_all_queries(late_run, scenes, tmp_path):
    build(late_run, scenes, tmp_path / "index")
    index = open_index(tmp_path / "index")
    key = next(iter(index.items))
    for query in (
        SearchQuery(like=((1.0, key),)),
        SearchQuery(images=((1.0, index.locate(index.items[key]).path),)),
    ):
        assert search_collection(index, query, 3).hits[0].key == key
    test = ItemFilter(metadata={"split": "test"})
    found = search_collection(
        index, SearchQuery(texts=((1.0, "a red circle"), (-0.5, "a square"))), 40, test
    )
    assert sum(1 + len(hit.duplicates) for hit in found) == 10
    assert all(hit.item.metadata["split"] == "test" for hit in found)
    reranked = visavis.search(
        tmp_path / "index", "a red circle", rerank=late_run, top=70, filter={"duplicates": "show"}
    )
    plain = visavis.search(
        tmp_path / "index", "a red circle", top=70, filter={"duplicates": "show"}
    )
    assert [hit.score for hit in reranked[:50]] == pytest.approx(
        [hit.score for hit in plain[:50]], abs=1e-5
    )


def test_index_groups_duplicates_by_mean_vector(late_run, photos, tmp_path):
    image = min(photos.iterdir())
    shutil.copy(image, photos / "copy.png")
    build(late_run, photos, tmp_path / "index")
    [best] = visavis.search(tmp_path / "index", image=image, top=1)
    assert {best.key, *best.duplicates} >= {"copy.png", image.name}


def test_index_update_equals_new_index(late_run, photos, tmp_path):
    build(late_run, photos, tmp_path / "index")
    images = sorted(photos.iterdir())
    images[0].rename(photos / "elsewhere.png")
    images[1].unlink()
    shutil.copy(images[2], photos / "copy.png")
    first, second = images[5].read_bytes(), images[6].read_bytes()
    images[5].write_bytes(second)
    images[6].write_bytes(first)
    report = build(late_run, photos, tmp_path / "index")
    assert (report.num_encoded, report.num_moved, report.num_removed) == (0, 4, 1)
    build(late_run, photos, tmp_path / "new")
    assert equal(content(tmp_path / "index"), content(tmp_path / "new"))


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.long)])
def test_index_is_complete_after_repeated_kills(late_run, photos, tmp_path, times):
    moments = random.Random(times)
    assert (
        kill_indexing(
            late_run,
            photos,
            tmp_path / "index",
            [moments.uniform(0.0, 0.9) for _ in range(times)],
            None,
        )
        >= times // 2
    )
    build(late_run, photos, tmp_path / "index")
    build(late_run, photos, tmp_path / "undisturbed")
    assert equal(content(tmp_path / "index"), content(tmp_path / "undisturbed"))


def test_damaged_vectors_are_encoded_again(late_run, photos, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("visavis.retrieval.stores.maxsim_search.MIN_ITEMS", 1)
    build(late_run, photos, tmp_path / "index")
    search = lambda: visavis.search(tmp_path / "index", "a red circle", top=40).to_json()  # noqa: E731
    expected = search()
    vectors = tmp_path / "index" / "vectors"
    [coarse] = vectors.glob("1.coarse-*")
    names = sorted(path.relative_to(vectors).as_posix() for path in vectors.rglob("*.npy"))
    assert names == [
        f"{coarse.name}/offsets.npy",
        f"{coarse.name}/pooled.npy",
        "1.ends.npy",
        "1.npy",
    ]
    for name in names:
        content = bytearray((vectors / name).read_bytes())
        content[-9] ^= 1
        (vectors / name).write_bytes(content)
        if "coarse" in name:
            assert search() == expected
            assert ["Searches are slower" in message for message in caplog.messages] == [True]
        else:
            with pytest.raises(RunError, match="run visavis index again"):
                search()
            assert build(late_run, photos, tmp_path / "index").num_encoded > 0
            assert "damaged, and their files are encoded again" in caplog.messages[-1]
            assert search() == expected
            break
        caplog.clear()


@pytest.mark.slow
def test_measure_command_reports_compression(late_run, scenes, tmp_path):
    build(late_run, scenes, tmp_path / "index")
    command = ["indexes", "measure", str(tmp_path / "index")]
    report = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["compression"]
    assert (report["num_items"], report["num_queries"], report["query_source"]) == (
        70,
        50,
        "captions of the items",
    )
    exact, *compressed = report["encodings"]
    assert exact["name"] == "float32"
    assert all(encoding["stored_bytes"] < exact["stored_bytes"] for encoding in compressed)
    shown = CliRunner().invoke(app, command)
    assert "Search: exact, " in shown.output
    assert "bytes: per item" in shown.output


def test_index_rejects_unsuitable_settings(late_run, photos, tmp_path):
    with pytest.raises(DataError, match="got Milvus"):
        build(late_run, photos, tmp_path / "index", store=str(tmp_path / "items.db"))
    with pytest.raises(RunError, match="embedding_dim"):
        build(late_run, photos, tmp_path / "other", embedding_dim=8)
    with pytest.raises(ShapeError, match="expected one vector per item, got several"):
        visavis.load(late_run).encode_images([min(photos.iterdir())])
