"""Degrees of relevance: how well a caption fits an image that it was not written for, in [0, 1].

What knows degrees is given a list of captions once and then asked for blocks, so that nothing is ever [N, N]. An
image's degree to a caption comes from its own captions, or, where the truth about the image is known, from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset

ImageBy = Literal["own", "best", "mean"]


class CaptionDegrees(ABC):
    """Degrees between the captions of one list, by index. notes: sentences on captions that were treated specially, counted."""

    notes: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The block ``[R, C]`` of two LongTensors of indices, float32 in [0, 1]."""

    @abstractmethod
    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """The degree of caption ``first[i]`` with caption ``second[i]`` only: ``[N]``."""

    def where(self, asked: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Of a block, only the degrees where ``asked [R, C]``, row by row: ``[asked.sum()]``."""
        return self(rows, columns)[asked]


class ImageDegrees(Protocol):
    """Degrees between the images and the captions of one data set, by index. notes: as of CaptionDegrees."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __call__(self, images: Tensor, captions: Tensor, own: Tensor | None = None) -> Tensor:
        """The block ``[V, T]``. own ``[V]``: the caption that stands for each image; default its first."""


class Degrees(ABC):
    """A way to tell degrees; the base class of all. ``degrees(captions_a, captions_b)`` is ``[A, B]`` in [0, 1]."""

    @abstractmethod
    def of(self, captions: Sequence[str]) -> CaptionDegrees:
        """Ready for the captions of one list."""

    def __call__(self, captions_a: Sequence[str], captions_b: Sequence[str]) -> Tensor:
        """The degrees of every caption of one list with every caption of the other: ``[A, B]``."""
        first = torch.arange(len(captions_a))
        return self.of([*captions_a, *captions_b])(first, len(captions_a) + torch.arange(len(captions_b)))

    def between(self, data: Dataset, image: ImageBy = "own") -> ImageDegrees:
        """Ready for the images and captions of a data set. image: whose degree is that of an image: of the caption that stands
        for it ("own", as the paper), the best of its captions, or their mean.
        """
        return OfCaptions(self.of(data.captions), data, image)


@dataclass(frozen=True, eq=False)
class OfCaptions:
    """Degrees of images from those of their captions."""

    degrees: CaptionDegrees
    data: Dataset
    image: ImageBy

    @property
    def notes(self) -> tuple[str, ...]:
        return self.degrees.notes

    def __call__(self, images: Tensor, captions: Tensor, own: Tensor | None = None) -> Tensor:
        described = [self.data.captions_of[i] for i in images.tolist()]
        if self.image == "own":
            return self.degrees(torch.tensor([own_captions[0] for own_captions in described]) if own is None else own, captions)
        lengths = torch.tensor([len(own_captions) for own_captions in described])
        block = self.degrees(torch.from_numpy(np.concatenate(described)), captions)
        return torch.segment_reduce(block, "max" if self.image == "best" else "mean", lengths=lengths)


def counted(captions: Sequence[str], special: Tensor, treatment: str) -> tuple[str, ...]:
    """A note that names the first of some captions and how they are treated; none where there are none."""
    which = special.nonzero().flatten().tolist()
    return (f"{len(which):,} of {len(captions):,} captions are {treatment} (first: {captions[which[0]]!r}).",) if which else ()
