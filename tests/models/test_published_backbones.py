"""Published image encoders: layers, weight names, and invalid files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.fixtures.recipes import write_recipe
from tests.platforms import posix

import visavis
from visavis.core.errors import DataError
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models.encoders import pretrained_loading as published_backbones
from visavis.models.encoders.cnn_backbones import (
    PUBLISHED_BACKBONES,
    VGG19,
    PublishedBackbone,
    ResNet,
)
from visavis.models.encoders.frozen_encoders import open_visual_encoder
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.encoders.pretrained_files import model_files, weights_fingerprint
from visavis.models.encoders.pretrained_loading import open_published_backbone

PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg19": 143_667_240,
    "resnext101-32x8d-wsl": 88_791_336,
}
"""Numbers of torchvision's page of models, including the last layer for 1,000 classes."""
CONVOLUTIONS = {"resnet50": 53, "resnet152": 155, "vgg19": 16, "resnext101-32x8d-wsl": 104}
NAMES = {
    "resnet50": {
        "layer1.0.downsample.0.weight": [256, 64, 1, 1],
        "layer4.2.conv2.weight": [512, 512, 3, 3],
        "layer3.5.bn3.running_var": [1024],
    },
    "resnet152": {
        "layer3.35.conv1.weight": [256, 1024, 1, 1],
        "layer2.7.bn1.bias": [128],
        "layer4.0.downsample.1.weight": [2048],
    },
    "vgg19": {
        "features.34.weight": [512, 512, 3, 3],
        "classifier.0.weight": [4096, 25088],
        "classifier.3.bias": [4096],
    },
    "resnext101-32x8d-wsl": {
        "layer1.0.conv2.weight": [256, 8, 3, 3],
        "layer4.2.conv1.weight": [2048, 2048, 1, 1],
        "conv1.weight": [64, 3, 7, 7],
    },
}


@pytest.mark.parametrize("name", PUBLISHED_BACKBONES)
def test_published_backbones_have_published_layer_names(name):
    with torch.device("meta"):
        model = PUBLISHED_BACKBONES[name].build()
        last = 4096 if name == "vgg19" else 2048
        outputs = model(torch.zeros(2, 3, 224, 224))
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    assert (
        sum(parameter.numel() for parameter in model.parameters()) + last * 1000 + 1000
        == PARAMETERS[name]
    )
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == CONVOLUTIONS[name]
    assert all(shapes[key] == shape for key, shape in NAMES[name].items())
    assert list(outputs.last_hidden_state.shape) == [2, 512 if name == "vgg19" else 2048, 7, 7]
    assert list(outputs.pooler_output.shape) == [2, last]


def test_resnet_matches_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        depths=[1, 2, 1, 1], hidden_sizes=[256, 512, 1024, 2048], embedding_size=64
    )
    theirs, ours = transformers.ResNetModel(config).eval(), ResNet((1, 2, 1, 1)).eval()
    for name, buffer in theirs.named_buffers():
        if name.endswith("running_mean"):
            torch.nn.init.normal_(buffer, std=0.1)
    given = [tensor for key, tensor in theirs.state_dict().items() if "shortcut" not in key]
    beside = [tensor for key, tensor in theirs.state_dict().items() if "shortcut" in key]
    state = ours.state_dict()
    for keys, tensors in (
        ([key for key in state if "downsample" not in key], given),
        ([key for key in state if "downsample" in key], beside),
    ):
        assert [state[key].shape for key in keys] == [tensor.shape for tensor in tensors]
        state |= dict(zip(keys, tensors, strict=True))
    ours.load_state_dict(state)
    pixels = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        expected, found = theirs(pixels), ours(pixels)
    torch.testing.assert_close(
        found.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        found.pooler_output, expected.pooler_output.flatten(1), rtol=1e-4, atol=1e-4
    )


def test_vgg19_returns_fc7_after_relu():
    model = VGG19.__new__(VGG19)
    torch.nn.Module.__init__(model)
    model.features, model.avgpool = torch.nn.Identity(), torch.nn.AdaptiveAvgPool2d(7)
    model.classifier = torch.nn.Sequential(torch.nn.Linear(2 * 49, 5), torch.nn.ReLU())
    output = model(torch.randn(3, 2, 14, 14))
    assert output.pooler_output.shape == (3, 5) and (output.pooler_output >= 0).all()
    with torch.device("meta"):
        assert [type(layer).__name__ for layer in VGG19().classifier] == [
            "Linear",
            "ReLU",
            "Dropout",
        ] * 2


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Publish a small network in its own cache, and return its file with the network."""
    monkeypatch.setitem(
        PUBLISHED_BACKBONES,
        "tiny",
        PublishedBackbone(lambda: ResNet((1, 1, 1, 1), 2, 4), ("tiny-0123.pth",)),
    )
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "cache" / "backbones" / "tiny-0123.pth"
    file.parent.mkdir(parents=True)
    model = PUBLISHED_BACKBONES["tiny"].build()
    content = {
        **model.state_dict(),
        "fc.weight": torch.zeros(1000, 2048),
        "fc.bias": torch.zeros(1000),
    }
    torch.save(
        {key: tensor for key, tensor in content.items() if not key.endswith("num_batches_tracked")},
        file,
    )  # as older files are
    return file, model


def test_published_weights_load_from_cache_or_path(tiny, tmp_path):
    file, model = tiny
    state = open_published_backbone("tiny").state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    encoder = open_visual_encoder("tiny", "regions")
    assert encoder.encode([blank_image()]).vectors.shape == (1, 49, 2048)
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    moved = shutil.move(file, tmp_path / file.name)
    assert open_visual_encoder(str(moved)).embedding_dim == 2048
    assert model_files(str(moved)) == [Path(moved)] and weights_fingerprint(str(moved))
    with pytest.raises(
        DataError,
        match=r"tiny-0123\.pth: expected the weights of tiny, got no file\. Download https://download\.pytorch\.org/models/tiny-0123\.pth",
    ):
        open_visual_encoder("tiny")
    shutil.copy(moved, tmp_path / "cache" / "backbones" / "tiny.pth")
    assert open_visual_encoder("tiny").embedding_dim == 2048
    with pytest.raises(
        DataError, match=r"other\.pth: expected one of the published files .*tiny-0123\.pth"
    ):
        open_visual_encoder(str(tmp_path / "other.pth"))


class Stranger:
    pass


WRONG = {
    "another": (
        lambda state: PUBLISHED_BACKBONES["resnet50"].build().state_dict(),
        r"tiny-0123\.pth: expected the weights of tiny-0123\.pth, got unknown weights layer1\.1\.",
    ),
    "fewer": (
        lambda state: {key: state[key] for key in list(state)[5:]},
        r"expected the weights of tiny-0123\.pth, got missing weights bn1\.",
    ),
    "more": (
        lambda state: state | {"layer9.weight": torch.zeros(2)},
        r"got unknown weights layer9\.weight",
    ),
    "shape": (
        lambda state: state | {"bn1.bias": torch.zeros(3)},
        r"expected bn1\.bias of shape \[64\], got \[3\]",
    ),
    "not finite": (
        lambda state: state | {"bn1.bias": torch.full((64,), torch.nan)},
        r"is damaged: expected finite weights, got NaN or infinity in bn1\.bias",
    ),
    "an object": (
        lambda state: Stranger(),
        (
            r"expected a checkpoint of tensors and plain values, got objects of \S+\.Stranger, which "
            r"could run code\."
        ),
    ),
    "a list": (lambda state: [1, 2], "expected the state_dict of a model"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_weights_file_is_reported(wrong, tiny):
    file, model = tiny
    change, sentence = WRONG[wrong]
    torch.save(change(dict(model.state_dict())), file)
    with pytest.raises(DataError, match=sentence):
        open_published_backbone("tiny")


@posix
def test_damaged_weights_file_and_pipe_are_reported(tiny):
    file, _ = tiny
    file.write_bytes(file.read_bytes()[:10_000])
    with pytest.raises(
        DataError, match="expected a checkpoint of tensors and plain values, got a damaged file"
    ):
        open_published_backbone("tiny")
    if hasattr(os, "mkfifo"):
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(DataError, match=r"got no file|named pipe"):
            open_published_backbone("tiny")


@pytest.mark.slow
def test_trained_backbone_loads_without_published_file(tiny, tmp_path):
    file, _ = tiny
    data = write_synthetic_scenes(
        tmp_path / "scenes",
        num_train=4,
        num_val=2,
        num_test=2,
        captions_per_image=1,
        size=32,
        seed=1,
    )
    recipe = write_recipe(
        tmp_path / "tiny.toml",
        {"objective": "Triplet()", "optimizer": {"lr_multipliers": {"backbone": 0.1}}},
        visual={"encoder": "tiny", "granularity": "pixels"},
        model={"word_dim": 8, "region_pool": "encoder"},
        training={"batch_size": 2},
    )
    trained = visavis.train(recipe, data=data, out=tmp_path / "run")
    file.unlink()
    assert visavis.evaluate(tmp_path / "run").metrics == trained.test.metrics


def test_published_backbones_do_not_import_torchvision():
    assert "torchvision" not in vars(published_backbones)
