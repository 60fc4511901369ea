"""A small model that knows its own sixty drawn images by heart."""

import pytest

import visavis
from visavis.data.scenes import write_scenes

RECIPE = """
name = "by-heart"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 64, word_width = 32 }
training = { batch_size = 30, probe_batches = 1, threads = 1 }
evaluation = { validation = "train" }
[[phases]]
epochs = 40
objective = "Unified(gamma=30)"
optimizer = { lr = 0.01 }
"""


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "scenes"
    return write_scenes(folder, num_train=60, num_val=0, num_test=10, captions_per_image=2, size=48, seed=4)


@pytest.fixture(scope="session")
def run(scenes, tmp_path_factory):
    recipe = tmp_path_factory.mktemp("recipe") / "by-heart.toml"
    recipe.write_text(RECIPE)
    folder = tmp_path_factory.mktemp("runs") / "run"
    trained = visavis.train(recipe, data=scenes, out=folder)
    assert trained.validation_rsum > 550, "the training images are known by heart"
    return folder
