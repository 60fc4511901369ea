"""Training on features stored with the dataset, without an image encoder."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from tests.docs import read_blocks
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core import storage
from visavis.core.errors import DataError, RecipeError, RunError
from visavis.data.features import arrays as finite
from visavis.evaluation import Protocol, protocols
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import read_run_recipe
from visavis.training.runs.run_folder import RunFolder

WORDS = ["dog", "cat", "boat", "tree", "kite", "car", "lamp", "moon"]


@pytest.fixture
def precomp(tmp_path):
    """Write images whose features are the one-hot code of the word in their captions, which is easy
    to learn.
    """
    random = np.random.default_rng(0)
    for split, per_word in (("train", 8), ("dev", 2), ("test", 2)):
        words = np.repeat(np.arange(len(WORDS)), per_word)
        features = np.eye(len(WORDS), dtype=np.float32)[words] + 0.05 * random.standard_normal(
            (len(words), len(WORDS)), np.float32
        )
        np.save(tmp_path / f"{split}_ims.npy", features)
        captions = [
            f"{opening} {WORDS[word]} number {i}"
            for i, word in enumerate(words)
            for opening in ("a", "one", "the", "this", "some")
        ]
        (tmp_path / f"{split}_caps.txt").write_text("\n".join(captions) + "\n")
    return tmp_path


@pytest.fixture
def recipe(precomp):
    return write_recipe(
        precomp / "tiny.toml",
        {"epochs": 4, "objective": "Unified(gamma=20)", "optimizer": {"lr": 0.02}},
        data={"path": str(precomp)},
        visual={"encoder": None, "granularity": None, "features": "precomp"},
        model={"embedding_dim": 16, "word_dim": 8},
        training={"batch_size": 16, "metric_batches": None, "threads": None},
    )


def test_nonfinite_features_stop_training_before_start(precomp, recipe, tmp_path):
    for split, image in (("test", 15), ("dev", 3), ("dev", 0), ("train", 63)):
        features = np.load(precomp / f"{split}_ims.npy")
        features[image, 2] = np.nan
        np.save(precomp / f"{split}_ims.npy", features)
        named = f"row {image} of split {'val' if split == 'dev' else split} in {precomp}: expected finite features"
        with pytest.raises(RecipeError, match=f"^{re.escape(named)}"):
            visavis.train(recipe, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_dataset_without_features_is_rejected(recipe, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(40):
        Image.new("RGB", (4, 4)).save(folder / f"{number}.png")
    (folder / "captions.csv").write_text(
        "filename,caption\n" + "".join(f"{number}.png,a dog\n" for number in range(40))
    )
    with pytest.raises(
        DataError,
        match=r'captions\.csv: features = "precomp" expects train_ims\.npy with train_caps\.txt',
    ):
        visavis.train(recipe, data=folder, out=tmp_path / "run")


def test_features_are_scanned_by_first_command_only(precomp, recipe, tmp_path, monkeypatch):
    scans, scan = [], finite._scan
    monkeypatch.setattr(
        finite, "_scan", lambda features: scans.append(features.path) or scan(features)
    )
    run = visavis.train(recipe, out=tmp_path / "run", overrides={"phases.0.epochs": 1}).run
    visavis.evaluate(run)
    assert scans == [precomp]
    features = np.load(precomp / "test_ims.npy")
    features[0, 0] = np.inf
    np.save(precomp / "test_ims.npy", features)
    with pytest.raises(RecipeError, match="expected finite features"):
        visavis.evaluate(run)
    assert len(scans) == 2


def test_recipe_of_data_page_trains(precomp, tmp_path):
    block = read_blocks("docs/guides/data.md", "toml")[0]
    (tmp_path / "precomp.toml").write_text(block.text)
    for file in precomp.glob("*_ims.npy"):
        np.save(file, np.load(file)[:, None].repeat(3, 1))
    run = visavis.train(
        tmp_path / "precomp.toml",
        data=precomp,
        out=tmp_path / "run",
        overrides=[
            "phases.0.epochs=1",
            "model.embedding_dim=8",
            "model.word_dim=4",
            "training.batch_size=16",
            "text.min_count=1",
        ],
    )
    assert run.test.num_texts == 5 * run.test.num_images == 80


def test_protocol_uses_first_captions(precomp, recipe, tmp_path, monkeypatch):
    three = Protocol(name="three", description="the first three captions", captions_per_image=3)
    monkeypatch.setattr(protocols, "CATALOG", (*protocols.CATALOG, three))
    trained = visavis.train(
        recipe, out=tmp_path / "run", overrides={"evaluation.protocol": "three", "epochs": 1}
    )
    assert trained.test is not None
    assert (trained.test.num_images, trained.test.num_texts) == (16, 48)
    assert visavis.evaluate(tmp_path / "run", protocol="plain").num_texts == 80


def test_model_of_stored_features_rejects_images(recipe, tmp_path):
    trained = visavis.train(recipe, out=tmp_path / "run")
    log = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert trained.test is not None
    assert trained.test.num_images == 16
    assert trained.validation_rsum > log[0]["rsum"] + 100
    assert visavis.evaluate(tmp_path / "run").metrics == trained.test.metrics
    assert visavis.load(tmp_path / "run").encode_texts(
        ["a dog number 3"]
    ).norm().item() == pytest.approx(1)
    with pytest.raises(RunError, match="expected one for new images or videos"):
        visavis.load(tmp_path / "run").encode_images([Image.new("RGB", (8, 8))])
    results = visavis.search(tmp_path / "run", "a dog", top=5)
    assert all(re.fullmatch(r"(train|val|test)-\d+", result.name) for result in results)
    assert len({result.name for result in results}) == 5
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    with pytest.raises(RunError, match="expected one for new images or videos"):
        visavis.search(tmp_path / "run", "a dog", collection=tmp_path)


def test_run_reads_stored_features_of_other_data(precomp, recipe, tmp_path):
    run, other = (
        visavis.train(recipe, out=tmp_path / "run", overrides={"epochs": 2}),
        tmp_path / "other",
    )
    other.mkdir()
    for file in (*precomp.glob("*_ims.npy"), *precomp.glob("*_caps.txt")):
        (other / file.name).write_bytes(file.read_bytes())
    np.save(other / "test_ims.npy", np.load(other / "test_ims.npy")[::-1])
    assert visavis.evaluate(run.run, data=precomp).metrics == run.test.metrics
    assert visavis.evaluate(run.run, data=other).metrics["rsum"] < run.test.metrics["rsum"] - 50


@pytest.fixture
def read_on(recipe, precomp, tmp_path):
    """Return a function for the features that a run reads on a dataset."""
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (4, 4)).save(photos / "0.png")
    (photos / "captions.csv").write_text("filename,caption\n0.png,a dog\n")
    places = {
        "its own": precomp,
        "its own by another name": precomp / ".." / precomp.name,
        "photos": photos,
    }

    def read(features, encoder, place):
        keys = {"visual.features": features, "visual.encoder": encoder}
        storage.write_toml(RunFolder(tmp_path / "run").recipe, read_recipe(recipe, keys).to_dict())
        return read_run_recipe(tmp_path / "run", str(places[place])).visual.features

    (tmp_path / "run").mkdir()
    return read


@pytest.mark.parametrize(
    ("features", "encoder", "place", "expected"),
    [
        ("stored.npy", "", "its own", "stored.npy"),
        ("stored.npy", "scenes", "its own by another name", "stored.npy"),
        ("stored.npy", "scenes", "photos", ""),
        ("precomp", "scenes", "its own", "precomp"),
        ("precomp", "scenes", "photos", ""),
        ("precomp", "", "photos", "precomp"),
    ],
)
def test_features_come_from_data_or_encoder(features, encoder, place, expected, read_on):
    assert read_on(features, encoder, place) == expected


def test_features_of_other_images_are_not_used(read_on):
    with pytest.raises(
        RunError,
        match=r"whose stored features the run reads \(stored\.npy\), got .*photos\. Use the data of the run",
    ):
        read_on("stored.npy", "", "photos")
