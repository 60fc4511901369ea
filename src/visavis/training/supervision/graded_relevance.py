"""Supervision by pairs with graded relevance, for objectives such as Ladder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Encoded
from visavis.core.spec import validate_fields
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch
from visavis.evaluation.graded.base import CaptionAggregation
from visavis.evaluation.graded.catalog import parse_estimator
from visavis.losses.targets import Targets
from visavis.training.supervision.base import PairSupervision, Supervision, TrainingContext

QUANTILE_SAMPLE_SIZE = 256
"""Number of training images, and of captions, whose negative pairs define the quantiles."""


@dataclass(kw_only=True)
class GradedSupervision(Supervision):
    """Pairs, and the relevance of every caption of a batch to every image. Relevance is computed
    for requested blocks only.

    Attributes:
        relevance: Spec of the relevance estimator, such as "CBoW()" or "SceneRelevance()".
        caption_aggregation: How the relevance to an image follows from that to its captions.
            "paired": its caption in the batch, as in the paper (with several captions per image:
            its first one). "max" or "mean": over all its captions.
        scale: "relevance" passes the values as they are. "quantile" passes the share of random
            negative training pairs with a lower value, so ``thresholds=(0.9, 0.7)`` are the top 10
            % and the next 20 % for any estimator. The random pairs are those of 256 training images
            with 256 captions, sampled with the seed of the run.
        by: "ids" or "position". See `PairSupervision`.
    """

    relevance: str = "CBoW()"
    caption_aggregation: CaptionAggregation = "paired"
    scale: Literal["relevance", "quantile"] = "relevance"
    by: Literal["ids", "position"] = "ids"

    def __post_init__(self) -> None:
        validate_fields(self)
        self._estimator = parse_estimator(self.relevance)

    def files(self, data: Dataset) -> list[Path]:
        """List the files of the estimator. See `Supervision.files`."""
        return self._estimator.files(data)

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        """Prepare the estimator for both splits. See `Supervision.begin_phase`."""
        self._context = context
        self._train, self._validation = (
            self._estimator.for_dataset(loader.data, self.caption_aggregation)
            for loader in (context.train, context.validation)
        )
        self._negative_relevance = torch.empty(0)
        if self.scale == "quantile":
            self._negative_relevance = state["usual"] if state else self._sample_negatives()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sampled relevance values, if quantiles are used."""
        return {"usual": self._negative_relevance} if self.scale == "quantile" else {}

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build targets with graded relevance. See `Supervision.targets`."""
        image_relevance = (
            self._train if self._context.is_training_batch(batch) else self._validation
        )
        image_of, captions = (
            torch.from_numpy(batch.loader.data.image_of),
            torch.from_numpy(batch.captions),
        )
        paired = batch.loader.schedule.captions_per_image is None
        # Rows and columns are positions in the data set, so they are valid in all processes. A
        # paired image has the position of its caption.
        positions = {
            "rows": captions if paired else torch.from_numpy(batch.images),
            "columns": captions,
        }

        def relevance(rows: Tensor, columns: Tensor) -> Tensor:
            row_positions, caption_positions = rows.cpu(), columns.cpu()
            if paired:
                block = image_relevance(image_of[row_positions], caption_positions, row_positions)
            else:
                block = image_relevance(row_positions, caption_positions)
            if self.scale == "quantile":
                block = torch.searchsorted(self._negative_relevance, block) / len(
                    self._negative_relevance
                )
            return block.to(rows.device)

        return replace(
            PairSupervision(by=self.by).targets(visual, text, batch),
            relevance=relevance,
            **positions,
        )

    def _sample_negatives(self) -> Tensor:
        """The relevance of random negative training pairs, in ascending order."""
        data = self._context.train.data
        random = np.random.default_rng(self._context.seed)
        paired, others = (
            random.permutation(len(data.captions))[:QUANTILE_SAMPLE_SIZE] for _ in range(2)
        )
        images = data.image_of[paired]
        block = self._train(*(torch.from_numpy(index) for index in (images, others, paired)))
        return block[torch.from_numpy(images[:, None] != data.image_of[others])].sort().values
