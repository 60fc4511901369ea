"""Fixtures: synthetic scenes, a recipe that trains on them in a second, a comparison, and feedback."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.data.dataset_reader import open_dataset
from visavis.data.feedback.records import Judgment, QueryKey
from visavis.data.feedback.sources import write_feedback
from visavis.research.experiments.comparison_result import Comparison


@pytest.fixture(scope="session")
def recipe(scenes, tmp_path_factory) -> Path:
    """Recipe for the shared scenes, whose features are cached before any test."""
    visavis.features(scenes, visual="scenes", granularity="pooled")
    return write_recipe(
        tmp_path_factory.mktemp("compared") / "tiny.toml",
        {"objective": "VLC(gamma=20)", "optimizer": {"name": "AdamW", "lr": 0.01}},
        model={"embedding_dim": 16, "word_dim": 8},
        data={"path": str(scenes)},
        training={"batch_size": 16, "threads": None},
    )


@pytest.fixture(scope="session")
def plain(recipe, tmp_path_factory) -> Comparison:
    """Comparison of two objectives with two seeds, trained by one worker."""
    out = tmp_path_factory.mktemp("plain") / "both"
    return visavis.compare(
        recipe, objective=["Unified(gamma=20)", "TripletHN()"], seeds=2, out=out, workers=1
    )


@pytest.fixture(scope="session")
def votes(scenes, tmp_path_factory) -> Path:
    """Feedback file: two queries with relevant test images, one query without, and judgments of
    images outside the test split.
    """
    data = open_dataset(scenes)
    test, train = (
        [image.name for image in data.images if image.split == split] for split in ("test", "train")
    )
    path = tmp_path_factory.mktemp("votes") / "votes.jsonl"
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
    write_feedback(
        path,
        (
            Judgment("2026-05-01T09:30:00.000+00:00", "photos", QueryKey(text), item, "", fits)
            for text, item, fits in records
        ),
    )
    return path
