"""Region features: .tsv of bottom-up-attention, and folders of arrays by image id."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
import torch
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.errors import DataError, RecipeError, VisavisError
from visavis.data.features.expert_store import RegionFeatures

WIDTH = 5
IDS = ["391895", "1000092795", "7"]
NAMES = ["val2014/COCO_val2014_000000391895.jpg", "1000092795.jpg", "7.png"]


def regions(numbers=(3, 3, 3), seed=0):
    draw = np.random.default_rng(seed)
    return {
        item: draw.standard_normal((number, WIDTH)).astype(np.float32)
        for item, number in zip(IDS, numbers, strict=True)
    }


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
        np.savez_compressed(
            folder / "npz" / f"{item}.npz", features=array, boxes=np.zeros((len(array), 4))
        )
    return folder / "npz"


def silent(done, total):
    pass


@pytest.mark.parametrize("numbers", [(3, 3, 3), (4, 1, 2)], ids=["equal", "ragged"])
@pytest.mark.parametrize("write", [as_tsv, as_two_tsv, as_npy, as_npz])
def test_region_features_of_each_format(write, numbers, tmp_path):
    given, progress_calls = regions(numbers), []
    path = write(tmp_path, given)
    stored = RegionFeatures.open(path, lambda done, total: progress_calls.append((done, total)))
    assert progress_calls and all(done <= total for done, total in progress_calls)
    order = [2, 0, 1]
    items = stored.read(stored.rows([NAMES[i] for i in order]))
    assert (
        (items.mask is None) == (numbers == (3, 3, 3))
        and stored.embedding_dim == WIDTH
        and len(stored) == 3
    )
    for row, item in enumerate(IDS[i] for i in order):
        there = slice(None) if items.mask is None else items.mask[row]
        assert torch.equal(items.vectors[row][there], torch.from_numpy(given[item]))
    progress_calls.clear()
    again = RegionFeatures.open(path, lambda done, total: progress_calls.append(done))
    assert not progress_calls and again.sha256 == stored.sha256, "converted once"


def test_region_features_are_converted_again_after_a_change(tmp_path, caplog):
    path = as_tsv(tmp_path, regions())
    before = RegionFeatures.open(path, silent)
    array, sha256 = before.store.folder / "regions.npy", before.sha256
    # Windows does not remove a file that is mapped.
    del before
    array.write_bytes(array.read_bytes()[:-4] + b"\0\0\0\1")
    assert RegionFeatures.open(path, silent).sha256 == sha256
    assert "is damaged" in caplog.text
    assert "Restore" not in caplog.text, "the cache is rebuilt"
    tsv(path, regions(seed=1))
    assert RegionFeatures.open(path, silent).sha256 != sha256


def test_region_features_report_missing_images(tmp_path):
    stored = RegionFeatures.open(as_tsv(tmp_path, regions()), silent)
    with pytest.raises(
        DataError,
        match=r"has no features of 2 of 3 images, such as 8\.jpg \(searched for 8\.jpg or 8\)\. Its ids look like 391895",
    ):
        stored.rows(["8.jpg", "7.jpg", "a_7.jpg"])


def broken(array):
    return np.where(np.arange(array.size).reshape(array.shape) == 3, np.nan, array).astype(
        np.float32
    )


WRONG = {
    "columns": (
        lambda good: "a b c\n",
        r"regions\.tsv, line 2: expected the tab-separated columns id, width, height",
    ),
    "base64": (
        lambda good: line("7", good)[:-3] + "?\n",
        r"line 2: expected the features of image 7 as base64 in the last column",
    ),
    "cut": (
        lambda good: line("7", good, boxes=7),
        r"line 2: 60 bytes of features do not match '7' boxes",
    ),
    "no boxes": (
        lambda good: line("7", good[:0]),
        r"line 2: 0 bytes of features do not match '0' boxes",
    ),
    "boxes in words": (lambda good: line("7", good, boxes="many"), r"do not match 'many' boxes"),
    "width": (
        lambda good: line("7", good[:, :4].copy()),
        r"line 2: expected numbers of shape \[regions, 5\], got float32 of shape \[3, 4\]",
    ),
    "NaN": (
        lambda good: line("7", broken(good)),
        r"line 2: image 7: .*got NaN or infinity\. Compute them again",
    ),
    "twice": (
        lambda good: line("391895", good),
        r"line 2: image 391895: duplicate item .391895.: expected the features of each item once\. Remove the copy",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_region_features_report_malformed_lines(wrong, tmp_path):
    good = regions()["391895"]
    make, sentence = WRONG[wrong]
    (tmp_path / "regions.tsv").write_text(line("391895", good) + make(good))
    with pytest.raises(DataError, match=sentence):
        RegionFeatures.open(tmp_path / "regions.tsv", silent)
    (tmp_path / "regions.tsv").write_text(line("391895", good))
    assert len(RegionFeatures.open(tmp_path / "regions.tsv", silent)) == 1


def test_region_features_report_malformed_folders(tmp_path):
    folder = as_npy(tmp_path, regions())
    np.save(folder / "9.npy", np.array([{"features": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"9\.npy"):
        RegionFeatures.open(folder, silent)
    np.save(folder / "9.npy", np.array(3.0))
    with pytest.raises(DataError, match=r"9\.npy: expected .*, got .* of shape"):
        RegionFeatures.open(folder, silent)
    np.save(folder / "9.npy", np.ones((2, WIDTH + 1)))
    with pytest.raises(
        DataError,
        match=r"9\.npy: expected numbers of shape \[regions, 5\], got float64 of shape \[2, 6\]",
    ):
        RegionFeatures.open(folder, silent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError,
        match=r"empty has no region features: expected \.tsv of bottom-up-attention, or ID\.npy",
    ):
        RegionFeatures.open(tmp_path / "empty", silent)
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(DataError, match=r"empty\.tsv is empty"):
        RegionFeatures.open(tmp_path / "empty.tsv", silent)
    for name, content, sentence in (
        ("a", b"PK", "is not a readable .npz"),
        ("b", None, "has no features: expected an array named features"),
    ):
        other = tmp_path / name
        other.mkdir()
        if content is None:
            np.savez(other / "1.npz", boxes=np.ones(3))
        else:
            (other / "1.npz").write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            RegionFeatures.open(other, silent)


def test_training_on_region_features_resumes(tmp_path):
    draw, data = np.random.default_rng(0), tmp_path / "photos"
    data.mkdir()
    splits = ["train"] * 8 + ["val"] * 2 + ["test"] * 2
    images = [
        {
            "filename": f"{100 + i}.jpg",
            "split": split,
            "sentences": [{"raw": f"a thing number {i % 3}"}, {"raw": "a thing"}],
        }
        for i, split in enumerate(splits)
    ]
    (data / "dataset_photos.json").write_text(json.dumps({"images": images}))
    features = {
        str(100 + i): draw.standard_normal((1 + i % 4, WIDTH)).astype(np.float32)
        for i in range(len(splits))
    }
    recipe = write_recipe(
        tmp_path / "regions.toml",
        {"objective": "TripletHN()"},
        name="regions",
        visual={
            "encoder": None,
            "features": str(tsv(tmp_path / "regions.tsv", features)),
            "granularity": "regions",
        },
        model={"kind": "SCAN", "word_dim": 8},
        training={"batch_size": 6},
    )
    trained = visavis.train(recipe, data=data, out=tmp_path / "run")
    assert visavis.evaluate(tmp_path / "run").metrics == trained.test.metrics
    assert visavis.train(resume=tmp_path / "run").test.metrics == trained.test.metrics
    for overrides, sentence in (
        (
            {"visual.granularity": "pooled", "model": "VSE++()"},
            "visual.features|regions by the ids|regions by image id",
        ),
        ({"visual.standardize": "zscore"}, "visual.standardize|unequal number"),
    ):
        with pytest.raises(RecipeError, match=sentence):
            visavis.train(recipe, data=data, out=tmp_path / "other", overrides=overrides)
    tsv(tmp_path / "regions.tsv", {item: features[item] for item in list(features)[1:]})
    with pytest.raises(
        VisavisError, match=re.escape("has no features of 1 of 8 images, such as 100.jpg")
    ):
        visavis.train(recipe, data=data, out=tmp_path / "third")
