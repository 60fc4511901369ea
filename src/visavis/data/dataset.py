"""A data set: images by name, captions, and which caption describes which image.

A ``Dataset`` is a value without pixels. Each image has the location of its bytes: a file, or a
range of bytes in a tar archive, which is read in place. Features of images and captions are stored
separately (``visavis.data.features``).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL.Image import Image as PILImage
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import DataError, ShapeError, closest_name
from visavis.data.images import MAX_IMAGE_BYTES, decode_image
from visavis.data.sequences import CaptionGroups, LazySequence, hash_parts
from visavis.data.video import count_frames, first_frame, is_video, iter_frames, video_duration

# Called with the number of finished units and of all units.
ProgressCallback = Callable[[int, int], None]
T = TypeVar("T")


def require(condition: object, problem: str) -> None:
    """Check content of a file.

    Args:
        condition: Whether the content is as expected.
        problem: The expected and the given content, the place and the fix.

    Raises:
        DataError: If the condition does not hold.
    """
    if not condition:
        raise DataError(problem)


@dataclass(frozen=True)
class ByteRange:
    """Location of an image's bytes: a whole file, or a part of an archive.

    Attributes:
        path: The file or archive.
        offset: First byte.
        size: Number of bytes. None: the whole file.
        root: Resolved folder that must contain the file, unless ``VISAVIS_IMAGE_ROOTS`` does.
            Checked on every access. None: any place.
    """

    path: Path
    offset: int = 0
    size: int | None = None
    root: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return self.path.stat().st_size if self.size is None else self.size

    @property
    def content_hash(self) -> str:
        """Hash of the bytes."""
        return self.sha256()[:32]

    def sha256(self) -> str:
        """Compute the SHA-256 of the bytes.

        Returns:
            The hash in hexadecimal.

        Raises:
            DataError: As for ``open``.
        """
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read(self) -> bytes:
        """Read the bytes.

        Returns:
            The bytes.

        Raises:
            DataError: As for ``open``, or if there are more than ``MAX_IMAGE_BYTES``.
        """
        with self.open(limit=MAX_IMAGE_BYTES) as file:
            return file.read()

    @contextmanager
    def open(self, limit: int | None = None) -> Iterator[io.BufferedReader | io.BytesIO]:
        """Open the bytes as a file.

        Args:
            limit: Maximum number of bytes, or None.

        Yields:
            The file.

        Raises:
            DataError: If the file cannot be read now, is not a regular file, is too large, or lies
                outside ``root``.
        """
        with storage.open_file(
            self.path, self.root, limit=limit if self.size is None else None
        ) as file:
            if self.size is None:
                yield file
            elif limit is not None and self.size > limit:
                raise DataError(
                    f"{self.path}: expected a part of at most {limit:,} bytes, got {self.size:,}. "
                    "Store a smaller file."
                )
            else:
                yield io.BufferedReader(_FilePart(file, self.offset, self.size))


class _FilePart(io.RawIOBase):
    """A part of an open file, which is read in place.

    Args:
        file: The file.
        offset: First byte.
        size: Number of bytes.
    """

    def __init__(self, file: io.BufferedReader, offset: int, size: int):
        self.file = file
        self.offset = offset
        self.size = size
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = max(
            0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        )
        return self.position

    def readinto(self, buffer: Any) -> int:
        # The file is shared with other parts, so its own position is unknown.
        self.file.seek(self.offset + self.position)
        count = self.file.readinto(memoryview(buffer)[: max(0, self.size - self.position)])
        self.position += count
        return count


@dataclass(frozen=True)
class Image:
    """An image or a video.

    Attributes:
        name: Name, unique in the data set.
        split: Name of its split.
        location: Location of its bytes. None if only its captions or features are available.
    """

    name: str
    split: str
    location: ByteRange | None = None

    @property
    def is_video(self) -> bool:
        """Whether it is a video, by the suffix of its file name."""
        return is_video(self.name) or (
            self.location is not None
            and self.location.size is None
            and is_video(self.location.path.name)
        )

    def read(self) -> bytes:
        """Read the file of an image.

        Returns:
            Its content.

        Raises:
            DataError: If it is a video or cannot be read.
        """
        require(
            not self.is_video,
            f'{self.name}: expected an image, got a video. Read its frames with visual.granularity = "frames".',
        )
        return self._pixels.read()

    def open(self, min_side: int = 0) -> PILImage:
        """Decode the image.

        Args:
            min_side: Pixels that the shorter side of a reduced JPEG keeps, as for ``decode_image``.
                0: full size.

        Returns:
            An upright RGB image (EXIF orientation applied).

        Raises:
            DataError: If it is a video or cannot be decoded.
        """
        return decode_image(self.read(), self.name, min_side=min_side)

    def iter_frames(self, frames_per_second: float) -> Iterator[PILImage]:
        """Decode frames of a video, one at a time. An image is a video of one frame.

        Args:
            frames_per_second: Number of frames per second.

        Yields:
            Upright RGB images.

        Raises:
            DataError: If the video cannot be decoded.
        """
        if not self.is_video:
            yield self.open()
            return
        with self._pixels.open() as file:
            yield from iter_frames(file, self.name, frames_per_second)

    def frames(self, frames_per_second: float) -> list[PILImage]:
        """Decode all frames of a video, as ``iter_frames``.

        Args:
            frames_per_second: Number of frames per second.

        Returns:
            Upright RGB images.
        """
        return list(self.iter_frames(frames_per_second))

    def num_frames(self, frames_per_second: float) -> int:
        """Count the frames that ``frames`` returns, without decoding them.

        Args:
            frames_per_second: Number of frames per second.

        Returns:
            The number of frames.

        Raises:
            DataError: If the video cannot be read.
        """
        if not self.is_video:
            return 1
        with self._pixels.open() as file:
            return count_frames(file, self.name, frames_per_second)

    def duration(self) -> float:
        """Read the duration of a video without decoding it.

        Returns:
            Seconds. 0 for an image.

        Raises:
            DataError: If the video cannot be read.
        """
        if not self.is_video:
            return 0.0
        with self._pixels.open() as file:
            return video_duration(file, self.name)

    def preview(self, min_side: int = 0) -> PILImage:
        """Decode the image, or the first frame of a video.

        Args:
            min_side: Pixels that the shorter side of a reduced JPEG keeps. 0: full size.

        Returns:
            An upright RGB image.

        Raises:
            DataError: If it cannot be decoded.
        """
        if not self.is_video:
            return self.open(min_side)
        with self._pixels.open() as file:
            return first_frame(file, self.name)

    @property
    def _pixels(self) -> ByteRange:
        if self.location is None:
            raise DataError(
                f"image {self.name} has no pixels: this data set has only captions or features. "
                "Put the image files next to their list."
            )
        return self.location


class LazyImages(LazySequence[Image], ABC):
    """Images that are made when they are read."""

    @property
    @abstractmethod
    def split_codes(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Names of splits, and the index of the split of each image, shape ``[images]``."""


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

    def _in_split(self, name: str) -> np.ndarray:
        """Whether each image is in a split, shape ``[images]``."""
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
        chosen = np.flatnonzero(self._in_split(name))
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
        inside = self._in_split(split)
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

    def with_noisy_correspondence(
        self, noise_ratio: float, seed: int, split: str = "train"
    ) -> Dataset:
        """Add synthetic noise for studies: a share of a split's captions exchange their images.

        Args:
            noise_ratio: Share of the captions, from 0 to 1.
            seed: Random seed.
            split: The split.

        Returns:
            The data set. ``image_of`` differs exactly at the captions that are wrong now.
        """
        random = np.random.default_rng([seed, len(self.captions)])
        inside = np.flatnonzero(self._in_split(split)[self.image_of])
        # A permutation of the images among the chosen captions keeps the number of captions of each
        # image.
        chosen = np.sort(random.choice(inside, round(noise_ratio * len(inside)), replace=False))
        image_of = self.image_of.copy()
        image_of[chosen] = random.permutation(image_of[chosen])
        return replace(self, image_of=image_of)

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
    """Make a data set of images without captions, for ``Dataset.unpaired``.

    Args:
        name: Name of the data set.
        images: The images.
        image_origin: Their indices in the whole data set. None: they are not a part of it.

    Returns:
        The data set.
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

        Args:
            files: Locations by name.
            on_progress: Called with the number of files that were read and of all files.

        Returns:
            The fingerprint.
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
