"""What an objective is told about a batch: who belongs to whom, and whatever else it needs.

A Supervision is asked for the targets of every batch, hears what the terms of the loss were, and is told when an epoch
begins. It may own a bank, a second matcher, an optimizer; whatever it must remember to go on exactly is in its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.data.loader import Batch
from visavis.models.base import Matcher
from visavis.spec import check_fields
from visavis.targets import Targets
from visavis.types import Encoded


class Supervision(ABC):
    """The source of targets; the base class of all that trains with more than ids."""

    def begin_epoch(self, epoch: int, matcher: Matcher, data: Dataset) -> None:  # noqa: B027 - most have nothing to do
        """Called before the first batch of an epoch (again with the same epoch when a stopped run goes on)."""

    @abstractmethod
    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """The targets of a batch whose items are encoded as ``visual`` and ``text``."""

    def observe(self, batch: Batch, loss: float) -> None:  # noqa: B027
        """Called after every step of training with the value of its loss."""

    def state_dict(self) -> dict[str, Tensor]:
        """All that is needed to go on exactly; tensors by name."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Take back what ``state_dict`` gave."""


@dataclass(frozen=True, kw_only=True)
class PairSupervision(Supervision):
    """Pairs alone. by "ids": all captions of an image belong to it; by "position": caption i to image i only, as the
    papers' codes do (other captions of the same image in the batch are then wrong answers).
    """

    by: Literal["ids", "position"] = "ids"

    def __post_init__(self) -> None:
        check_fields(self)

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        if self.by == "position":
            return Targets.paired(len(batch.text_ids))
        return Targets(query_ids=batch.image_ids, candidate_ids=batch.text_ids)
