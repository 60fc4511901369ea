"""Encoder of synthetic scenes: shapes, file size, and features that identify objects and positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from visavis.data.synthetic import Scene, SceneObject, render_scene, resample_layout, sample_scene
from visavis.models.encoders.pretrained_files import SCENE_ENCODER_WEIGHTS
from visavis.models.encoders.scene_encoder import SceneEncoder


@pytest.fixture(scope="module")
def encoder():
    return SceneEncoder.load()


@torch.inference_mode()
def pooled(encoder, sampled):
    """Mean region features of rendered scenes."""
    batches = SceneEncoder.preprocess([render_scene(scene) for scene in sampled]).split(64)
    return torch.cat([encoder(batch).mean(1) for batch in batches])


@pytest.fixture(scope="module")
def sampled():
    rng = np.random.default_rng(7)
    return [sample_scene(rng, training=False) for _ in range(60)]


def test_scene_encoder_file_is_small():
    assert SCENE_ENCODER_WEIGHTS.stat().st_size <= 2_000_000


def test_scene_encoder_shapes(encoder, sampled):
    pixels = SceneEncoder.preprocess(
        [render_scene(sampled[0]), render_scene(sampled[1], 200), Image.new("L", (40, 60))]
    )
    assert pixels.shape == (3, 3, 96, 96)
    assert pixels.dtype == torch.uint8
    grid = encoder(pixels)
    assert grid.shape == (3, 36, encoder.embedding_dim)
    assert grid.dtype == torch.float32


def test_scene_encoder_is_independent_of_batch(encoder, sampled):
    pixels = SceneEncoder.preprocess([render_scene(scene) for scene in sampled[:5]])
    torch.testing.assert_close(
        encoder(pixels), torch.cat([encoder(one) for one in pixels.split(1)]), atol=1e-4, rtol=1e-4
    )


def test_scene_encoder_finds_redrawn_scene(encoder, sampled):
    rng = np.random.default_rng(8)
    first = pooled(encoder, sampled)
    again = pooled(encoder, [resample_layout(scene, rng) for scene in sampled])
    first, again = (
        torch.nn.functional.normalize(vectors - first.mean(0), dim=1) for vectors in (first, again)
    )
    nearest = (again @ first.T).argmax(1)
    assert (nearest == torch.arange(len(sampled))).float().mean() > 0.9


@pytest.mark.slow
def test_scene_encoder_keeps_positions(encoder):
    rng = np.random.default_rng(9)
    places = torch.from_numpy(rng.uniform(0.15, 0.85, (250, 2)))
    stars = [
        Scene("meadow", (SceneObject("star", "red", "plain", "small", x, y, 0.1),), i)
        for i, (x, y) in enumerate(places.tolist())
    ]
    features = pooled(encoder, stars).double()
    features = torch.cat([features - features.mean(0), torch.ones(250, 1)], 1)
    learned, held = features[:200], features[200:]
    reading = torch.linalg.solve(
        learned.T @ learned + 0.1 * torch.eye(features.shape[1]), learned.T @ places[:200]
    )
    guessed = (places[:200].mean(0) - places[200:]).abs().mean()
    assert (held @ reading - places[200:]).abs().mean() < guessed / 2
