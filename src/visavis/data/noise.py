"""Synthetic noise: training captions on wrong images, by the permutations of papers.

Papers with the same share of wrong captions use different permutations. The released files of BiCro
move each caption by itself. The files of L2RM move all captions of an image together. `noise_index`
hashes the resulting assignment, so that runs with different noise are recognized.

All kinds are computed with integers and exact divisions. The same data, kind and seed give the same
assignment on every machine.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.core.fields import NonNegativeInt, UnitFloat, require_field, validate_fields
from visavis.data.dataset import Dataset
from visavis.data.words import tokenize

# Images whose similarities are computed at once: 128 rows for 100,000 images need 100 MB.
_IMAGES_PER_BLOCK = 128


class Noise(ABC):
    """Assignment of captions to wrong images (base class).

    Attributes:
        path_fields: Fields that hold a path, which a run stores as an absolute one.
    """

    path_fields: ClassVar[tuple[str, ...]] = ()
    # None: the seed of the run.
    seed: NonNegativeInt | None = None

    @abstractmethod
    def assign(
        self, data: Dataset, captions: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Assign captions to images.

        Args:
            data: Data set.
            captions: Indices of the captions of the noisy split, shape ``[N]``.
            random: Random generator of the seed.

        Returns:
            Index of the image of each of these captions, shape ``[N]``.
        """


@dataclass(frozen=True, kw_only=True)
class ShuffledCaptions(Noise):
    """A share of the captions exchange their images at random, each caption by itself.

    The number of captions of each image stays. A few of the chosen captions keep their image by
    chance.

    Args:
        share: Share of the captions, from 0 to 1.
        seed: Random seed. None: the seed of the run.

    Source:
        Released code of Huang et al., NCR (2021), and the released indices of BiCro (2023).
    """

    share: UnitFloat = 0.2
    seed: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        validate_fields(self)

    def assign(
        self, data: Dataset, captions: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Permute the images of the chosen captions. See `Noise.assign`."""
        count = round(self.share * len(captions))
        # Sorted positions: the permutation does not depend on the order of the choice.
        chosen = np.sort(random.choice(len(captions), count, replace=False))
        images = data.image_of[captions]
        images[chosen] = random.permutation(images[chosen])
        return images


@dataclass(frozen=True, kw_only=True)
class ShuffledImages(Noise):
    """A share of the images exchange their captions at random. All captions of an image move
    together.

    Args:
        share: Share of the images, from 0 to 1.
        seed: Random seed. None: the seed of the run.

    Source:
        Released code of Qin et al., DECL (2022), and the released indices of L2RM (2024).
    """

    share: UnitFloat = 0.2
    seed: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        validate_fields(self)

    def assign(
        self, data: Dataset, captions: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Permute the chosen images, with all their captions. See `Noise.assign`."""
        images, positions = np.unique(data.image_of[captions], return_inverse=True)
        chosen = np.sort(random.choice(len(images), round(self.share * len(images)), replace=False))
        moved = images.copy()
        moved[chosen] = random.permutation(images[chosen])
        return moved[positions]


class _Exchange(Noise):
    """Captions exchange their images in pairs whose images have a certain similarity."""

    share: UnitFloat

    def assign(
        self, data: Dataset, captions: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Exchange captions of similar images. See `Noise.assign`."""
        images, image_of = np.unique(data.image_of[captions], return_inverse=True)
        assigned = data.image_of[captions]
        # Pairs of captions: an odd number of them leaves one in place.
        missing = round(self.share * len(captions)) // 2
        content = _ImageContent(
            [
                [data.captions[i] for i in captions[image_of == image]]
                for image in range(len(images))
            ]
        )
        free = np.ones(len(captions), bool)
        # Captions of each image that were not exchanged yet.
        num_free = np.bincount(image_of, minlength=len(images))
        order = random.permutation(len(captions))
        for start in range(0, len(order), _IMAGES_PER_BLOCK):
            block = order[start : start + _IMAGES_PER_BLOCK]
            similarities = content.similarities(image_of[block]) if missing else ()
            for caption, similarity in zip(block.tolist(), similarities, strict=False):
                candidates = num_free > 0
                candidates[image_of[caption]] = False
                if not missing or not free[caption] or not candidates.any():
                    continue
                # An image is the least similar to itself: it is never chosen.
                similarity[image_of[caption]] = -1
                partner = self.choose(similarity, candidates, random)
                if partner < 0:
                    continue
                other = random.choice(np.flatnonzero(free & (image_of == partner)))
                assigned[[caption, other]] = assigned[[other, caption]]
                free[[caption, other]] = False
                num_free[image_of[[caption, other]]] -= 1
                missing -= 1
        if missing:
            raise DataError(
                f"{self!r}: expected {round(self.share * len(captions)):,} of {len(captions):,} "
                f"captions on other images, got {int((~free).sum()):,}, because the other images "
                "have no free caption, or too few of them are as similar as this noise needs. Set a "
                "smaller share."
            )
        return assigned

    @abstractmethod
    def choose(
        self, similarity: np.ndarray, candidates: np.ndarray, random: np.random.Generator
    ) -> int:
        """Choose an image by its similarity ``[V]`` among candidates, bool ``[V]``. -1: none fits."""


@dataclass(frozen=True, kw_only=True)
class SimilarImages(_Exchange):
    """Captions exchange their images with captions of the most similar image.

    Two images are similar if their captions share words: $sum_w over both$ divided by the sum over
    either, each word with the weight ``floor(log2(V / n))``, where n of V images have the word. A
    caption takes the most similar image that still has a caption to exchange. With a large share,
    later captions therefore get less similar images.

    Args:
        share: Share of the captions, from 0 to 1. An even number of captions is moved.
        seed: Random seed. None: the seed of the run.

    Source:
        This project. Papers discuss such pairs as hard noise, and none of the released code that
        was examined (NCR, DECL, BiCro, L2RM, CRCL) makes them.
    """

    share: UnitFloat = 0.2
    seed: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        validate_fields(self)

    def choose(
        self, similarity: np.ndarray, candidates: np.ndarray, random: np.random.Generator
    ) -> int:
        """Choose the most similar image. See `_Exchange.choose`."""
        return int(np.where(candidates, similarity, -1).argmax())


@dataclass(frozen=True, kw_only=True)
class PartlyRelevantImages(_Exchange):
    """Captions exchange their images with captions of images of intermediate similarity.

    The similarity is that of `SimilarImages`. A caption gets a random image among those from rank
    ``nearest`` to rank ``farthest``, as shares of the images. They share words with its own image.

    Args:
        share: Share of the captions, from 0 to 1. An even number of captions is moved.
        nearest: Share of the images that are too similar, at least the most similar one.
        farthest: Share of the images up to which an image is partly relevant.
        seed: Random seed. None: the seed of the run.

    Source:
        This project, for the partly mismatched pairs of web data that NCR (2021) and PC2 (2024)
        describe. Their released code makes no such noise.
    """

    share: UnitFloat = 0.2
    nearest: UnitFloat = 0.01
    farthest: UnitFloat = 0.1
    seed: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        validate_fields(self)
        require_field(self.nearest < self.farthest, self, "nearest", "a share below farthest")

    def choose(
        self, similarity: np.ndarray, candidates: np.ndarray, random: np.random.Generator
    ) -> int:
        """Choose a random image of intermediate similarity. See `_Exchange.choose`."""
        first = max(round(self.nearest * len(similarity)), 1)
        last = max(round(self.farthest * len(similarity)), first + 1)
        # A stable order, so that equal similarities have the same ranks on every machine.
        ranked = np.argsort(-similarity, kind="stable")[first:last]
        ranked = ranked[candidates[ranked] & (similarity[ranked] > 0)]
        return int(random.choice(ranked)) if len(ranked) else -1


@dataclass(frozen=True, kw_only=True)
class NoiseIndex(Noise):
    """A published noise index: a file with the position of the image of each training caption.

    Positions count the images of the training split in the order of the data set, from 0. A file
    with one integer per image instead moves all captions of the image, as DECL stores it.

    Args:
        file: File ``.npy`` of integers, one per training caption, or one per training image.

    Source:
        The format of ``noise_file`` in the released code of NCR (2021), BiCro (2023) and L2RM
        (2024), and of DECL (2022).
    """

    path_fields: ClassVar[tuple[str, ...]] = ("file",)

    file: str = ""

    def assign(
        self, data: Dataset, captions: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Read the images from the file. See `Noise.assign`."""
        if not self.file:
            raise DataError(
                "NoiseIndex: expected file='FILE.npy', one integer per training caption, got none. "
                "Name the file."
            )
        images, image_of = np.unique(data.image_of[captions], return_inverse=True)
        index = storage.read_array(Path(self.file), kinds="iu", dimensions=1)
        if len(index) not in (len(captions), len(images)):
            raise DataError(
                f"{self.file}: expected {len(captions):,} integers, one per training caption, or "
                f"{len(images):,}, one per training image, got {len(index):,}. Use the index of this data set, without "
                "data.training_images and data.training_captions."
            )
        if index.min() < 0 or index.max() >= len(images):
            raise DataError(
                f"{self.file}: expected positions of {len(images):,} training images, from 0 to "
                f"{len(images) - 1:,}, got {index.min():,} to {index.max():,}. Use the index of "
                "this data set."
            )
        return images[index if len(index) == len(captions) else index[image_of]]


CATALOG: tuple[type[Noise], ...] = (
    ShuffledCaptions,
    ShuffledImages,
    SimilarImages,
    PartlyRelevantImages,
    NoiseIndex,
)
"""Kinds of noise that a recipe can name."""


def add_noise(data: Dataset, noise: Noise, seed: int, split: str = "train") -> Dataset:
    """Move captions of a split to wrong images. ``image_of`` then differs exactly at these captions. The
    seed is used if the noise has none.
    """
    captions = _captions_of_split(data, split)
    seed = seed if noise.seed is None else noise.seed
    image_of = data.image_of.copy()
    if len(captions):
        random = np.random.default_rng([seed, len(data.captions)])
        image_of[captions] = noise.assign(data, captions, random)
    return replace(data, image_of=image_of)


def noise_index(data: Dataset, split: str = "train") -> str:
    """Hash the assignment of the captions of a split to its images: the first 16 digits of the SHA-256 of
    the content of a published noise index, little endian 64-bit integers.
    """
    positions = np.cumsum(data.in_split(split)) - 1
    index = positions[data.image_of[_captions_of_split(data, split)]]
    return hashlib.sha256(index.astype("<i8").tobytes()).hexdigest()[:16]


def _captions_of_split(data: Dataset, split: str) -> np.ndarray:
    """Indices of the captions of a split."""
    return np.flatnonzero(data.in_split(split)[data.image_of])


@dataclass(frozen=True, eq=False)
class _ImageContent:
    """Words of the captions of each image."""

    captions: list[list[str]]

    @cached_property
    def _words(self) -> tuple[Any, Any, np.ndarray]:
        """Words of each image, the same with the weights, and the sum of weights of each image."""
        from scipy.sparse import csr_array

        words = [
            sorted({word for text in texts for word in tokenize(text)}) for texts in self.captions
        ]
        counts = Counter(word for of_image in words for word in of_image)
        # floor(log2(V / n)) by integers. Words of half of the images or more have the weight 0, and a word
        # of one image is shared with none.
        weights = {
            word: (len(words) // count).bit_length() - 1
            for word, count in sorted(counts.items())
            if 1 < count <= len(words) // 2
        }
        column = {word: i for i, word in enumerate(weights)}
        kept = [[column[word] for word in of_image if word in column] for of_image in words]
        indptr = np.cumsum([0, *map(len, kept)])
        indices = np.array([i for of_image in kept for i in of_image], np.int64)
        values = np.array(list(weights.values()), np.int64)
        shape = len(words), len(weights)
        present = csr_array((np.ones(len(indices), np.int64), indices, indptr), shape=shape)
        weighted = csr_array((values[indices], indices, indptr), shape=shape)
        return present, weighted, weighted.sum(1)

    def similarities(self, images: np.ndarray) -> np.ndarray:
        """Similarity of some images to all images, shape ``[images, V]``."""
        present, weighted, total = self._words
        shared = (weighted[images] @ present.T).toarray()
        either = total[images][:, None] + total - shared
        # One division of integers below 2^53 is exact up to rounding, which IEEE 754 prescribes.
        return shared / np.maximum(either, 1)
