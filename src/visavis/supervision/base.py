"""What an objective is told about a batch: who belongs to whom, and whatever else it needs.

A Supervision is asked for the targets of every batch, hears what the terms of the loss were, and is told when an epoch
begins. It may own a bank, a second matcher, an optimizer; whatever it must remember to go on exactly is in its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader
from visavis.engine import PairLoss
from visavis.memory import Memory
from visavis.models.base import Matcher
from visavis.objectives import Objective
from visavis.spec import check_fields
from visavis.targets import FACTS, Fact, Targets
from visavis.types import Encoded


class Peer(Protocol):
    """A network beside the first, of the same architecture, trained as the phase trains the first. loss: of the phase, for this network."""

    matcher: Matcher
    loss: PairLoss

    def learn(self, value: Callable[[], Tensor]) -> None:
        """The gradient of a batch, and one step down where the first network takes one."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class TrainingContext:
    """What a supervision may use of the training that it is part of.

    train, validation: the batches of the two splits. optimizer: of the matcher, in this phase. peer_network: a new one, from
    a seed. seed: of the run; with ``loader.seed_of(seed, epoch, batch)`` everything is repeatable. memory: what blocks of scores may take.
    """

    matcher: Matcher
    objective: Objective
    optimizer: Optimizer
    peer_network: Callable[[int], Peer]
    train: Loader
    validation: Loader
    seed: int
    device: torch.device
    memory: Memory = None

    def trains_on(self, batch: Batch) -> bool:
        """Whether a batch is one of the training data; else it is one of those of ``validation``, which may be of the same split."""
        return batch.loader.data is self.train.data


class Supervision(ABC):
    """The source of targets; the base class of all that trains with more than ids.

    pairs_alone: tells who belongs together, and nothing else that an objective could need.
    """

    pairs_alone: ClassVar[bool] = False

    @property
    def peer(self) -> Matcher | None:
        """The second network, where one is trained beside the first: it is kept with the best of the first."""
        return None

    def unread_by(self, objective: Objective) -> tuple[str, ...]:
        """The facts that this supplies, if the objective reads none of them."""
        supplied = tuple(fact.name for fact in self._supplied)
        return () if set(supplied) & set(objective.reads) else supplied

    def check_read_by(self, objective: Objective) -> None:
        """Raise MissingSupervision for an objective that needs another fact than this supplies, as two pairs that are made up show.

        What supplies facts that are not declared as its own is not judged.
        """
        if self._supplied or self.pairs_alone:
            facts = {fact.name: torch.zeros([2] * (2 if fact.shape == "pairwise" else 1 + len(fact.axes))) for fact in self._supplied}
            objective(torch.zeros(2, 2), Targets.paired(2, **facts))

    @property
    def _supplied(self) -> tuple[Fact, ...]:
        """What ``targets.FACTS`` declares as supplied by this."""
        return tuple(fact for fact in FACTS if fact.supplier == type(self).__name__)

    def check(self, train: Loader, validation: Loader) -> None:  # noqa: B027 - most can work with any
        """Called for every phase before anything is trained. Raises RecipeError for batches that this cannot work with."""

    def files(self, data: Dataset) -> list[Path]:
        """What is read besides the data set, so that a run goes on with the very same."""
        return []

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:  # noqa: B027 - most have nothing to do
        """Called once before a phase. state: what ``state_dict`` gave, where a stopped run goes on, or ``handed_on``, where the phase
        before had the same supervision; else empty.
        """

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027
        """Called before the first batch of an epoch, never in the middle of one."""

    @abstractmethod
    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """The targets of a batch whose items are encoded as ``visual`` and ``text``; in training and when losses are watched."""

    def observe(self, batch: Batch, loss: float) -> None:  # noqa: B027
        """Called after every batch of training with the value of its loss."""

    def state_dict(self) -> dict[str, Tensor]:
        """All that is needed to go on exactly; tensors by name."""
        return {}

    def handed_on(self) -> dict[str, Tensor]:
        """The part of the state that a next phase of the same supervision begins with."""
        return self.state_dict()


@dataclass(frozen=True, kw_only=True)
class PairSupervision(Supervision):
    """Pairs alone. by "ids": all captions of an image belong to it; by "position": caption i to image i only, as the
    papers' codes do (other captions of the same image in the batch are then wrong answers).
    """

    pairs_alone: ClassVar[bool] = True

    by: Literal["ids", "position"] = "ids"

    def __post_init__(self) -> None:
        check_fields(self)

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        if self.by == "position":
            return Targets.paired(len(batch.text_ids)).to(batch.text_ids.device)
        return Targets(query_ids=batch.image_ids, candidate_ids=batch.text_ids)
