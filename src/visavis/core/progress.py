"""Progress of long-running functions: the command line draws bars from it, a script may ignore it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TrainingStep:
    """Position, loss and speed of a training.

    Attributes:
        phase: Index of the phase, from 0.
        phases: Number of phases.
        epoch: Index of the epoch in this phase, from 0.
        epochs: Number of epochs of this phase.
        step: Number of finished steps of this epoch.
        steps: Number of steps of an epoch.
        loss: Mean loss since the last validation.
        rsum: RSUM of the last validation, or None before the first.
        pairs_per_second: Captions per second.
        seconds_left: Estimated seconds until the end of all phases.
        data_wait_share: Share of the training time since the last validation that was spent waiting
            for batches.
    """

    phase: int
    phases: int
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    rsum: float | None
    pairs_per_second: float
    seconds_left: float
    data_wait_share: float = 0.0


class Progress(Protocol):
    """Receiver of messages and progress."""

    def message(self, text: str) -> None:
        """Show a message.

        Args:
            text: Plain text.
        """

    def update(self, task: str, done: int, total: int, items_per_second: float) -> None:
        """Show the progress of a task.

        Args:
            task: Name of the task.
            done: Items that are done.
            total: All items.
            items_per_second: Speed, 0 if unknown.
        """

    def training_step(self, step: TrainingStep) -> None:
        """Show the progress of a training.

        Args:
            step: Position, loss and speed.
        """


class NoProgress:
    """Progress that shows nothing."""

    def message(self, text: str) -> None:
        """Ignore a message.

        Args:
            text: Plain text.
        """

    def update(self, task: str, done: int, total: int, items_per_second: float) -> None:
        """Ignore the progress of a task.

        Args:
            task: Name of the task.
            done: Items that are done.
            total: All items.
            items_per_second: Speed, 0 if unknown.
        """

    def training_step(self, step: TrainingStep) -> None:
        """Ignore the progress of a training.

        Args:
            step: Position, loss and speed.
        """
