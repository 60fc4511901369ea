"""A small visual encoder for drawn scenes: 0.9 million parameters, trained by tools/train_scene_encoder.py, shipped.

Convolutions over the pixels and two channels with their coordinates give a grid of 6 x 6 regions; one layer of
attention lets every region see the others, so that relations can be read too. No network is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import as_file, files
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from visavis import storage

if TYPE_CHECKING:
    from PIL.Image import Image


class SceneEncoder(nn.Module):
    """Pictures to a grid of region features ``[N, 36, 192]``, row by row from the upper left."""

    side = 96
    num_regions = 36
    width = 192
    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.PixelUnshuffle(2),
            _convolution(20, 64, stride=2),
            _Residual(_convolution(64, 64)),
            _convolution(64, 128, stride=2),
            _Residual(_convolution(128, 128)),
            _Residual(_convolution(128, 128)),
            _convolution(128, self.width, stride=2),
        )
        self.attention = nn.TransformerEncoderLayer(self.width, 6, 288, 0.0, "gelu", batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(self.width)
        axis = torch.linspace(-1, 1, self.side)
        self.register_buffer("places", torch.stack(torch.meshgrid(axis, axis, indexing="xy"))[None], persistent=False)

    @classmethod
    def load(cls) -> SceneEncoder:
        """The shipped encoder, in evaluation mode."""
        encoder = cls()
        with as_file(files("visavis.models") / "weights" / "scene_encoder.safetensors") as path:
            weights = storage.read_tensors(path)
        encoder.load_state_dict({name: weight.float() if weight.is_floating_point() else weight for name, weight in weights.items()})
        return encoder.eval()

    @classmethod
    def preprocess(cls, images: Iterable[Image]) -> Tensor:
        """Pictures of any size as uint8 pixels ``[N, 3, 96, 96]``."""
        shape = (cls.side, cls.side)
        pictures = (image.convert("RGB") for image in images)
        pixels = np.stack([np.asarray(picture if picture.size == shape else picture.resize(shape)) for picture in pictures])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def forward(self, pixels: Tensor) -> Tensor:
        """The grid ``[N, 36, 192]`` of pixels ``[N, 3, 96, 96]`` from 0 to 255."""
        colors = pixels.to(self.places.dtype) / 127.5 - 1
        seen = torch.cat([colors, self.places.expand(len(colors), -1, -1, -1)], 1).contiguous(memory_format=torch.channels_last)
        grid = self.convolutions(seen).flatten(2).transpose(1, 2)
        return self.norm(self.attention(grid))

    def pool(self, grid: Tensor) -> Tensor:
        """One vector an image ``[N, 192]``: the mean of its regions."""
        return grid.mean(1)

    @torch.inference_mode()
    def encode(self, images: Iterable[Image], *, batch_size: int = 64) -> Tensor:
        """The grids ``[N, 36, 192]`` of pictures, computed in batches."""
        images = list(images)
        batches = (images[start : start + batch_size] for start in range(0, len(images), batch_size))
        grids = [self(self.preprocess(batch).to(self.places.device)) for batch in batches]
        return torch.cat(grids) if grids else torch.empty(0, self.num_regions, self.width)


class SceneModel(nn.Module):
    """The shipped encoder of drawn scenes, speaking as models of transformers do."""

    def __init__(self, encoder: SceneEncoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        grid = self.encoder(pixel_values)
        return SimpleNamespace(last_hidden_state=grid, pooler_output=self.encoder.pool(grid))


class _Residual(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _convolution(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
