"""Pairs with degrees of relevance, as Ladder reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visavis.data.loader import Batch
from visavis.spec import check_fields, parse
from visavis.supervision.base import Setting, Supervision
from visavis.supervision.graded.catalog import CATALOG
from visavis.supervision.graded.degrees import ImageBy
from visavis.targets import Targets
from visavis.types import Encoded


@dataclass(kw_only=True, eq=False)
class GradedSupervision(Supervision):
    """Who belongs to whom, and how relevant every caption of a batch is to every image.

    degrees: who tells, as "CBoW()" or "SceneDegrees()". image: from which of its captions an image's degree comes: "own", the one
    that it is paired with in the batch (with several captions an image: its first), as the paper; "best"; "mean".
    by: as in PairSupervision. Degrees are computed for the blocks that are asked for.
    """

    degrees: str = "CBoW()"
    image: ImageBy = "own"
    by: Literal["ids", "position"] = "ids"

    def __post_init__(self) -> None:
        check_fields(self)
        self._degrees = parse(self.degrees, CATALOG)

    def begin_phase(self, setting: Setting, state: dict[str, Tensor]) -> None:
        self._setting = setting
        self._of = {
            "train": self._degrees.between(setting.train.data, self.image),
            "validation": self._degrees.between(setting.validation.data, self.image),
        }

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        degrees = self._of["train" if batch.loader is self._setting.train else "validation"]
        images, captions = torch.from_numpy(batch.images), torch.from_numpy(batch.captions)
        paired = batch.loader.plan.captions_per_image is None

        def relevance(rows: Tensor, columns: Tensor) -> Tensor:
            here, there = rows.cpu(), columns.cpu()
            return degrees(images[here], captions[there], captions[here] if paired else None).to(rows.device)

        if self.by == "position":
            return Targets.paired(len(batch.text_ids), relevance=relevance)
        return Targets(query_ids=batch.image_ids, candidate_ids=batch.text_ids, relevance=relevance)
