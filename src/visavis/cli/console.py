"""Tables and lines with colors on stdout, and progress bars on stderr.

rich is imported when it prints, because most commands end before and print plain lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from threading import RLock, Timer
from typing import TYPE_CHECKING, Self

from visavis.cli.terminal import escape_control_characters, print_line
from visavis.core.progress import TrainingStep
from visavis.core.result import Result
from visavis.core.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from visavis.cli.safe_console import SafeConsole


def standard_output() -> SafeConsole:
    """Return a console for stdout as it is now."""
    from visavis.cli.safe_console import SafeConsole

    return SafeConsole(file=sys.stdout, highlight=False)


def print_markup(text: str) -> None:
    """Print a line on stdout. Terminals wrap it."""
    standard_output().print(text, soft_wrap=True)


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables with their titles and notes on stdout, separated by empty lines. A note of
    several tables is printed below the last one.
    """
    from rich.markup import escape

    from visavis.core.table_formats import text_lines

    for number, table in enumerate(tables):
        if number:
            print_line("")
        if table.title:
            print_markup(f"[bold]{escape(table.title)}[/bold]")
        for line, is_heading in text_lines(table):
            if is_heading:
                print_markup(f"[bold]{escape(line)}[/bold]")
            else:
                print_line(line)
        later = {note for other in tables[number + 1 :] for note in other.notes}
        for note in table.notes:
            if note not in later:
                print_line(note)


def print_result(result: Result | Iterable[Result]) -> None:
    """Print the tables of a result, or of several results, on stdout."""
    results = [result] if isinstance(result, Result) else result
    print_tables([table for each in results for table in each.tables()])


MIN_SHOWN_WAIT_SHARE = 0.05
"""Share of the training time spent waiting for data, above which the progress shows it."""

LINE_INTERVAL_S = 30.0
"""Minimum seconds between two lines of progress in a file or a pipe."""


SHOWN_AFTER_S = 1.0
"""Seconds after which a command shows its progress. A faster one shows none."""


class ProgressBars:
    """Progress that draws bars on stderr if it is a terminal, else prints a line every 30 seconds.

    The bars are drawn from the first second on, as long as something is in progress, so that a
    server that has started logs to a terminal without bars. Errors of a terminal that was closed
    are ignored, so that the work continues.

    Args:
        title: Activity that is shown while no other one is. Empty: none.
    """

    def __init__(self, title: str = "") -> None:
        self.draws_bars = sys.stderr.isatty()
        self.tasks: dict[str, TaskID] = {}
        self.first_done: dict[str, tuple[float, int]] = {}
        # The innermost activity is the last one.
        self.activities = [title] if title else []
        self.created = self.last_line_time = time.monotonic()
        self.lock = RLock()
        self.closed = False
        self.timer = Timer(SHOWN_AFTER_S, self._refresh)
        self.timer.daemon = True

    @cached_property
    def console(self) -> SafeConsole:
        """Console of messages on stderr."""
        from visavis.cli.safe_console import SafeConsole

        return SafeConsole(stderr=True, highlight=False)

    @cached_property
    def progress(self) -> Progress:
        """The bars."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        return Progress(*columns, console=self.console, transient=True)

    @cached_property
    def activity_task(self) -> TaskID:
        """The bar of activities of unknown length."""
        return self.progress.add_task("", total=None, note="", visible=False)

    def __enter__(self) -> Self:
        # Before version 15, rich prints an empty line even if it shows no bars.
        if self.draws_bars:
            self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        with self.lock:
            self.closed = True
            self._refresh()

    def _refresh(self) -> None:
        """Draw the bars, or the innermost activity, if the first second is over."""
        if not self.draws_bars or time.monotonic() - self.created < SHOWN_AFTER_S:
            return
        with self.lock, suppress(OSError):
            has_bars = any(self.progress.tasks[task].visible for task in self.tasks.values())
            shows_activity = bool(self.activities) and not has_bars
            # The first access adds the bar, so it comes before the list is copied.
            activity_task = self.activity_task
            shown = self.progress.tasks[activity_task]
            if shows_activity and not (shown.visible and shown.description == self.activities[-1]):
                # Its time starts again.
                self.progress.reset(self.activity_task, description=self.activities[-1])
            self.progress.update(self.activity_task, visible=shows_activity)
            is_active = (has_bars or shows_activity) and not self.closed
            if is_active and not self.progress.live.is_started:
                self.progress.start()
            elif self.progress.live.is_started and not is_active:
                self.progress.stop()

    def message(self, text: str) -> None:
        """Print a message."""
        from rich.markup import escape

        with suppress(OSError):
            self.console.print(escape(text), soft_wrap=True)

    def update(self, task: str, done: int, total: int, items_per_second: float) -> None:
        """Show the progress of a task, with the time that is left."""
        now = time.monotonic()
        first_time, first_done = self.first_done.setdefault(task, (now, done))
        speed = items_per_second or (done - first_done) / max(now - first_time, 1e-9)
        note = f"{done:,}/{total:,}"
        if items_per_second:
            note += f"  {items_per_second:,.{int(items_per_second < 10)}f}/s"
        if speed and now - first_time >= SHOWN_AFTER_S:
            note += f"  {_format_duration((total - done) / speed)} left"
        if done >= total:
            # The next task of this name has a time of its own.
            del self.first_done[task]
        self._show(task, task, done, total, note)

    @contextmanager
    def activity(self, task: str) -> Iterator[None]:
        """Show that a task of unknown length is in progress."""
        self.activities.append(escape_control_characters(task))
        self._refresh()
        try:
            yield
        finally:
            self.activities.pop()
            self._refresh()

    def training_step(self, step: TrainingStep) -> None:
        """Show the progress of a training."""
        phase = f"phase {step.phase + 1}/{step.phases} " if step.phases > 1 else ""
        rsum = "" if step.rsum is None else f"  RSUM {step.rsum:.1f}"
        waiting = (
            f"  {step.data_wait_share:.0%} waiting for data"
            if step.data_wait_share > MIN_SHOWN_WAIT_SHARE
            else ""
        )
        note = f"loss {step.loss:.4g}{rsum}  {step.pairs_per_second:,.0f} pairs/s{waiting}  {_format_duration(step.seconds_left)} left"
        done = step.epoch * step.steps + step.step
        self._show(
            "training",
            f"{phase}epoch {step.epoch + 1}/{step.epochs}",
            done,
            step.epochs * step.steps,
            note,
        )

    def _show(self, key: str, title: str, done: int, total: int, note: str) -> None:
        # Threads share the bars, which are made at the first access.
        with self.lock:
            title = escape_control_characters(title)
            if not self.draws_bars:
                if (now := time.monotonic()) - self.last_line_time >= LINE_INTERVAL_S:
                    self.last_line_time = now
                    self.message(f"{title}: {note}")
                return
            if key not in self.tasks:
                self.tasks[key] = self.progress.add_task(title, total=total, note=note)
            visible = done < total or key == "training"
            self.progress.update(
                self.tasks[key],
                description=title,
                completed=done,
                total=total,
                note=note,
                visible=visible,
            )
            self._refresh()


def _format_duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
