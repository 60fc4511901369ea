"""Model input of the images or of the captions of a data set: pixels of listed images, or stored
features, which may be standardized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from PIL.Image import Resampling
from torch import Tensor

from visavis.core.encoded import Encoded, concatenate
from visavis.data.features.standardization import Standardization
from visavis.data.image_file import Image as ListedImage
from visavis.data.images import decode_image, upright_size
from visavis.data.parallel import map_in_order
from visavis.data.random_transforms import (
    Box,
    random_area_box,
    random_horizontal_flip,
    random_sides_box,
)
from visavis.data.sequences import read_items

if TYPE_CHECKING:
    from PIL.Image import Image

PixelFunction = Callable[[Sequence["Image"]], Tensor]
"""Converts images to pixels ``[N, 3, H, W]``."""
CropFunction = Callable[[tuple[int, int], torch.Generator], Box]
"""Samples a crop of an image of a given width and height."""
# Crop functions by their names in recipes.
CROP_FUNCTIONS: dict[str, CropFunction] = {
    "random_area": random_area_box,
    "random_sides": random_sides_box,
}


class ItemSource(Protocol):
    """Input of a model for the images or for the captions of a data set."""

    def read(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Read items in the given order. Seeds of their random transforms are given in training
        alone.
        """
        ...


class FeatureReader(Protocol):
    """Stored features of images or captions, in any format."""

    @property
    def embedding_dim(self) -> int:
        """Number of dimensions of the features, the sum over all parts."""
        ...

    def rows(self, keys: Iterable[str], /) -> np.ndarray:
        """Look up the rows of items by names of images, or by captions."""
        ...

    def read(self, rows: np.ndarray, /) -> Encoded:
        """Read rows in float32, padded with a mask if items have different lengths."""
        ...


class PixelSource:
    """Pixels of a split's images, for a matcher that trains its image encoder. Training crops and
    flips at random.

    Images are decoded in parallel, and an image that occurs twice in a batch is decoded once.

    Args:
        images: Images of the split.
        preprocess: Converts images to pixels.
        preprocess_crops: Converts random crops to pixels. None: no cropping and flipping.
        crop: Name of the crop function.
        min_side: Pixels that the shorter side of a reduced JPEG, or of its crop, keeps. 0: images
            are decoded in full.
        normalize: Normalizes the pixels of a batch, on their device. None: both functions return
            normalized pixels.
    """

    def __init__(
        self,
        images: Sequence[ListedImage],
        preprocess: PixelFunction,
        preprocess_crops: PixelFunction | None = None,
        crop: str = "random_area",
        min_side: int = 0,
        normalize: Callable[[Tensor], Tensor] | None = None,
    ):
        self.images = images
        self.preprocess = preprocess
        self.preprocess_crops = preprocess_crops
        self.crop = CROP_FUNCTIONS[crop]
        self.min_side = min_side
        self._normalize = normalize

    def read(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Read pixels of some images, shape ``[N, 3, H, W]``. Each image has its own seed of crop
        and flip. None: neither.
        """
        return self.normalize(self.read_unnormalized(index, seeds))

    def normalize(self, pixels: Encoded) -> Encoded:
        """Normalize the result of ``read_unnormalized``, on any device."""
        return pixels if self._normalize is None else pixels.map(self._normalize)

    def read_unnormalized(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Read pixels of some images as ``read``, before ``normalize``: bytes, if that normalizes."""
        # Sorted, so that a stream reads its shards in order.
        numbers, image_of = np.unique(index, return_inverse=True)
        # A stream reads the bytes of all images here, because its shards are not open to threads.
        images = read_items(self.images, numbers)
        if self.preprocess_crops is None or seeds is None:
            pixels = list(
                map_in_order(lambda image: self.preprocess([image.open(self.min_side)]), images)
            )
            return Encoded(torch.cat([pixels[number] for number in image_of]))
        positions = [np.flatnonzero(image_of == number) for number in range(len(images))]
        crops = map_in_order(
            lambda number: self._read_crops(images[number], seeds[positions[number]]),
            range(len(images)),
        )
        rows = [row for pixels in crops for row in pixels]
        return Encoded(
            # Rows come image by image. The argsort of their positions restores the order of the
            # batch.
            torch.stack([rows[number] for number in np.argsort(np.concatenate(positions))])
        )

    def _read_crops(self, image: ListedImage, seeds: np.ndarray) -> Tensor:
        """Read one random crop of an image for each seed. Crops are sampled first, because a small
        one needs more pixels of the image.
        """
        assert self.preprocess_crops is not None
        name = image.name
        content = image.read()
        size = upright_size(content, name)
        # One generator per crop: box and flip depend on its seed alone, not on other images.
        generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        boxes = [self.crop(size, generator) for generator in generators]
        smallest = min(min(right - left, bottom - top) for left, top, right, bottom in boxes)
        decoded = decode_image(content, name, min_side=-(-self.min_side * min(size) // smallest))
        # The parts of the reduced image that show the crops, at least a pixel.
        scale = np.tile([decoded.width / size[0], decoded.height / size[1]], 2)
        crops = []
        for box in boxes:
            left, top, right, bottom = map(round, (np.array(box) * scale).tolist())
            crops.append(decoded.crop((left, top, max(right, left + 1), max(bottom, top + 1))))
        if not self.min_side:  # the preprocessing does not resize
            crops = [crop.resize((min(size),) * 2, Resampling.BICUBIC) for crop in crops]
        return self.preprocess_crops(
            [
                random_horizontal_flip(crop, generator)
                for crop, generator in zip(crops, generators, strict=True)
            ]
        )


def read_unnormalized(
    source: ItemSource, index: np.ndarray, seeds: np.ndarray | None = None
) -> Encoded:
    """Read items for a batch, which is normalized as a whole on the device of the training."""
    return (source.read_unnormalized if isinstance(source, PixelSource) else source.read)(
        index, seeds
    )


@dataclass(frozen=True)
class StoredFeatures:
    """Items of a store. Several crops are averaged, then features are standardized.

    Attributes:
        store: The store.
        rows: Row of each item.
        crops: Number of crops per item.
        standardization: Statistics for standardization. None: unchanged features.
    """

    store: FeatureReader
    rows: np.ndarray
    crops: int = 1
    standardization: Standardization | None = None

    def read(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Read items, as ``ItemSource.read``."""
        encoded = self.store.read(self.rows[index])
        # [n, crops, ...] to [n, ...]
        encoded = encoded.map(lambda part: part.mean(1)) if self.crops > 1 else encoded
        return encoded if self.standardization is None else self.standardization(encoded)


@dataclass(frozen=True)
class ConcatSource:
    """Items of two sources, the first before the second.

    Attributes:
        first: The first source.
        second: The second source.
        first_count: Number of items of the first source.
    """

    first: ItemSource
    second: ItemSource
    first_count: int

    def read(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Read items, as ``ItemSource.read``."""
        # Each source reads its items at once. The double argsort restores the order of the batch.
        in_second = index >= self.first_count
        parts = [
            source.read(index[part] - offset, None if seeds is None else seeds[part])
            for source, part, offset in (
                (self.first, ~in_second, 0),
                (self.second, in_second, self.first_count),
            )
            if part.any()
        ]
        return concatenate(parts)[
            torch.from_numpy(np.argsort(np.argsort(in_second, kind="stable")))
        ]
