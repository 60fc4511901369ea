"""The pictures of a comparison: how far every choice is behind the best, and how sure that is; what one number does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from visavis.comparison.bootstrap import Drawn
from visavis.comparison.statistics import Paired
from visavis.comparison.sweep import Sweep
from visavis.report.figures import LIGHT, Theme, dress, legend, new_figure, png

if TYPE_CHECKING:
    from visavis.comparison.statistics import Interval

WIDE = 10
"""Values whose largest is so many times the smallest are drawn by their logarithm."""


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


def sweep_picture(sweep: Sweep, theme: Theme = LIGHT) -> bytes:
    """Mean RSUM against the number that was varied, with 95 % intervals over seeds: validation as full lines, test as dashed ones.

    Source: Unified loss, figure 5.
    """
    figure = new_figure(8.6, 3.4 + 0.2 * len(sweep.curves), theme)
    from matplotlib.transforms import offset_copy  # once new_figure has found matplotlib

    axes = figure.add_subplot()
    splits = (("validation", "-", 0), ("test", (0, (3, 1.6)), 1))
    for number, (name, curve) in enumerate(sweep.curves.items()):
        for points, (split, style, second) in zip(curve, splits, strict=True):
            color = theme.lines[(number if len(sweep.curves) > 1 else second) % len(theme.lines)]
            beside = offset_copy(axes.transData, figure, x=5 * number + 2.5 * second, units="points")  # bars of one value stand apart
            lines = axes.plot([one.value for one in points], [one.mean for one in points], "o", linestyle=style, color=color, markersize=4)
            lines[0].set_label(", ".join(filter(None, (name, split))))
            for one in points:
                if one.interval is not None:
                    ends = one.interval.low, one.interval.high
                    lines += axes.plot([one.value] * 2, ends, color=color, linewidth=1.2, alpha=0.7)
            for line in lines:
                line.set_transform(beside)
    values = sorted({point.value for validation, _ in sweep.curves.values() for point in validation})
    if values[0] > 0 and values[-1] >= WIDE * values[0]:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    dress(axes, "RSUM", theme, sweep.name)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, **legend(theme) | {"handlelength": 2.6})
    figure.tight_layout()
    return png(figure)


def _line(axes: object, interval: Interval | None, place: float, color: str, width: float) -> None:
    if interval is not None:
        axes.plot([interval.low, interval.high], [place, place], color=color, linewidth=width, solid_capstyle="round")  # type: ignore[attr-defined]
