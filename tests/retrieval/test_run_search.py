"""Search without an index, and encoding, with an overfitted model."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RunError, ShapeError, VisavisError
from visavis.core.progress import NoProgress
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation import evaluate
from visavis.training.runs.open_run import open_run, read_run_recipe


@pytest.fixture(scope="module")
def train_split(scenes):
    return open_dataset(scenes).split("train")


def rank_of(hits, name):
    return next(rank for rank, hit in enumerate(hits, 1) if hit.name.endswith(name))


def test_encode_equals_evaluation(run, train_split):
    """Equal up to the float16 precision of cached features."""
    model = visavis.load(run)
    images = model.encode_images([image.location.path for image in train_split.images])
    texts = model.encode_texts(train_split.captions)
    for rows in (images, texts):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    cached = data_module.encode(matcher, train_split)
    torch.testing.assert_close(images, cached[0].vectors, rtol=0, atol=2e-3)
    torch.testing.assert_close(texts, cached[1].vectors, rtol=0, atol=1e-5)
    result = evaluate(
        Encoded(images),
        Encoded(texts),
        matcher.score,
        range(60),
        torch.from_numpy(train_split.image_of),
    )
    expected = visavis.evaluate(run, split="train")
    assert result.metrics["rsum"] == pytest.approx(expected.metrics["rsum"], abs=5)


def test_encode_images_accepts_paths_and_pil_images(run, train_split, tmp_path):
    model, calls = visavis.load(run), []
    path = train_split.images[0].location.path
    with Image.open(path) as image:
        rows = model.encode_images(
            [path, str(path), image, image.convert("RGBA")],
            lambda done, total: calls.append((done, total)),
        )
    assert all(torch.allclose(row, rows[0], atol=1e-6) for row in rows)
    assert calls == [(4, 4)]


@pytest.mark.parametrize(
    "call", [lambda model: model.encode_images([]), lambda model: model.encode_texts([])]
)
def test_encode_rejects_empty_list(run, call):
    with pytest.raises(ShapeError, match="expected at least one to encode"):
        call(visavis.load(run))


def test_encode_images_rejects_unreadable_files(run, tmp_path):
    (tmp_path / "notes.png").write_text("not an image")
    for name, what in (
        ("gone.png", "cannot be read: No such file"),
        ("notes.png", "is not an image of a known format"),
    ):
        with pytest.raises(DataError, match=f"{name} {what}"):
            visavis.load(run).encode_images([tmp_path / name])


def test_search_finds_images_in_data_of_run(run, train_split):
    ranks = []
    for index in range(0, len(train_split.captions), 6):
        hits = visavis.search(run, train_split.captions[index], top=70)
        assert len(hits) == 70
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        ranks.append(rank_of(hits, train_split.images[train_split.image_of[index]].name))
    assert np.median(ranks) == 1
    assert np.mean(ranks) < 4


def test_search_finds_images_in_folder_and_data_set(run, scenes, train_split, tmp_path):
    hits = visavis.search(run, train_split.captions[4], top=1)
    nested = tmp_path / "nested" / "deeper"
    shutil.copytree(scenes / "images", nested)
    for collection in (nested.parent, scenes, scenes / "captions.jsonl"):
        (hit,) = visavis.search(run, train_split.captions[4], collection=collection, top=1)
        assert hit.name.endswith(hits[0].name.rpartition("/")[2])
        assert hit.score == pytest.approx(hits[0].score, abs=1e-3)
        assert hit.image.open().size == (48, 48)


def test_search_encodes_changed_folder_again(run, scenes, train_split, tmp_path):
    first, second = (image.location.path for image in train_split.images[:2])
    shutil.copy(first, tmp_path / "image.png")
    before = visavis.search(run, train_split.captions[0], collection=tmp_path)
    shutil.copy(second, tmp_path / "image.png")
    shutil.copy(first, tmp_path / "another.png")
    after = visavis.search(run, train_split.captions[0], collection=tmp_path)
    assert after[0].name == "another.png"
    assert after[0].score == pytest.approx(before[0].score, abs=1e-5)


def test_search_reports_skipped_images(recorder, run, train_split, tmp_path):
    shutil.copy(train_split.images[0].location.path, tmp_path / "good.png")
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    hits = visavis.search(run, "a red thing", collection=tmp_path, progress=recorder)
    assert [hit.name for hit in hits] == ["good.png"]
    assert any("bad.jpg" in message and "Skipped" in message for message in recorder.messages)
    (tmp_path / "good.png").unlink()
    with pytest.raises(DataError, match=r"has no usable image .*bad\.jpg"):
        visavis.search(run, "a red thing", collection=tmp_path)


def test_search_rejects_invalid_arguments(run, scenes, tmp_path):
    with pytest.raises(VisavisError, match="got an empty query"):
        visavis.search(run, "  ")
    with pytest.raises(VisavisError, match="top: expected an integer >= 1, got 0"):
        visavis.search(run, "a dog", top=0)
    with pytest.raises(VisavisError, match="top: expected an integer >= 1, got 0"):
        visavis.classify(run, next((scenes / "images").iterdir()), ["a dog"], top=0)
    (tmp_path / "notes.txt").write_text("no images here")
    with pytest.raises(DataError, match="expected a data set or a folder of images"):
        visavis.search(run, "a dog", collection=tmp_path)
    with pytest.raises(DataError, match="gone: expected an existing path"):
        visavis.search(run, "a dog", collection=tmp_path / "gone")
    with pytest.raises(RunError, match=r"expected a run or model folder .* got none of them"):
        visavis.search(tmp_path, "a dog")


def test_moved_run_loads_searches_and_evaluates(run, train_split, tmp_path, monkeypatch):
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(run, moved)
    monkeypatch.chdir(tmp_path)
    query = train_split.captions[10]
    assert [hit.to_json() for hit in visavis.search(moved, query)] == [
        hit.to_json() for hit in visavis.search(run, query)
    ]
    assert torch.equal(
        visavis.load(moved).encode_texts([query]), visavis.load(run).encode_texts([query])
    )
    assert visavis.evaluate(moved).metrics == visavis.evaluate(run).metrics
    shutil.copytree(moved / "model", tmp_path / "model-alone")
    assert torch.equal(
        visavis.load(tmp_path / "model-alone").encode_texts([query]),
        visavis.load(run).encode_texts([query]),
    )


def test_evaluate_other_data_uses_vocabulary_of_run(run, tmp_path):
    """A vocabulary of the other data would assign other vectors to the words."""
    other = write_synthetic_scenes(
        tmp_path / "other",
        num_train=0,
        num_val=0,
        num_test=9,
        captions_per_image=2,
        size=48,
        seed=8,
    )
    result = visavis.evaluate(run, data=other)
    model, data = visavis.load(run), open_dataset(other)
    images = model.encode_images([image.location.path for image in data.images])
    texts = model.encode_texts(data.captions)
    expected = evaluate(
        Encoded(images),
        Encoded(texts),
        model.matcher.score,
        range(9),
        torch.from_numpy(data.image_of),
    )
    assert (result.num_images, result.num_texts, result.protocol) == (9, 18, "plain")
    assert expected.metrics["rsum"] == pytest.approx(result.metrics["rsum"], abs=25)


@pytest.mark.parametrize("damage", ["config", "weights", "kind", "entry"])
def test_load_reports_damaged_model_folder(run, tmp_path, damage):
    model = tmp_path / "model"
    shutil.copytree(run / "model", model)
    config = (model / "config.json").read_text()
    if damage == "config":
        (model / "config.json").write_text(config[:50])
    elif damage == "weights":
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:500])
    elif damage == "kind":
        (model / "config.json").write_text(
            config.replace('"VSEPlusPlus"', '"VSE--"').replace('"VSE++"', '"VSE--"')
        )
    else:
        (model / "config.json").write_text(config.replace('"vocabulary"', '"vocabluary"'))
    with pytest.raises((RunError, DataError), match=r"config\.json|model\.safetensors"):
        visavis.load(model)


def test_search_reports_unknown_words(recorder, run):
    visavis.search(run, "a red zeppelin", progress=recorder)
    assert recorder.messages == ["The model does not know: zeppelin"]
    with pytest.raises(VisavisError, match="'zeppelin gramophone': expected at least one of the"):
        visavis.search(run, "zeppelin gramophone")
