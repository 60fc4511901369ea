"""Tables and lines with colors on stdout, and progress bars on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock, Timer
from typing import Any, NoReturn, Self

from rich import console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from visavis.cli.terminal import escape_control_characters, exit_quietly, print_line
from visavis.core.progress import TrainingStep


class SafeConsole(console.Console):
    """Console that escapes control characters and exits quietly when its reader has left."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render markup after escaping control characters.

        Args:
            text: Text with markup of rich.
            options: Further options of rich.

        Returns:
            The rendered text.
        """
        return super().render_str(escape_control_characters(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Exit without a message."""
        exit_quietly()


def standard_output() -> SafeConsole:
    """Return a console for stdout as it is now."""
    return SafeConsole(file=sys.stdout, highlight=False)


def print_markup(text: str) -> None:
    """Print a line on stdout. Terminals wrap it.

    Args:
        text: Text with markup of rich.
    """
    standard_output().print(text, soft_wrap=True)


MIN_TABLE_WIDTH = 150
"""Characters that a table may have on a narrow terminal: a line that is too wide is better than a
truncated one.
"""


def print_result_table(result: Any) -> None:
    """Print the table of a result.

    Args:
        result: Result with a method ``table``, which returns a `visavis.core.table.Table`.
    """
    table = result.table()
    print_table(table.columns, table.rows, text_columns=table.text_columns)
    for note in table.notes:
        print_line(note)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, text_columns: int = 1
) -> None:
    """Print a table on stdout.

    Args:
        columns: Titles.
        rows: Cells, as plain texts or with a style.
        text_columns: Number of columns at the start that are aligned to the left. The others are
            aligned to the right.
    """
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        is_text = number < text_columns
        table.add_column(
            column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    console = standard_output()
    console.width = max(console.width, MIN_TABLE_WIDTH)
    console.print(table)


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
        self.console = SafeConsole(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        )
        self.tasks: dict[str, TaskID] = {}
        self.first_done: dict[str, tuple[float, int]] = {}
        # The innermost activity is the last one.
        self.activities = [title] if title else []
        self.activity_task = self.progress.add_task("", total=None, note="", visible=False)
        self.created = self.last_line_time = time.monotonic()
        self.lock = RLock()
        self.closed = False
        self.timer = Timer(SHOWN_AFTER_S, self._refresh)
        self.timer.daemon = True

    def __enter__(self) -> Self:
        # Before version 15, rich prints an empty line even if it shows no bars.
        if not self.progress.disable:
            self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        with self.lock:
            self.closed = True
            self._refresh()

    def _refresh(self) -> None:
        """Draw the bars, or the innermost activity, if the first second is over."""
        if self.progress.disable or time.monotonic() - self.created < SHOWN_AFTER_S:
            return
        with self.lock, suppress(OSError):
            has_bars = any(self.progress.tasks[task].visible for task in self.tasks.values())
            shows_activity = bool(self.activities) and not has_bars
            shown = self.progress.tasks[self.activity_task]
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
        """Print a message.

        Args:
            text: Plain text.
        """
        with suppress(OSError):
            self.console.print(escape(text), soft_wrap=True)

    def update(self, task: str, done: int, total: int, items_per_second: float) -> None:
        """Show the progress of a task, with the time that is left.

        Args:
            task: Name of the task.
            done: Items that are done.
            total: All items.
            items_per_second: Speed, 0 if unknown.
        """
        now = time.monotonic()
        first_time, first_done = self.first_done.setdefault(task, (now, done))
        speed = items_per_second or (done - first_done) / max(now - first_time, 1e-9)
        note = f"{done:,}/{total:,}"
        if items_per_second >= 1:
            note += f"  {items_per_second:,.0f}/s"
        if speed and now - first_time >= SHOWN_AFTER_S:
            note += f"  {_format_duration((total - done) / speed)} left"
        if done >= total:
            # The next task of this name has a time of its own.
            del self.first_done[task]
        self._show(task, task, done, total, note)

    @contextmanager
    def activity(self, task: str) -> Iterator[None]:
        """Show that a task of unknown length is in progress.

        Args:
            task: Name of the task.

        Yields:
            Nothing.
        """
        self.activities.append(escape_control_characters(task))
        self._refresh()
        try:
            yield
        finally:
            self.activities.pop()
            self._refresh()

    def training_step(self, step: TrainingStep) -> None:
        """Show the progress of a training.

        Args:
            step: Position, loss and speed.
        """
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
        title = escape_control_characters(title)
        if self.progress.disable:
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
