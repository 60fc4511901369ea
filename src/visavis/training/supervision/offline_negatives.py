"""Supervision by offline hard negatives: the highest-scoring negatives of each item in the whole
split, listed once per phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Direction, Encoded
from visavis.core.errors import RecipeError
from visavis.core.fields import require_field, validate_fields
from visavis.data.loader import Batch, Loader, derive_seed
from visavis.losses.targets import Targets
from visavis.models.batch_encoding import evaluation_mode
from visavis.models.inference import (
    batches_by_length,
    consecutive_batches,
    encode_items,
)
from visavis.training.supervision.base import Supervision, TrainingContext
from visavis.training.supervision.candidate_scores import iter_candidate_scores

ENCODING_BATCH_SIZE = 512
"""Number of items that are encoded together."""


@dataclass(kw_only=True)
class OfflineNegativeSupervision(Supervision):
    """Scores of offline negatives, as AOQ uses them, sampled from the hardest negatives of each
    item in the whole split.

    The lists are computed at the beginning of the phase with the current model. The previous phase,
    with another objective, is the first round of training. For an image v, the pairs are v with a
    caption t_o of its list, and t_o with an image of the list of one of v's own captions. For a
    caption, the roles are exchanged. All four items are encoded again, with gradient.

    Attributes:
        size: Number of negatives in the list of each item.
        preselect: Number of negatives of each item that are scored, for scores that are not a plain
            cosine (attention). They are the negatives with the highest cosine of mean-pooled
            regions and words. 0, or at least the number of negatives: all, which is exact.

    Source:
        Chen et al., AOQ (2020), with lists of 300. Differs from the released code, which reads
        lists from files, and whose second pair of items is sampled once for both directions.
    """

    reads_model: ClassVar[bool] = True
    # How positives are defined, for the report of a training.
    by: ClassVar[str] = "ids"

    size: int = 300
    preselect: int = 0

    def __post_init__(self) -> None:
        validate_fields(self)
        require_field(self.size > 0, self, "size", "at least 1")
        require_field(
            self.preselect == 0 or self.preselect >= self.size,
            self,
            "preselect",
            "0 for all, or at least size",
        )

    def check(self, train: Loader, validation: Loader) -> None:
        """Check that both splits have negatives. See `Supervision.check`."""
        for name, loader in (("training", train), ("validation", validation)):
            if len(np.unique(loader.data.image_of)) < 2:
                raise RecipeError(
                    "OfflineNegativeSupervision: expected at least 2 images with captions in the "
                    f"{name} split, got 1. Use a larger split."
                )

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        """Compute or restore the lists of negatives. See `Supervision.begin_phase`."""
        self._context = context
        self._lists = {
            name: (state[f"{name}.texts"], state[f"{name}.images"])
            if state
            else self._hardest_negatives(loader)
            for name, loader in (("train", context.train), ("validation", context.validation))
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the lists of negatives."""
        lists = self._lists.items()
        return {
            f"{name}.{side}": part
            for name, parts in lists
            for side, part in zip(("texts", "images"), parts, strict=True)
        }

    def carried_over(self) -> dict[str, Tensor]:
        """Return nothing: each phase computes new lists with its own model."""
        return {}

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build targets with the scores of sampled negatives. See `Supervision.targets`."""
        loader = batch.loader
        matcher = self._context.matcher
        text_lists, image_lists = self._lists[
            "train" if self._context.is_training_batch(batch) else "validation"
        ]
        random = np.random.default_rng(derive_seed(self._context.seed, batch.epoch, batch.index))

        def sample(lists: Tensor, items: np.ndarray) -> np.ndarray:
            return lists[items, random.integers(lists.shape[1], size=len(items))].numpy()

        # The order of sampling and encoding defines the random numbers of a run.
        # Items are sampled for the batch of all processes, so that their number does not matter.
        all_images = batch.global_images
        all_captions = batch.global_captions
        positive_captions = np.array(
            [random.choice(loader.data.captions_of[image]) for image in all_images]
        )
        i2t_texts = sample(text_lists, all_images)
        t2i_texts = sample(text_lists, loader.data.image_of[all_captions])
        t2i_images = sample(image_lists, all_captions)
        i2t_images = sample(image_lists, positive_captions)
        image_rows = slice(batch.image_start, batch.image_start + len(batch.images))
        caption_rows = slice(batch.caption_start, batch.caption_start + len(batch.captions))
        i2t_visual = self._visual(loader, i2t_images[image_rows])
        t2i_visual = self._visual(loader, t2i_images[caption_rows])
        i2t_text = self._text(loader, i2t_texts[image_rows])
        t2i_text = self._text(loader, t2i_texts[caption_rows])
        image_scores = [
            matcher.score_pairs(visual, i2t_text),
            matcher.score_pairs(i2t_visual, i2t_text),
        ]
        caption_scores = [
            matcher.score_pairs(t2i_visual, text),
            matcher.score_pairs(t2i_visual, t2i_text),
        ]
        return Targets(
            query_ids=batch.image_ids,
            candidate_ids=batch.text_ids,
            query_offline_scores=torch.stack(image_scores, 1),
            candidate_offline_scores=torch.stack(caption_scores, 1),
        )

    def _visual(self, loader: Loader, items: np.ndarray) -> Encoded:
        return self._context.matcher.encode_visual(
            loader.visual.read(items).to(self._context.device)
        )

    def _text(self, loader: Loader, items: np.ndarray) -> Encoded:
        return self._context.matcher.encode_text(loader.text.read(items).to(self._context.device))

    @torch.no_grad()
    def _hardest_negatives(self, loader: Loader) -> tuple[Tensor, Tensor]:
        """The highest-scoring negative captions of each image ``[V, size]``, and negative images of
        each caption ``[T, size]``.
        """
        matcher = self._context.matcher
        data = loader.data
        device = self._context.device
        images_of = consecutive_batches(len(data.images), ENCODING_BATCH_SIZE)
        visual = encode_items(
            matcher,
            "visual",
            loader.read_images(images_of, device),
            images_of,
            output_device=device,
        )
        texts_of = batches_by_length(data.captions, ENCODING_BATCH_SIZE)
        text = encode_items(
            matcher, "text", map(loader.text.read, texts_of), texts_of, output_device=device
        )
        with evaluation_mode(matcher):
            text_images = torch.from_numpy(data.image_of).to(device)
            images = torch.arange(len(data.images), device=device)
            return self._hardest(visual, text, "i2t", images, text_images), self._hardest(
                visual, text, "t2i", text_images, images
            )

    def _hardest(
        self,
        visual: Encoded,
        text: Encoded,
        direction: Direction,
        query_images: Tensor,
        candidate_images: Tensor,
    ) -> Tensor:
        """The hardest negatives of each query ``[Q, size]``. Items of the same image belong
        together.
        """
        matcher = self._context.matcher
        hardest = list[Tensor]()
        # The number of negatives that every query has.
        num_negatives = len(candidate_images) - int(
            torch.bincount(candidate_images)[query_images].max()
        )
        preselect = (
            0 if matcher.score_is_cosine or self.preselect >= num_negatives else self.preselect
        )
        images = (query_images, candidate_images)
        for rows, candidates, scores in iter_candidate_scores(
            matcher.score,
            visual,
            text,
            direction,
            *images,
            preselect=preselect,
            memory=self._context.memory,
        ):
            is_positive = query_images[rows, None] == candidate_images[candidates]
            negatives = (
                scores.masked_fill(is_positive, float("-inf"))
                .topk(min(self.size, num_negatives))
                .indices
            )
            hardest.append(candidates[negatives].int().cpu())
        return torch.cat(hardest)
