"""VGG19, with the names of parameters under which torchvision publishes its weights."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, nn

CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)
"""Of each 3 x 3 convolution; 0: the map is halved by its maxima."""


class VGG19(nn.Module):
    """Sixteen convolutions and two fully connected layers, without the layer that names classes.

    Pixels ``[N, 3, 224, 224]`` to a map ``[N, 512, 7, 7]`` and one vector ``[N, 4096]`` ("fc7"), in the manner of transformers.
    Source: Simonyan and Zisserman, Very Deep Convolutional Networks (2015), configuration E.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for channels in CHANNELS:
            layers += [nn.Conv2d(inputs, channels, 3, 1, 1), nn.ReLU()] if channels else [nn.MaxPool2d(2, 2)]
            inputs = channels or inputs
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()
        )

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        grid = self.features(pixel_values)
        return SimpleNamespace(last_hidden_state=grid, pooler_output=self.classifier(self.avgpool(grid).flatten(1)))
