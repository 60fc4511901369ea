"""A small drawn world, and a recipe that trains on it in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

import visavis
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
