"""Search with a small model that knows its own sixty drawn images by heart."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.data import open_dataset
from visavis.data.scenes import write_scenes
from visavis.errors import DataError, RunError, ShapeError, VisavisError
from visavis.evaluation import evaluate
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of
from visavis.types import Encoded


class Listener(Silent):
    def __init__(self):
        self.said = []

    def say(self, sentence):
        self.said.append(sentence)


@pytest.fixture(scope="module")
def train_split(scenes):
    return open_dataset(scenes).split("train")


def rank_of(hits, name):
    return next(rank for rank, hit in enumerate(hits, 1) if hit.name.endswith(name))


def test_encoders_give_unit_rows_equal_to_what_evaluation_used(run, train_split):
    """Up to the half precision in which features are kept."""
    model = visavis.load(run)
    images = model.encode_images([image.bytes.path for image in train_split.images])
    texts = model.encode_texts(train_split.captions)
    for rows in (images, texts):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    used = data_module.encode(matcher, train_split)
    torch.testing.assert_close(images, used[0].vectors, rtol=0, atol=2e-3)
    torch.testing.assert_close(texts, used[1].vectors, rtol=0, atol=1e-5)
    ours = evaluate(Encoded(images), Encoded(texts), matcher.score, range(60), torch.from_numpy(train_split.image_of))
    theirs = visavis.evaluate(run, split="train")
    assert ours.metrics["rsum"] == pytest.approx(theirs.metrics["rsum"], abs=5)


def test_pictures_and_paths_are_the_same_to_a_model(run, train_split, tmp_path):
    model, told = visavis.load(run), []
    path = train_split.images[0].bytes.path
    with Image.open(path) as picture:
        rows = model.encode_images([path, str(path), picture, picture.convert("RGBA")], lambda done, total: told.append((done, total)))
    assert all(torch.allclose(row, rows[0], atol=1e-6) for row in rows)
    assert told == [(4, 4)]


@pytest.mark.parametrize("call", [lambda model: model.encode_images([]), lambda model: model.encode_texts([])])
def test_nothing_to_encode_is_a_sentence(run, call):
    with pytest.raises(ShapeError, match="there is nothing to encode: the list is empty"):
        call(visavis.load(run))


def test_one_text_instead_of_a_list_is_a_sentence(run):
    with pytest.raises(ShapeError, match=r"write \['a dog'\]"):
        visavis.load(run).encode_texts("a dog")


def test_a_file_that_is_missing_or_no_picture_is_a_sentence(run, tmp_path):
    (tmp_path / "notes.png").write_text("no picture")
    for name, what in (("gone.png", "cannot be read: No such file"), ("notes.png", "is not an image of a known format")):
        with pytest.raises(DataError, match=f"{name} {what}"):
            visavis.load(run).encode_images([tmp_path / name])


def test_the_right_images_are_found_in_the_runs_own_data(run, train_split):
    ranks = []
    for index in range(0, len(train_split.captions), 6):
        hits = visavis.search(run, train_split.captions[index], top=70)
        assert len(hits) == 70
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        ranks.append(rank_of(hits, train_split.images[train_split.image_of[index]].name))
    assert np.median(ranks) == 1
    assert np.mean(ranks) < 4


def test_the_right_image_is_found_in_a_loose_folder_and_in_a_data_set(run, scenes, train_split, tmp_path):
    hits = visavis.search(run, train_split.captions[4], top=1)
    loose = tmp_path / "loose" / "deeper"
    shutil.copytree(scenes / "images", loose)
    for inside in (loose.parent, scenes, scenes / "captions.jsonl"):
        (found,) = visavis.search(run, train_split.captions[4], inside=inside, top=1)
        assert found.name.endswith(hits[0].name.rpartition("/")[2])
        assert found.score == pytest.approx(hits[0].score, abs=1e-3)
        assert found.image.open().size == (48, 48)


def test_a_changed_folder_is_looked_at_anew(run, scenes, train_split, tmp_path):
    first, second = (image.bytes.path for image in train_split.images[:2])
    shutil.copy(first, tmp_path / "picture.png")
    before = visavis.search(run, train_split.captions[0], inside=tmp_path)
    shutil.copy(second, tmp_path / "picture.png")
    shutil.copy(first, tmp_path / "another.png")
    after = visavis.search(run, train_split.captions[0], inside=tmp_path)
    assert after[0].name == "another.png"
    assert after[0].score == pytest.approx(before[0].score, abs=1e-5)


def test_an_unreadable_image_is_left_out_and_said(run, train_split, tmp_path):
    shutil.copy(train_split.images[0].bytes.path, tmp_path / "good.png")
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    progress = Listener()
    hits = visavis.search(run, "a red thing", inside=tmp_path, progress=progress)
    assert [hit.name for hit in hits] == ["good.png"]
    assert any("bad.jpg" in sentence and "left out" in sentence for sentence in progress.said)
    (tmp_path / "good.png").unlink()
    with pytest.raises(DataError, match=r"no image that can be used .*bad\.jpg"):
        visavis.search(run, "a red thing", inside=tmp_path)


def test_what_cannot_be_searched_is_a_sentence(run, scenes, tmp_path):
    with pytest.raises(VisavisError, match="the query is empty"):
        visavis.search(run, "  ")
    with pytest.raises(VisavisError, match="top is 0, expected at least 1"):
        visavis.search(run, "a dog", top=0)
    (tmp_path / "notes.txt").write_text("no pictures here")
    with pytest.raises(DataError, match="holds no images and no data set: name a folder with pictures in it"):
        visavis.search(run, "a dog", inside=tmp_path)
    with pytest.raises(DataError, match="gone does not exist"):
        visavis.search(run, "a dog", inside=tmp_path / "gone")
    with pytest.raises(RunError, match="is no run or model folder"):
        visavis.search(tmp_path, "a dog")


def test_a_run_that_was_moved_still_loads_searches_and_evaluates(run, train_split, tmp_path, monkeypatch):
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(run, moved)
    monkeypatch.chdir(tmp_path)
    query = train_split.captions[10]
    assert [hit.to_json() for hit in visavis.search(moved, query)] == [hit.to_json() for hit in visavis.search(run, query)]
    assert torch.equal(visavis.load(moved).encode_texts([query]), visavis.load(run).encode_texts([query]))
    assert visavis.evaluate(moved).metrics == visavis.evaluate(run).metrics
    shutil.copytree(moved / "model", tmp_path / "model-alone")
    assert torch.equal(visavis.load(tmp_path / "model-alone").encode_texts([query]), visavis.load(run).encode_texts([query]))


def test_other_data_are_read_with_the_models_own_words(run, tmp_path):
    """A vocabulary made of the other data would give every word another vector."""
    other = write_scenes(tmp_path / "other", num_train=0, num_val=0, num_test=9, captions_per_image=2, size=48, seed=8)
    result = visavis.evaluate(run, data=other)
    model, data = visavis.load(run), open_dataset(other)
    images = model.encode_images([image.bytes.path for image in data.images])
    texts = model.encode_texts(data.captions)
    ours = evaluate(Encoded(images), Encoded(texts), model.matcher.score, range(9), torch.from_numpy(data.image_of))
    assert (result.num_images, result.num_texts, result.protocol) == (9, 18, "plain")
    assert ours.metrics["rsum"] == pytest.approx(result.metrics["rsum"], abs=25)


@pytest.mark.parametrize("damage", ["config", "weights", "kind", "entry"])
def test_a_damaged_model_folder_is_a_sentence(run, tmp_path, damage):
    model = tmp_path / "model"
    shutil.copytree(run / "model", model)
    config = (model / "config.json").read_text()
    if damage == "config":
        (model / "config.json").write_text(config[:50])
    elif damage == "weights":
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:500])
    elif damage == "kind":
        (model / "config.json").write_text(config.replace('"VSEPlusPlus"', '"VSE--"').replace('"VSE++"', '"VSE--"'))
    else:
        (model / "config.json").write_text(config.replace('"vocabulary"', '"vocabluary"'))
    with pytest.raises((RunError, DataError), match=r"config\.json|model\.safetensors"):
        visavis.load(model)


def test_words_that_the_model_never_learned_are_said(run):
    listener = Listener()
    visavis.search(run, "a red zeppelin", progress=listener)
    assert listener.said == ["words that this model has not learned: zeppelin"]
    with pytest.raises(VisavisError, match="no word of 'zeppelin gramophone' is among the"):
        visavis.search(run, "zeppelin gramophone")
