"""Pairs with degrees of relevance, as Ladder reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.data.loader import Batch
from visavis.degrees.base import ImageBy
from visavis.degrees.catalog import CATALOG
from visavis.spec import check_fields, parse
from visavis.supervision.base import Supervision, TrainingContext
from visavis.targets import Targets
from visavis.types import Encoded

SAMPLED_CAPTIONS = 256


@dataclass(kw_only=True, eq=False)
class GradedSupervision(Supervision):
    """Who belongs to whom, and how relevant every caption of a batch is to every image.

    degrees: who tells, as "CBoW()" or "SceneDegrees()". image: from which of its captions an image's degree comes: "own", the one
    that it is paired with in the batch (with several captions an image: its first), as the paper; "best"; "mean".
    scale: "degrees" hands them on as they are; "share" hands on the share of random wrong training pairs of a lower degree, so
    that ``thresholds=(0.9, 0.7)`` are the best tenth and the next two, whatever the degrees' own scale. The random pairs are
    those of 256 training images with 256 captions, drawn by the run's seed.
    by: as in PairSupervision. Degrees are computed for the blocks that are asked for.
    """

    degrees: str = "CBoW()"
    image: ImageBy = "own"
    scale: Literal["degrees", "share"] = "degrees"
    by: Literal["ids", "position"] = "ids"

    def __post_init__(self) -> None:
        check_fields(self)
        self._degrees = parse(self.degrees, CATALOG)

    def files(self, data: Dataset) -> list[Path]:
        return parse(self.degrees, CATALOG).files(data)

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        self._context = context
        self._train, self._validation = (self._degrees.between(loader.data, self.image) for loader in (context.train, context.validation))
        self._usual = torch.empty(0)
        if self.scale == "share":
            self._usual = state["usual"] if state else self._sample()

    def state_dict(self) -> dict[str, Tensor]:
        return {"usual": self._usual} if self.scale == "share" else {}

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        degrees = self._train if self._context.trains_on(batch) else self._validation
        image_of, captions = torch.from_numpy(batch.loader.data.image_of), torch.from_numpy(batch.captions)
        paired = batch.loader.plan.captions_per_image is None
        # positions are numbers in the data set, that of a paired image its caption's: they hold over all processes
        places = {"rows": captions if paired else torch.from_numpy(batch.images), "columns": captions}

        def relevance(rows: Tensor, columns: Tensor) -> Tensor:
            here, there = rows.cpu(), columns.cpu()
            block = degrees(image_of[here], there, here) if paired else degrees(here, there)
            if self.scale == "share":
                block = torch.searchsorted(self._usual, block) / len(self._usual)
            return block.to(rows.device)

        if self.by == "position":
            return Targets.paired(len(captions), relevance=relevance, **places)
        return Targets(query_ids=batch.image_ids, candidate_ids=batch.text_ids, relevance=relevance, **places)

    def _sample(self) -> Tensor:
        """The degrees of random wrong training pairs, in rising order."""
        data = self._context.train.data
        random = np.random.default_rng(self._context.seed)
        own, others = (random.permutation(len(data.captions))[:SAMPLED_CAPTIONS] for _ in range(2))
        images = data.image_of[own]
        block = self._train(*(torch.from_numpy(index) for index in (images, others, own)))
        return block[torch.from_numpy(images[:, None] != data.image_of[others])].sort().values
