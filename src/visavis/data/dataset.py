"""What every reader returns: images by name, captions, and which caption describes which image.

A Dataset is a value. It holds no pixels: each image knows where its bytes are (a file, or a range of bytes in a tar
archive, read in place). Features of images and captions live in stores beside it (data/features.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from visavis import storage
from visavis.errors import DataError, nearest

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


@dataclass(frozen=True)
class Bytes:
    """Where an image's bytes lie: a whole file, or ``size`` bytes from ``offset`` of an archive."""

    path: Path
    offset: int = 0
    size: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.size is None else self.size

    @property
    def source(self) -> Path | bytes:
        """The file, or the bytes that are a part of one: what readers of videos take."""
        return self.path if self.size is None else self.read()

    @property
    def content(self) -> str:
        """A hash of the bytes, by which they are known under any name. Raises DataError."""
        return hashlib.sha256(self.read()).hexdigest()[:32]

    def read(self) -> bytes:
        """The bytes. Raises DataError for a file that cannot be read at the moment, or is no regular one of up to a gigabyte."""
        return storage.read_bytes(self.path) if self.size is None else storage.read_part(self.path, self.offset, self.size)


@dataclass(frozen=True)
class Image:
    """One image, or a clip: its name (unique in the data set), its split, and where its bytes lie (None: text or features only)."""

    name: str
    split: str
    bytes: Bytes | None = None

    @property
    def is_clip(self) -> bool:
        """Whether it is a video, by the ending of its file's name."""
        from visavis.data.clips import is_video

        return is_video(self.name) or (self.bytes is not None and self.bytes.size is None and is_video(self.bytes.path.name))

    def open(self) -> Picture:
        """The picture in RGB, upright (EXIF orientation applied). Raises DataError naming the image."""
        from visavis.data.pictures import open_picture

        if self.is_clip:
            raise DataError(f'{self.name} is a video, expected a picture: read its frames, with visual.view = "frames".')
        return open_picture(self._there.read(), self.name)

    def frames(self, rate: float) -> list[Picture]:
        """The pictures of a clip, so many a second; of a picture itself. Raises DataError naming the clip."""
        from visavis.data.clips import clip_frames

        return clip_frames(self._there.source, self.name, rate) if self.is_clip else [self.open()]

    def num_frames(self, rate: float) -> int:
        """How many pictures ``frames`` gives; nothing is decoded. Raises DataError naming the clip."""
        from visavis.data.clips import frames_in

        return frames_in(self._there.source, self.name, rate) if self.is_clip else 1

    def seconds(self) -> float:
        """How long a clip is; 0 for a picture. Nothing is decoded. Raises DataError naming the clip."""
        from visavis.data.clips import seconds_in

        return seconds_in(self._there.source, self.name) if self.is_clip else 0.0

    def preview(self) -> Picture:
        """The picture; of a clip its first frame. Raises DataError naming it."""
        from visavis.data.clips import first_frame

        return first_frame(self._there.source, self.name) if self.is_clip else self.open()

    @property
    def _there(self) -> Bytes:
        if self.bytes is None:
            raise DataError(
                f"image {self.name} has no pixels in this data set: only its captions or features are here; put the pictures beside their list."
            )
        return self.bytes


@dataclass(frozen=True)
class Dataset:
    """Images, captions, and which caption describes which image.

    images: in a fixed order, that of the reader's list. captions: texts, in order. image_of ``[captions]``: the
    index of the image that each caption describes. origin ``[images]`` and caption_origin ``[captions]``: for a
    part of a data set, the indices in the whole (features are stored for the whole). skipped: sentences that say
    what the reader left out.
    """

    name: str
    images: tuple[Image, ...]
    captions: tuple[str, ...]
    image_of: np.ndarray
    origin: np.ndarray | None = None
    caption_origin: np.ndarray | None = None
    skipped: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(image.split for image in self.images))

    @cached_property
    def captions_of(self) -> tuple[np.ndarray, ...]:
        """For each image, the indices of its captions, in order."""
        order = np.argsort(self.image_of, kind="stable")
        counts = np.bincount(self.image_of, minlength=len(self.images))
        return tuple(np.split(order, np.cumsum(counts)[:-1]))

    @property
    def image_rows(self) -> np.ndarray:
        """Each image's index in the whole data set: its row in a feature store."""
        return np.arange(len(self.images)) if self.origin is None else self.origin

    @property
    def caption_rows(self) -> np.ndarray:
        """Each caption's index in the whole data set."""
        return np.arange(len(self.captions)) if self.caption_origin is None else self.caption_origin

    def split(self, name: str) -> Dataset:
        """The images of one split and their captions, in order. Raises DataError for an unknown split."""
        chosen = np.array([i for i, image in enumerate(self.images) if image.split == name], dtype=np.int64)
        if not len(chosen):
            raise DataError(f"data set {self.name} has no split {name}: {nearest(name, self.splits)}")
        return self.take(chosen)

    def take(self, images: np.ndarray) -> Dataset:
        """Some images, by index, with their captions."""
        place = np.full(len(self.images), -1)
        place[images] = np.arange(len(images))
        captions = np.concatenate([self.captions_of[i] for i in images]) if len(images) else np.empty(0, np.int64)
        return replace(
            self,
            images=tuple(self.images[i] for i in images),
            captions=tuple(self.captions[i] for i in captions),
            image_of=place[self.image_of[captions]],
            origin=self.image_rows[images],
            caption_origin=self.caption_rows[captions],
        )

    def first_captions(self, count: int) -> Dataset:
        """All images, each with its first ``count`` captions, or with all where it has fewer."""
        return self.with_captions(np.concatenate([captions[:count] for captions in self.captions_of]))

    def with_captions(self, kept: np.ndarray) -> Dataset:
        """All images with some captions, by index, in the order of the whole."""
        kept = np.sort(kept)
        return replace(
            self,
            captions=tuple(self.captions[i] for i in kept),
            image_of=self.image_of[kept],
            caption_origin=self.caption_rows[kept],
        )

    def fewer(self, images: int, captions: int, seed: int, split: str = "train") -> Dataset:
        """The data set with at most so many images of a split, and captions of each, drawn at random; 0: all. What is drawn of fewer is part
        of what is drawn of more.
        """
        inside = np.array([image.split == split for image in self.images])
        if captions:
            random = np.random.default_rng([seed, 5])
            few = [random.permutation(own)[:captions] if chosen else own for own, chosen in zip(self.captions_of, inside, strict=True)]
            return self.with_captions(np.concatenate(few)).fewer(images, 0, seed, split)
        if images:
            drawn = np.random.default_rng([seed, 4]).permutation(np.flatnonzero(inside))[:images]
            return self.take(np.sort(np.concatenate([np.flatnonzero(~inside), drawn])))
        return self

    def misplaced(self, share: float, seed: int, split: str = "train") -> Dataset:
        """The data set with a share of a split's captions moved to other images of the split: synthetic noise for studies.

        The chosen captions exchange their images; ``image_of`` changes exactly at those that are wrong now.
        """
        random = np.random.default_rng([seed, len(self.captions)])
        inside = np.flatnonzero([self.images[image].split == split for image in self.image_of])
        chosen = np.sort(random.choice(inside, round(share * len(inside)), replace=False))
        image_of = self.image_of.copy()
        image_of[chosen] = random.permutation(image_of[chosen])
        return replace(self, image_of=image_of)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of names, splits, captions and their images; pixels are not read."""
        digest = hashlib.sha256()
        for image in self.images:
            digest.update(f"{image.name}\x1f{image.split}\x1e".encode())
        for caption, image in zip(self.captions, self.image_of, strict=True):
            digest.update(f"{image}\x1f{caption}\x1e".encode())
        return digest.hexdigest()[:16]
