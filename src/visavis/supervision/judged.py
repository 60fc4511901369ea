"""What people judged of the pictures that a search showed them, as facts of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from visavis.data.loader import Batch, Loader
from visavis.errors import RecipeError
from visavis.models.base import Matcher
from visavis.scoring import score_by_blocks
from visavis.spec import check_fields, require
from visavis.supervision.base import PairSupervision, Supervision, TrainingContext
from visavis.targets import Targets
from visavis.types import Encoded


@dataclass(kw_only=True, eq=False)
class JudgedSupervision(Supervision):
    """Pairs by ids, and what people said of others: sentences fit the images that they were judged to fit, and not those that they were
    judged not to fit, which the batches bring together.

    unknown: what is an image of which nobody said whether a judged sentence fits it. "ignore": neither right nor wrong if it scores about
    as high as one that fits, as it may fit, too: at least the lowest score of those in the batch that fit, less ``slack`` standard deviations
    of the scores of all images of the batch with the sentence. A sentence that nothing fits is told of judged images alone. "wrong": wrong,
    as other images are for captions.
    Needs ``data.judgements``, or ``visavis train --judgements``, which sets both.
    """

    pairs_alone: ClassVar[bool] = True

    unknown: Literal["ignore", "wrong"] = "ignore"
    slack: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.slack >= 0, self, "slack", "a number of at least 0")

    @property
    def by(self) -> str:
        return "ids and judgements"

    def check(self, train: Loader, validation: Loader) -> None:
        if train.judged is None:
            raise RecipeError(
                "JudgedSupervision has nothing to tell: name the file of judgements in data.judgements, or with --judgements."
            )

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        self._context = context

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        judged = batch.loader.judged
        if judged is None or not (asked := torch.from_numpy(judged.sentence_of[batch.captions] >= 0)).any():
            return PairSupervision().targets(visual, text, batch)
        device = batch.image_ids.device
        fits, wrong = (torch.from_numpy(said).to(device) for said in judged.facts(batch.images, batch.captions))
        together = (batch.image_ids[:, None] == batch.text_ids) | fits
        ignore = None
        if self.unknown == "ignore":
            columns = asked.nonzero().flatten().to(device)
            ignore = torch.zeros_like(together)
            scores = _scores(self._context.matcher, visual, text[columns], self._context)
            ignore[:, columns] = unknown(scores, together[:, columns], wrong[:, columns], self.slack)
        rows, texts = together.nonzero().T
        return Targets.from_pairs(rows, texts, *together.shape, ignore=ignore)


@torch.no_grad()
def _scores(matcher: Matcher, visual: Encoded, text: Encoded, context: TrainingContext) -> Tensor:
    return score_by_blocks(matcher.score, visual, text, context.memory).float()


def unknown(scores: Tensor, fits: Tensor, wrong: Tensor, slack: float) -> Tensor:
    """Which of the pairs ``[V, T]`` of which nothing was said may be right: those of a text that score at least its lowest that fits, less
    ``slack`` standard deviations of all its scores; all of a text that nothing fits.

    >>> scores = torch.tensor([[0.9], [0.7], [0.5], [0.1]])
    >>> fits = torch.tensor([[False], [True], [False], [False]])
    >>> unknown(scores, fits, torch.zeros_like(fits), slack=0.0).flatten().tolist()
    [True, False, False, False]
    """
    lowest = scores.masked_fill(~fits, float("inf")).amin(0)
    floor = torch.where(fits.any(0), lowest - slack * scores.std(0, correction=0), float("-inf"))
    return (scores >= floor) & ~fits & ~wrong
