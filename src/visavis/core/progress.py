"""Progress of long-running functions: the command line draws bars from it, a script may ignore it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        """Show a message."""

    def update(self, task: str, done: int, total: int, items_per_second: float) -> None:
        """Show the progress of a task."""

    def activity(self, task: str) -> AbstractContextManager[None]:
        """Show that a task of unknown length is in progress, such as loading a model."""
        ...

    def training_step(self, step: TrainingStep) -> None:
        """Show the progress of a training."""


class NoProgress:
    """Progress that shows nothing."""

    def message(self, text: str) -> None:
        """Ignore a message."""

    def update(self, task: str, done: int, total: int, items_per_second: float) -> None:
        """Ignore the progress of a task."""

    def activity(self, task: str) -> AbstractContextManager[None]:
        """Ignore a task of unknown length."""
        return nullcontext()

    def training_step(self, step: TrainingStep) -> None:
        """Ignore the progress of a training."""


class BarsOnly(NoProgress):
    """Progress that forwards bars, but no messages, such as the messages of a step within another
    one.

    Args:
        progress: Receives the bars.
    """

    def __init__(self, progress: Progress):
        self.progress = progress

    def update(self, task: str, done: int, total: int, items_per_second: float) -> None:
        """Forward the progress of a task."""
        self.progress.update(task, done, total, items_per_second)

    def activity(self, task: str) -> AbstractContextManager[None]:
        """Forward a task of unknown length."""
        return self.progress.activity(task)

    def training_step(self, step: TrainingStep) -> None:
        """Forward the progress of a training."""
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
        """Report items if a report is due."""
        now = time.monotonic()
        is_first = self.reported == self.started
        if now - self.reported >= REPORT_INTERVAL_S or (done >= self.total and not is_first):
            self.reported = now
            self.progress.update(self.task, done, self.total, done / (now - self.started))


OTHER_STAGE = "other"
"""Stage of a job outside of all named stages."""


class StageClock:
    """Measures the duration of each stage of a job. Each moment belongs to the innermost stage, so
    that the durations add up to the duration of the job.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stage = OTHER_STAGE
        self._since = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of this block as a stage."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def read(self) -> dict[str, float]:
        """Return the seconds of each stage until now."""
        self._switch(self._stage)
        return dict(self._seconds)

    def _switch(self, stage: str) -> str:
        """Begin or continue a stage. Returns the previous one."""
        now = time.monotonic()
        previous = self._stage
        self._seconds[previous] = self._seconds.get(previous, 0.0) + now - self._since
        self._stage = stage
        self._since = now
        return previous
