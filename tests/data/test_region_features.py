"""Regions in the layouts that people have them in: .tsv of bottom-up-attention, folders by id."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
import torch

import visavis
from visavis.data.region_features import RegionFeatures
from visavis.errors import DataError, RecipeError, VisavisError

WIDTH = 5
IDS = ["391895", "1000092795", "7"]
NAMES = ["val2014/COCO_val2014_000000391895.jpg", "1000092795.jpg", "7.png"]


def regions(numbers=(3, 3, 3), seed=0):
    draw = np.random.default_rng(seed)
    return {item: draw.standard_normal((number, WIDTH)).astype(np.float32) for item, number in zip(IDS, numbers, strict=True)}


def line(item, features, boxes=None):
    places = np.zeros((len(features), 4), np.float32)
    columns = [
        item,
        "640",
        "480",
        str(len(features) if boxes is None else boxes),
        *(base64.b64encode(a.tobytes()).decode() for a in (places, features)),
    ]
    return "\t".join(columns) + "\n"


def tsv(path, features):
    path.write_text("".join(line(item, array) for item, array in features.items()))
    return path


def as_tsv(folder, features):
    return tsv(folder / "regions.tsv", features)


def as_two_tsv(folder, features):
    (folder / "parts").mkdir()
    items = list(features)
    tsv(folder / "parts" / "train.tsv.0", {item: features[item] for item in items[:2]})
    tsv(folder / "parts" / "train.tsv.1", {item: features[item] for item in items[2:]})
    return folder / "parts"


def as_npy(folder, features):
    (folder / "npy").mkdir()
    for item, array in features.items():
        np.save(folder / "npy" / f"{item}.npy", array)
    return folder / "npy"


def as_npz(folder, features):
    (folder / "npz").mkdir()
    for item, array in features.items():
        np.savez_compressed(folder / "npz" / f"{item}.npz", features=array, boxes=np.zeros((len(array), 4)))
    return folder / "npz"


def silent(done, total):
    pass


@pytest.mark.parametrize("numbers", [(3, 3, 3), (4, 1, 2)], ids=["equal", "ragged"])
@pytest.mark.parametrize("write", [as_tsv, as_two_tsv, as_npy, as_npz])
def test_every_layout_gives_the_features_of_each_image_by_its_name(write, numbers, tmp_path):
    given, told = regions(numbers), []
    path = write(tmp_path, given)
    stored = RegionFeatures.open(path, lambda done, total: told.append((done, total)))
    assert told and all(done <= total for done, total in told)
    order = [2, 0, 1]
    items = stored.read(stored.rows([NAMES[i] for i in order]))
    assert (items.mask is None) == (numbers == (3, 3, 3)) and stored.width == WIDTH and len(stored) == 3
    for row, item in enumerate(IDS[i] for i in order):
        there = slice(None) if items.mask is None else items.mask[row]
        assert torch.equal(items.vectors[row][there], torch.from_numpy(given[item]))
    told.clear()
    again = RegionFeatures.open(path, lambda done, total: told.append(done))
    assert not told and again.sha256 == stored.sha256, "converted once"


def test_a_file_that_changed_is_converted_anew_and_a_damaged_store_too(tmp_path, caplog):
    path = as_tsv(tmp_path, regions())
    before = RegionFeatures.open(path, silent)
    array = before.store.folder / "regions.npy"
    array.write_bytes(array.read_bytes()[:-4] + b"\0\0\0\1")
    assert RegionFeatures.open(path, silent).sha256 == before.sha256
    assert "is damaged and is made anew" in caplog.text
    tsv(path, regions(seed=1))
    assert RegionFeatures.open(path, silent).sha256 != before.sha256


def test_images_without_features_are_counted_and_the_first_is_named(tmp_path):
    stored = RegionFeatures.open(as_tsv(tmp_path, regions()), silent)
    with pytest.raises(
        DataError,
        match=r"holds no features of 2 of 3 images, the first of which is 8\.jpg \(looked for 8\.jpg or 8\): its ids are like 391895",
    ):
        stored.rows(["8.jpg", "7.jpg", "a_7.jpg"])


def broken(array):
    return np.where(np.arange(array.size).reshape(array.shape) == 3, np.nan, array).astype(np.float32)


WRONG = {
    "columns": (lambda good: "a b c\n", r"regions\.tsv, line 2 has 1 columns, expected the id, width, height"),
    "base64": (lambda good: line("7", good)[:-3] + "?\n", r"line 2: the last column is not base64, expected the features of image 7"),
    "cut": (lambda good: line("7", good, boxes=7), r"line 2: 60 bytes of features are not those of '7' boxes: the line may be cut"),
    "no boxes": (lambda good: line("7", good[:0]), r"line 2: 0 bytes of features are not those of '0' boxes"),
    "boxes in words": (lambda good: line("7", good, boxes="many"), r"are not those of 'many' boxes"),
    "width": (
        lambda good: line("7", good[:, :4].copy()),
        r"line 2: the features are float32 of shape \[3, 4\], expected numbers of shape \[regions, 5\]",
    ),
    "NaN": (lambda good: line("7", broken(good)), r"line 2: the features hold values that are not finite"),
    "twice": (lambda good: line("391895", good), r"line 2: image 391895 comes a second time"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_line_is_one_sentence_and_leaves_nothing(wrong, tmp_path):
    good = regions()["391895"]
    make, sentence = WRONG[wrong]
    (tmp_path / "regions.tsv").write_text(line("391895", good) + make(good))
    with pytest.raises(DataError, match=sentence):
        RegionFeatures.open(tmp_path / "regions.tsv", silent)
    (tmp_path / "regions.tsv").write_text(line("391895", good))
    assert len(RegionFeatures.open(tmp_path / "regions.tsv", silent)) == 1


def test_wrong_folders_are_one_sentence(tmp_path):
    folder = as_npy(tmp_path, regions())
    np.save(folder / "9.npy", np.array([{"features": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"9\.npy"):
        RegionFeatures.open(folder, silent)
    np.save(folder / "9.npy", np.ones((2, WIDTH + 1)))
    with pytest.raises(DataError, match=r"9\.npy: the features are float64 of shape \[2, 6\], expected numbers of shape \[regions, 5\]"):
        RegionFeatures.open(folder, silent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no features of regions: expected \.tsv of bottom-up-attention, or ID\.npy"):
        RegionFeatures.open(tmp_path / "empty", silent)
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(DataError, match=r"empty\.tsv is empty"):
        RegionFeatures.open(tmp_path / "empty.tsv", silent)
    for name, content, sentence in (
        ("a", b"PK", "is no readable .npz"),
        ("b", None, "holds no features: expected an array named features"),
    ):
        other = tmp_path / name
        other.mkdir()
        if content is None:
            np.savez(other / "1.npz", boxes=np.ones(3))
        else:
            (other / "1.npz").write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            RegionFeatures.open(other, silent)


RECIPE = """
name = "regions"
visual = { features = "FEATURES", view = "grid" }
text = { min_count = 1 }
model = { kind = "SCAN", width = 8, word_width = 8 }
training = { batch_size = 6, probe_batches = 1, threads = 1 }
phases = [{ epochs = 1, objective = "TripletHN()" }]
"""


def test_a_recipe_trains_on_ragged_regions_by_ids_and_resumes(tmp_path):
    draw, data = np.random.default_rng(0), tmp_path / "photos"
    data.mkdir()
    splits = ["train"] * 8 + ["val"] * 2 + ["test"] * 2
    images = [
        {"filename": f"{100 + i}.jpg", "split": split, "sentences": [{"raw": f"a thing number {i % 3}"}, {"raw": "a thing"}]}
        for i, split in enumerate(splits)
    ]
    (data / "dataset_photos.json").write_text(json.dumps({"images": images}))
    features = {str(100 + i): draw.standard_normal((1 + i % 4, WIDTH)).astype(np.float32) for i in range(len(splits))}
    recipe = tmp_path / "regions.toml"
    recipe.write_text(RECIPE.replace("FEATURES", str(tsv(tmp_path / "regions.tsv", features))))
    trained = visavis.train(recipe, data=data, out=tmp_path / "run")
    assert visavis.evaluate(tmp_path / "run").metrics == trained.test.metrics
    assert visavis.train(resume=tmp_path / "run").test.metrics == trained.test.metrics
    for overrides, sentence in (
        ({"visual.view": "pooled", "model": "VSE++()"}, "holds regions by the ids of images: set visual.view"),
        ({"visual.standardize": "values"}, "holds regions of unequal number an image, which visual.standardize does not count"),
    ):
        with pytest.raises(RecipeError, match=sentence):
            visavis.train(recipe, data=data, out=tmp_path / "other", overrides=overrides)
    tsv(tmp_path / "regions.tsv", {item: features[item] for item in list(features)[1:]})
    with pytest.raises(VisavisError, match=re.escape("holds no features of 1 of 8 images, the first of which is 100.jpg")):
        visavis.train(recipe, data=data, out=tmp_path / "third")
