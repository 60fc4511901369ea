"""Training the text side alone on item vectors: of an index, a Parquet file or an array with ids."""

import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.dual_encoder_kinds import ENCODER, bert_tokenizer
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.errors import DataError, RecipeError, RunError, VisavisError
from visavis.core.process_group import ONE_PROCESS
from visavis.core.progress import NoProgress
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.item_vectors import ItemVectors
from visavis.data.feedback.records import Judgment, QueryKey
from visavis.data.feedback.sources import write_feedback
from visavis.data.image_file import Image
from visavis.retrieval.index_vectors import read_index_vectors
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.teacher import open_teacher
from visavis.training.stop_signals import Stopped
from visavis.training.training_run import resolve

AT = "2026-05-01T09:30:00.000+00:00"


def write_words_recipe(path, **visual):
    return write_recipe(
        path,
        {"epochs": 2, "optimizer": {"lr": 0.01}},
        name="words",
        visual=visual,
        model={"embedding_dim": 24, "word_dim": 12},
        training={"batch_size": 30},
    )


@pytest.fixture(scope="session")
def words_recipe(tmp_path_factory):
    return write_words_recipe(tmp_path_factory.mktemp("recipe") / "words.toml")


@pytest.fixture(scope="session")
def two_sides(scenes, words_recipe, tmp_path_factory):
    """A run of both sides."""
    run = tmp_path_factory.mktemp("two") / "run"
    visavis.train(words_recipe, data=scenes, out=run)
    return run


@pytest.fixture(scope="session")
def index(scenes, two_sides, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes") / "index"
    visavis.index(two_sides, scenes, out=folder)
    return folder


@pytest.fixture(scope="session")
def captions_only(scenes, index, tmp_path_factory):
    """The data set after its images were deleted."""
    folder = tmp_path_factory.mktemp("captions") / "scenes"
    shutil.copytree(scenes, folder)
    for image in [*folder.rglob("*.png"), *folder.rglob("*.jpg")]:
        image.unlink()
    return folder


@pytest.fixture(scope="session")
def text_run(captions_only, words_recipe, index, tmp_path_factory):
    run = tmp_path_factory.mktemp("text") / "run"
    visavis.train(words_recipe, data=captions_only, index=index, out=run)
    return run


def test_text_side_trains_without_image_files(text_run, two_sides, scenes, index):
    run, whole = visavis.load(text_run), visavis.load(two_sides)
    assert run.processor.items == whole.fingerprint
    assert visavis.evaluate(text_run).metrics["rsum"] > 0
    items = read_index_vectors(index)
    names, vectors = items.names, items.vectors
    images = open_dataset(scenes).images
    row = {name: number for number, name in enumerate(names)}
    expected = whole.encode_images([image.location.path for image in images[:3]])
    stored = torch.from_numpy(np.array(vectors[[row[image.name] for image in images[:3]]]))
    assert torch.allclose(stored, expected, atol=1e-5), "the index holds what the run encodes"
    with pytest.raises(RunError, match="visavis indexes use-queries INDEX RUN"):
        run.encode_images([images[0].location.path])


def test_text_side_opens_no_image(scenes, words_recipe, index, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", refuse)
    monkeypatch.setattr(Image, "read", refuse)
    visavis.train(words_recipe, data=scenes, index=index, out=tmp_path / "run")
    assert visavis.load(tmp_path / "run").encode_texts(["a circle"]).shape == (1, 24)


def test_text_side_has_no_visual_weights(text_run):
    names = visavis.load(text_run).matcher.state_dict().keys()
    assert names and all(name.startswith("text.") for name in names)


def test_text_side_is_not_exported(text_run, tmp_path):
    with pytest.raises(VisavisError, match="encodes only texts, for the item vectors"):
        visavis.export(text_run, format="onnx", out=tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("parts", [{}, {"phases.0.trainable": ["text"]}])
def test_pretrained_text_encoder_trains_on_items(parts, scenes, words_recipe, index, tmp_path):
    from transformers import BertConfig, BertModel

    folder = tmp_path / "bert"
    folder.mkdir()
    tokenizer = bert_tokenizer(folder)
    tokenizer.save_pretrained(folder)
    BertModel(BertConfig(vocab_size=len(tokenizer), **ENCODER)).save_pretrained(folder)
    text = {"encoder": str(folder), "granularity": "tokens"}
    overrides = {"text": text, "model": "VSE++(word_pool='mean')", **parts}
    result = visavis.train(
        words_recipe, data=scenes, index=index, overrides=overrides, out=tmp_path / "run"
    )
    assert visavis.evaluate(result.run).metrics == result.test.metrics
    weights = visavis.load(result.run).matcher.state_dict()
    assert {name.split(".")[0] for name in weights} == {"text", "text_backbone"}


def test_score_is_cosine_with_stored_vector(text_run, index):
    module, matcher = open_run(text_run, read_run_recipe(text_run), NoProgress())
    data = module.data.split("test")
    visual, text = module.encode(matcher, data)
    items = read_index_vectors(index)
    names, vectors = items.names, items.vectors
    row = {name: number for number, name in enumerate(names)}
    stored = torch.from_numpy(np.array(vectors[[row[image.name] for image in data.images]]))
    words = visavis.load(text_run).encode_texts(list(data.captions))
    assert torch.allclose(matcher.score(visual, text), stored @ words.T, atol=1e-5)


def test_default_recipe_is_text_side_of_run(scenes, index, two_sides, tmp_path):
    result = visavis.train(data=scenes, index=index, out=tmp_path / "run", overrides={"epochs": 1})
    assert visavis.evaluate(result.run).metrics == result.test.metrics
    start, now = (visavis.load(run).matcher.state_dict() for run in (two_sides, tmp_path / "run"))
    assert set(now) < set(start)


def test_new_words_extend_vocabulary_of_run(captions_only, index, two_sides, tmp_path):
    file = shutil.copytree(captions_only, tmp_path / "data") / "captions.jsonl"
    file.write_text(re.sub(r"(?i)\bred\b", "zorb", file.read_text()))
    run = visavis.train(data=tmp_path / "data", index=index, out=tmp_path / "run").run
    old, new = visavis.load(two_sides), visavis.load(run)
    words = old.processor.vocabulary.words
    assert new.processor.vocabulary.words[: len(words)] == words
    assert new.unknown_words("a zorb circle") == [] != old.unknown_words("a zorb circle")
    # A word that no new caption has keeps its embedding.
    row, name = words.index("red"), "text.embedding.weight"
    before, now = (model.matcher.state_dict()[name] for model in (old, new))
    assert torch.equal(now[row], before[row]) and not torch.equal(now[: len(words)], before)


@pytest.mark.parametrize("kind", ["npy", "parquet", "scaled"])
def test_files_of_vectors_equal_index(kind, scenes, words_recipe, index, text_run, tmp_path):
    items = read_index_vectors(index)
    names, vectors = items.names, items.vectors
    order = np.random.default_rng(0).permutation(len(names))
    ids, rows = [names[i] for i in order], np.array(vectors[order])
    if kind == "parquet":
        path = tmp_path / "vectors.parquet"
        pq.write_table(pa.table({"path": ids, "vector": list(rows)}), path)
    else:
        path = tmp_path / "vectors.npy"
        # Vectors of any length are read as unit vectors.
        np.save(path, rows * (7 if kind == "scaled" else 1))
        (tmp_path / "vectors.ids.txt").write_text("\n".join(ids) + "\n")
    result = visavis.train(words_recipe, data=scenes, index=path, out=tmp_path / "run")
    assert result.test.metrics == visavis.evaluate(text_run).metrics
    items = visavis.load(result.run).processor.items
    assert len(items) == 16 and items != visavis.load(text_run).processor.items


def test_array_without_ids_is_in_order_of_data(scenes, words_recipe, index, text_run, tmp_path):
    items = read_index_vectors(index)
    names, vectors = items.names, items.vectors
    row = {name: number for number, name in enumerate(names)}
    images = open_dataset(scenes).images
    np.save(tmp_path / "all.npy", vectors[[row[image.name] for image in images]])
    result = visavis.train(
        words_recipe, data=scenes, index=tmp_path / "all.npy", out=tmp_path / "run"
    )
    assert result.test.metrics == visavis.evaluate(text_run).metrics


def test_vectors_with_ids_set_item_vectors(scenes, index, tmp_path, words_recipe):
    vectors = {"encoder": None, "features": str(index)}
    write_words_recipe(tmp_path / "index.toml", **vectors)
    plan = visavis.train(tmp_path / "index.toml", data=scenes, dry_run=True)
    assert plan.recipe.visual.item_vectors
    write_words_recipe(tmp_path / "changed.toml", **vectors, standardize="zscore")
    with pytest.raises(RecipeError, match="item vectors are not changed"):
        visavis.train(tmp_path / "changed.toml", data=scenes, dry_run=True)
    with pytest.raises(RecipeError, match=r"visual\.crops: expected no key of visual"):
        visavis.train(words_recipe, data=scenes, index=index, overrides={"visual.crops": 10})


def test_missing_vectors_are_reported_or_skipped(scenes, words_recipe, index, tmp_path):
    items = read_index_vectors(index)
    names, vectors = items.names, items.vectors
    kept = [number for number, name in enumerate(names) if number % 5]
    np.save(tmp_path / "some.npy", vectors[kept])
    (tmp_path / "some.ids.txt").write_text("\n".join(names[number] for number in kept))
    lost = len(names) - len(kept)
    with pytest.raises(
        DataError, match=rf"got none of {lost}, such as '.+\.png'.*Index the folder"
    ):
        visavis.train(words_recipe, data=scenes, index=tmp_path / "some.npy", out=tmp_path / "no")
    result = visavis.train(
        words_recipe, data=scenes, index=tmp_path / "some.npy", out=tmp_path / "run", skip_bad=True
    )
    assert visavis.evaluate(result.run).metrics == result.test.metrics


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (["a", "b"], r"expected 3 ids, one per line for each row of x\.npy, got 2"),
        (["a", "b", "a"], "expected each id once, got 'a' more than once"),
    ],
)
def test_invalid_ids_are_rejected(ids, problem, scenes, words_recipe, tmp_path):
    np.save(tmp_path / "x.npy", np.eye(3, dtype=np.float32))
    (tmp_path / "x.ids.txt").write_text("\n".join(ids))
    with pytest.raises(DataError, match=problem):
        visavis.train(words_recipe, data=scenes, index=tmp_path / "x.npy", out=tmp_path / "run")


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"id": ["a", "b"]}, r"one of lists of numbers \(vectors\), got id \(string\)"),
        ({"id": ["a", "b"], "v": [[1.0], [1.0, 2.0]]}, r"a vector of the same length in each row"),
        ({"id": ["a", None], "v": [[1.0], [1.0]]}, "1 empty cells"),
    ],
)
def test_invalid_parquet_is_rejected(columns, problem, scenes, words_recipe, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=problem):
        visavis.train(words_recipe, data=scenes, index=tmp_path / "x.parquet", out=tmp_path / "run")


def test_folder_without_vectors_is_rejected(tmp_path):
    with pytest.raises(DataError, match="expected item vectors, such as an index, got a folder"):
        ItemVectors.open_items(tmp_path)


def test_models_of_several_vectors_are_rejected(scenes, words_recipe, index, tmp_path):
    with pytest.raises(RecipeError, match=r"expected a model with one vector per item, got MaxSim"):
        visavis.train(words_recipe, data=scenes, index=index, overrides={"model": "MaxSim()"})


@pytest.mark.parametrize("teacher", ["two_sides", "text_run"])
def test_teacher_of_items_encodes_only_captions(
    teacher, captions_only, words_recipe, index, listener, tmp_path, request
):
    run = request.getfixturevalue(teacher)
    result = visavis.train(
        words_recipe,
        data=captions_only,
        index=index,
        out=tmp_path / "student",
        overrides={
            "phases.0.supervision": f"DistillationSupervision(teacher={str(run)!r})",
            "model": "Heads(num_filters=8, word_dim=8)",
        },
        progress=listener,
    )
    assert f"The teacher {run} encodes the captions. Its items are stored." in listener.messages
    assert visavis.evaluate(result.run).metrics == result.test.metrics


def test_teacher_scores_are_cosines_with_items(scenes, two_sides, index, words_recipe):
    settings = {"data.path": str(scenes), "visual": {"features": str(index)}}
    data, plan = open_dataset(scenes), resolve(read_recipe(words_recipe, settings))
    splits = data.split("train"), data.split("val")
    _, validation = open_teacher(str(two_sides), plan.recipe, splits, NoProgress(), ONE_PROCESS)
    images, captions = torch.tensor([3, 0, 7]), torch.tensor([5, 1])
    expected = visavis.load(two_sides).score(
        [splits[1].images[i].location.path for i in images],
        [splits[1].captions[i] for i in captions],
    )
    assert torch.allclose(validation(images, captions), expected, atol=1e-5)


def test_text_side_trains_on_feedback(captions_only, words_recipe, index, tmp_path):
    lines = (captions_only / "captions.jsonl").read_text().splitlines()
    names = [row["filename"] for row in map(json.loads, lines) if row["split"] == "train"]
    write_feedback(
        tmp_path / "votes.jsonl",
        (
            Judgment(AT, "photos", QueryKey("a wobbly gizmo"), name, "", number < 3)
            for number, name in enumerate(names[:6])
        ),
    )
    result = visavis.train(
        words_recipe,
        data=captions_only,
        index=index,
        feedback=tmp_path / "votes.jsonl",
        out=tmp_path / "run",
        overrides={"epochs": 8},
    )
    assert "FeedbackSupervision" in result.supervision
    items = read_index_vectors(index)
    row = {name: number for number, name in enumerate(items.names)}
    scores = items.vectors @ visavis.load(result.run).encode_texts(["a wobbly gizmo"]).numpy()[0]
    rated = scores[[row[name] for name in names[:6]]]
    assert rated[:3].min() > rated[3:].max()


@pytest.mark.slow
def test_text_sides_are_compared_and_averaged(
    captions_only, words_recipe, index, text_run, tmp_path
):
    comparison = visavis.compare(
        words_recipe,
        objective=["VLC()", "Unified()"],
        seeds=2,
        tune=False,
        data=captions_only,
        out=tmp_path / "comparison",
        workers=1,
        overrides=[f"visual={{ features = '{index}' }}", "epochs=1"],
    )
    runs = sorted(file.parent for file in comparison.folder.rglob("result.json"))
    assert len(runs) == 4
    mean, first = visavis.evaluate([text_run, runs[0]]), visavis.evaluate(text_run)
    assert mean.num_images == first.num_images and mean.metrics != first.metrics
    visavis.papers_diagnose(text_run)


def test_stopped_text_side_resumes(
    captions_only, words_recipe, index, text_run, in_pieces, outcome, tmp_path
):
    stops = in_pieces(words_recipe, tmp_path / "run", data=captions_only, index=index)
    assert stops and outcome(tmp_path / "run") == outcome(text_run)


def test_changed_vectors_stop_a_resume(captions_only, words_recipe, index, stop_at, tmp_path):
    items = read_index_vectors(index)
    names, vectors = items.names, items.vectors
    np.save(tmp_path / "x.npy", vectors)
    (tmp_path / "x.ids.txt").write_text("\n".join(names))
    options = {"data": captions_only, "index": tmp_path / "x.npy", "out": tmp_path / "run"}
    with pytest.raises(Stopped):
        visavis.train(words_recipe, **options, progress=stop_at(2))
    # Items that the data set does not have may be added.
    np.save(tmp_path / "x.npy", np.concatenate([vectors, vectors[:1]]))
    (tmp_path / "x.ids.txt").write_text("\n".join([*names, "new"]))
    with pytest.raises(Stopped):
        visavis.train(resume=tmp_path / "run", progress=stop_at(1))
    np.save(tmp_path / "x.npy", np.concatenate([-vectors, vectors[:1]]))
    with pytest.raises(RunError, match="stored_features changed"):
        visavis.train(resume=tmp_path / "run")
    with pytest.raises(RunError, match="expected the item vectors"):
        visavis.evaluate(tmp_path / "run")


@pytest.mark.slow
def test_ensemble_of_text_sides_trains_and_teaches(
    captions_only, words_recipe, index, listener, tmp_path
):
    grid = tmp_path / "two.toml"
    members = (
        "[members.wide]\nmodel = { word_dim = 16 }\n[members.narrow]\nmodel = { word_dim = 4 }\n"
    )
    grid.write_text(words_recipe.read_text() + members)
    options = {"data": captions_only, "index": index}
    result = visavis.train(grid, out=tmp_path / "both", **options)
    assert len(result.members) == 2
    assert visavis.evaluate(tmp_path / "both").metrics == result.test.metrics
    teacher = f"DistillationSupervision(teacher={str(tmp_path / 'both')!r})"
    overrides = {"phases.0.supervision": teacher, "epochs": 1}
    visavis.train(
        words_recipe, out=tmp_path / "one", overrides=overrides, progress=listener, **options
    )
    assert any("Its items are stored" in message for message in listener.messages)
