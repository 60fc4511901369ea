"""A small image encoder for synthetic scenes with 0.9 million parameters. Its weights, trained by
tools/train_scene_encoder.py, are included.

Convolutions over the pixels and two channels with their coordinates yield a grid of 6 x 6 regions.
One attention layer relates the regions, so that relations are encoded, too. No network access is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from visavis.core import storage
from visavis.models.encoders.pretrained_files import SCENE_ENCODER_WEIGHTS

if TYPE_CHECKING:
    from PIL.Image import Image


class SceneEncoder(nn.Module):
    """Encodes images as a grid of region features ``[N, 36, 192]``, row by row from the upper left."""

    image_size = 96
    embedding_dim = 192
    coordinates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            # [N, 5, 96, 96] to [N, 20, 48, 48]: colors and coordinates of 2 x 2 pixels.
            nn.PixelUnshuffle(2),
            _convolution(20, 64, stride=2),
            _Residual(_convolution(64, 64)),
            _convolution(64, 128, stride=2),
            _Residual(_convolution(128, 128)),
            _Residual(_convolution(128, 128)),
            _convolution(128, self.embedding_dim, stride=2),
        )
        self.attention = nn.TransformerEncoderLayer(
            self.embedding_dim, 6, 288, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(self.embedding_dim)
        axis = torch.linspace(-1, 1, self.image_size)
        self.register_buffer(
            "coordinates",
            torch.stack(torch.meshgrid(axis, axis, indexing="xy"))[None],
            persistent=False,
        )

    @classmethod
    def load(cls) -> SceneEncoder:
        """Load the included encoder in evaluation mode."""
        encoder = cls()
        weights = storage.read_tensors(SCENE_ENCODER_WEIGHTS)
        # Saved in half precision.
        encoder.load_state_dict(
            {
                name: weight.float() if weight.is_floating_point() else weight
                for name, weight in weights.items()
            }
        )
        return encoder.eval()

    @classmethod
    def preprocess(cls, images: Iterable[Image]) -> Tensor:
        """Convert images of any size to pixels as uint8, ``[N, 3, 96, 96]``."""
        shape = (cls.image_size, cls.image_size)
        rgb_images = (image.convert("RGB") for image in images)
        pixels = np.stack(
            [
                np.asarray(image if image.size == shape else image.resize(shape))
                for image in rgb_images
            ]
        )
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels from 0 to 255, ``[N, 3, 96, 96]``, to region features ``[N, 36, 192]``."""
        colors = pixels.to(self.coordinates.dtype) / 127.5 - 1
        # A shape, not ``len``, so that an exported graph accepts any number of images.
        channels = torch.cat(
            [colors, self.coordinates.expand(colors.shape[0], -1, -1, -1)], 1
        ).contiguous(memory_format=torch.channels_last)
        # [N, 36, 192]
        grid = self.convolutions(channels).flatten(2).transpose(1, 2)
        return self.norm(self.attention(grid))


class SceneEncoderOutputAdapter(nn.Module):
    """The included encoder with the output format of transformers models.

    Args:
        encoder: The encoder.
    """

    def __init__(self, encoder: SceneEncoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        """Encode pixels from 0 to 255, ``[N, 3, 96, 96]``, to regions and their mean."""
        grid = self.encoder(pixel_values)
        return SimpleNamespace(last_hidden_state=grid, pooler_output=grid.mean(1))


class _Residual(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _convolution(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )
