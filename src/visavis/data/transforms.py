"""Random transforms of pictures in training; each draws from the ``torch.Generator`` passed to it.

>>> from PIL import Image
>>> random_resized_crop(Image.new("RGB", (400, 300)), 224, torch.Generator().manual_seed(0)).size
(224, 224)
"""

from __future__ import annotations

import math

import torch
from PIL.Image import Image, Resampling, Transpose


def random_resized_crop(
    picture: Image,
    size: int,
    generator: torch.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Image:
    """A random crop, of ``scale`` times the area and with width / height in ``ratio``, as ``size x size`` pixels.

    If ten draws do not fit into the picture, the largest center crop of an allowed ratio is taken.
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


def random_part(picture: Image, generator: torch.Generator, *, share: tuple[float, float] = (0.6, 1.0)) -> Image:
    """A random part of the picture's own shape, whose sides are ``share`` of its sides. Source: the code of VSE-infinity (Chen et al., 2021)."""
    part = _uniform(*share, generator)
    width, height = max(1, int(part * picture.width)), max(1, int(part * picture.height))
    left = int(_uniform(0, picture.width - width + 1, generator))
    top = int(_uniform(0, picture.height - height + 1, generator))
    return picture.crop((left, top, left + width, top + height))


def random_flip(picture: Image, generator: torch.Generator) -> Image:
    """Flip the picture horizontally with probability 1/2."""
    return picture.transpose(Transpose.FLIP_LEFT_RIGHT) if _uniform(0, 1, generator) < 0.5 else picture


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()
