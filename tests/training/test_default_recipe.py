"""Training without a recipe: choice of the default, its messages, and the commands of the README."""

import csv
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from tests.docs import read_blocks, split_commands

import visavis
from visavis import cli
from visavis.core import storage
from visavis.core.errors import RecipeError, SpecError
from visavis.core.progress import NoProgress
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation.metrics.ranking import random_recall, random_rsum
from visavis.models.encoders.cnn_backbones import SmallCNN
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.feature_extraction import cache_features
from visavis.objectives import VLC
from visavis.training.recipes.default_recipe import choose_recipe
from visavis.training.recipes.files import read_recipe

FOLDERS = ("Été à Nice", "two words", "Größe & Fünf", ".")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Synthetic scenes in folders with spaces and accents, 1 to 3 captions each, without splits."""
    folder = tmp_path_factory.mktemp("own")
    scenes = open_dataset(
        write_synthetic_scenes(
            folder / "scenes", num_train=40, num_val=4, num_test=4, captions_per_image=3, size=32
        )
    )
    rows = []
    for number, image in enumerate(scenes.images):
        place = folder / "photos" / FOLDERS[number % 4] / f"photo {number} é.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        image.open().save(place)
        captions = [scenes.captions[i] for i in scenes.captions_of[number]]
        rows += [
            (str(place.relative_to(folder / "photos")), caption)
            for caption in captions[: 1 + number % 3]
        ]
    with (folder / "photos" / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("filename", "caption"), *rows])
    return folder / "photos"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def call(monkeypatch, capfd):
    """Run ``visavis ARGUMENTS``, which must succeed, and return stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["visavis", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capfd.readouterr()
        assert not end.value.code, printed.err
        return printed

    return run


class MessageLog(NoProgress):
    def __init__(self):
        self.sentences = []

    def message(self, text):
        self.sentences.append(text)


def test_readme_commands_run(photos, empty_cache, call, tmp_path, monkeypatch):
    blocks = read_blocks("README.md", "sh")
    (block,) = (block for block in blocks if "--data photos/" in block.text)
    commands = split_commands(block.text)
    assert [command[0] for command in commands] == ["data", "train", "evaluate", "search"]
    shutil.copytree(photos, tmp_path / "here" / "photos")
    monkeypatch.chdir(tmp_path / "here")
    commands[1].append("epochs=2")  # the rest of its 20 epochs does the same
    check, train, evaluate, search = (call(*command) for command in commands)
    assert "OK: training uses all data" in check.out
    assert "Using the default recipe photos/pixels-" in train.err.replace("\n", " ")
    assert "RSUM" in evaluate.out
    assert "é.png" in search.out
    assert (tmp_path / "here" / "runs" / "mine" / "run.toml").exists()


def test_default_recipe_follows_available_encoders(photos, empty_cache):
    data = {"data.path": str(photos)}
    assert choose_recipe(data).name == "photos/pixels-minilm"
    assert "a small CNN trained from scratch" in choose_recipe(data).reason
    assert "visual.encoder=" in choose_recipe(data).reason, "how to do better"
    named = choose_recipe({**data, "visual.encoder": "my/encoder", "text.encoder": "vocabulary"})
    assert named.name == "photos/frozen-words"
    assert "visavis[minilm]" in named.reason
    assert choose_recipe({**data, "visual.encoder": "small-cnn"}).name == "photos/pixels-minilm"

    cache_features(open_dataset(photos), EncoderSpec("visual", "scenes"))
    cached = choose_recipe(data)
    assert (cached.name, cached.overrides["visual.encoder"]) == ("photos/frozen-minilm", "scenes")
    storage.write_json(empty_cache / "backbones" / "mobilenet-v2" / "preprocessor_config.json", {})
    assert choose_recipe(data).overrides["visual.encoder"] == "mobilenet-v2", (
        "the one that is preferred"
    )
    assert "\n" not in choose_recipe(data).reason


def test_default_recipe_finds_published_encoder_file(photos, empty_cache):
    (empty_cache / "backbones").mkdir(parents=True)
    (empty_cache / "backbones" / "resnet50-0676ba61.pth").write_bytes(b"")
    assert choose_recipe({"data.path": str(photos)}).overrides["visual.encoder"] == "resnet50"


def test_data_without_images_use_stored_features(tmp_path, empty_cache):
    for split, images in (("train", 8), ("dev", 3), ("test", 3)):
        np.save(
            tmp_path / f"{split}_ims.npy", np.random.default_rng(0).random((images, 4), np.float32)
        )
        (tmp_path / f"{split}_caps.txt").write_text("".join(f"a dog {i}\n" for i in range(images)))
    with pytest.raises(
        RecipeError,
        match=r"expected images, found none\. Name stored features with visual\.features=FILE\.npy, or precomp",
    ):
        visavis.train(data=tmp_path)
    given = {
        "visual.features": "precomp",
        "text.encoder": "vocabulary",
        "epochs": 1,
        "model.embedding_dim": 4,
    }
    assert (
        visavis.train(data=tmp_path, out=tmp_path / "run", overrides=given).run == tmp_path / "run"
    )


def test_default_recipe_needs_data():
    with pytest.raises(
        RecipeError, match=r"expected a data set or a recipe, got neither\. Pass --data FOLDER"
    ):
        visavis.train()


def test_first_argument_with_equals_sign_is_override(photos, empty_cache, call, tmp_path):
    short = ["text.encoder=vocabulary", "epochs=1", "model.embedding_dim=8"]
    call(
        "train",
        "objective=VLC(gamma=7)",
        *short,
        "--data",
        str(photos),
        "--out",
        str(tmp_path / "run"),
    )
    recipe = read_recipe(tmp_path / "run" / "run.toml")
    assert recipe.name == "photos-pixels-words"
    assert [phase.objective for phase in recipe.phases] == [VLC(gamma=7.0)]


def test_untrained_model_is_reported_as_chance_level(photos, empty_cache, tmp_path):
    log = MessageLog()
    still = {
        "text.encoder": "vocabulary",
        "epochs": 1,
        "model.embedding_dim": 8,
        "phases.0.optimizer.lr": 1e-9,
    }
    visavis.train(data=photos, out=tmp_path / "run", overrides=still, progress=log)
    (sentence,) = [sentence for sentence in log.sentences if "not above chance" in sentence]
    assert re.search(
        r"RSUM \d+\.\d, a random ranking of \d+ images reaches \d+\.\d ± \d+\.\d\.", sentence
    )


def test_small_cnn_starts_at_random_and_needs_training(photos):
    torch.manual_seed(0)
    encoder, again = SmallCNN(), SmallCNN()
    assert not torch.equal(next(encoder.parameters()), next(again.parameters()))
    output = encoder(torch.rand(2, 3, 64, 64))
    assert output.last_hidden_state.shape == (2, 256, 4, 4)
    torch.testing.assert_close(output.pooler_output, output.last_hidden_state.mean((2, 3)))
    with pytest.raises(
        RecipeError,
        match=r'visual\.encoder: small-cnn has random weights and must be trained\. Set visual\.granularity = "pixels"',
    ):
        read_recipe("photos/pixels-words", {"visual.granularity": "pooled"})
    with pytest.raises(
        SpecError,
        match=r"expected trained weights, got small-cnn, which starts with random weights",
    ):
        cache_features(open_dataset(photos), EncoderSpec("visual", "small-cnn"))


def test_chance_recall_and_rsum_match_random_order():
    assert random_recall(10, 1, 1) == pytest.approx(0.1)
    assert random_recall(4, 2, 2) == pytest.approx(1 - (2 / 4) * (1 / 3))
    assert random_recall(3, 1, 5) == 1.0
    assert random_rsum([1] * 10)[0] == pytest.approx(2 * (10 + 50 + 100))
    generator, captions = torch.Generator().manual_seed(0), [1, 2, 3] * 10
    image_of = torch.arange(30).repeat_interleave(torch.tensor(captions))
    own = image_of == torch.arange(30)[:, None]
    drawn = []
    for _ in range(300):
        scores = torch.rand(30, 60, generator=generator)
        best = scores.where(own, -1.0).amax(1, keepdim=True)
        ranks = [
            1 + ((scores > best) & ~own).sum(1),
            (scores >= scores[image_of, torch.arange(60)]).sum(0),
        ]
        drawn.append(
            100 * sum((rank <= k).double().mean().item() for rank in ranks for k in (1, 5, 10))
        )
    mean, deviation = random_rsum(captions)
    assert torch.tensor(drawn).mean() == pytest.approx(mean, abs=2.5)
    assert 0.7 * deviation < torch.tensor(drawn).std() < deviation * 1.1
