"""A small model that was overfitted to sixty synthetic scenes."""

import pytest
from tests.fixtures.recipes import recipe_text, write_recipe

import visavis
from visavis.core.progress import NoProgress
from visavis.data.synthetic import write_synthetic_scenes

RECIPE = recipe_text(
    {"epochs": 40, "objective": "Unified(gamma=30)", "optimizer": {"lr": 0.01}},
    name="overfitted",
    model={"embedding_dim": 64, "word_dim": 32},
    training={"batch_size": 30},
    evaluation={"validation": "train"},
)


class MessageRecorder(NoProgress):
    """A Progress that keeps messages."""

    def __init__(self):
        self.messages = []

    def message(self, text):
        self.messages.append(text)


@pytest.fixture
def recorder():
    return MessageRecorder()


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "scenes"
    return write_synthetic_scenes(
        folder, num_train=60, num_val=0, num_test=10, captions_per_image=2, size=48, seed=4
    )


@pytest.fixture(scope="session")
def run(scenes, tmp_path_factory):
    recipe = tmp_path_factory.mktemp("recipe") / "overfitted.toml"
    recipe.write_text(RECIPE)
    folder = tmp_path_factory.mktemp("runs") / "run"
    trained = visavis.train(recipe, data=scenes, out=folder)
    assert trained.validation_rsum > 550, "the model must have memorized the training images"
    return folder


@pytest.fixture(scope="session")
def late_run(scenes, tmp_path_factory):
    """A late-interaction model."""
    folder = tmp_path_factory.mktemp("late")
    recipe = write_recipe(
        folder / "late.toml",
        {"epochs": 2, "optimizer": {"lr": 0.01}},
        name="late",
        visual={"granularity": "regions"},
        model={"kind": "MaxSim", "embedding_dim": 32, "word_dim": 32},
        training={"batch_size": 30},
        evaluation={"validation": "train"},
    )
    visavis.train(recipe, data=scenes, out=folder / "run")
    return folder / "run"
