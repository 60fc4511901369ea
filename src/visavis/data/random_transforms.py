"""Random crops and flips of images for training. Each samples from the ``torch.Generator`` that is
passed to it.

Example:
    >>> random_sides_box((400, 300), torch.Generator().manual_seed(0))
    (4, 2, 399, 298)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL.Image import Image, Resampling, Transpose
from torch import Tensor

from visavis.data.images import decode_image, upright_size

if TYPE_CHECKING:
    from visavis.data.image_file import Image as ListedImage
    from visavis.data.item_sources import PixelFunction

Box = tuple[int, int, int, int]
"""Left, top, right and bottom of a part of an image, in pixels."""


def random_area_box(
    size: tuple[int, int],
    generator: torch.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Sample a crop by its share of the area (``scale``), and its width / height (``ratio``)."""
    for _ in range(10):
        # The order of the calls of the generator is a part of a seed.
        area = size[0] * size[1] * _uniform(*scale, generator)
        aspect = math.exp(_uniform(math.log(ratio[0]), math.log(ratio[1]), generator))
        width = round(math.sqrt(area * aspect))
        height = round(math.sqrt(area / aspect))
        if 0 < width <= size[0] and 0 < height <= size[1]:
            left = int(_uniform(0, size[0] - width + 1, generator))
            top = int(_uniform(0, size[1] - height + 1, generator))
            break
    else:
        # No crop fits into the image: the largest centered one of an allowed ratio.
        aspect = min(max(size[0] / size[1], ratio[0]), ratio[1])
        width = min(size[0], round(size[1] * aspect))
        height = min(size[1], round(size[0] / aspect))
        left = (size[0] - width) // 2
        top = (size[1] - height) // 2
    return left, top, left + width, top + height


def random_sides_box(
    size: tuple[int, int], generator: torch.Generator, *, scale: tuple[float, float] = (0.6, 1.0)
) -> Box:
    """Sample a crop with the aspect ratio of the image, and sides of a share ``scale`` of its sides."""
    # As the code of VSE-infinity (Chen et al., 2021).
    side_share = _uniform(*scale, generator)
    width = max(1, int(side_share * size[0]))
    height = max(1, int(side_share * size[1]))
    left = int(_uniform(0, size[0] - width + 1, generator))
    top = int(_uniform(0, size[1] - height + 1, generator))
    return left, top, left + width, top + height


def random_horizontal_flip(image: Image, generator: torch.Generator) -> Image:
    """Flip an image horizontally with probability 1/2."""
    return image.transpose(Transpose.FLIP_LEFT_RIGHT) if _uniform(0, 1, generator) < 0.5 else image


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


CropFunction = Callable[[tuple[int, int], torch.Generator], Box]
"""Samples a crop of an image of a given width and height."""
# Crop functions by their names in recipes.
CROP_FUNCTIONS: dict[str, CropFunction] = {
    "random_area": random_area_box,
    "random_sides": random_sides_box,
}


class RandomCrops:
    """Reads random crops of images, half of them flipped.

    Args:
        preprocess: Converts crops to pixels.
        crop: Name of the crop function.
    """

    def __init__(self, preprocess: PixelFunction, crop: str = "random_area"):
        self.preprocess = preprocess
        self.crop = CROP_FUNCTIONS[crop]

    def __call__(self, image: ListedImage, seeds: np.ndarray, min_side: int) -> Tensor:
        """Read one crop of an image for each seed, as ``CropReader``."""
        # Crops are sampled first, because a small one needs more pixels of the image.
        content = image.read()
        size = upright_size(content, image.name)
        # One generator per crop: box and flip depend on its seed alone, not on other images.
        generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        boxes = [self.crop(size, generator) for generator in generators]
        smallest = min(min(right - left, bottom - top) for left, top, right, bottom in boxes)
        decoded = decode_image(content, image.name, min_side=-(-min_side * min(size) // smallest))
        # The parts of the reduced image that show the crops, at least a pixel.
        scale = np.tile([decoded.width / size[0], decoded.height / size[1]], 2)
        parts = [tuple(map(round, (np.array(box) * scale).tolist())) for box in boxes]
        crops = [
            decoded.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
            for left, top, right, bottom in parts
        ]
        if not min_side:  # the preprocessing does not resize
            crops = [crop.resize((min(size),) * 2, Resampling.BICUBIC) for crop in crops]
        return self.preprocess(
            [
                random_horizontal_flip(crop, generator)
                for crop, generator in zip(crops, generators, strict=True)
            ]
        )
