"""From pictures to tensors with Pillow and torch; whatever is random draws from the ``torch.Generator`` it is given.

>>> from PIL import Image
>>> picture = Image.new("RGB", (400, 300))
>>> normalize(to_tensor(center_crop(resize_shorter(picture, 256), 224))).shape
torch.Size([3, 224, 224])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL.Image import Image, Resampling, Transpose
from torch import Tensor

from visavis.errors import ShapeError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def resize_shorter(picture: Image, size: int) -> Image:
    """The shorter side becomes ``size`` pixels, the other keeps the shape (bicubic)."""
    scale = size / min(picture.size)
    width, height = (max(size, round(side * scale)) for side in picture.size)
    return picture if (width, height) == picture.size else picture.resize((width, height), Resampling.BICUBIC)


def center_crop(picture: Image, size: int) -> Image:
    """The ``size x size`` pixels in the middle. Raises ShapeError for a smaller picture."""
    _require_at_least(picture, size)
    return _crop(picture, (picture.width - size) // 2, (picture.height - size) // 2, size)


def ten_crop(picture: Image, size: int) -> list[Image]:
    """Four corners and the middle, then the same of the mirrored picture. Raises ShapeError for a smaller picture."""
    _require_at_least(picture, size)
    right, bottom = picture.width - size, picture.height - size
    corners = [(0, 0), (right, 0), (0, bottom), (right, bottom), (right // 2, bottom // 2)]
    mirrored = picture.transpose(Transpose.FLIP_LEFT_RIGHT)
    return [_crop(side, left, top, size) for side in (picture, mirrored) for left, top in corners]


def random_resized_crop(
    picture: Image,
    size: int,
    generator: torch.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Image:
    """A random part, of ``scale`` times the area and with width / height in ``ratio``, as ``size x size`` pixels.

    Ten draws that do not fit are followed by the largest middle part of an allowed ratio.
    """
    for _ in range(10):
        area = picture.width * picture.height * _uniform(*scale, generator)
        aspect = math.exp(_uniform(math.log(ratio[0]), math.log(ratio[1]), generator))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= picture.width and 0 < height <= picture.height:
            left = int(_uniform(0, picture.width - width + 1, generator))
            top = int(_uniform(0, picture.height - height + 1, generator))
            break
    else:
        aspect = min(max(picture.width / picture.height, ratio[0]), ratio[1])
        width, height = min(picture.width, round(picture.height * aspect)), min(picture.height, round(picture.width / aspect))
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.resize((size, size), Resampling.BICUBIC, box=(left, top, left + width, top + height))


def random_flip(picture: Image, generator: torch.Generator) -> Image:
    """Mirrored left to right in half of the draws."""
    return picture.transpose(Transpose.FLIP_LEFT_RIGHT) if _uniform(0, 1, generator) < 0.5 else picture


def to_tensor(picture: Image) -> Tensor:
    """``[3, H, W]`` float32 in [0, 1] of an RGB picture."""
    return torch.from_numpy(np.array(picture, dtype=np.float32)).div_(255).permute(2, 0, 1).contiguous()


def normalize(pixels: Tensor, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> Tensor:
    """``(pixels - mean) / std`` per channel of ``[..., 3, H, W]``."""
    return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def _crop(picture: Image, left: int, top: int, size: int) -> Image:
    return picture.crop((left, top, left + size, top + size))


def _require_at_least(picture: Image, size: int) -> None:
    if min(picture.size) < size:
        raise ShapeError(f"a crop of {size} pixels does not fit in a picture of {picture.width} x {picture.height}: resize it first.")
