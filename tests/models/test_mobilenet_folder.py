"""Conversion of MobileNetV2: same network as its folded weights describe."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import conv2d, pad

from visavis.core import storage
from visavis.core.errors import RefusedOverwrite
from visavis.models.encoders.frozen_encoders import open_visual_encoder

pytest.importorskip("transformers")
pytestmark = pytest.mark.data

STRIDES = (1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).parents[2] / "tools" / "mobilenet_folder.py"
    spec = importlib.util.spec_from_file_location("mobilenet_folder", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written_out(weights: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """Compute the feature map layer by layer, as the description of the weights defines it."""

    def layer(features, name, stride=1, groups=1, bounded=True):
        weight = weights[f"{name}.weight"].float()
        if (
            weight.shape[-1] == 3
        ):  # TensorFlow's SAME: on even sizes a stride of 2 pads right and bottom only
            features = pad(features, (0, 1, 0, 1) if stride == 2 else (1, 1, 1, 1))
        features = conv2d(features, weight, weights[f"{name}.bias"].float(), stride, groups=groups)
        return features.clamp(0, 6) if bounded else features

    features = layer(pixels, "stem", 2)
    for block, stride in enumerate(STRIDES):
        before = features
        if block:
            features = layer(features, f"blocks.{block}.expand")
        features = layer(features, f"blocks.{block}.depthwise", stride, features.shape[1])
        features = layer(features, f"blocks.{block}.project", bounded=False)
        if stride == 1 and features.shape == before.shape:
            features = features + before
    return layer(features, "head")


def test_mobilenet_folder_matches_folded_weights(tool, data_folder, tmp_path):
    folder = tool.convert(data_folder / "backbone", tmp_path / "mobilenet")
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    )
    encoder = open_visual_encoder(str(folder), "regions")
    pixels = encoder.preprocess([image]).vectors
    assert torch.allclose(
        pixels[0], torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1, atol=1e-6
    )
    expected = written_out(storage.read_tensors(data_folder / "backbone" / tool.WEIGHTS), pixels)
    assert torch.allclose(
        encoder.encode([image]).vectors, expected.flatten(2).transpose(1, 2), atol=1e-4
    )


def test_mobilenet_folder_is_not_overwritten(tool, data_folder, tmp_path):
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(RefusedOverwrite, match="add --force"):
        tool.convert(data_folder / "backbone", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_mobilenet_features_match_stored_features(tool, data_folder, tmp_path):
    found = tool.check(
        tool.convert(data_folder / "backbone", tmp_path / "mobilenet"),
        data_folder / "backbone",
        data_folder / "flickr8k",
        count=8,
    )
    assert found["median cosine"] > 0.94
