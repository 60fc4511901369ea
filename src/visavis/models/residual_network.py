"""Residual networks of convolutions, with the names of parameters under which torchvision publishes their weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

EXPANSION = 4
"""Channels that leave a block, for each of its base width."""


class ResidualNetwork(nn.Module):
    """A ResNet of bottleneck blocks, or a ResNeXt, without the layer that names classes.

    blocks: in each of the four stages. groups, group_width: of the 3 x 3 convolutions; 1 and 64 for a ResNet. Pixels ``[N, 3, H, W]`` to a
    map ``[N, 2048, H / 32, W / 32]`` and its mean ``[N, 2048]``, in the manner of transformers.
    Source: He et al., Deep Residual Learning for Image Recognition (2016); Xie et al., Aggregated Residual Transformations (2017).
    Differs from: the former, whose blocks have their stride in the first convolution; here in the 3 x 3 one, as the published weights.
    """

    def __init__(self, blocks: tuple[int, int, int, int], groups: int = 1, group_width: int = 64):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [64 * 2**stage for stage in range(4)]
        inputs = (64, *(EXPANSION * width for width in widths[:-1]))
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(inputs[stage], widths[stage], blocks[stage], 1 if stage == 0 else 2, groups, group_width) for stage in range(4)
        )

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        states = self.maxpool(torch.relu(self.bn1(self.conv1(pixel_values))))
        grid = self.layer4(self.layer3(self.layer2(self.layer1(states))))
        return SimpleNamespace(last_hidden_state=grid, pooler_output=grid.mean((2, 3)))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, each with batch norm, around which the input is added."""

    def __init__(self, inputs: int, width: int, stride: int, groups: int, group_width: int):
        super().__init__()
        inner, outputs = width * group_width // 64 * groups, EXPANSION * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, states: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(states)))
        inner = torch.relu(self.bn2(self.conv2(inner)))
        return torch.relu(self.bn3(self.conv3(inner)) + self.downsample(states))


def _stage(inputs: int, width: int, blocks: int, stride: int, groups: int, group_width: int) -> nn.Sequential:
    first = Bottleneck(inputs, width, stride, groups, group_width)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * width, width, 1, groups, group_width) for _ in range(blocks - 1)))
