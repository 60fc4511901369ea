"""A small convolutional image tower that begins with random weights, for those who have no pretrained encoder at hand."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

from torch import Tensor, nn

from visavis.models.preprocessing import Preprocessing

NAME = "small-cnn"


class SmallCNN(nn.Module):
    """Four 3 x 3 convolutions of stride 2 with batch norm and ReLU: 0.4 million parameters, to be trained from pixels.

    Pixels ``[N, 3, 64, 64]`` to a map ``[N, 256, 4, 4]`` and its mean ``[N, 256]``, in the manner of transformers.
    """

    preprocessing = Preprocessing(resize=(64, 64), crop=None, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        self.convolutions = nn.Sequential(*(_convolution(*pair) for pair in pairwise(widths)))

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        grid = self.convolutions(pixel_values)
        return SimpleNamespace(last_hidden_state=grid, pooler_output=grid.mean((2, 3)))


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
