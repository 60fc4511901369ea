"""Supervision by edited captions: each caption of a batch brings a text that one edit makes false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from visavis.core.encoded import Encoded
from visavis.core.errors import RecipeError
from visavis.core.fields import PositiveInt, validate_fields
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader
from visavis.data.words import tokenize
from visavis.losses.targets import Targets
from visavis.papers.caption_edits import make_text_pairs
from visavis.training.supervision.base import PairSupervision, Supervision


@dataclass(frozen=True, eq=False)
class EditedTexts:
    """Edited texts of a split, numbered after its captions.

    Attributes:
        texts: The texts.
        image_of: Image of each caption of the split and of each text, shape ``[T + E]``. Negative,
            and different for each text, where an edit made it false.
        edited_of: Image whose caption was edited to each text, -1 for a caption, shape ``[T + E]``.
        pairs_of: For each caption, its pairs of a true and a false text by their numbers, int64,
            shape ``[P, 2]``. The true text can be the caption.
    """

    texts: tuple[str, ...]
    image_of: np.ndarray
    edited_of: np.ndarray
    pairs_of: tuple[np.ndarray, ...]

    @classmethod
    def from_split(cls, split: Dataset) -> EditedTexts:
        """Edit all captions of a split. A text that is a caption of another image is left out."""
        captions = {" ".join(tokenize(caption)) for caption in split.captions}
        # Number of each text, which is true or false of one image.
        numbers: dict[tuple[str, int, bool], int] = {}
        pairs: list[list[tuple[int, int]]] = [[] for _ in split.captions]
        first = len(split.captions)
        for image, indices in enumerate(split.captions_of):
            own = [split.captions[index] for index in indices]
            for pair in make_text_pairs(own, [EDIT_SEED, image]):
                if " ".join(tokenize(pair.edited)) in captions:
                    continue
                caption = int(indices[pair.caption])
                is_caption = tokenize(pair.true) == tokenize(own[pair.caption])
                true = (
                    caption
                    if is_caption
                    else numbers.setdefault((pair.true, image, True), first + len(numbers))
                )
                false = numbers.setdefault((pair.edited, image, False), first + len(numbers))
                pairs[caption].append((true, false))
        images = [
            image if is_true else -1 - number for number, (_, image, is_true) in enumerate(numbers)
        ]
        edited_of = [image for _, image, _ in numbers]
        return cls(
            tuple(text for text, *_ in numbers),
            np.concatenate([split.image_of, np.array(images, np.int64)]),
            np.concatenate([np.full(first, -1), np.array(edited_of, np.int64)]),
            tuple(np.array(each, np.int64).reshape(-1, 2) for each in pairs),
        )


EDIT_SEED = 1
"""Seed of the edits, the same for all runs. A probe has another one."""


@dataclass(frozen=True, eq=False)
class EditedBatches:
    """Adds edited texts to batches. See `BatchExtension`.

    Attributes:
        edited: The edited texts of the training split.
        per_caption: Number of pairs that each caption samples.
    """

    edited: EditedTexts
    per_caption: int

    @property
    def image_of(self) -> np.ndarray:
        """Image of each caption and text, negative for a false text, shape ``[T + E]``."""
        return self.edited.image_of

    def add_negatives(
        self, images: np.ndarray, captions: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add sampled pairs of the captions of a batch."""
        sampled = [
            random.permutation(pairs)[: self.per_caption].ravel()
            for pairs in (self.edited.pairs_of[caption] for caption in captions.tolist())
            if len(pairs)
        ]
        texts = np.unique(np.concatenate([np.zeros(0, np.int64), *sampled]))
        return images, np.concatenate([captions, np.setdiff1d(texts, captions)])


@dataclass(frozen=True, kw_only=True)
class EditedCaptionSupervision(Supervision):
    """Pairs by ids, in batches with edited captions as further candidates of the images.

    One edit swaps, replaces, adds or negates words, so that the caption becomes false. The edited
    caption is a negative of its image. Other images ignore it, because it may be true of them. It
    is not a query, because no image belongs to it. Edits that make a true text, such as "is not
    sitting" of a caption "is running", add this text as a positive of the image, so that the word
    "not" does not mark negatives. ``visavis papers probe`` makes the same edits on data without ground truth.

    Attributes:
        per_caption: Number of edited captions that each caption of a batch samples. Captions
            without an edit add none.

    Source:
        Negative captions by rules: Yuksekgonul et al., NegCLIP (2023). Differs from their code,
        which adds images with similar captions, and has edited captions as negatives of all images.
    """

    pairs_only: ClassVar[bool] = True
    # How positives are defined, for the report of a training.
    by: ClassVar[str] = "ids"
    one_process_only: ClassVar[str] = "it compares each edited caption with its own image only"

    per_caption: PositiveInt = 1

    def __post_init__(self) -> None:
        validate_fields(self)

    def check(self, train: Loader, validation: Loader) -> None:
        """Check that captions of the training split can be edited. See `Supervision.check`."""
        if train.schedule.captions_per_image is not None:
            raise RecipeError(
                "training.captions_per_image: expected no value with EditedCaptionSupervision, got "
                f"{train.schedule.captions_per_image}. Remove it."
            )
        if not EditedTexts.from_split(train.data).texts:
            raise RecipeError(
                f"EditedCaptionSupervision: expected a training caption of {train.data.name} with a "
                "color, number, relation, thing or action that can be edited, found none. Use "
                "PairSupervision()."
            )

    def extra_texts(self, split: Dataset) -> Sequence[str]:
        """Return the edited texts. See `Supervision.extra_texts`."""
        return EditedTexts.from_split(split).texts

    def extend_batches(self, train: Loader) -> Loader:
        """Add edited captions to the training batches. See `Supervision.extend_batches`."""
        return replace(
            train, extension=EditedBatches(EditedTexts.from_split(train.data), self.per_caption)
        )

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build the targets from ids, and ignore edited captions of other images. See
        `Supervision.targets`.
        """
        pairs = PairSupervision().targets(visual, text, batch)
        if not isinstance(batch.loader.extension, EditedBatches):
            return pairs
        edited_of = torch.from_numpy(batch.loader.extension.edited.edited_of[batch.captions])
        edited_of = edited_of.to(batch.image_ids.device)
        return replace(pairs, ignore=(edited_of >= 0) & (edited_of != batch.image_ids[:, None]))
