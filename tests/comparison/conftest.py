"""A small drawn world, and a recipe that trains on it in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

import visavis
from visavis.comparison.result import Comparison
from visavis.data import open_dataset
from visavis.data.judgements import Asked, Judgement, open_judgements
from visavis.data.scenes import write_scenes

RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 16, word_width = 8 }
data = { path = "SCENES" }

[training]
batch_size = 16
probe_batches = 1
checkpoint_s = 0

[[phases]]
epochs = 1
objective = "VLC(gamma=20)"
optimizer = { name = "AdamW", lr = 0.01 }
"""


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    """For 60 + 12 + 12 drawn images with 3 captions each, whose features are cached before any test."""
    folder = tmp_path_factory.mktemp("compared")
    scenes = write_scenes(folder / "scenes", num_train=60, num_val=12, num_test=12, captions_per_image=3, size=48, seed=1)
    visavis.features(scenes, visual="scenes", view="pooled")
    path = folder / "tiny.toml"
    path.write_text(RECIPE.replace("SCENES", str(scenes)))
    return path


@pytest.fixture(scope="session")
def plain(recipe, tmp_path_factory) -> Comparison:
    """Two objectives with two seeds, one run after the other."""
    out = tmp_path_factory.mktemp("plain") / "both"
    return visavis.compare(recipe, objective=["Unified(gamma=20)", "TripletHN()"], seeds=2, out=out, workers=1)


@pytest.fixture(scope="session")
def votes(recipe) -> Path:
    """Two sentences that test images fit and others do not, one that fits nothing, and votes of images that are no test."""
    data = open_dataset(recipe.parent / "scenes")
    test, train = ([image.name for image in data.images if image.split == split] for split in ("test", "train"))
    path = recipe.parent / "votes.jsonl"
    said = [("a red star", test[0], True), ("a red star", test[1], True), ("a red star", test[2], False), ("a red star", train[0], True)]
    said += [("a small blue circle", test[3], True), ("a small blue circle", test[0], False), ("a small blue circle", "gone.png", True)]
    said += [("a dog", test[5], False), ("a dog", train[1], False)]
    with open_judgements(path) as file:
        for text, item, fits in said:
            file.add(Judgement("2026-05-01T09:30:00.000+00:00", "photos", Asked(text), item, "", fits))
    return path
