"""Fixtures: synthetic scenes, a recipe that trains on them in a second, a comparison, and feedback."""

from __future__ import annotations

from pathlib import Path

import pytest

import visavis
from visavis.data.dataset_reader import open_dataset
from visavis.data.feedback.records import Judgment, QueryKey, open_feedback
from visavis.data.synthetic import write_synthetic_scenes
from visavis.research.experiments.comparison_result import Comparison

RECIPE = """
name = "tiny"
visual = { encoder = "scenes", granularity = "pooled" }
text = { encoder = "vocabulary", min_count = 1 }
model = { kind = "VSE++", embedding_dim = 16, word_dim = 8 }
data = { path = "SCENES" }

[training]
batch_size = 16
metric_batches = 1

[[phases]]
epochs = 1
objective = "VLC(gamma=20)"
optimizer = { name = "AdamW", lr = 0.01 }
"""


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    """Recipe for 60 + 12 + 12 synthetic images with 3 captions each, whose features are cached
    before any test.
    """
    folder = tmp_path_factory.mktemp("compared")
    scenes = write_synthetic_scenes(
        folder / "scenes",
        num_train=60,
        num_val=12,
        num_test=12,
        captions_per_image=3,
        size=48,
        seed=1,
    )
    visavis.features(scenes, visual="scenes", granularity="pooled")
    path = folder / "tiny.toml"
    path.write_text(RECIPE.replace("SCENES", str(scenes)))
    return path


@pytest.fixture(scope="session")
def plain(recipe, tmp_path_factory) -> Comparison:
    """Comparison of two objectives with two seeds, trained by one worker."""
    out = tmp_path_factory.mktemp("plain") / "both"
    return visavis.compare(
        recipe, objective=["Unified(gamma=20)", "TripletHN()"], seeds=2, out=out, workers=1
    )


@pytest.fixture(scope="session")
def votes(recipe) -> Path:
    """Feedback file: two queries with relevant test images, one query without, and judgments of
    images outside the test split.
    """
    data = open_dataset(recipe.parent / "scenes")
    test, train = (
        [image.name for image in data.images if image.split == split] for split in ("test", "train")
    )
    path = recipe.parent / "votes.jsonl"
    records = [
        ("a red star", test[0], True),
        ("a red star", test[1], True),
        ("a red star", test[2], False),
        ("a red star", train[0], True),
    ]
    records += [
        ("a small blue circle", test[3], True),
        ("a small blue circle", test[0], False),
        ("a small blue circle", "gone.png", True),
    ]
    records += [("a dog", test[5], False), ("a dog", train[1], False)]
    with open_feedback(path) as file:
        for text, item, fits in records:
            file.append(
                Judgment("2026-05-01T09:30:00.000+00:00", "photos", QueryKey(text), item, "", fits)
            )
    return path
