"""Base classes of relevance estimators: how well a caption describes an image for which it was not
written, in [0, 1].

An estimator receives a list of captions once and then computes any block of their relevance matrix,
so the full ``[N, N]`` matrix never exists. The relevance of a caption to an image is computed from
the image's own captions, or from known ground truth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import unit_rows
from visavis.core.fields import validate_fields
from visavis.data.dataset import Dataset

CaptionAggregation = Literal["paired", "max", "mean"]
"""How the relevance to an image follows from the relevance to its captions: of its paired caption,
their maximum, or their mean.
"""


# The vectors of this many pairs take tens of megabytes.
_PAIRS_PER_CHUNK = 16_384


class CaptionRelevance(ABC):
    """Relevance between the captions of one list, by index (base class).

    Attributes:
        notes: Sentences about captions that needed special treatment.
    """

    notes: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Compute a block of the relevance matrix.

        Args:
            rows: Indices of captions, shape ``[R]``.
            columns: Indices of captions, shape ``[C]``.

        Returns:
            Relevance in [0, 1], float32, shape ``[R, C]``.
        """

    @abstractmethod
    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Compute the relevance of single pairs.

        Args:
            first: Indices of captions, shape ``[N]``.
            second: Indices of captions, shape ``[N]``.

        Returns:
            Relevance of caption ``first[i]`` and caption ``second[i]``, shape ``[N]``.
        """

    def masked(self, mask: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Compute some elements of a block.

        Args:
            mask: Which elements to compute, bool, shape ``[R, C]``.
            rows: Indices of captions, shape ``[R]``.
            columns: Indices of captions, shape ``[C]``.

        Returns:
            The elements where ``mask`` is true, row by row, shape ``[mask.sum()]``.
        """
        return self(rows, columns)[mask]


@dataclass(frozen=True, eq=False)
class ImageRelevance:
    """Relevance of the captions of one data set to its images, by index.

    Attributes:
        function: Computes a block from the arguments of a call.
        notes: Sentences about captions that needed special treatment.
    """

    function: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    notes: tuple[str, ...] = ()

    def __call__(
        self, images: Tensor, captions: Tensor, paired_captions: Tensor | None = None
    ) -> Tensor:
        """Compute a block of the relevance matrix.

        Args:
            images: Indices of images, shape ``[V]``.
            captions: Indices of captions, shape ``[T]``.
            paired_captions: The caption that represents each image, shape ``[V]``. Default: its
                first caption.

        Returns:
            Relevance in [0, 1], shape ``[V, T]``.
        """
        return self.function(images, captions, paired_captions)

    @classmethod
    def from_captions(
        cls, relevance: CaptionRelevance, data: Dataset, caption_aggregation: CaptionAggregation
    ) -> ImageRelevance:
        """Combine the relevance to the captions of each image.

        Args:
            relevance: Relevance between the captions of the data set.
            data: The data set.
            caption_aggregation: How the captions of an image are combined.

        Returns:
            The relevance to images.
        """

        def compute(images: Tensor, captions: Tensor, paired_captions: Tensor | None) -> Tensor:
            captions_of_images = [data.captions_of[i] for i in images.tolist()]
            if caption_aggregation == "paired":
                if paired_captions is None:
                    paired_captions = torch.tensor([indices[0] for indices in captions_of_images])
                return relevance(paired_captions, captions)
            lengths = torch.tensor([len(indices) for indices in captions_of_images])
            block = relevance(torch.from_numpy(np.concatenate(captions_of_images)), captions)
            return torch.segment_reduce(block, caption_aggregation, lengths=lengths)

        # An estimator of a user may return a plain function, which has no notes.
        return cls(compute, getattr(relevance, "notes", ()))


class RelevanceEstimator(ABC):
    """Estimator of graded relevance (base class).

    ``estimator(captions_a, captions_b)`` is the relevance of every pair, shape ``[A, B]``, in [0,
    1].
    """

    def __post_init__(self) -> None:
        validate_fields(self)

    @abstractmethod
    def for_captions(self, captions: Sequence[str]) -> CaptionRelevance:
        """Prepare the relevance between the captions of one list.

        Args:
            captions: The captions.

        Returns:
            The relevance, computed block by block.
        """

    def files(self, data: Dataset) -> list[Path]:
        """List the files that the estimator reads for a data set.

        Args:
            data: The data set.

        Returns:
            Paths of the files.
        """
        return []

    def __call__(self, captions_a: Sequence[str], captions_b: Sequence[str]) -> Tensor:
        """Compute the relevance of every caption of one list to every caption of another.

        Args:
            captions_a: First list.
            captions_b: Second list.

        Returns:
            Relevance in [0, 1], shape ``[A, B]``.
        """
        first = torch.arange(len(captions_a))
        return self.for_captions([*captions_a, *captions_b])(
            first, len(captions_a) + torch.arange(len(captions_b))
        )

    def for_dataset(
        self, data: Dataset, caption_aggregation: CaptionAggregation = "paired"
    ) -> ImageRelevance:
        """Prepare the relevance of the captions of a data set to its images.

        Args:
            data: The data set.
            caption_aggregation: "paired": relevance to the caption that represents the image, as in
                the Ladder paper. "max" and "mean": over all captions of the image.

        Returns:
            The relevance, computed block by block.
        """
        return ImageRelevance.from_captions(
            self.for_captions(data.captions), data, caption_aggregation
        )


def treatment_note(captions: Sequence[str], special: Tensor, treatment: str) -> tuple[str, ...]:
    """Describe captions that need special treatment in one sentence. Empty if there are none."""
    indices = special.nonzero().flatten().tolist()
    return (
        (
            (
                f"{len(indices):,} of {len(captions):,} captions are {treatment} (first: "
                f"{captions[indices[0]]!r})."
            ),
        )
        if indices
        else ()
    )


@dataclass(frozen=True, eq=False)
class CosineRelevance(CaptionRelevance):
    """Relevance as the cosine similarity of one vector per caption.

    Negative cosines count as 0. The relevance of a zero vector is 0, even to itself.

    Attributes:
        vectors: Unit vectors or zeros, shape ``[N, D]``.
        notes: Sentences about captions that needed special treatment.
    """

    vectors: Tensor
    notes: tuple[str, ...] = ()

    @classmethod
    def from_vectors(cls, vectors: Tensor, notes: tuple[str, ...] = ()) -> CosineRelevance:
        """Normalize vectors of any length, ``[N, D]``."""
        return cls(unit_rows(vectors.float()), notes)

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Compute a block of the relevance matrix. See `CaptionRelevance`."""
        return (self.vectors[rows] @ self.vectors[columns].T).clamp(0, 1)

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Compute the relevance of single pairs. See `CaptionRelevance`."""
        chunks = zip(first.split(_PAIRS_PER_CHUNK), second.split(_PAIRS_PER_CHUNK), strict=True)
        return torch.cat(
            [(self.vectors[left] * self.vectors[right]).sum(-1) for left, right in chunks]
        ).clamp(0, 1)
