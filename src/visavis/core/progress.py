"""Progress of long-running functions: the command line draws bars from it, a script may ignore it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
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

    def activity(self, task: str) -> AbstractContextManager[None]:
        """Show that a task of unknown length is in progress, such as loading a model.

        Args:
            task: Name of the task.

        Returns:
            Context of the task.
        """
        ...

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

    def activity(self, task: str) -> AbstractContextManager[None]:
        """Ignore a task of unknown length.

        Args:
            task: Name of the task.

        Returns:
            Context that does nothing.
        """
        return nullcontext()

    def training_step(self, step: TrainingStep) -> None:
        """Ignore the progress of a training.

        Args:
            step: Position, loss and speed.
        """


class BarsOnly(NoProgress):
    """Progress that forwards bars, but no messages, such as the messages of a step within another
    one.

    Args:
        progress: Receives the bars.
    """

    def __init__(self, progress: Progress):
        self.progress = progress

    def update(self, task: str, done: int, total: int, items_per_second: float) -> None:
        """Forward the progress of a task.

        Args:
            task: Name of the task.
            done: Items that are done.
            total: All items.
            items_per_second: Speed, 0 if unknown.
        """
        self.progress.update(task, done, total, items_per_second)

    def activity(self, task: str) -> AbstractContextManager[None]:
        """Forward a task of unknown length.

        Args:
            task: Name of the task.

        Returns:
            Context of the task.
        """
        return self.progress.activity(task)

    def training_step(self, step: TrainingStep) -> None:
        """Forward the progress of a training.

        Args:
            step: Position, loss and speed.
        """
        self.progress.training_step(step)


REPORT_INTERVAL_S = 0.5
"""Seconds between two reports of the items of a task."""


class ItemCounter:
    """Reports the encoded items of a task twice a second, and nothing for a faster task.

    Args:
        progress: Receives the reports.
        task: Name of the task.
        total: All items.
    """

    def __init__(self, progress: Progress, task: str, total: int):
        self.progress = progress
        self.task = task
        self.total = total
        self.started = self.reported = time.monotonic()

    def __call__(self, done: int) -> None:
        """Report items if a report is due.

        Args:
            done: Items that are done.
        """
        now = time.monotonic()
        is_first = self.reported == self.started
        if now - self.reported >= REPORT_INTERVAL_S or (done >= self.total and not is_first):
            self.reported = now
            self.progress.update(self.task, done, self.total, done / (now - self.started))
