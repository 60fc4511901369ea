"""Pictures of a data set as pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.data.transforms import random_flip, random_part, random_resized_crop
from visavis.types import Encoded

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

ToPixels = Callable[[Sequence["Picture"]], Tensor]
Crop = Callable[["Picture", torch.Generator], "Picture"]
CROPS: dict[str, Crop] = {
    "area": lambda picture, generator: random_resized_crop(picture, min(picture.size), generator),
    "sides": random_part,
}
"""By the names that recipes use."""


class PixelSource:
    """The pixels of a split's images, for a matcher that trains its backbone; cropped and flipped at random in training.

    preprocess: pictures to pixels ``[N, 3, H, W]``. preprocess_crops: the same for random crops; None: nothing is cropped or flipped.
    crop: how a crop is drawn.
    """

    def __init__(self, data: Dataset, preprocess: ToPixels, preprocess_crops: ToPixels | None = None, crop: Crop | None = None):
        self.data, self.preprocess, self.preprocess_crops, self.crop = data, preprocess, preprocess_crops, crop or CROPS["area"]

    def read(self, index: np.ndarray, generator: torch.Generator | None = None) -> Encoded:
        pictures = [self.data.images[i].open() for i in index]
        if self.preprocess_crops is None or generator is None:
            return Encoded(self.preprocess(pictures))
        crops = [random_flip(self.crop(picture, generator), generator) for picture in pictures]
        return Encoded(self.preprocess_crops(crops))
