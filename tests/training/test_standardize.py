"""Features that a recipe standardizes: in training, on the way back from a run, and for new pictures."""

import json

import pytest
import torch

import visavis
from visavis.errors import RecipeError, RunError
from visavis.models.base import vectors
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of


def test_stored_and_new_pictures_are_standardized_alike(scenes, recipe, tmp_path):
    run = visavis.train(
        recipe, data=scenes, out=tmp_path / "run", overrides={"visual.standardize": "roots", "phases.0.epochs": 1, "phases.1.epochs": 1}
    ).folder
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    train = data_module.data.split("train")
    features = vectors(data_module.sources(train)[0].read(torch.arange(len(train.images)).numpy()))
    torch.testing.assert_close(features.flatten(0, 1).mean(0), torch.zeros(features.shape[-1]), atol=1e-3, rtol=0)
    stored = vectors(data_module.encode(matcher, train)[0])[:4]
    fresh = visavis.load(run).encode_images([image.open() for image in train.images[:4]])
    torch.testing.assert_close(fresh, stored, atol=2e-3, rtol=0)  # stores are in half precision

    config = json.loads((run / "model" / "config.json").read_text())
    config["standardization"]["mean"].pop()
    config["standardization"]["deviation"].pop()
    (run / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"standardization of .* dimensions, expected the .* of its visual_width"):
        visavis.load(run)


def test_pixels_are_not_standardized(recipe, scenes, tmp_path):
    with pytest.raises(RecipeError, match=r'visual\.standardize are for frozen features: visual\.view is "pixels"'):
        visavis.train(
            recipe,
            data=scenes,
            out=tmp_path / "run",
            overrides={"visual": {"tower": "small-cnn", "view": "pixels", "standardize": "values"}},
        )
