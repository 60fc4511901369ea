"""Standardized features: in training, in evaluation of a run, and for new images."""

import json

import pytest
import torch

import visavis
from visavis.errors import RecipeError, RunError
from visavis.models.base import get_vectors
from visavis.progress import NoProgress
from visavis.runs.open_run import open_run, read_run_recipe


def test_stored_and_new_images_are_standardized_alike(scenes, recipe, tmp_path):
    run = visavis.train(
        recipe,
        data=scenes,
        out=tmp_path / "run",
        overrides={"visual.standardize": "sqrt_zscore", "phases.0.epochs": 1, "phases.1.epochs": 1},
    ).run
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    train = data_module.data.split("train")
    features = get_vectors(data_module.sources(train)[0].read(torch.arange(len(train.images)).numpy()))
    torch.testing.assert_close(features.flatten(0, 1).mean(0), torch.zeros(features.shape[-1]), atol=1e-3, rtol=0)
    stored = get_vectors(data_module.encode(matcher, train)[0])[:4]
    fresh = visavis.load(run).encode_images([image.open() for image in train.images[:4]])
    torch.testing.assert_close(fresh, stored, atol=2e-3, rtol=0)  # Stores use half precision.

    config = json.loads((run / "model" / "config.json").read_text())
    config["standardization"]["mean"].pop()
    config["standardization"]["std"].pop()
    (run / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"config\.json is damaged: expected config_sha256 \w{64}, got \w{64}"):
        visavis.load(run)


def test_standardize_rejects_pixels(recipe, scenes, tmp_path):
    with pytest.raises(RecipeError, match=r'visual\.standardize: expected none with granularity "pixels"'):
        visavis.train(
            recipe,
            data=scenes,
            out=tmp_path / "run",
            overrides={"visual": {"encoder": "small-cnn", "granularity": "pixels", "standardize": "zscore"}},
        )
