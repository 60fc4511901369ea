"""Vector encodings of an index, and indexes of Matryoshka dimensions."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import RunError
from visavis.core.progress import NoProgress
from visavis.retrieval.build.compression import (
    VectorEncoding,
    compare_encodings,
    recommend_encoding,
)
from visavis.retrieval.build.encoding import RayEncoder
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_splits import RunSplits

from .conftest import RECIPE


def normalize(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors():
    """Rows whose first dimensions have the largest variance, queries that are each near one row,
    and these rows.
    """
    random = np.random.default_rng(2)
    rows = normalize(random.standard_normal((900, 96)) * 0.97 ** np.arange(96))
    return (
        rows,
        normalize(rows[:40] + 0.3 * normalize(random.standard_normal((40, 96)))),
        list(range(40)),
    )


def test_compare_encodings_equals_numpy(vectors):
    rows, queries, positives = vectors
    encodings = {
        encoding.name: encoding
        for encoding in compare_encodings(rows, queries, (4, 64), positives=positives).encodings
    }
    scores = queries.astype(np.float64) @ rows.T.astype(np.float64)
    true = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    for encoding in encodings.values():
        assert encoding.milliseconds > 0
        if encoding.embedding_dim == 96:
            assert encoding.recall_at_10 == 100
            assert encoding.caption_recall_at_10 == 100 * np.mean(
                [row in best for row, best in zip(positives, true, strict=True)]
            )
    for dim in (4, 64):
        short_scores = queries[:, :dim].astype(np.float64) @ normalize(rows[:, :dim]).T.astype(
            np.float64
        )
        ranking = np.argsort(-short_scores, axis=1, kind="stable")
        recalls = [
            len({*best} & {*found[:10]}) / 10
            for best, found in zip(true.tolist(), ranking.tolist(), strict=True)
        ]
        only = encodings[f"first {dim} only"]
        assert only.recall_at_10 == pytest.approx(100 * np.mean(recalls))
        assert only.stored_bytes in (4 * dim, 5 * dim)
    assert encodings["first 64 only"].recall_at_10 > encodings["first 4 only"].recall_at_10


def test_compare_encodings_of_fewer_than_ten_rows(vectors):
    rows, queries, _ = vectors
    assert {
        encoding.recall_at_10 for encoding in compare_encodings(rows[:3], queries, (64,)).encodings
    } == {100}


PLAIN = VectorEncoding("float32", 512, 2048, 2048, 0, 100.0, None, 10.0)
INT8 = replace(PLAIN, name="int8", scanned_bytes=512, stored_bytes=2560, milliseconds=4.0)
SHORT = replace(
    PLAIN,
    name="first 64 only",
    embedding_dim=64,
    scanned_bytes=256,
    stored_bytes=256,
    recall_at_10=60.0,
    milliseconds=1.0,
)


@pytest.mark.parametrize(
    ("encodings", "text"),
    [
        ([PLAIN, replace(INT8, milliseconds=11.0)], "Keep the default: float32, 10 ms per query, always the true top 10."),
        ([PLAIN, INT8], "Keep the default: int8, 4 ms per query, always the true top 10."),
        ([PLAIN, INT8, SHORT], "Keep the default: int8"),
        ([PLAIN, INT8, replace(SHORT, recall_at_10=98.0)], "Use --embedding-dim 64: 98.0 % of the true top 10 (all dimensions: 100.0 %), 256 "),
        (
            [replace(PLAIN, caption_recall_at_10=50.0), replace(SHORT, caption_recall_at_10=49.5),
             replace(SHORT, embedding_dim=128, stored_bytes=512, caption_recall_at_10=51.0)],
            ("Use --embedding-dim 64: 49.5 % of captions with their item among the first 10 (all "
            "dimensions: 50.0 %), 256 instead of 2,048 bytes "),
        ),
    ],
)  # fmt: skip
def test_recommend_encoding(encodings, text):
    assert recommend_encoding(encodings).startswith(text)


@pytest.fixture(scope="module")
def matryoshka_run(tmp_path_factory, scenes):
    """A run whose vectors were trained for 16 dimensions, too."""
    folder = tmp_path_factory.mktemp("matryoshka")
    (folder / "recipe.toml").write_text(RECIPE)
    overrides = {"matryoshka_dims": [16], "phases.0.epochs": 3}
    return visavis.train(
        folder / "recipe.toml", data=scenes, out=folder / "run", overrides=overrides
    ).run


def test_index_of_matryoshka_dims(matryoshka_run, scenes, tmp_path):
    report = build_index(
        matryoshka_run, scenes, tmp_path / "index", embedding_dim=16, progress=NoProgress()
    )
    index = open_index(tmp_path / "index")
    keys = sorted(index.items)
    rows, model = index.store.all_vectors(), visavis.load(matryoshka_run)
    full = model.encode_images([index.locate(index.items[key]).path for key in keys]).numpy()
    assert (
        rows.shape
        == (70, 16)
        == (report.num_items, len(index.model.encode_texts(["a red circle"])[0]))
    )
    assert np.abs(rows - normalize(full[:, :16])).max() < 1e-5
    [best] = search_collection(index, SearchQuery(like=((1.0, keys[5]),)), top=1)
    assert best.item.key == keys[5]
    index.store.close()
    assert (
        build_index(matryoshka_run, scenes, tmp_path / "index", progress=NoProgress()).num_unchanged
        == 70
    )
    with pytest.raises(
        RunError,
        match=r"embedding_dim: expected 16, the value of this index, got 64\. Make another index with --out\.$",
    ):
        build_index(
            matryoshka_run, scenes, tmp_path / "index", embedding_dim=64, progress=NoProgress()
        )


def test_calibration_and_ray_use_matryoshka_dims(matryoshka_run):
    model = visavis.load(matryoshka_run).with_embedding_dim(16)
    splits = RunSplits(matryoshka_run)
    scores, relevant = splits.scores("train", 16)
    full_scores, _ = splits.scores("train", 64)
    captions = (
        open_run(matryoshka_run, read_run_recipe(matryoshka_run), NoProgress())[0]
        .data.split("train")
        .captions
    )
    assert scores.shape == relevant.shape == (len(captions), 60)
    assert not np.allclose(scores, full_scores, atol=1e-3)
    assert (np.abs(scores) <= 1 + 1e-5).all()
    assert model.encode_texts(captions[:3]).shape == (3, 16)
    assert RayEncoder(str(matryoshka_run), 16, False, 4.0).model.embedding_dim == 16
    assert RayEncoder(str(matryoshka_run), None, False, 4.0).model.embedding_dim is None
    assert RayEncoder(str(matryoshka_run), 16, True, 4.0).model.processor.visual_spec.full_decoding


def test_index_rejects_untrained_dims(matryoshka_run, run, scenes, tmp_path):
    for model, dim, text in ((matryoshka_run, 20, r"16, 64.*got 20"), (run, 16, r"\[16\]")):
        with pytest.raises(RunError, match=text):
            build_index(model, scenes, tmp_path / "index", embedding_dim=dim, progress=NoProgress())
    assert not (tmp_path / "index").exists()


def test_measure_command_reports_compression(matryoshka_run, scenes, tmp_path):
    def invoke(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result

    invoke("index", matryoshka_run, scenes, "--out", tmp_path / "set")
    report = json.loads(invoke("indexes", "measure", tmp_path / "set", "--json").stdout)[
        "compression"
    ]
    assert (report["num_items"], report["num_queries"], report["query_source"]) == (
        70,
        70,
        "captions of the items",
    )
    assert {"float32", "first 16 only"} <= {encoding["name"] for encoding in report["encodings"]}
    assert all(0 <= encoding["caption_recall_at_10"] <= 100 for encoding in report["encodings"])
    photos = tmp_path / "photos"
    invoke("index", matryoshka_run, scenes / "images", "--out", photos, "--embedding-dim", "16")
    shown = invoke("indexes", "measure", photos)
    assert "vectors of the items with noise of length 0.3" in shown.output
    assert "first 16" not in shown.output
    assert (
        "compression"
        not in build_index(
            matryoshka_run, scenes, tmp_path / "set", progress=NoProgress()
        ).to_json()
    )
