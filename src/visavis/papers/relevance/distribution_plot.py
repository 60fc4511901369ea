"""Plot of the relevance of random pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from visavis.research.reports.html_report import (
    DASH_PATTERN,
    LIGHT_THEME,
    PlotTheme,
    figure_to_png,
    new_figure,
    style_axes,
    with_own_style,
)

if TYPE_CHECKING:
    from visavis.papers.relevance.estimator_quality import RelevanceDistribution


@with_own_style
def plot_relevance_distributions(
    rows: Sequence[RelevanceDistribution], theme: PlotTheme = LIGHT_THEME
) -> bytes:
    """Plot the distribution of relevance for each estimator, with suggested thresholds as lines.
    The Ladder paper's 0.63 is dashed.
    """
    figure = new_figure(8.6, 0.35 + 1.25 * len(rows), theme)
    for number, (row, axes) in enumerate(
        zip(rows, figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0], strict=True)
    ):
        bins = len(row.histogram)
        first_share = row.histogram[0] / row.pairs
        axes.bar(
            [(i + 0.5) / bins for i in range(bins)],
            row.histogram,
            1 / bins,
            color=theme.lines[number % len(theme.lines)],
        )
        # Suggested thresholds, and the first one of the Ladder paper.
        for value in row.quantiles:
            axes.axvline(value, color=theme.foreground, linewidth=0.9)
        axes.axvline(0.63, color=theme.foreground, linewidth=0.9, linestyle=DASH_PATTERN)
        style_axes(
            axes,
            row.estimator
            if first_share < 0.1
            else f"{row.estimator}   (axis cut: {first_share:.0%} are below 0.01)",
            theme,
        )
        # A peak at 0 would flatten everything else.
        top = 1.1 * max(row.histogram if first_share < 0.1 else row.histogram[1:])
        axes.set(
            xlim=(0, 1),
            ylim=(0, top or 1),
            yticks=[],
            xlabel="relevance of a random pair" if number == len(rows) - 1 else "",
        )
    figure.tight_layout()
    return figure_to_png(figure)
