"""Supervision by the relevance judgments that people gave in the web UI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from visavis.core.encoded import Encoded
from visavis.core.errors import RecipeError
from visavis.core.fields import require_field, validate_fields
from visavis.data.feedback.training_pairs import FeedbackSplit
from visavis.data.loader import Batch, Loader
from visavis.losses.scoring import score_matrix
from visavis.losses.targets import Targets
from visavis.training.supervision.base import PairSupervision, Supervision, TrainingContext


@dataclass(kw_only=True)
class FeedbackSupervision(Supervision):
    """Pairs by ids, and judged pairs of text queries and images.

    A query is a positive of the images that were judged relevant, and a negative of those that were
    judged not relevant. Batches contain both. Needs ``data.feedback`` in the recipe, or ``visavis
    train --feedback``, which sets both.

    Attributes:
        unlabeled: Role of an image that nobody judged for a query of the batch. "ignore": neither
            positive nor negative if its score is about as high as that of a relevant image, because
            it may be relevant, too: at least the lowest score of the relevant images in the batch,
            minus ``slack`` standard deviations of the scores of all images with the query. A query
            without a relevant image uses judged images only. "negative": a negative, as other
            images are for captions.
        slack: Number of standard deviations for "ignore".
    """

    pairs_only: ClassVar[bool] = True
    one_process_only: ClassVar[str] = (
        "it compares each query with the scores of all images of a batch"
    )
    # How positives are defined, for the report of a training.
    by: ClassVar[str] = "ids and feedback"

    unlabeled: Literal["ignore", "negative"] = "ignore"
    slack: float = 0.5

    def __post_init__(self) -> None:
        validate_fields(self)
        require_field(self.slack >= 0, self, "slack", "a number of at least 0")

    def check(self, train: Loader, validation: Loader) -> None:
        """Check that the training has feedback. See `Supervision.check`."""
        if not isinstance(train.extension, FeedbackSplit):
            raise RecipeError(
                "FeedbackSupervision: expected feedback, got none. Set data.feedback or "
                "pass --feedback."
            )

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        """Store the context, whose model scores unlabeled pairs. See `Supervision.begin_phase`."""
        self._context = context

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build targets from ids and judgments. See `Supervision.targets`."""
        feedback = batch.loader.extension
        pair_targets = PairSupervision().targets(visual, text, batch)
        if not isinstance(feedback, FeedbackSplit):
            return pair_targets
        is_query = torch.from_numpy(feedback.query_of[batch.captions] >= 0)
        if not is_query.any():
            return pair_targets
        device = batch.image_ids.device
        relevant, not_relevant = (
            torch.from_numpy(labels).to(device)
            for labels in feedback.batch_labels(batch.images, batch.captions)
        )
        positive = (batch.image_ids[:, None] == batch.text_ids) | relevant
        ignore = None
        if self.unlabeled == "ignore":
            columns = is_query.nonzero().flatten().to(device)
            ignore = torch.zeros_like(positive)
            with torch.no_grad():
                scores = score_matrix(
                    self._context.matcher.score, visual, text[columns], self._context.memory
                ).float()
            ignore[:, columns] = possible_positives(
                scores, positive[:, columns], not_relevant[:, columns], self.slack
            )
        rows, texts = positive.nonzero().T
        return Targets.from_pairs(rows, texts, *positive.shape, ignore=ignore)


def possible_positives(
    scores: Tensor, relevant: Tensor, not_relevant: Tensor, slack: float
) -> Tensor:
    """Find the unlabeled pairs that may be positives, because they score about as high as a
    relevant pair of the same text.

    Args:
        scores: Scores of images and texts, shape ``[V, T]``.
        relevant: Relevant pairs, bool, shape ``[V, T]``.
        not_relevant: Pairs that are not relevant, bool, shape ``[V, T]``.
        slack: Margin below the lowest relevant score of a text, in standard deviations of all its
            scores.

    Returns:
        Unlabeled pairs above this bound, bool, shape ``[V, T]``. All unlabeled pairs of a text
        without a relevant image.

    Example:
        >>> scores = torch.tensor([[0.9], [0.7], [0.5], [0.1]])
        >>> relevant = torch.tensor([[False], [True], [False], [False]])
        >>> possible_positives(scores, relevant, torch.zeros_like(relevant), slack=0.0).flatten().tolist()
        [True, False, False, False]
    """
    lowest = scores.masked_fill(~relevant, float("inf")).amin(0)
    bound = torch.where(
        relevant.any(0), lowest - slack * scores.std(0, correction=0), float("-inf")
    )
    return (scores >= bound) & ~relevant & ~not_relevant
