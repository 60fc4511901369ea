"""The papers' image encoders: layers, widths, names of weights, and files that are not what they should be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import visavis
from visavis.data.scenes import write_scenes
from visavis.errors import DataError
from visavis.models import published_backbones
from visavis.models.pretrained import model_files, weights_mark
from visavis.models.published_backbones import open_published
from visavis.models.published_files import CATALOG, PublishedBackbone
from visavis.models.residual_network import ResidualNetwork
from visavis.models.towers import blank, open_visual
from visavis.models.vgg import VGG19

PARAMETERS = {"resnet50": 25_557_032, "resnet152": 60_192_808, "vgg19": 143_667_240, "resnext101-32x8d-wsl": 88_791_336}
"""As torchvision's page of models says, the last layer for 1,000 classes among them."""
CONVOLUTIONS = {"resnet50": 53, "resnet152": 155, "vgg19": 16, "resnext101-32x8d-wsl": 104}
NAMES = {
    "resnet50": {
        "layer1.0.downsample.0.weight": [256, 64, 1, 1],
        "layer4.2.conv2.weight": [512, 512, 3, 3],
        "layer3.5.bn3.running_var": [1024],
    },
    "resnet152": {"layer3.35.conv1.weight": [256, 1024, 1, 1], "layer2.7.bn1.bias": [128], "layer4.0.downsample.1.weight": [2048]},
    "vgg19": {"features.34.weight": [512, 512, 3, 3], "classifier.0.weight": [4096, 25088], "classifier.3.bias": [4096]},
    "resnext101-32x8d-wsl": {
        "layer1.0.conv2.weight": [256, 8, 3, 3],
        "layer4.2.conv1.weight": [2048, 2048, 1, 1],
        "conv1.weight": [64, 3, 7, 7],
    },
}


@pytest.mark.parametrize("name", CATALOG)
def test_layers_widths_and_names_are_those_of_the_published_files(name):
    with torch.device("meta"):
        model = CATALOG[name].build()
        last = 4096 if name == "vgg19" else 2048
        outputs = model(torch.zeros(2, 3, 224, 224))
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    assert sum(parameter.numel() for parameter in model.parameters()) + last * 1000 + 1000 == PARAMETERS[name]
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == CONVOLUTIONS[name]
    assert all(shapes[key] == shape for key, shape in NAMES[name].items())
    assert list(outputs.last_hidden_state.shape) == [2, 512 if name == "vgg19" else 2048, 7, 7]
    assert list(outputs.pooler_output.shape) == [2, last]


def test_a_residual_network_computes_what_that_of_transformers_does():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(depths=[1, 2, 1, 1], hidden_sizes=[256, 512, 1024, 2048], embedding_size=64)
    theirs, ours = transformers.ResNetModel(config).eval(), ResidualNetwork((1, 2, 1, 1)).eval()
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
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output.flatten(1), rtol=1e-4, atol=1e-4)


def test_vgg19_reads_fc7_behind_its_last_relu():
    model = VGG19.__new__(VGG19)
    torch.nn.Module.__init__(model)
    model.features, model.avgpool = torch.nn.Identity(), torch.nn.AdaptiveAvgPool2d(7)
    model.classifier = torch.nn.Sequential(torch.nn.Linear(2 * 49, 5), torch.nn.ReLU())
    output = model(torch.randn(3, 2, 14, 14))
    assert output.pooler_output.shape == (3, 5) and (output.pooler_output >= 0).all()
    with torch.device("meta"):
        assert [type(layer).__name__ for layer in VGG19().classifier] == ["Linear", "ReLU", "Dropout"] * 2


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A published network that is small, in a cache of its own; and its file, as torchvision writes one."""
    monkeypatch.setitem(
        CATALOG,
        "tiny",
        PublishedBackbone(lambda: ResidualNetwork((1, 1, 1, 1), 2, 4), ("tiny-0123.pth",), "https://example.org/tiny-0123.pth"),
    )
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "cache" / "backbones" / "tiny-0123.pth"
    file.parent.mkdir(parents=True)
    model = CATALOG["tiny"].build()
    content = {**model.state_dict(), "fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}
    torch.save({key: tensor for key, tensor in content.items() if not key.endswith("num_batches_tracked")}, file)  # as older files are
    return file, model


def test_weights_are_read_by_name_from_the_cache_or_a_path(tiny, tmp_path):
    file, model = tiny
    state = open_published("tiny").state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    tower = open_visual("tiny", "grid")
    assert tower.encode([blank()]).vectors.shape == (1, 49, 2048)
    assert all(parameter.requires_grad for parameter in tower.parameters())
    moved = shutil.move(file, tmp_path / file.name)
    assert open_visual(str(moved)).width == 2048
    assert model_files(str(moved)) == [Path(moved)] and weights_mark(str(moved))
    with pytest.raises(
        DataError, match=r"tiny-0123\.pth is not there, the weights of tiny: fetch https://example\.org/tiny-0123\.pth and put it there"
    ):
        open_visual("tiny")
    shutil.copy(moved, tmp_path / "cache" / "backbones" / "tiny.pth")
    assert open_visual("tiny").width == 2048
    with pytest.raises(DataError, match=r"other\.pth is a file of weights of an unknown network: expected one of .*tiny-0123\.pth"):
        open_visual(str(tmp_path / "other.pth"))


class Stranger:
    pass


WRONG = {
    "another": (lambda state: CATALOG["resnet50"].build().state_dict(), r"tiny-0123\.pth: layer1\.0\.\S+ is of shape|holds layer1\.1"),
    "fewer": (lambda state: {key: state[key] for key in list(state)[5:]}, r"lacks bn1\.\S+: it is not tiny-0123\.pth, or is incomplete"),
    "more": (lambda state: state | {"layer9.weight": torch.zeros(2)}, r"holds layer9\.weight: it is not"),
    "shape": (lambda state: state | {"bn1.bias": torch.zeros(3)}, r"bn1\.bias is of shape \[3\], expected \[64\]"),
    "not finite": (
        lambda state: state | {"bn1.bias": torch.full((64,), torch.nan)},
        r"is damaged: bn1\.bias holds values that are not finite",
    ),
    "an object": (
        lambda state: Stranger(),
        r"is no checkpoint of tensors and plain values, which alone are read: it is damaged, or holds objects, .* its authors published\.$",
    ),
    "a list": (lambda state: [1, 2], "holds no tensors by name"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_one_sentence(wrong, tiny):
    file, model = tiny
    change, sentence = WRONG[wrong]
    torch.save(change(dict(model.state_dict())), file)
    with pytest.raises(DataError, match=sentence):
        open_published("tiny")


def test_a_damaged_file_and_a_pipe_are_one_sentence(tiny):
    file, _ = tiny
    file.write_bytes(file.read_bytes()[:10_000])
    with pytest.raises(DataError, match=r"is no checkpoint of tensors and plain values, .*: it is damaged, or holds .* published\.$"):
        open_published("tiny")
    if hasattr(os, "mkfifo"):
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(DataError, match=r"is not there|is a named pipe"):
            open_published("tiny")


def test_models_train_it_and_their_folder_needs_the_file_no_more(tiny, tmp_path):
    file, _ = tiny
    data = write_scenes(tmp_path / "scenes", num_train=12, num_val=4, num_test=4, captions_per_image=1, size=32, seed=1)
    (tmp_path / "tiny.toml").write_text(
        """
name = "tiny"
visual = { tower = "tiny", view = "pixels" }
text = { min_count = 1 }
model = { kind = "VSE++", width = 8, word_width = 8, region_pool = "tower" }
training = { batch_size = 6, probe_batches = 1, threads = 1 }
phases = [{ epochs = 1, objective = "Triplet()", optimizer = { lr_multipliers = { backbone = 0.1 } } }]
"""
    )
    trained = visavis.train(tmp_path / "tiny.toml", data=data, out=tmp_path / "run")
    file.unlink()
    assert visavis.evaluate(tmp_path / "run").metrics == trained.test.metrics


def test_nothing_of_torchvision_is_needed():
    assert "torchvision" not in vars(published_backbones)
