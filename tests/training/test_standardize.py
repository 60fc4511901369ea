"""Standardized features: in training, in evaluation of a run, and for new images."""

import json

import pytest
import torch
from torch.nn.functional import normalize

import visavis
from visavis.core.errors import RecipeError, RunError
from visavis.core.process_group import ONE_PROCESS
from visavis.core.progress import NoProgress
from visavis.core.spec import build_object
from visavis.models import CATALOG
from visavis.models.base import get_vectors
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.train_step import PeerNetwork, StepControl


def test_stored_and_new_images_are_standardized_alike(scenes, recipe, tmp_path):
    run = visavis.train(
        recipe,
        data=scenes,
        out=tmp_path / "run",
        overrides={"visual.standardize": "sqrt_zscore", "phases.0.epochs": 1, "phases.1.epochs": 1},
    ).run
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    train = data_module.data.split("train")
    features = get_vectors(
        data_module.sources(train)[0].read(torch.arange(len(train.images)).numpy())
    )
    torch.testing.assert_close(
        features.flatten(0, 1).mean(0), torch.zeros(features.shape[-1]), atol=1e-3, rtol=0
    )
    stored = get_vectors(data_module.encode(matcher, train)[0])[:4]
    fresh = visavis.load(run).encode_images([image.open() for image in train.images[:4]])
    torch.testing.assert_close(fresh, stored, atol=2e-3, rtol=0)  # Stores use half precision.

    config = json.loads((run / "model" / "config.json").read_text())
    config["standardization"]["mean"].pop()
    config["standardization"]["std"].pop()
    (run / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        RunError, match=r"config\.json is damaged: expected config_sha256 \w{64}, got \w{64}"
    ):
        visavis.load(run)


def test_standardize_rejects_pixels(recipe, scenes, tmp_path):
    with pytest.raises(
        RecipeError, match=r'visual\.standardize: expected none with granularity "pixels"'
    ):
        visavis.train(
            recipe,
            data=scenes,
            out=tmp_path / "run",
            overrides={
                "visual": {"encoder": "small-cnn", "granularity": "pixels", "standardize": "zscore"}
            },
        )


def test_whitened_texts_are_fitted_to_training_captions(dual_encoders, scenes, tmp_path):
    clip = dual_encoders / "clip"
    (tmp_path / "heads.toml").write_text(f"""
name = "heads"
visual = {{ encoder = "{clip}", granularity = "pooled" }}
text = {{ encoder = "{clip}", granularity = "pooled" }}
model = {{ kind = "Heads", embedding_dim = 8, hidden_layers = 0, whiten_text = true }}
training = {{ batch_size = 8, metric_batches = 1, threads = 1 }}
phases = [{{ epochs = 1, objective = "VLC()" }}]
""")
    run = visavis.train(tmp_path / "heads.toml", data=scenes, out=tmp_path / "run").run
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    train = data_module.data.split("train")
    features = get_vectors(
        data_module.sources(train)[1].read(torch.arange(len(train.captions)).numpy())
    ).float()
    torch.testing.assert_close(matcher.whitening.mean, features.mean(0))
    torch.testing.assert_close(
        matcher.whitening(features).mean(0), torch.zeros(features.shape[1]), atol=1e-4, rtol=0
    )
    new = get_vectors(data_module.processor.process_texts(train.captions[:4]))
    expected = normalize(
        matcher.eval().text((new - matcher.whitening.mean) @ matcher.whitening.matrix)
    )
    torch.testing.assert_close(visavis.load(run).encode_texts(list(train.captions[:4])), expected)
    with pytest.raises(
        RecipeError, match='whiten_text: expected False unless texts are "pooled", got True'
    ):
        words = {"text.encoder": "vocabulary", "text.granularity": "tokens", "text.min_count": 1}
        visavis.train(tmp_path / "heads.toml", data=scenes, out=tmp_path / "words", overrides=words)


def test_second_network_has_the_whitening_of_the_first():
    first = CATALOG["Heads"](
        build_object(
            CATALOG["Heads"].Config,
            {
                "visual_input_dim": 3,
                "text_input_dim": 4,
                "text_granularity": "pooled",
                "whiten_text": True,
            },
        )
    )
    first.whitening.fit(torch.randn(9, 4))
    recipe = read_recipe("heads-flickr8k", {})
    second = PeerNetwork(first, recipe.phases[0], recipe, StepControl(), ONE_PROCESS, 1).matcher
    torch.testing.assert_close(second.whitening.matrix, first.whitening.matrix, rtol=0, atol=0)
    assert not torch.equal(second.text[0].weight, first.text[0].weight)
