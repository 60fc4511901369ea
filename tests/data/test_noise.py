"""Synthetic noise: laws of each kind, golden hashes, and files of published indices."""

import hashlib
import json

import numpy as np
import pytest

import visavis
from visavis.core import spec
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_file import Image
from visavis.data.noise import (
    CATALOG,
    Noise,
    NoiseIndex,
    PartlyRelevantImages,
    ShuffledCaptions,
    ShuffledImages,
    SimilarImages,
    add_noise,
    noise_index,
)
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import read_run_recipe
from visavis.training.runs.record import RunRecord
from visavis.training.runs.run_folder import RunFolder

PERMUTATIONS = (ShuffledCaptions, ShuffledImages, SimilarImages, PartlyRelevantImages)
ANIMALS = ("dog", "cat", "horse", "bird", "cow", "fish")
PLACES = ("beach", "street", "forest", "river", "field", "house")


def animals(images=60, captions=2):
    """An animal at a place for each image, some in validation, described in several ways."""
    texts = [
        f"a {ANIMALS[i % 6]} number {k} at the {PLACES[i // 6 % 6]}"
        for i in range(images)
        for k in range(captions)
    ]
    splits = ["val" if i % 10 == 9 else "train" for i in range(images)]
    return Dataset(
        "animals",
        tuple(Image(f"{i}.jpg", split) for i, split in enumerate(splits)),
        tuple(texts),
        np.repeat(np.arange(images), captions),
    )


def content(data, caption):
    """Animal and place of a caption."""
    words = set(data.captions[caption].split())
    return words & {*ANIMALS, *PLACES}


@pytest.mark.parametrize("kind", PERMUTATIONS)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_noise_permutes_training_captions(kind, share):
    """Captions are moved within the training split, about as many as the share, and each image
    keeps its number of captions.
    """
    data = animals()
    noisy = add_noise(data, kind(share=share), seed=3)
    moved = noisy.image_of != data.image_of
    train = data.in_split("train")
    assert train[data.image_of[moved]].all()
    assert train[noisy.image_of[moved]].all()
    assert sorted(noisy.image_of) == sorted(data.image_of)
    num_train = int(train[data.image_of].sum())
    assert 0.8 * share * num_train <= moved.sum() <= share * num_train


@pytest.mark.parametrize("kind", PERMUTATIONS)
def test_noise_depends_only_on_data_and_seed(kind):
    data = animals()
    first, again, other = (noise_index(add_noise(data, kind(), seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert noise_index(add_noise(data, kind(seed=2), 1)) == other
    assert spec.parse(repr(kind(seed=2)), CATALOG, Noise, "noises") == kind(seed=2)


# Computed once: the noise of a seed must not change with a version or a machine.
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ShuffledCaptions, "6d8ab16bc34f36d6"),
        (ShuffledImages, "4bd1deb4316ae029"),
        (SimilarImages, "038af374a630898a"),
        (PartlyRelevantImages, "424c22d3e321b61a"),
    ],
)
def test_noise_index_is_golden(kind, expected):
    assert noise_index(add_noise(animals(), kind(share=0.5), seed=1)) == expected


def test_noise_index_of_clean_data_is_known():
    """The hash is that of the content of the file: two captions for each of three images."""
    data = animals(images=3)
    expected = np.array([0, 0, 1, 1, 2, 2], "<i8").tobytes()
    assert noise_index(data) == hashlib.sha256(expected).hexdigest()[:16]


def test_shuffled_images_moves_captions_together():
    data = animals()
    noisy = add_noise(data, ShuffledImages(share=0.5), seed=1)
    pairs = noisy.image_of.reshape(-1, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all()
    alone = add_noise(data, ShuffledCaptions(share=0.5), seed=1).image_of.reshape(-1, 2)
    assert (alone[:, 0] != alone[:, 1]).any()


def test_similar_images_share_more_than_partly_relevant():
    """Shared animal and place: both at first, one with intermediate similarity, and hardly any by a
    uniform permutation.
    """
    data = animals(images=120)
    shared = []
    for noise in (
        SimilarImages(share=0.25),
        PartlyRelevantImages(share=0.25, nearest=0.04, farthest=0.3),
        ShuffledCaptions(share=0.25),
    ):
        image_of = add_noise(data, noise, seed=1).image_of
        moved = np.flatnonzero(image_of != data.image_of)
        shared.append(
            np.mean([len(content(data, i) & content(data, 2 * image_of[i])) for i in moved])
        )
    similar, partly, uniform = shared
    assert similar == 2
    assert partly == 1
    assert uniform < 0.6


def test_similar_images_by_hand():
    """Four images: the two dogs exchange captions, as do the two cats."""
    data = Dataset(
        "four",
        tuple(Image(f"{i}.jpg", "train") for i in range(4)),
        ("a dog runs", "the cat sleeps", "one dog", "my cat"),
        np.arange(4),
    )
    noisy = add_noise(data, SimilarImages(share=1.0), seed=0)
    assert noisy.image_of.tolist() == [2, 3, 0, 1]


def test_partly_relevant_images_report_too_few_candidates():
    data = animals(images=12, captions=1)
    with pytest.raises(DataError, match=r"^PartlyRelevantImages\(.*expected 10 of 11 captions on other images, got \d.* smaller share"):  # fmt: skip
        add_noise(data, PartlyRelevantImages(share=0.9), seed=0)


def test_noise_index_reads_published_file(tmp_path):
    """One integer per training caption, or one per training image."""
    data = animals(images=20)
    train = np.flatnonzero(data.in_split("train"))
    noisy = add_noise(data, ShuffledImages(share=0.5), seed=4)
    positions = np.cumsum(data.in_split("train")) - 1
    captions = positions[noisy.image_of[np.isin(data.image_of, train)]]
    for name, index in (("captions", captions), ("images", captions[::2])):
        np.save(tmp_path / f"{name}.npy", index)
        read = add_noise(data, NoiseIndex(file=str(tmp_path / f"{name}.npy")), seed=0)
        assert (read.image_of == noisy.image_of).all()
        assert noise_index(read) == noise_index(noisy)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (np.zeros(7, int), r"expected 36 integers, one per training caption, or 18, .* got 7"),
        (np.zeros(36), r"expected integers or unsigned integers of 1 dimensions, got float64 of shape"),
        (np.full(36, 18), r"expected positions of 18 training images, from 0 to 17, got 18 to 18"),
    ],
)  # fmt: skip
def test_noise_index_rejects_other_file(tmp_path, index, message):
    np.save(tmp_path / "index.npy", index)
    with pytest.raises(DataError, match=message):
        add_noise(animals(images=20), NoiseIndex(file=str(tmp_path / "index.npy")), seed=0)


def test_noise_index_needs_a_file():
    with pytest.raises(DataError, match=r"^NoiseIndex: expected file='FILE.npy'"):
        add_noise(animals(images=20), NoiseIndex(), seed=0)


def test_run_records_noise(scenes, tmp_path):
    """The hash is in the record, in the result and in its printed form."""
    index = noise_index(add_noise(open_dataset(scenes), ShuffledImages(share=0.5), seed=7))
    overrides = {
        "data.noise": "ShuffledImages(share=0.5)",
        "epochs": 1,
        "seed": 7,
        "model.embedding_dim": 16,
    }
    run = visavis.train("demo", data=scenes, out=tmp_path / "run", overrides=overrides)
    assert run.noise_index == index
    assert f"ShuffledImages(share=0.5, seed=7), noise index {index}" in run.tables()[-1].notes[0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["noise"], result["noise_index"]) == (run.noise, index)
    record = RunRecord.read(RunFolder(tmp_path / "run").environment)
    assert record.noise_index == index
    assert read_run_recipe(tmp_path / "run").data.noise == ShuffledImages(share=0.5)
    assert visavis.evaluate(tmp_path / "run").metrics == run.test.metrics


def test_recipe_names_the_noise_with_its_seed():
    """A published index has no seed."""
    for noise, described in (
        ("ShuffledImages(share=0.5)", "ShuffledImages(share=0.5, seed=3)"),
        ("ShuffledImages(share=0.5, seed=9)", "ShuffledImages(share=0.5, seed=9)"),
        ("NoiseIndex(file='index.npy')", "NoiseIndex(file='index.npy')"),
    ):
        assert read_recipe("demo", {"data.noise": noise, "seed": 3}).noise == described
