"""How long-running verbs report their progress: the command line draws bars from it, a script may ignore it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TrainingStep:
    """A step of training: step of steps in this epoch, epoch of epochs in this phase, phase of phases. loss: the mean since the last
    validation. rsum: of that validation. pairs_per_s: captions per second. seconds_left: until the end of all phases.
    """

    phase: int
    phases: int
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    rsum: float | None
    pairs_per_s: float
    seconds_left: float


class Progress(Protocol):
    """``say`` a sentence, show ``work`` (done of total, items a second; 0 if unknown), show a ``step`` of training."""

    def say(self, sentence: str) -> None: ...
    def work(self, what: str, done: int, total: int, per_s: float) -> None: ...
    def step(self, step: TrainingStep) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def say(self, sentence: str) -> None: ...
    def work(self, what: str, done: int, total: int, per_s: float) -> None: ...
    def step(self, step: TrainingStep) -> None: ...
