"""Whoever wants to see a long verb at work: the command line draws bars from it, a script may keep silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TrainingStep:
    """A step of training. step of steps in this epoch, epoch of epochs in this phase, phase of phases; the mean loss since
    the last validation, its RSUM, captions a second, and the seconds left if all phases run to their end.
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
    """Watches nothing."""

    def say(self, sentence: str) -> None: ...
    def work(self, what: str, done: int, total: int, per_s: float) -> None: ...
    def step(self, step: TrainingStep) -> None: ...
