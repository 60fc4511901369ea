"""Training without a recipe: which default is taken, what is said of it, and the commands of the README as they stand there."""

import csv
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import visavis
from visavis import cli, storage
from visavis.data import open_dataset
from visavis.data.scenes import write_scenes
from visavis.errors import RecipeError, SpecError
from visavis.metrics.recall import hit_by_chance, random_rsum
from visavis.models.caching import cache_features
from visavis.models.small_cnn import SmallCNN
from visavis.models.towers import TowerSpec
from visavis.progress import Silent
from visavis.training.default_recipe import choose_recipe
from visavis.training.recipe_files import read_recipe

README = (Path(__file__).parents[2] / "README.md").read_text()
FOLDERS = ("Été à Nice", "two words", "Größe & Fünf", ".")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Drawn scenes in folders with spaces and accents, 1 to 3 captions each, no splits given."""
    folder = tmp_path_factory.mktemp("own")
    scenes = open_dataset(write_scenes(folder / "scenes", num_train=40, num_val=4, num_test=4, captions_per_image=3, size=32))
    rows = []
    for number, image in enumerate(scenes.images):
        place = folder / "photos" / FOLDERS[number % 4] / f"photo {number} é.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        image.open().save(place)
        captions = [scenes.captions[i] for i in scenes.captions_of[number]]
        rows += [(str(place.relative_to(folder / "photos")), caption) for caption in captions[: 1 + number % 3]]
    with (folder / "photos" / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("filename", "caption"), *rows])
    return folder / "photos"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def call(monkeypatch, capfd):
    """``visavis ARGUMENTS``, which must succeed: stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["visavis", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capfd.readouterr()
        assert not end.value.code, printed.err
        return printed

    return run


class Said(Silent):
    def __init__(self):
        self.sentences = []

    def say(self, text):
        self.sentences.append(text)


def test_the_commands_of_the_readme_work_as_they_stand_there(photos, empty_cache, call, tmp_path, monkeypatch):
    (block,) = (block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "--data photos/" in block)
    commands = [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("visavis ")]
    assert [command[1] for command in commands] == ["data", "train", "evaluate", "search"]
    shutil.copytree(photos, tmp_path / "here" / "photos")
    monkeypatch.chdir(tmp_path / "here")
    check, train, evaluate, search = (call(*command[1:]) for command in commands)
    assert "All is well" in check.out
    assert "no recipe named, so photos/pixels-" in train.err.replace("\n", " ")
    assert "RSUM" in evaluate.out
    assert "é.png" in search.out
    assert (tmp_path / "here" / "runs" / "mine" / "run.toml").exists()


def test_the_default_follows_the_encoders_at_hand(photos, empty_cache):
    data = {"data.path": str(photos)}
    assert choose_recipe(data).name == "photos/pixels-minilm"
    assert "small CNN from random weights" in choose_recipe(data).why
    assert "visual.tower=" in choose_recipe(data).why, "how to do better"
    named = choose_recipe({**data, "visual.tower": "my/encoder", "text.tower": "vocabulary"})
    assert named.name == "photos/frozen-words"
    assert "visavis[minilm]" in named.why
    assert choose_recipe({**data, "visual.tower": "small-cnn"}).name == "photos/pixels-minilm"

    cache_features(open_dataset(photos), TowerSpec("visual", "scenes"))
    cached = choose_recipe(data)
    assert (cached.name, cached.overrides["visual.tower"]) == ("photos/frozen-minilm", "scenes")
    storage.write_json(empty_cache / "backbones" / "mobilenet-v2" / "preprocessor_config.json", {})
    assert choose_recipe(data).overrides["visual.tower"] == "mobilenet-v2", "the one that is preferred"
    assert "\n" not in choose_recipe(data).why


def test_the_published_file_of_an_encoder_is_at_hand_too(photos, empty_cache):
    (empty_cache / "backbones").mkdir(parents=True)
    (empty_cache / "backbones" / "resnet50-0676ba61.pth").write_bytes(b"")
    assert choose_recipe({"data.path": str(photos)}).overrides["visual.tower"] == "resnet50"


def test_data_without_pictures_are_trained_by_their_stored_features(tmp_path, empty_cache):
    for split, images in (("train", 8), ("dev", 3), ("test", 3)):
        np.save(tmp_path / f"{split}_ims.npy", np.random.default_rng(0).random((images, 4), np.float32))
        (tmp_path / f"{split}_caps.txt").write_text("".join(f"a dog {i}\n" for i in range(images)))
    with pytest.raises(RecipeError, match=r"has no pictures: name their stored features, visual\.features=FILE\.npy, or precomp"):
        visavis.train(data=tmp_path)
    given = {"visual.features": "precomp", "text.tower": "vocabulary", "epochs": 1, "model.width": 4}
    assert visavis.train(data=tmp_path, out=tmp_path / "run", overrides=given).folder == tmp_path / "run"


def test_a_default_needs_data():
    with pytest.raises(RecipeError, match=r"there is nothing to train on: give --data FOLDER, or name a recipe"):
        visavis.train()


def test_a_first_argument_with_an_equals_sign_is_an_override(photos, empty_cache, call, tmp_path):
    short = ["text.tower=vocabulary", "epochs=1", "model.width=8"]
    call("train", "objective=VLC(gamma=7)", *short, "--data", str(photos), "--out", str(tmp_path / "run"))
    recipe = read_recipe(tmp_path / "run" / "run.toml")
    assert recipe.name == "photos-pixels-words"
    assert [phase.objective for phase in recipe.phases] == ["VLC(gamma=7.0, reduction='sum')"]


def test_a_model_that_learns_nothing_is_said_to_be_no_better_than_chance(photos, empty_cache, tmp_path):
    said = Said()
    still = {"text.tower": "vocabulary", "epochs": 1, "model.width": 8, "phases.0.optimizer.lr": 1e-9}
    visavis.train(data=photos, out=tmp_path / "run", overrides=still, progress=said)
    (sentence,) = [sentence for sentence in said.sentences if "not above chance" in sentence]
    assert re.search(r"RSUM \d+\.\d, where a random order reaches \d+\.\d ± \d+\.\d on \d+ images", sentence)


def test_the_small_tower_begins_at_random_and_is_only_for_training(photos):
    torch.manual_seed(0)
    tower, again = SmallCNN(), SmallCNN()
    assert not torch.equal(next(tower.parameters()), next(again.parameters()))
    output = tower(torch.rand(2, 3, 64, 64))
    assert output.last_hidden_state.shape == (2, 256, 4, 4)
    torch.testing.assert_close(output.pooler_output, output.last_hidden_state.mean((2, 3)))
    with pytest.raises(RecipeError, match=r'visual\.tower small-cnn begins with random weights: train it with visual\.view = "pixels"'):
        read_recipe("photos/pixels-words", {"visual.view": "pooled"})
    with pytest.raises(SpecError, match=r"small-cnn begins with random weights, so that its features say nothing"):
        cache_features(open_dataset(photos), TowerSpec("visual", "small-cnn"))


def test_hits_by_chance_and_the_rsum_of_a_random_order():
    assert hit_by_chance(10, 1, 1) == pytest.approx(0.1)
    assert hit_by_chance(4, 2, 2) == pytest.approx(1 - (2 / 4) * (1 / 3))
    assert hit_by_chance(3, 1, 5) == 1.0
    assert random_rsum([1] * 10)[0] == pytest.approx(2 * (10 + 50 + 100))
    generator, captions = torch.Generator().manual_seed(0), [1, 2, 3] * 10
    image_of = torch.arange(30).repeat_interleave(torch.tensor(captions))
    own = image_of == torch.arange(30)[:, None]
    drawn = []
    for _ in range(300):
        scores = torch.rand(30, 60, generator=generator)
        best = scores.where(own, -1.0).amax(1, keepdim=True)
        ranks = [1 + ((scores > best) & ~own).sum(1), (scores >= scores[image_of, torch.arange(60)]).sum(0)]
        drawn.append(100 * sum((rank <= k).double().mean().item() for rank in ranks for k in (1, 5, 10)))
    mean, deviation = random_rsum(captions)
    assert torch.tensor(drawn).mean() == pytest.approx(mean, abs=2.5)
    assert 0.7 * deviation < torch.tensor(drawn).std() < deviation * 1.1
