"""Supervision by pairs with graded relevance: the values themselves, for objectives such as Ladder,
or weights and margins of pairs that follow from them, for Unified. Entry points of the group
``visavis.supervisions`` name the classes, so that recipes can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Encoded
from visavis.core.fields import require_field, validate_fields
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch
from visavis.losses.targets import Targets
from visavis.papers.relevance.base import CaptionAggregation
from visavis.papers.relevance.catalog import parse_estimator
from visavis.training.supervision.base import PairSupervision, Supervision, TrainingContext

BlockFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Values ``[rows, columns]`` of a pairwise annotation, from positions of both."""
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
        # Both are lazy: a block is computed when an objective requests it.
        self._train, self._validation = (
            self._estimator.for_dataset(loader.data, self.caption_aggregation)
            for loader in (context.train, context.validation)
        )
        # The sample of a resumed phase is the saved one.
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
        image_of = torch.from_numpy(batch.loader.data.image_of)
        captions = torch.from_numpy(batch.captions)
        paired = batch.loader.schedule.captions_per_image is None
        # Rows and columns are positions in the data set, so they are valid in all processes. A
        # paired image has the position of its caption.
        positions = {
            "rows": captions if paired else torch.from_numpy(batch.images),
            "columns": captions,
        }

        # Both functions compute the blocks that an objective requests. Estimators are on the CPU.
        def relevance(rows: Tensor, columns: Tensor) -> Tensor:
            row_positions = rows.cpu()
            caption_positions = columns.cpu()
            if paired:
                block = image_relevance(image_of[row_positions], caption_positions, row_positions)
            else:
                block = image_relevance(row_positions, caption_positions)
            if self.scale == "quantile":
                block = torch.searchsorted(self._negative_relevance, block) / len(
                    self._negative_relevance
                )
            return block.to(rows.device)

        def positive(rows: Tensor, columns: Tensor) -> Tensor:
            row_positions = rows.cpu()
            caption_positions = columns.cpu()
            if paired and self.by == "position":
                pairs = row_positions[:, None] == caption_positions
            else:
                images = image_of[row_positions] if paired else row_positions
                pairs = images[:, None] == image_of[caption_positions]
            return pairs.to(rows.device)

        # Pairs are the same as without relevance.
        return replace(
            PairSupervision(by=self.by).targets(visual, text, batch),
            **self._annotations(relevance, positive),
            **positions,
        )

    def _annotations(self, relevance: BlockFunction, positive: BlockFunction) -> dict[str, Any]:
        """Annotations of a batch, from functions of positions in the data set: the relevance, and
        which pairs are positive.
        """
        return {"relevance": relevance}

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


@dataclass(kw_only=True)
class RelevanceWeights(GradedSupervision):
    """Pairs, and a weight for every pair from the relevance of captions, as ``Unified`` uses it: a
    relevant negative weighs less.

    Formula:
        $w_ij = 1 + strength (1 / 2 - R_ij)$ for a negative, $w_ii = 1$ for a positive pair.

    With ``scale="quantile"``, the mean weight of random negatives is 1. Another mean moves all scores
    up or down, because eq. 24 multiplies scores.

    Attributes:
        scale: See `GradedSupervision`.
        strength: Difference between the weights of negatives with relevance 0 and 1, from 0 to 2.

    Source:
        Unified loss, eq. 24, whose weights are not specified. This choice is of this package.
    """

    scale: Literal["relevance", "quantile"] = "quantile"
    strength: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(0 <= self.strength <= 2, self, "strength", "a number from 0 to 2")

    def _annotations(self, relevance: BlockFunction, positive: BlockFunction) -> dict[str, Any]:
        """Weights by relevance."""

        def weight(rows: Tensor, columns: Tensor) -> Tensor:
            weights = 1 + self.strength * (0.5 - relevance(rows, columns))
            return weights.masked_fill(positive(rows, columns), 1.0)

        return {"weight": weight}


@dataclass(kw_only=True)
class RelevanceMargins(GradedSupervision):
    """Pairs, and a margin for every pair from the relevance of captions, as ``Unified`` and ``NCR``
    use it: a relevant negative needs a smaller distance.

    Formula:
        $m_ij = margin (1 - R_ij)$.

    Attributes:
        margin: Margin of a negative without any relevance. Replaces that of the objective.

    Source:
        Unified loss, eq. 26, with a margin for each pair as in Biten et al., Is an Image Worth Five
        Sentences? (2022), which the paper cites for it. There the difference of two CIDEr values
        takes the place of $1 - R_ij$.
    """

    margin: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(self.margin > 0, self, "margin", "a number above 0")

    def _annotations(self, relevance: BlockFunction, positive: BlockFunction) -> dict[str, Any]:
        """Margins by relevance."""

        def margin(rows: Tensor, columns: Tensor) -> Tensor:
            return self.margin * (1 - relevance(rows, columns))

        return {"pair_margin": margin}
