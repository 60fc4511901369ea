"""A data set: images by name, captions, and which caption describes which image.

A ``Dataset`` is a value without pixels. Each image has the location of its bytes: a file, or a
range of bytes in a tar archive, which is read in place. Features of images and captions are stored
separately (``visavis.data.features``).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import DataError, ShapeError, closest_name
from visavis.data.image_file import ByteRange, Image
from visavis.data.sequences import CaptionGroups, LazySequence, hash_parts

# Called with the number of finished units and of all units.
ProgressCallback = Callable[[int, int], None]
T = TypeVar("T")


def require(condition: object, problem: str) -> None:
    """Raise DataError with the problem of a file, unless a condition holds."""
    if not condition:
        raise DataError(problem)


class LazyImages(LazySequence[Image], ABC):
    """Images that are made when they are read."""

    @property
    @abstractmethod
    def split_codes(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Names of splits, and the index of the split of each image, shape ``[images]``."""

    @abstractmethod
    def with_splits(self, codes: np.ndarray) -> LazyImages:
        """The same images in other splits, by the index of the split of each."""


@dataclass(frozen=True)
class Dataset:
    """Images, captions, and which caption describes which image.

    Attributes:
        name: Name of the data set.
        images: Images in the order of their list. Lazy if they come from a large table.
        captions: Captions in the order of their list. Lazy if they come from a large table.
        image_of: Index of the image of each caption, shape ``[captions]``.
        image_origin: For a part of a data set, the indices of its images in the whole, shape
            ``[images]``. Features are stored for the whole.
        caption_origin: The same for captions, shape ``[captions]``.
        skipped: Sentences about the items that were skipped by the reader.
        unlisted_files: Image files of the folder that are not in the list of the data set.
        unreadable_files: Images that are listed, and whose files may exist but cannot be read now.
        other_files: Number and suffixes of the files of the folder that are neither images nor
            read. None: there are none.
        unpaired: Images without captions, and texts without images (``image_of`` is -1): candidates of
            evaluations, which are neither queries nor trained on. Parts of different origin are
            separate.
        source: List or folder that it was read from. None: it was not read.
    """

    name: str
    images: Sequence[Image]
    captions: Sequence[str]
    image_of: np.ndarray
    image_origin: np.ndarray | None = None
    caption_origin: np.ndarray | None = None
    skipped: tuple[str, ...] = ()
    unlisted_files: tuple[str, ...] = ()
    unreadable_files: tuple[str, ...] = ()
    other_files: str | None = None
    unpaired: tuple[Dataset, ...] = ()
    source: Path | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits in order of first occurrence."""
        # argmax finds the first image of a split.
        names, codes = self._split_codes
        firsts = {
            name: int(np.argmax(codes == code))
            for code, name in enumerate(names)
            if (codes == code).any()
        }
        return tuple(sorted(firsts, key=firsts.__getitem__))

    @property
    def is_lazy(self) -> bool:
        """Whether images and captions are read when they are needed, as in a large table."""
        return isinstance(self.images, LazyImages) and isinstance(self.captions, LazySequence)

    @cached_property
    def captions_of(self) -> CaptionGroups:
        """For each image, the indices of its captions, in order."""
        return CaptionGroups.from_images(self.image_of, len(self.images))

    @cached_property
    def text_keys(self) -> Tensor:
        """Number of the text of each caption, equal for equal texts, shape ``[captions]``."""
        from visavis.data.equal_texts import text_keys

        return text_keys(self.captions)

    @cached_property
    def _split_codes(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Names of splits, and the index of the split of each image."""
        if isinstance(self.images, LazyImages):
            return self.images.split_codes
        codes: dict[str, int] = {}
        of_images = np.array(
            [codes.setdefault(image.split, len(codes)) for image in self.images], dtype=np.int64
        )
        return tuple(codes), of_images

    @cached_property
    def caption_lengths(self) -> np.ndarray:
        """Number of spaces of each caption, a measure of its length, shape ``[captions]``."""
        spaces = getattr(self.captions, "num_spaces", None)
        return (
            np.array([caption.count(" ") for caption in self.captions])
            if spaces is None
            else spaces
        )

    def in_split(self, name: str) -> np.ndarray:
        """Mark the images of a split.

        Args:
            name: Name of the split. An unknown split has no image.

        Returns:
            Whether each image is in the split, shape ``[images]``.
        """
        names, codes = self._split_codes
        return codes == names.index(name) if name in names else np.zeros(len(codes), bool)

    @property
    def image_rows(self) -> np.ndarray:
        """Index of each image in the whole data set, which is its row in a feature store."""
        return np.arange(len(self.images)) if self.image_origin is None else self.image_origin

    @property
    def caption_rows(self) -> np.ndarray:
        """Index of each caption in the whole data set."""
        return np.arange(len(self.captions)) if self.caption_origin is None else self.caption_origin

    def check_lengths(self, num_images: int, num_captions: int) -> None:
        """Check that encoded items belong to this data set.

        Args:
            num_images: Number of encoded images.
            num_captions: Number of encoded captions.

        Raises:
            ShapeError: If the numbers differ from those of the data set.
        """
        for name, actual, expected in (
            ("visual", num_images, len(self.images)),
            ("text", num_captions, len(self.captions)),
        ):
            if actual != expected:
                raise ShapeError(
                    f"{name}: expected {expected} items, one for each image or caption of "
                    f"{self.name}, got {actual}. Encode this data set."
                )

    def split(self, name: str) -> Dataset:
        """Select the images of a split and their captions.

        Args:
            name: Name of the split.

        Returns:
            The part of the data set, in the same order, with the unpaired images of the split.

        Raises:
            DataError: If the split is unknown.
        """
        chosen = np.flatnonzero(self.in_split(name))
        if not len(chosen):
            close = closest_name(name, self.splits)
            splits = ", ".join(self.splits) or "none"
            raise DataError(
                f"{self.name}: expected one of its splits ({splits}), got {name}. Use "
                f"{close or 'one of them'}."
            )
        unpaired = tuple(part.split(name) for part in self.unpaired if name in part.splits)
        return replace(self.take(chosen), unpaired=unpaired)

    @property
    def unpaired_images(self) -> list[Image]:
        """Images without captions, in the order of the parts."""
        return [image for part in self.unpaired for image in part.images]

    @property
    def unpaired_texts(self) -> list[str]:
        """Texts without images."""
        return [text for part in self.unpaired for text in part.captions]

    def take(self, images: np.ndarray) -> Dataset:
        """Select images with their captions.

        Args:
            images: Indices of images.

        Returns:
            The part of the data set, in the given order.
        """
        # image_of of the new data set: the position of each kept image, -1 for the others.
        new_index = np.full(len(self.images), -1)
        new_index[images] = np.arange(len(images))
        captions = self.captions_of.select(images)
        return replace(
            self,
            images=_take(self.images, images),
            captions=_take(self.captions, captions),
            image_of=new_index[self.image_of[captions]],
            image_origin=self.image_rows[images],
            caption_origin=self.caption_rows[captions],
        )

    def first_captions(self, n: int) -> Dataset:
        """Keep the first captions of each image.

        Args:
            n: Maximum number of captions per image.

        Returns:
            The data set with all images and fewer captions.
        """
        return self.with_captions(self.captions_of.select(np.arange(len(self.images)), n))

    def with_captions(self, indices: np.ndarray) -> Dataset:
        """Keep some captions, in the order of the data set.

        Args:
            indices: Indices of captions.

        Returns:
            The data set with all images and fewer captions.
        """
        # Captions keep their order, so that rows of stored features are read in order.
        indices = np.sort(indices)
        return replace(
            self,
            captions=_take(self.captions, indices),
            image_of=self.image_of[indices],
            caption_origin=self.caption_rows[indices],
        )

    def subsample(
        self, max_images: int, max_captions: int, seed: int, split: str = "train"
    ) -> Dataset:
        """Sample images of a split and captions of each at random. A smaller sample is a part of a
        larger one.

        Args:
            max_images: Maximum number of images of the split. 0: all.
            max_captions: Maximum number of captions per image of the split. 0: all.
            seed: Random seed.
            split: The split. Other splits are unchanged.

        Returns:
            The smaller data set.
        """
        inside = self.in_split(split)
        if max_captions:
            # Each kind of sampling has a stream of its own, so that one does not shift another.
            random = np.random.default_rng([seed, 5])
            # A permutation of one caption reads no random numbers.
            several = inside & (self.captions_of.counts > 1)
            sampled = [
                random.permutation(self.captions_of[i])[:max_captions]
                for i in np.flatnonzero(several).tolist()
            ]
            others = self.captions_of.select(np.flatnonzero(~several))
            return self.with_captions(np.concatenate([*sampled, others])).subsample(
                max_images, 0, seed, split
            )
        if max_images:
            sampled_images = np.random.default_rng([seed, 4]).permutation(np.flatnonzero(inside))[
                :max_images
            ]
            return self.take(np.sort(np.concatenate([np.flatnonzero(~inside), sampled_images])))
        return self

    def redraw(self, splits: Sequence[str], seed: int) -> Dataset:
        """Redraw the images of some splits at random.

        Args:
            splits: Names of splits.
            seed: Random seed.

        Returns:
            The data set with as many images in each split as before.
        """
        rows = np.flatnonzero(np.any([self.in_split(name) for name in splits], axis=0))
        sources = np.arange(len(self.images))
        sources[rows] = np.random.default_rng([seed, 6]).permutation(rows)
        names, codes = self._split_codes
        images: Sequence[Image] = (
            self.images.with_splits(codes[sources])
            if isinstance(self.images, LazyImages)
            else tuple(
                replace(image, split=names[code])
                for image, code in zip(self.images, codes[sources].tolist(), strict=True)
            )
        )
        return replace(self, images=images)

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of names, splits, captions and their images. Pixels are not read."""
        if isinstance(self.images, LazyImages) and isinstance(self.captions, LazySequence):
            image_of = np.ascontiguousarray(self.image_of).data
            return hash_parts(
                self.images.fingerprint.encode(), self.captions.fingerprint.encode(), image_of
            )
        # Separators of fields and items, which names and captions rarely contain.
        digest = hashlib.sha256()
        for image in self.images:
            digest.update(f"{image.name}\x1f{image.split}\x1e".encode())
        for caption, image in zip(self.captions, self.image_of, strict=True):
            digest.update(f"{image}\x1f{caption}\x1e".encode())
        return digest.hexdigest()[:16]


def without_captions(
    name: str, images: Sequence[Image], image_origin: np.ndarray | None = None
) -> Dataset:
    """Make a data set of images without captions, for ``Dataset.unpaired``. ``image_origin`` is
    their indices in the whole data set.
    """
    return Dataset(name, images, (), np.zeros(0, np.int64), image_origin)


def _take(items: Sequence[T], indices: np.ndarray) -> Sequence[T]:
    return (
        items.take(indices) if isinstance(items, LazySequence) else tuple(items[i] for i in indices)
    )


@dataclass(frozen=True)
class ContentFingerprint:
    """Fingerprint of many files. The same names with the same bytes have the same ``content_hash``.

    Attributes:
        num_files: Number of files.
        stat_hash: Hash of names, locations, sizes and times of change.
        content_hash: Hash of names and bytes.
    """

    num_files: int
    stat_hash: str
    content_hash: str

    @classmethod
    def compute(
        cls, files: Mapping[str, ByteRange], on_progress: ProgressCallback | None = None
    ) -> ContentFingerprint:
        """Compute the fingerprint of files. They are read only if a size or time has changed since
        an earlier call.
        """
        locations = [
            [name, str(location.path), location.offset, location.size]
            for name, location in sorted(files.items())
        ]
        # Sizes and times of the files, and the place of each image in them.
        key = storage.stat_hash({location.path for location in files.values()}, locations)
        record = storage.cache_folder() / "checks" / f"contents-{key}.json"
        fingerprint: ContentFingerprint | None = storage.read_checksummed_json(record, cls)
        if fingerprint is None:
            hashes = {}
            # In the order of archives and tables, where images of one block are next to each other.
            ordered = sorted(files.items(), key=lambda file: (file[1].path, file[1].offset))
            for number, (name, location) in enumerate(ordered, 1):
                hashes[name] = location.sha256()
                if on_progress is not None:
                    on_progress(number, len(files))
            digest = hashlib.sha256()
            for entry in sorted(hashes.items()):
                digest.update(json.dumps(entry).encode())
            fingerprint = cls(len(files), key, digest.hexdigest()[:32])
            storage.write_checksummed_json(record, asdict(fingerprint))
        return fingerprint
