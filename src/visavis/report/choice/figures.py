"""The picture of a comparison: how far every choice is behind the best, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from visavis.comparison.bootstrap import Drawn
from visavis.comparison.statistics import Paired
from visavis.report.figures import LIGHT, Theme, dress, new_figure, png

if TYPE_CHECKING:
    from visavis.comparison.statistics import Interval


def differences_picture(pairs: Sequence[tuple[Paired, Drawn]], theme: Theme = LIGHT) -> bytes:
    """A line a choice: the best minus it, with its 95 % interval over seeds (thick) and over test images (thin)."""
    figure = new_figure(8.6, 1.1 + 0.42 * len(pairs), theme)
    axes = figure.add_subplot()
    for place, (pair, drawn) in enumerate(reversed(pairs)):
        for interval, width, offset in ((pair.interval, 3.2, 0.12), (drawn.interval, 1.2, -0.14)):
            _line(axes, interval, place + offset, theme.lines[1] if width > 2 else theme.lines[0], width)
        axes.plot([pair.difference], [place + 0.12], "o", color=theme.lines[1], markersize=6)
        axes.plot([drawn.value], [place - 0.14], "o", color=theme.lines[0], markersize=3.5)
    axes.axvline(0, color=theme.ink, linewidth=0.9, linestyle=(0, (2, 1.4)))
    axes.set_yticks(range(len(pairs)), [pair.b.replace("$", r"\$") for pair, _ in reversed(pairs)])
    axes.set_ylim(-0.6, len(pairs) - 0.4)
    dress(axes, "test RSUM by which the best is ahead", theme, "95 % intervals: thick over seeds, thin over test images")
    figure.tight_layout()
    return png(figure)


def _line(axes: object, interval: Interval | None, place: float, color: str, width: float) -> None:
    if interval is not None:
        axes.plot([interval.low, interval.high], [place, place], color=color, linewidth=width, solid_capstyle="round")  # type: ignore[attr-defined]
