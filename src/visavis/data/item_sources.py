"""Model input of the images or of the captions of a data set: pixels of listed images, or stored
features, which may be standardized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Encoded, concatenate
from visavis.data.features.standardization import Standardization
from visavis.data.image_file import Image as ListedImage
from visavis.data.parallel import map_in_order
from visavis.data.sequences import read_items

if TYPE_CHECKING:
    from PIL.Image import Image

PixelFunction = Callable[[Sequence["Image"]], Tensor]
"""Converts images to pixels ``[N, 3, H, W]``."""
CropReader = Callable[[ListedImage, np.ndarray, int], Tensor]
"""Reads random parts of an image as pixels ``[N, 3, H, W]``, from a seed for each of them and the
pixels that the shorter side of a reduced JPEG keeps.
"""


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
        read_crops: Reads random crops, such as ``RandomCrops``. None: no cropping and flipping.
        min_side: Pixels that the shorter side of a reduced JPEG, or of its crop, keeps. 0: images
            are decoded in full.
        normalize: Normalizes the pixels of a batch, on their device. None: both functions return
            normalized pixels.
    """

    def __init__(
        self,
        images: Sequence[ListedImage],
        preprocess: PixelFunction,
        read_crops: CropReader | None = None,
        min_side: int = 0,
        normalize: Callable[[Tensor], Tensor] | None = None,
    ):
        self.images = images
        self.preprocess = preprocess
        self.read_crops = read_crops
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
        read_crops = self.read_crops
        if read_crops is None or seeds is None:
            pixels = list(
                map_in_order(lambda image: self.preprocess([image.open(self.min_side)]), images)
            )
            return Encoded(torch.cat([pixels[number] for number in image_of]))
        positions = [np.flatnonzero(image_of == number) for number in range(len(images))]
        crops = map_in_order(
            lambda number: read_crops(images[number], seeds[positions[number]], self.min_side),
            range(len(images)),
        )
        rows = [row for pixels in crops for row in pixels]
        return Encoded(
            # Rows come image by image. The argsort of their positions restores the order of the
            # batch.
            torch.stack([rows[number] for number in np.argsort(np.concatenate(positions))])
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
