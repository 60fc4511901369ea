"""Progress on stderr: bars on a terminal, else a line now and then."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from visavis.cli.output.console import Console
from visavis.cli.terminal import visible
from visavis.progress import TrainingStep

LINE_S = 30.0
"""The least time between two lines of progress in a file or a pipe."""


class Bars:
    """A Progress that draws bars on stderr if it is a terminal: one for each kind of work, one for training; else it prints a line every half
    minute of how far the work is, so that a log tells that something happens.

    A terminal that was closed sees nothing, and the work goes on.
    """

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.tasks: dict[str, TaskID] = {}
        self.line_at = time.monotonic()

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.progress.stop()

    def say(self, sentence: str) -> None:
        with suppress(OSError):
            self.console.print(escape(sentence), soft_wrap=True)

    def work(self, what: str, done: int, total: int, per_s: float) -> None:
        self._show(what, what, done, total, f"{done:,}/{total:,}" + (f"  {per_s:,.0f}/s" if per_s else ""))

    def step(self, step: TrainingStep) -> None:
        phase = f"phase {step.phase + 1}/{step.phases} " if step.phases > 1 else ""
        rsum = "" if step.rsum is None else f"  RSUM {step.rsum:.1f}"
        note = f"loss {step.loss:.4g}{rsum}  {step.pairs_per_s:,.0f} pairs/s  {_duration(step.seconds_left)} left"
        done = step.epoch * step.steps + step.step
        self._show("training", f"{phase}epoch {step.epoch + 1}/{step.epochs}", done, step.epochs * step.steps, note)

    def _show(self, key: str, title: str, done: int, total: int, note: str) -> None:
        title = visible(title)
        if self.progress.disable:
            self._line(f"{title}: {note}")
            return
        if key not in self.tasks:
            self.tasks[key] = self.progress.add_task(title, total=total, note=note)
        task = self.tasks[key]
        self.progress.update(task, description=title, completed=done, total=total, note=note, visible=done < total or key == "training")

    def _line(self, line: str) -> None:
        if (now := time.monotonic()) - self.line_at >= LINE_S:
            self.line_at = now
            self.say(line)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
