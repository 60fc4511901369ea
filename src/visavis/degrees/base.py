"""Degrees of relevance: how well a caption fits an image that it was not written for, in [0, 1].

An estimator of degrees is given a list of captions once and then computes any block of their matrix, so that the whole
[N, N] never exists. The degree of an image with a caption comes from the image's own captions, or from the known truth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset

ImageBy = Literal["own", "best", "mean"]


class CaptionDegrees(ABC):
    """Degrees between the captions of one list, by index. notes: sentences that count the captions that needed special treatment."""

    notes: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The block ``[R, C]`` of two LongTensors of indices, float32 in [0, 1]."""

    @abstractmethod
    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """The degree of caption ``first[i]`` with caption ``second[i]`` only: ``[N]``."""

    def where(self, mask: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Only those degrees of a block where ``mask [R, C]`` is true, row by row: ``[mask.sum()]``."""
        return self(rows, columns)[mask]


class ImageDegrees(Protocol):
    """Degrees between the images and the captions of one data set, by index. notes: as of CaptionDegrees."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __call__(self, images: Tensor, captions: Tensor, own: Tensor | None = None) -> Tensor:
        """The block ``[V, T]``. own ``[V]``: the caption that stands for each image; default its first."""


class Degrees(ABC):
    """An estimator of degrees of relevance (base class). ``degrees(captions_a, captions_b)`` is ``[A, B]`` in [0, 1]."""

    @abstractmethod
    def of(self, captions: Sequence[str]) -> CaptionDegrees:
        """The degrees between the captions of one list, to be computed by blocks."""

    def files(self, data: Dataset) -> list[Path]:
        """What is read to tell the degrees of a data set."""
        return []

    def __call__(self, captions_a: Sequence[str], captions_b: Sequence[str]) -> Tensor:
        """The degrees of every caption of one list with every caption of the other: ``[A, B]``."""
        first = torch.arange(len(captions_a))
        return self.of([*captions_a, *captions_b])(first, len(captions_a) + torch.arange(len(captions_b)))

    def between(self, data: Dataset, image: ImageBy = "own") -> ImageDegrees:
        """The degrees between the images and captions of a data set. image: which captions an image's degree comes from: the one that
        stands for it ("own", as in the paper), the best of its captions, or their mean.
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


def treatment_note(captions: Sequence[str], special: Tensor, treatment: str) -> tuple[str, ...]:
    """A note that counts the special captions, names the first, and says how they are treated; none where there are none."""
    which = special.nonzero().flatten().tolist()
    return (f"{len(which):,} of {len(captions):,} captions are {treatment} (first: {captions[which[0]]!r}).",) if which else ()
