"""Base class of supervision, and supervision by pairs.

A Supervision builds the targets of every batch, receives the loss of each training batch, and is
notified when an epoch begins. It can own a second network, lists of negatives or an optimizer.
Everything it needs for an exact resume is part of its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from visavis.core.encoded import Encoded
from visavis.core.errors import RecipeError
from visavis.core.fields import validate_fields
from visavis.core.memory_budget import MemoryLimit
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader
from visavis.data.shard_stream import StreamImages
from visavis.losses.objectives import Objective
from visavis.losses.targets import ANNOTATIONS, Annotation, Targets, equal_text_pairs
from visavis.models.base import Matcher

PairScores: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Scores of the images ``[V]`` and captions ``[T]`` of a split, by their positions on the CPU, as a
block ``[V, T]``.
"""


class PeerModel(Protocol):
    """A second network with the same architecture, trained like the first.

    Attributes:
        matcher: The network.
    """

    matcher: Matcher

    def step(
        self, batch: Batch, compute_targets: Callable[[Encoded, Encoded, Batch], Targets]
    ) -> None:
        """Accumulate the gradient of a batch, and take a step whenever the first network does."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by name."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore weights and optimizer state."""


@dataclass(frozen=True)
class TrainingContext:
    """The parts of a training that a supervision can use.

    Attributes:
        matcher: The trained model.
        objective: Objective of the phase.
        optimizer: Optimizer of the model in this phase.
        make_peer: Creates a second network from a seed.
        train: Batches of the training split.
        validation: Batches of the validation split.
        seed: Seed of the run. Use it with `derive_seed`, so that runs are repeatable.
        device: Device of the model.
        open_teacher: Opens a teacher, and returns its scores on the training and on the validation
            split.
        memory: Memory for blocks of scores.
        group: Processes that train together.
    """

    matcher: Matcher
    objective: Objective
    optimizer: Optimizer
    make_peer: Callable[[int], PeerModel]
    open_teacher: Callable[[str], tuple[PairScores, PairScores]]
    train: Loader
    validation: Loader
    seed: int
    device: torch.device
    memory: MemoryLimit = None
    group: ProcessGroup = ONE_PROCESS

    def is_training_batch(self, batch: Batch) -> bool:
        """Check whether a batch comes from ``train`` and not from ``validation``, which can have
        the same split.

        Args:
            batch: The batch.

        Returns:
            Whether it is a training batch.
        """
        return batch.loader.data is self.train.data


class Supervision(ABC):
    """Source of the targets of each batch (base class).

    Attributes:
        pairs_only: Whether the targets hold only positive and negative pairs, without further
            annotations.
        reads_model: Whether the targets depend on the model, which must then be whole in each
            process.
        one_process_only: Why the supervision needs the whole batch in one process. "": it works
            with any number.
        path_fields: Fields that hold a path, which a run stores as an absolute one.
    """

    pairs_only: ClassVar[bool] = False
    reads_model: ClassVar[bool] = False
    one_process_only: ClassVar[str] = ""
    path_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def peer(self) -> Matcher | None:
        """The second network, if one is trained. It is saved with the best weights of the first."""
        return None

    def unused_annotations(self, objective: Objective) -> tuple[str, ...]:
        """List the supplied annotations if the objective uses none of them.

        Args:
            objective: The objective of the phase.

        Returns:
            Names of annotations. Empty if the objective uses at least one.
        """
        supplied = tuple(annotation.name for annotation in self._supplied)
        return () if set(supplied) & set(objective.used_annotations) else supplied

    def added_objective(self, objective: Objective) -> tuple[float, Objective] | None:
        """Return an objective whose loss is added to the phase's own loss in training.

        Args:
            objective: The objective of the phase.

        Returns:
            The factor of its loss, and the objective, which reads the scores without a learned
            scale. None: nothing is added.
        """
        return None

    def check_objective(self, objective: Objective) -> None:
        """Check with two synthetic pairs that the objective gets the annotations that it needs.

        A user-defined supervision, whose annotations are not declared, is not checked.

        Args:
            objective: The objective of the phase.

        Raises:
            MissingSupervision: If an annotation is missing.
        """
        if self._supplied or self.pairs_only:
            shapes = {
                annotation.name: [2]
                * (2 if annotation.shape == "pairwise" else 1 + len(annotation.axes))
                for annotation in self._supplied
            }
            annotations = {name: torch.zeros(shape) for name, shape in shapes.items()}
            objective(torch.zeros(2, 2), Targets.paired(2, **annotations))

    @property
    def _supplied(self) -> tuple[Annotation, ...]:
        """The annotations that `targets.ANNOTATIONS` declares for this class."""
        return tuple(
            annotation for annotation in ANNOTATIONS if type(self).__name__ in annotation.suppliers
        )

    def check(self, train: Loader, validation: Loader) -> None:  # noqa: B027 - most work with any batches
        """Check the batches. Called for every phase before the training begins.

        Args:
            train: Training batches.
            validation: Validation batches.

        Raises:
            RecipeError: If the supervision does not work with these batches.
        """

    def files(self, data: Dataset) -> list[Path]:
        """List the files that are read in addition to the data set, so that a resumed run can check
        them.

        Args:
            data: The data set.

        Returns:
            Paths of the files.
        """
        return []

    def extra_texts(self, split: Dataset) -> Sequence[str]:
        """Return texts that batches can hold besides the captions, such as edited captions.

        Args:
            split: Training split.

        Returns:
            The texts. Their numbers follow the captions of the split. `extend_batches` adds them to
            batches.
        """
        return ()

    def extend_batches(self, train: Loader) -> Loader:
        """Add items to the training batches of a phase. Called before ``begin_phase``.

        Args:
            train: Training batches of the recipe.

        Returns:
            Training batches of the phase.
        """
        return train

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:  # noqa: B027 - optional
        """Prepare a phase. Called once before its first batch.

        Args:
            context: Parts of the training.
            state: Result of ``state_dict`` if a run is resumed, or of ``carried_over`` if the
                previous phase had the same supervision. Else empty.
        """

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 - optional
        """Prepare an epoch. Called before its first batch, but not when a run resumes in its
        middle.

        Args:
            epoch: Number of the epoch.
        """

    @abstractmethod
    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build the targets of a batch, in training and for the validation loss.

        Args:
            visual: Encoded images of the batch.
            text: Encoded texts of the batch.
            batch: The batch.

        Returns:
            The targets.
        """

    def observe(self, batch: Batch, loss: float) -> None:  # noqa: B027 - optional
        """Receive the loss of a training batch. Called after every batch.

        Args:
            batch: The batch.
            loss: Its loss.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that an exact resume needs, as tensors by name."""
        return {}

    def carried_over(self) -> dict[str, Tensor]:
        """Return the part of the state that is carried over to the next phase with the same
        supervision.
        """
        return self.state_dict()


@dataclass(frozen=True, kw_only=True)
class PairSupervision(Supervision):
    """Supervision by pairs of images and captions only.

    Attributes:
        by: "ids": all captions of an image are positives. "texts": also all captions that have the
            same text as one of its captions in the split (see `visavis.data.equal_texts`).
            "position": only caption i is a positive of image i, as in the code of the papers. Other
            captions of the same image in the batch are then negatives.
    """

    pairs_only: ClassVar[bool] = True

    by: Literal["ids", "texts", "position"] = "ids"

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def one_process_only(self) -> str:  # type: ignore[override]
        """Why the whole batch must be in one process. See `Supervision`."""
        return "it compares all texts of a batch" if self.by == "texts" else ""

    def check(self, train: Loader, validation: Loader) -> None:
        """Check that the captions of the whole split are known. See `Supervision.check`."""
        if self.by == "texts" and isinstance(train.data.images, StreamImages):
            raise RecipeError(
                "PairSupervision(by='texts'): expected a data set, got shards that are read one "
                "after the other. Use by='ids', or remove data.stream."
            )

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build the targets from ids or positions. See `Supervision.targets`."""
        if self.by == "position":
            return Targets.paired(len(batch.text_ids)).to(batch.text_ids.device)
        targets = Targets(query_ids=batch.image_ids, candidate_ids=batch.text_ids)
        if self.by == "ids":
            return targets
        # Texts that equal a caption of an image are its positives, also if that caption is not in
        # the batch.
        data = batch.loader.data
        keys = data.text_keys
        groups = data.captions_of
        own = keys[torch.from_numpy(groups.select(batch.images))]
        image = torch.from_numpy(np.arange(len(batch.images)).repeat(groups.counts[batch.images]))
        pairs = equal_text_pairs(image, own, keys[torch.from_numpy(batch.captions)])
        # Without equal texts, ids suffice. With ids, the loss takes faster paths.
        if len(pairs[0]) == len(targets.positive_pairs([])[0]):
            return targets
        return Targets.from_pairs(*pairs, *targets.shape).to(batch.text_ids.device)
