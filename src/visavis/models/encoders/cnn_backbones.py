"""Convolutional image encoders: ResNet, VGG19 and a small network, and the published files of their
weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.models.encoders.preprocessing import Preprocessing

# Output channels of a block, per channel of its base width.
EXPANSION = 4


class ResNet(nn.Module):
    """ResNet with bottleneck blocks, or ResNeXt, without the classification layer. Parameter names
    are torchvision's.

    Args:
        blocks: Blocks in each of the four stages.
        groups: Groups of the 3 x 3 convolutions, 1 for a ResNet.
        width_per_group: Channels per group in the first stage, 64 for a ResNet.

    Source:
        He et al., Deep Residual Learning for Image Recognition (2016). Xie et al., Aggregated
        Residual Transformations (2017).

    Differs from:
        He et al. put the stride of a block in the first convolution. Here it is in the 3 x 3
        convolution, as in the published weights.
    """

    def __init__(
        self, blocks: tuple[int, int, int, int], groups: int = 1, width_per_group: int = 64
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = 64
        stages = list[nn.Sequential]()
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            # The first stage follows a max pooling, so that only later stages halve the map.
            strides = [1 if stage == 0 else 2, *[1] * (count - 1)]
            layers = []
            for stride in strides:
                layers.append(Bottleneck(inputs, width, stride, groups, width_per_group))
                inputs = EXPANSION * width
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        """Compute the feature map ``[N, 2048, H / 32, W / 32]`` and its mean ``[N, 2048]``."""
        states = self.maxpool(torch.relu(self.bn1(self.conv1(pixel_values))))
        grid = self.layer4(self.layer3(self.layer2(self.layer1(states))))
        # Names of the output as in transformers.
        return SimpleNamespace(last_hidden_state=grid, pooler_output=grid.mean((2, 3)))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 with batch norm, and a residual connection.

    Args:
        in_channels: Input channels.
        width: Base width.
        stride: Stride of the 3 x 3 convolution.
        groups: Groups of the 3 x 3 convolution.
        width_per_group: Channels per group at base width 64.
    """

    def __init__(
        self, in_channels: int, width: int, stride: int, groups: int, width_per_group: int
    ):
        super().__init__()
        inner = width * width_per_group // 64 * groups
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(in_channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        # The residual needs the shape of the output.
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, states: Tensor) -> Tensor:
        """Apply the block to a feature map ``[N, C, H, W]``."""
        inner = torch.relu(self.bn1(self.conv1(states)))
        inner = torch.relu(self.bn2(self.conv2(inner)))
        return torch.relu(self.bn3(self.conv3(inner)) + self.downsample(states))


# Channels of each 3 x 3 convolution. 0: max pooling that halves the map.
CHANNELS = (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0)


class VGG19(nn.Module):
    """VGG19 without the classification layer. Parameter names are torchvision's.

    Source:
        Simonyan and Zisserman, Very Deep Convolutional Networks (2015), configuration E.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for channels in CHANNELS:
            layers += (
                [nn.Conv2d(inputs, channels, 3, 1, 1), nn.ReLU()]
                if channels
                else [nn.MaxPool2d(2, 2)]
            )
            inputs = channels or inputs
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
        )

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        """Compute the feature map ``[N, 512, 7, 7]`` and the vector of layer fc7, ``[N, 4096]``."""
        grid = self.features(pixel_values)
        return SimpleNamespace(
            last_hidden_state=grid, pooler_output=self.classifier(self.avgpool(grid).flatten(1))
        )


# Name of ``SmallCNN`` in recipes.
SMALL_CNN = "small-cnn"


class SmallCNN(nn.Module):
    """Four 3 x 3 convolutions of stride 2 with batch norm and ReLU: 0.4 million parameters that
    start at random.
    """

    preprocessing = Preprocessing(
        resize=(64, 64), crop=None, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    )

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        self.convolutions = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(),
                )
                for inputs, outputs in pairwise(widths)
            )
        )

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        """Compute the feature map ``[N, 256, 4, 4]`` and its mean ``[N, 256]``."""
        grid = self.convolutions(pixel_values)
        return SimpleNamespace(last_hidden_state=grid, pooler_output=grid.mean((2, 3)))


@dataclass(frozen=True)
class PublishedBackbone:
    """Image encoder whose weights are published as one file.

    Attributes:
        build: Builds the encoder with random weights.
        files: Names of the file, the usual name first. All have the same training.
        classifier_prefix: Prefix of the classification layer's weights, which are ignored.
    """

    build: Callable[[], nn.Module]
    files: tuple[str, ...]
    classifier_prefix: str = "fc."


# Address of the published files.
WEIGHTS_URL = "https://download.pytorch.org/models"
# Published encoders by their names in recipes: torchvision's first weights (V1) of ImageNet, and
# weights learned from hashtags (WSL).
PUBLISHED_BACKBONES = {
    "resnet50": PublishedBackbone(
        lambda: ResNet((3, 4, 6, 3)), ("resnet50-0676ba61.pth", "resnet50-19c8e357.pth")
    ),
    "resnet152": PublishedBackbone(
        lambda: ResNet((3, 8, 36, 3)), ("resnet152-394f9c45.pth", "resnet152-b121ed2d.pth")
    ),
    "vgg19": PublishedBackbone(VGG19, ("vgg19-dcbb9e9d.pth",), "classifier.6."),
    "resnext101-32x8d-wsl": PublishedBackbone(
        lambda: ResNet((3, 4, 23, 3), groups=32, width_per_group=8),
        ("ig_resnext101_32x8-c38310e5.pth",),
    ),
}


def published_backbone_name(name: str) -> str | None:
    """Return the catalog name of a published encoder or file. None: another encoder."""
    if name in PUBLISHED_BACKBONES:
        return name
    if not name.endswith(".pth"):
        return None
    entry_of_file = {
        file: entry
        for entry, backbone in PUBLISHED_BACKBONES.items()
        for file in (*backbone.files, f"{entry}.pth")
    }
    if (file := Path(name).name) not in entry_of_file:
        raise DataError(
            f"{name}: expected one of the published files {', '.join(entry_of_file)}, got another. "
            "Rename the file, or use a folder of transformers."
        )
    return entry_of_file[file]


def published_weights_file(name: str) -> Path:
    """Find the weights of a published encoder: a path, or a file in the folder ``backbones`` of the
    cache.
    """
    candidates = _weights_paths(name)
    if (existing := next((path for path in candidates if os.path.isfile(path)), None)) is not None:
        return existing
    entry = published_backbone_name(name) or name
    url = f"{WEIGHTS_URL}/{PUBLISHED_BACKBONES[entry].files[0]}"
    raise DataError(
        f"{candidates[0]}: expected the weights of {entry}, got no file. Download {url} to this "
        "path."
    )


def is_downloaded(name: str) -> bool:
    """Check whether the weights of a published encoder are in the cache."""
    return any(os.path.isfile(path) for path in _weights_paths(name))


def _weights_paths(name: str) -> list[Path]:
    folder = storage.cache_folder() / "backbones"
    if name not in PUBLISHED_BACKBONES:
        return [Path(name)]
    return [folder / file for file in (*PUBLISHED_BACKBONES[name].files, f"{name}.pth")]
