"""Pictures of a data set as pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.data.transforms import random_flip, random_resized_crop
from visavis.types import Encoded

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


class PixelSource:
    """The pixels of a split's images, for a matcher that trains its backbone; cropped and flipped at random in training.

    preprocess: pictures to pixels ``[N, 3, H, W]``.
    """

    def __init__(self, data: Dataset, preprocess: Callable[[Sequence[Picture]], Tensor], *, augment: bool):
        self.data, self.preprocess, self.augment = data, preprocess, augment

    def read(self, index: np.ndarray, generator: torch.Generator | None = None) -> Encoded:
        pictures = [self.data.images[i].open() for i in index]
        if self.augment and generator is not None:
            pictures = [random_flip(random_resized_crop(picture, min(picture.size), generator), generator) for picture in pictures]
        return Encoded(self.preprocess(pictures))
