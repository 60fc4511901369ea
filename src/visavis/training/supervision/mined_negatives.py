"""Supervision by mined hard negatives: ``visavis data mine`` lists the negatives of each query, and
batches bring both together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RecipeError
from visavis.core.fields import require_field, validate_fields
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader
from visavis.losses.targets import Targets
from visavis.training.supervision.base import PairSupervision, Supervision


@dataclass(frozen=True, eq=False)
class MinedNegatives:
    """Hard negatives of each image and caption of a split, the hardest first. Rows with fewer
    negatives end in -1.

    Attributes:
        negative_captions: Negative captions of each image, int32, shape ``[V, K]``.
        negative_images: Negative images of each caption, int32, shape ``[T, K]``.
        caption_scores: Scores of ``negative_captions``, float32, shape ``[V, K]``. -inf where there
            is none.
        image_scores: Scores of ``negative_images``, float32, shape ``[T, K]``.
        fingerprint: Fingerprint of the split.
    """

    negative_captions: Tensor
    negative_images: Tensor
    caption_scores: Tensor
    image_scores: Tensor
    fingerprint: str

    @property
    def count(self) -> int:
        """Number of negatives of all images and captions."""
        return sum(int((index >= 0).sum()) for index in self._indices)

    @property
    def _indices(self) -> tuple[Tensor, Tensor]:
        return self.negative_captions, self.negative_images

    def save(self, file: str | Path) -> None:
        """Write the negatives as a safetensors file."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        storage.write_tensors(
            file,
            tensors
            | {"fingerprint": torch.tensor(list(self.fingerprint.encode()), dtype=torch.uint8)},
        )

    @classmethod
    def read(cls, file: str | Path, split: Dataset) -> MinedNegatives:
        """Read negatives that were mined on a split."""
        tensors = storage.read_tensors(file)
        expected = dict.fromkeys(("negative_captions", "negative_images"), torch.int32)
        expected |= dict.fromkeys(("caption_scores", "image_scores"), torch.float32)
        if {name: tensor.dtype for name, tensor in tensors.items()} != expected | {
            "fingerprint": torch.uint8
        }:
            raise DataError(
                f"{file}: expected a file of visavis data mine, got tensors "
                f"{', '.join(sorted(tensors)) or 'none'}. Mine negatives first."
            )
        fingerprint = bytes(tensors.pop("fingerprint").flatten().tolist()).decode(errors="replace")
        mined = cls(**tensors, fingerprint=fingerprint)
        counts = len(split.images), len(split.captions)
        if (
            fingerprint != split.fingerprint
            or tuple(index.shape[:1].numel() for index in mined._indices) != counts
        ):
            raise DataError(
                f"{file}: expected negatives of split {', '.join(split.splits)} of {split.name}, "
                "got negatives of other images or captions. "
                "Run visavis data mine on this data set and split."
            )
        for index, count in zip(mined._indices, reversed(counts), strict=True):
            if (
                index.dim() != 2
                or not index.numel()
                or not -1 <= int(index.min()) <= int(index.max()) < count
            ):
                given = f"shape {list(index.shape)}"
                if index.numel():
                    given = f"{int(index.min()):,} to {int(index.max()):,} of {given}"
                raise DataError(
                    f"{file}: expected indices below {count:,} in two dimensions, got {given}. "
                    "Mine the negatives again."
                )
        if not mined.count:
            raise DataError(
                f"{file}: expected at least one negative, got none. Mine with a larger "
                "--max-ratio, or with 0 to keep all."
            )
        return mined


@dataclass(frozen=True, eq=False)
class MinedBatches:
    """Adds mined negatives to batches, each as a pair of an image and one of its captions. See
    `BatchExtension`.

    Attributes:
        data: The training split.
        mined: Its mined negatives.
        per_query: Number of negatives that each query samples.
    """

    data: Dataset
    mined: MinedNegatives
    per_query: int

    @property
    def image_of(self) -> np.ndarray:
        """Image of each caption, shape ``[T]``."""
        return self.data.image_of

    def add_negatives(
        self, images: np.ndarray, captions: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add sampled negatives of the captions and images of a batch."""
        negative_images, negative_captions = self._lists_with_counts
        sampled_images = _sample(*negative_images, captions, self.per_query, random)
        captions_by_image = [self.data.captions_of[image] for image in sampled_images.tolist()]
        image_captions = np.array(
            [random.choice(choices) for choices in captions_by_image if len(choices)],
            dtype=np.int64,
        )
        sampled_captions = _sample(*negative_captions, np.unique(images), self.per_query, random)
        added = np.setdiff1d(np.concatenate([image_captions, sampled_captions]), captions)
        return np.concatenate([images, self.data.image_of[added]]), np.concatenate(
            [captions, added]
        )

    @cached_property
    def _lists_with_counts(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Negative images and negative captions, each with the number of negatives of every query."""
        lists = (
            self.mined.negative_images.long().numpy(),
            self.mined.negative_captions.long().numpy(),
        )
        return tuple((index, (index >= 0).sum(1)) for index in lists)


def _sample(
    index: np.ndarray,
    counts: np.ndarray,
    queries: np.ndarray,
    per_query: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Sample negatives of each query with replacement. Returns them sorted, each once."""
    queries = queries[counts[queries] > 0]
    columns = random.integers(counts[queries][:, None], size=(len(queries), per_query))
    return np.unique(index[queries[:, None], columns])


@dataclass(frozen=True, kw_only=True)
class MinedNegativeSupervision(Supervision):
    """Pairs by ids, in batches with mined hard negatives.

    Each caption of a batch samples images from its list, and each image samples captions. They join
    the batch as pairs, so they are positives of each other, and negatives and queries like all
    other pairs. A batch of 128 captions grows to at most 384 with ``per_query = 1``.

    Attributes:
        file: File of ``visavis data mine`` for the training split.
        per_query: Number of negatives that each caption and each image of a batch samples.

    Source:
        Lists of hard negatives without likely false negatives: de Souza P. Moreira et al.,
        NV-Retriever (2024).
    """

    pairs_only: ClassVar[bool] = True
    # How positives are defined, for the report of a training.
    by: ClassVar[str] = "ids"

    path_fields: ClassVar[tuple[str, ...]] = ("file",)

    file: str = ""
    per_query: int = 1

    def __post_init__(self) -> None:
        validate_fields(self)
        require_field(self.per_query > 0, self, "per_query", "at least 1")

    def check(self, train: Loader, validation: Loader) -> None:
        """Check that the file has negatives of the training split. See `Supervision.check`."""
        if not self.file:
            raise RecipeError(
                "MinedNegativeSupervision: expected file='FILE' of visavis data mine, got none. Mine "
                "negatives first."
            )
        if train.extension is not None:
            raise RecipeError(
                "MinedNegativeSupervision does not support relevance judgments. Remove "
                "data.feedback, or use FeedbackSupervision."
            )
        MinedNegatives.read(self.file, train.data)

    def files(self, data: Dataset) -> list[Path]:
        """List the file of negatives. See `Supervision.files`."""
        return [Path(self.file)] if self.file else []

    def extend_batches(self, train: Loader) -> Loader:
        """Add mined negatives to the training batches. See `Supervision.extend_batches`."""
        return replace(
            train,
            extension=MinedBatches(
                train.data, MinedNegatives.read(self.file, train.data), self.per_query
            ),
        )

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build the targets from ids. See `Supervision.targets`."""
        return PairSupervision().targets(visual, text, batch)
