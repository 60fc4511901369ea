"""Report of a diagnosis: contributing samples, their dependence on epsilon, and training curves."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from functools import partial

from visavis.core.encoded import DIRECTIONS
from visavis.core.environment import shell_command
from visavis.evaluation.published_row import MEASURES
from visavis.research.diagnostics.contribution_analysis import (
    ContributionAnalysis,
    ContributionCount,
)
from visavis.research.reports.html_report import ThemedImage, render_report
from visavis.research.reports.plotting import (
    LIGHT_THEME,
    PlotTheme,
    TrainingCurve,
    figure_to_png,
    legend_style,
    new_figure,
    plot_training_curves,
    style_axes,
)
from visavis.training.runs.run_folder import RunFolder


def render_diagnosis(diagnosis: ContributionAnalysis) -> str:
    """Render the report. Training curves are shown if the run has a log.

    Args:
        diagnosis: Counts and weights of contributing samples.

    Returns:
        The HTML page.
    """
    files = RunFolder(diagnosis.run)
    curves = None
    if os.path.exists(files.log):
        name = diagnosis.counts[0].objective.partition("(")[0]
        curves = ThemedImage.draw(
            partial(plot_training_curves, [TrainingCurve(name, files.read_log())])
        )
    epsilons = " ".join(f"--epsilon {epsilon:g}" for epsilon in diagnosis.epsilons)
    return render_report(
        "diagnosis",
        diagnosis=diagnosis,
        objectives=list(dict.fromkeys(count.objective for count in diagnosis.counts)),
        measures=list(MEASURES.values()),
        rows=list(_table_rows(diagnosis)),
        sweep=ThemedImage.draw(partial(plot_epsilon, diagnosis))
        if len(diagnosis.epsilons) > 1
        else None,
        curves=curves,
        command=f"{shell_command()} diagnose {shlex.quote(str(diagnosis.run))} --checkpoint {diagnosis.checkpoint} {epsilons}",
    )


def _table_rows(diagnosis: ContributionAnalysis) -> Iterator[list[str]]:
    for count in diagnosis.counts:
        released = ", as in the released code" if count.semantics == "reference" else ""
        name = f"{count.objective.partition('(')[0]}{released}, epsilon {count.epsilon:g}"
        for direction, title in DIRECTIONS.items():
            values = (
                (count.mean[f"{direction}_{measure}"], count.std[f"{direction}_{measure}"])
                for measure in MEASURES
            )
            yield [
                f"{name}, {title}",
                *("-" if math.isnan(mean) else f"{mean:.2f} ± {std:.2f}" for mean, std in values),
            ]


def plot_epsilon(diagnosis: ContributionAnalysis, theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot C^q over all queries, C^B and C^0 against epsilon, as means of both directions.

    Args:
        diagnosis: Counts at several epsilons.
        theme: Colors.

    Returns:
        A PNG. Each objective has a color, and its effective number of negatives is dotted.
    """
    figure = new_figure(8.6, 3.1, theme)
    counts = [count for count in diagnosis.counts if count.semantics == "paper"]
    for panel, (measure, title) in enumerate(
        (("per_query", "C^q, all queries"), ("in_batch", "C^B"), ("idle", "C^0"))
    ):
        axes = figure.add_axes((0.07 + 0.325 * panel, 0.17, 0.262, 0.64))
        for number, objective in enumerate(dict.fromkeys(count.objective for count in counts)):
            curve = sorted(
                (count for count in counts if count.objective == objective),
                key=lambda count: count.epsilon,
            )
            color, name = theme.lines[number % len(theme.lines)], objective.partition("(")[0]
            means = [_mean_of_directions(count, measure) for count in curve]
            axes.plot(
                [count.epsilon for count in curve],
                means,
                "o-",
                color=color,
                markersize=4,
                label=name,
            )
            if measure == "per_query":
                axes.axhline(
                    _mean_of_directions(curve[0], "effective"),
                    color=color,
                    linestyle=":",
                    linewidth=1.4,
                )
        style_axes(axes, title, theme, "epsilon")
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        if panel == 0:
            axes.legend(**legend_style(theme, 2.0))
    return figure_to_png(figure)


def _mean_of_directions(count: ContributionCount, measure: str) -> float:
    return (count.mean[f"i2t_{measure}"] + count.mean[f"t2i_{measure}"]) / 2
