"""Lazy sequences, the captions of each image as offsets, and padding of items of different lengths."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visavis.core.encoded import Encoded

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Items that an iteration reads at once.
_ITEMS_PER_BLOCK = 8192


class LazySequence(Sequence[T_co], ABC):
    """A sequence whose items are made when they are read. A slice or a selection is lazy, too."""

    @abstractmethod
    def take(self, indices: np.ndarray) -> LazySequence[T_co]:
        """Select items, in the given order."""

    @abstractmethod
    def read(self, indices: np.ndarray) -> list[T_co]:
        """Read items, in the given order."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Short hash of all items."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> LazySequence[T_co]: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> T_co | LazySequence[T_co]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        if isinstance(index, np.ndarray) and index.ndim:
            return self.take(index)
        return self.read(np.array([range(len(self))[int(index)]]))[0]

    def __iter__(self) -> Iterator[T_co]:
        for start in range(0, len(self), _ITEMS_PER_BLOCK):
            yield from self.read(np.arange(start, min(start + _ITEMS_PER_BLOCK, len(self))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        if isinstance(other, str) or len(other) != len(self):
            return False
        return all(item == other_item for item, other_item in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def read_items(items: Sequence[T], indices: np.ndarray) -> list[T]:
    """Read items of a sequence in the given order, at once if it is lazy."""
    return items.read(indices) if isinstance(items, LazySequence) else [items[i] for i in indices]


@dataclass(frozen=True)
class CaptionGroups(Sequence[np.ndarray]):
    """Indices of the captions of each image. Item i is ``order[offsets[i] : offsets[i + 1]]``.

    Attributes:
        order: Indices of all captions, sorted by their image, shape ``[captions]``.
        offsets: Start of each image in ``order``, and the end of the last one, shape ``[images +
            1]``.

    Example:
        >>> groups = CaptionGroups.from_images(np.array([1, 0, 1]), 3)
        >>> [captions.tolist() for captions in groups], groups.select(np.array([2, 1])).tolist()
        ([[1], [0, 2], []], [0, 2])
    """

    order: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_images(cls, image_of: np.ndarray, num_images: int) -> CaptionGroups:
        """Group captions by their image, ``image_of [captions]``."""
        # A stable sort keeps the captions of an image in the order of the list.
        counts = np.bincount(image_of, minlength=num_images)
        return cls(np.argsort(image_of, kind="stable"), np.concatenate([[0], np.cumsum(counts)]))

    @property
    def counts(self) -> np.ndarray:
        """Number of captions of each image, shape ``[images]``."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        return self.order[self.offsets[index] : self.offsets[index + 1]]

    def select(self, images: np.ndarray, max_captions: int | None = None) -> np.ndarray:
        """Return captions of images, one image after the other, each with at most ``max_captions``."""
        counts = (
            self.counts[images]
            if max_captions is None
            else np.minimum(self.counts[images], max_captions)
        )
        # Position of a caption in ``order``: the start of its image, plus its number within the
        # image.
        first = (
            np.repeat(self.offsets[images] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
            if len(images)
            else 0
        )
        return self.order[first + np.arange(counts.sum())]


def pad_items(items: Sequence[Tensor]) -> Encoded:
    """Pad items ``[L, ...]`` of different lengths with zeros: ``[N, L, ...]``, and a mask ``[N, L]``."""
    masks = [torch.ones(len(item), dtype=torch.bool, device=item.device) for item in items]
    # One item is not copied.
    padded = items[0][None] if len(items) == 1 else pad_sequence(list(items), batch_first=True)
    return Encoded(padded, pad_sequence(masks, batch_first=True))


def hash_parts(*parts: bytes | memoryview) -> str:
    """Hash parts and their lengths to 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        # The length separates parts: "ab", "c" and "a", "bc" have different hashes.
        digest.update(memoryview(part).nbytes.to_bytes(8))
        digest.update(part)
    return digest.hexdigest()[:16]
