"""Query models of an index: added, listed, switched and rolled back without encoding an item."""

import json
import os
import random
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.processes import FORKED

import visavis
from visavis.core.errors import DataError, RunError, VisavisError
from visavis.data.dataset_reader import open_dataset
from visavis.models.text_tower import missing_reason, tower_folder
from visavis.models.text_tower_export import SWITCH
from visavis.retrieval.index_folder import read_manifest
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection

from .test_index_builder import kill_repeatedly


@pytest.fixture(scope="module")
def foreign_captions(scenes, tmp_path_factory):
    """Captions of the scenes in words that the model does not know: each word with a mark."""
    folder = tmp_path_factory.mktemp("foreign") / "scenes"
    shutil.copytree(scenes, folder)
    lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    for line in lines:
        line["captions"] = [
            " ".join(f"{word}zz" for word in text.replace("-", " ").split())
            for text in line["captions"]
        ]
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


@pytest.fixture(scope="module")
def original(scenes, run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes") / "index"
    visavis.index(run, scenes, out=folder)
    return folder


@pytest.fixture(scope="module")
def words_run(original, foreign_captions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "words"
    visavis.train(data=foreign_captions, index=original, out=folder, overrides={"epochs": 20})
    return folder


@pytest.fixture
def index(original, tmp_path):
    return shutil.copytree(original, tmp_path / "index")


def names(index, text):
    return [hit.name for hit in visavis.search(index, text, filter={"duplicates": "show"})]


def test_new_words_are_found_and_restored(index, words_run, run, foreign_captions, monkeypatch):
    data = open_dataset(foreign_captions).split("train")
    before = {path: path.read_bytes() for path in index.rglob("*") if path.is_file()}
    items = open_index(index).items
    monkeypatch.setattr(
        "visavis.retrieval.build.index_builder.encode_in_shards", lambda *_: pytest.fail("encoded")
    )
    result = visavis.indexes_use_queries(index, words_run).to_json()
    changed = [path for path, content in before.items() if path.read_bytes() != content]
    assert changed == [index / "index.db"], "vectors stay as they are"
    assert open_index(index).items == items
    assert [model["active"] for model in result["models"]] == [False, True]
    assert len({model["items"] for model in result["models"]}) == 1
    ranks = [
        names(index, caption).index(data.images[image].name)
        if data.images[image].name in names(index, caption)
        else 5
        for caption, image in zip(data.captions[:40:4], data.image_of[:40:4], strict=True)
    ]
    assert np.mean(np.array(ranks) == 0) >= 0.7, "the text side has memorized its captions"
    old = visavis.indexes_restore_queries(index).to_json()
    assert [model["active"] for model in old["models"]] == [True, False]
    assert [model["previous"] for model in old["models"]] == [False, True]
    again = visavis.indexes_restore_queries(index).to_json()
    assert again == result, "a second roll back undoes the first"
    assert visavis.indexes_use_queries(index, "items").to_json() == old
    assert visavis.indexes_use_queries(index, result["models"][1]["queries"]).to_json() == result
    assert visavis.indexes_use_queries(index, run).to_json() == old, "the run of the items is known"
    assert visavis.indexes_list_queries(index).to_json() == old


def switch_queries(index, queries):
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ.pop(SWITCH, None)
    if queries is None:
        visavis.indexes_restore_queries(index)
    else:
        visavis.indexes_use_queries(index, queries)
    Path(f"{index}.acknowledged").touch()


def start_switch(index, queries):
    process = FORKED.Process(target=switch_queries, args=(index, queries))
    process.start()
    return process


def query_state(index):
    """The query model, its scale and its results. The index needs no manual step for them."""
    with closing(open_index(index)) as opened:
        fingerprint = opened.manifest.query_model.fingerprint
        assert opened.model.fingerprint == fingerprint
        assert missing_reason(index, fingerprint) == "", "the text tower of the model"
        text = opened.model.whole.processor.known_text
        hits = search_collection(opened, SearchQuery.from_text(text)).hits
        scale = opened.scale, opened.moments.to_bytes()
        return fingerprint, (scale, [(hit.key, hit.score, hit.match_probability) for hit in hits])


@pytest.mark.slow
@pytest.mark.parametrize(
    "times", [8, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_killed_switch_of_queries_is_made_or_not(index, words_run, tmp_path, times, monkeypatch):
    """An acknowledged switch stays. Whatever model is active has its text tower and its scale."""
    monkeypatch.delenv(SWITCH)
    chooser = random.Random(times)
    visavis.indexes_use_queries(index, "items")
    expected = dict([query_state(index)])
    items = next(iter(expected))
    visavis.indexes_use_queries(index, words_run)
    expected |= dict([query_state(index)])
    [words] = set(expected) - {items}
    acknowledged = tmp_path / "index.acknowledged"
    # The model before the switch, and after it.
    targets = [words, words]

    def start():
        before = read_manifest(index).query_model.fingerprint
        after = items if before == words else words
        targets[:] = before, after
        acknowledged.unlink(missing_ok=True)
        if chooser.random() < 0.5:
            # It is written again.
            shutil.rmtree(tower_folder(index, after), ignore_errors=True)
        run = words_run if after == words else "items"
        # The other model is also the previous one.
        return start_switch(index, chooser.choice([after, run, None]))

    def check(is_killed):
        active, state = query_state(index)
        assert active in targets
        assert not acknowledged.exists() or active == targets[1]
        assert is_killed or active == targets[1]
        assert state == expected[active]

    undisturbed = shutil.copytree(index, tmp_path / "timed")
    moments = [chooser.uniform(0.0, 1.0) for _ in range(times)]
    killed = kill_repeatedly(partial(start_switch, undisturbed, "items"), start, moments, check)
    assert killed >= times // 4
    visavis.indexes_use_queries(index, items)
    assert query_state(index) == (items, expected[items])


def test_texts_and_images_of_pair_use_their_models(index, words_run, run, scenes):
    visavis.indexes_use_queries(index, words_run)
    with_words, items = visavis.load(words_run), visavis.load(run)
    opened = open_index(index)
    image = open_dataset(scenes).images[3]
    model, text = opened.model, "a redzz"
    path = image.location.path
    [words] = with_words.encode_texts([text]).numpy()
    [pixels] = items.encode_images([path]).numpy()
    assert np.array_equal(model.encode_texts([text]), [words])
    assert np.array_equal(model.encode_images([path]), [pixels])
    assert model.score([path], [text], "i2t") == pytest.approx(pixels @ words)
    assert model.count_tokens([text]) == with_words.count_tokens([text])
    assert model.unknown_words("zebra redzz") == ["zebra"]
    query = SearchQuery(images=((1.0, path),))
    assert search_collection(opened, query)[0].name == image.name
    mixed = SearchQuery(texts=((1.0, text),), images=((1.0, path),))
    vector = opened.encode_query(mixed)[0]
    total = words + pixels
    assert np.allclose(vector, total / np.linalg.norm(total), atol=1e-6)
    opened.close()
    ranked = visavis.classify(index, path, ["redzz starzz", "bluezz"])
    assert ranked[0][1] == pytest.approx(max(score for _, score in ranked))


def test_update_of_index_keeps_query_models(index, words_run, run, scenes):
    visavis.indexes_use_queries(index, words_run)
    before = read_manifest(index)
    visavis.index(run, scenes, out=index)
    after = read_manifest(index)
    assert (after.queries, after.active_queries) == (before.queries, before.active_queries)
    assert open_index(index).model.fingerprint == visavis.load(words_run).fingerprint


def test_query_models_of_other_vectors_are_refused(index, run, scenes, words_run, tmp_path):
    with pytest.raises(RunError, match="a previous query model, got none"):
        visavis.indexes_restore_queries(index)
    with pytest.raises(RunError, match="or the fingerprint of a query model"):
        visavis.indexes_use_queries(index, "nothing")
    other, other_index = tmp_path / "other", tmp_path / "other-index"
    visavis.train(run / "run.toml", data=scenes, out=other, overrides={"seed": 9, "epochs": 1})
    with pytest.raises(RunError, match="images of its own"):
        visavis.indexes_use_queries(index, other)
    visavis.index(other, scenes, out=other_index)
    with pytest.raises(RunError, match="trained on the vectors of this index"):
        visavis.indexes_use_queries(other_index, words_run)
    with pytest.raises(RunError, match="encodes only texts"):
        visavis.index(words_run, scenes, out=tmp_path / "third")
    assert read_manifest(index).queries == ()


def test_missing_models_are_named(index, words_run, run, scenes, tmp_path):
    moved = shutil.copytree(words_run, tmp_path / "moved")
    visavis.indexes_use_queries(index, moved)
    text = "a redzz"
    expected = names(index, text)
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"run visavis indexes use-queries .*index RUN\.$"):
        visavis.search(index, text)
    visavis.indexes_use_queries(index, tmp_path / "elsewhere")
    assert names(index, text) == expected
    # A run that was trained again in the same folder replaces the earlier one.
    shutil.rmtree(tmp_path / "elsewhere")
    visavis.train(
        data=scenes, index=index, out=tmp_path / "elsewhere", overrides={"epochs": 1, "seed": 3}
    )
    visavis.indexes_use_queries(index, tmp_path / "elsewhere")
    models = [each.model for each in read_manifest(index).queries]
    assert len(models) == len(set(models)) == 1


def test_moved_model_of_items_is_recorded(index, run, scenes, words_run, tmp_path):
    moved = tmp_path / "moved-run"
    shutil.copytree(run, moved)
    other = tmp_path / "moved-index"
    visavis.index(moved, scenes, out=other)
    text = "a red circle"
    expected = names(other, text)
    moved.rename(tmp_path / "elsewhere-run")
    with pytest.raises(RunError, match=r"run visavis indexes move .*moved-index --model MODEL\.$"):
        visavis.search(other, text)
    with pytest.raises(RunError, match="expected a model with fingerprint"):
        visavis.indexes_move(other, model=words_run)
    assert visavis.indexes_move(other, model=tmp_path / "elsewhere-run") is None
    assert names(other, text) == expected
    assert visavis.index(tmp_path / "elsewhere-run", scenes, out=other).num_encoded == 0
    with pytest.raises(VisavisError, match="source, model: expected the new place"):
        visavis.indexes_move(other)


def write_vectors(folder, names, vectors, kind):
    if kind == "parquet":
        table = pa.table({"id": names, "vector": list(vectors)})
        pq.write_table(table, folder / "v.parquet")
        return folder / "v.parquet"
    np.save(folder / "v.npy", 3 * vectors)
    (folder / "v.ids.txt").write_text("\n".join(names) + "\n")
    return folder / "v.npy"


@pytest.mark.parametrize("kind", [pytest.param("parquet", marks=pytest.mark.slow), "npy"])
def test_given_vectors_equal_index_of_model(kind, original, scenes, foreign_captions, tmp_path):
    source = open_index(original)
    names_of_items = source.store.table().keys()
    vectors = np.array(source.store.all_vectors())
    file = write_vectors(tmp_path, names_of_items[1:], vectors[1:], kind)
    report = visavis.index(file, scenes, out=tmp_path / "given")
    assert report.num_items == len(vectors) - 1
    [problem] = [text for text in report.skipped if "no vector" in text]
    assert names_of_items[0] in problem
    given = open_index(tmp_path / "given")
    assert given.store.table().keys() == names_of_items[1:]
    assert np.allclose(given.store.all_vectors(), vectors[1:], atol=1e-6)
    like = SearchQuery(like=((1.0, names_of_items[5]),))
    assert next(hit.key for hit in search_collection(given, like, 3)) == names_of_items[5]
    dhashes = [item.dhash for item in given.items.values()]
    assert dhashes == [source.items[key].dhash for key in names_of_items[1:]]
    with pytest.raises(RunError, match="has none"):
        visavis.search(tmp_path / "given", "a star")
    assert visavis.index(file, scenes, out=tmp_path / "given").num_encoded == 0
    run = tmp_path / "run"
    overrides = {"evaluation.validation": "train", "epochs": 1}
    options = {"index": tmp_path / "given", "skip_bad": True, "overrides": overrides}
    visavis.train(data=foreign_captions, out=run, **options)
    visavis.indexes_use_queries(tmp_path / "given", run)
    file.unlink()
    assert len(visavis.search(tmp_path / "given", "a redzz starzz")) == 5
    with pytest.raises(RunError, match="has none"):
        visavis.search(tmp_path / "given", image=open_dataset(scenes).images[0].location.path)


def test_given_vectors_of_other_source_are_refused(scenes, tmp_path):
    file = write_vectors(tmp_path, ["a.png", "b.png"], np.eye(2, 4, dtype=np.float32), "parquet")
    with pytest.raises(DataError, match="paths below"):
        visavis.index(file, scenes, out=tmp_path / "given")
    with pytest.raises(RunError, match="holds the vectors"):
        visavis.index(file, scenes, out=tmp_path / "given", full_decoding=True)


def test_given_vectors_of_any_length_become_unit_vectors(original, scenes, tmp_path):
    source = open_index(original)
    names, vectors = source.store.table().keys(), np.array(source.store.all_vectors())
    scales = 10.0 ** np.linspace(-40, 38, len(names))[:, None]
    np.save(tmp_path / "v.npy", vectors.astype(np.float64) * scales)
    (tmp_path / "v.ids.txt").write_text("\n".join(names))
    visavis.index(tmp_path / "v.npy", scenes, out=tmp_path / "given")
    found = open_index(tmp_path / "given").store.all_vectors()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    # Values of 1e-40 have few digits.
    np.testing.assert_allclose(found, vectors, atol=1e-4)


@pytest.mark.parametrize(
    ("value", "got"), [(0.0, "zero"), (np.nan, "a value that"), (-np.inf, "a value"), (1e60, "a v")]
)
def test_given_vectors_without_direction_are_refused(value, got, original, scenes, tmp_path):
    names = open_index(original).store.table().keys()
    vectors = np.ones((len(names), 4))
    vectors[3] = value
    np.save(tmp_path / "v.npy", vectors)
    (tmp_path / "v.ids.txt").write_text("\n".join(names))
    with pytest.raises(DataError, match=rf"v\.npy: expected .* got {got}.* for {names[3]}\."):
        visavis.index(tmp_path / "v.npy", scenes, out=tmp_path / "given")
