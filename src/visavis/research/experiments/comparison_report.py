"""Report of a comparison: results, significance, contributing samples, capability tests and example
queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from visavis.core import storage
from visavis.core.environment import quote_argument, shell_command
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress, Progress
from visavis.core.table import Column, Row, Table
from visavis.data.dataset import Dataset
from visavis.evaluation.bootstrap import BootstrapEstimate
from visavis.evaluation.metrics.catalog import RSUM
from visavis.evaluation.protocols import get_protocol, get_protocols
from visavis.evaluation.query_ranks import read_query_ranks
from visavis.evaluation.statistics import PairedTest, format_number
from visavis.losses.scoring import select_items
from visavis.models.inference import score_all_pairs
from visavis.research.experiments.comparison_result import Comparison, Sweep
from visavis.research.experiments.grid import Setting
from visavis.research.experiments.jobs import RunOutcome
from visavis.research.reports.comparison_sections import report_sections
from visavis.research.reports.gradient_flow import flow_section, read_gradient_flow
from visavis.research.reports.html_report import (
    DASH_PATTERN,
    LIGHT_THEME,
    PlotTheme,
    ThemedImage,
    Thumbnails,
    TrainingCurve,
    figure_to_png,
    legend_style,
    new_figure,
    plot_training_curves,
    render_report,
    style_axes,
    with_own_style,
)
from visavis.training.evaluation.ranked_split import select_captions
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from visavis.evaluation.statistics import Interval


SPLIT_STYLES: tuple[tuple[str, Any], ...] = (("validation", "-"), ("test", (0, (3, 1.6))))
"""Line styles of the splits in the plot of sweeps."""
MIN_LOG_RATIO = 10
"""Ratio of the largest to the smallest value from which a sweep has a logarithmic axis."""


NUM_IMAGES = 5
"""Number of images shown per query."""


def write_comparison_report(comparison: Comparison, progress: Progress) -> None:
    """Write ``report.html`` and its plots to the folder of a comparison."""
    # The results are written first, and written again with the further sections, which take longer.
    with progress.activity("report"):
        render = _report_renderer(comparison)
        file = comparison.folder / "report.html"
        storage.write_text(file, render(measured_sections={}, is_complete=False))
    measured = dict[str, Table]()
    for section in report_sections():
        # The first run of each setting is measured. Settings that cannot be measured are left out.
        results = dict[str, Any]()
        for number, setting in enumerate(comparison.selected):
            progress.update(section.TITLE.lower(), number, len(comparison.selected), 0)
            try:
                results[setting.name] = section.measure(comparison.runs(setting)[0].folder)
            except VisavisError as error:
                progress.message(f"report: {section.TITLE} without {setting.name}: {error}")
        if results:
            measured[section.TITLE] = section.table(results)
    storage.write_text(file, render(measured_sections=measured, is_complete=True))


def _report_renderer(comparison: Comparison) -> Callable[..., str]:
    """Draw the plots and collect the examples, and return a function that renders the page with the
    given measurements.
    """
    folder = comparison.folder
    examples = example_queries(comparison)
    sweeps = comparison.sweeps
    logs = [
        TrainingCurve(setting.name, RunFolder(run.folder).read_log())
        for setting in comparison.selected
        for run in comparison.comparable_runs(setting)
    ]
    tests = comparison.differences_from_best.values()
    differences = [(test, comparison.image_bootstrap.difference(test.a, test.b)) for test in tests]
    curves = ThemedImage.draw(partial(plot_training_curves, logs), folder / "curves.png")
    flows = [
        flow
        for setting in comparison.selected
        for run in comparison.runs(setting)
        if (flow := read_gradient_flow(run.folder, setting.name)) is not None
    ]
    differences_image = (
        ThemedImage.draw(partial(plot_differences, differences), folder / "differences.png")
        if differences
        else None
    )
    sweep_image = (
        ThemedImage.draw(partial(plot_sweeps, sweeps), folder / "sweep.png") if sweeps else None
    )
    selected_values = {
        setting.name: comparison.selected_values(setting) for setting in comparison.selected
    }
    return partial(
        render_report,
        "comparison",
        comparison=comparison,
        facts=_facts(comparison),
        captions_table=replace(comparison.results, feedback=None).table(
            "objective", row_notes=selected_values
        ),
        **_feedback_tables(comparison, selected_values),
        curves=curves,
        gradients=flow_section(flows, folder / "gradients.png"),
        differences=differences_image,
        differences_alt="; ".join(
            f"{test.b}: {format_number(test.difference, signed=True)}, {test.verdict}"
            for test in tests
        ),
        pairs=_pairs_table(
            "RSUM",
            "images",
            [_pair_row(test.b, test, estimate) for test, estimate in differences],
            f"{len(comparison.rsum_tests)} pairs were tested, and p is corrected for all of them, "
            "because the best was selected among them.",
        ),
        sweep_image=sweep_image,
        sweep_alt=_sweeps_alt(sweeps) if sweeps else "",
        examples=examples,
        thumbnails=Thumbnails(examples.data) if examples else None,
        commands=_commands(comparison),
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    best = comparison.best
    runs = comparison.runs(comparison.best)
    row = next(row for row in comparison.results.rows if row.name == best.name)
    minutes = sum(run.seconds for run in comparison.outcomes) / 60
    chosen = (
        "random rankings reach as much"
        if comparison.is_at_chance
        else f"{best.name} is the best on validation"
    )
    facts = [
        (
            f"{row.mean(RSUM.name):.1f}",
            f"test RSUM ({row.describe_mean(RSUM.name)}), {chosen}",
        ),
        (
            f"{row.mean('t2i_r1'):.1f}",
            f"% of captions with their image at rank 1 ({row.describe_mean('t2i_r1')})",
        ),
        (
            str(len(runs)),
            f"seed{'s' if len(runs) > 1 else ''}, {minutes:.0f} minutes of training in total",
        ),
    ]
    if nearest := next(iter(comparison.differences_from_best.values()), None):
        difference = format_number(nearest.difference, signed=True)
        facts.append(
            (difference, f"RSUM compared with the second best, {nearest.b}: {nearest.verdict}")
        )
    return facts


def _feedback_tables(comparison: Comparison, row_notes: Mapping[str, str]) -> dict[str, Any]:
    """The feedback metrics of all settings, and the differences of the best one to the others."""
    if comparison.feedback is None:
        return {"feedback_table": None, "feedback_pairs": None}
    results = comparison.results
    rows = []
    for metric, label in comparison.feedback.labels.items():
        for test in comparison.feedback_differences_from_best(metric).values():
            estimate = comparison.query_bootstrap.difference(test.a, test.b, metric)
            rows.append(_pair_row(f"{test.b}: {label}", test, estimate))
    note = (
        "The best setting is the one with the best validation RSUM: judgments were not used for "
        "the choice. p is corrected for all pairs of one metric. Items without a judgment count as "
        "not relevant, so recall is a lower bound. The order of judged pairs is not affected."
    )
    groups = results.column_groups[-1:]
    return {
        "feedback_table": results.table("objective", row_notes=row_notes, groups=groups),
        "feedback_pairs": _pairs_table("percent", "queries", rows, note) if rows else None,
    }


def _pairs_table(unit: str, resampled: str, rows: list[Row], note: str) -> Table:
    """Differences of the best setting to others, from `_pair_row`."""
    columns = (
        Column("best minus", is_text=True),
        Column(unit),
        Column("over seeds"),
        Column(f"95 % over {resampled}"),
        Column("p (Holm)", ".3f", missing="-"),
        Column("verdict", is_text=True),
        Column("seeds needed", is_text=True, missing="-"),
    )
    return Table(columns, tuple(rows), (note,))


def _pair_row(name: str, test: PairedTest, estimate: BootstrapEstimate) -> Row:
    # 0: a difference is settled, None: the number of seeds is unknown.
    more_seeds = (
        ""
        if test.more_seeds == 0
        else None
        if test.more_seeds is None
        else f"about {test.more_seeds} more"
    )
    return (
        name,
        format_number(test.difference, signed=True),
        str(test.spread or "-"),
        str(estimate.interval or "-"),
        test.adjusted_p,
        test.verdict,
        more_seeds,
    )


def _sweeps_alt(sweeps: Sequence[Sweep]) -> str:
    """Mean RSUM on validation and on test for each value and reference."""
    lines = []
    for sweep in sweeps:
        for name, (validation, test) in sweep.curves.items():
            points = (
                f"{point.value:g}: {point.rsum.mean:.1f}, {other.rsum.mean:.1f}"
                for point, other in zip(validation, test, strict=True)
            )
            lines.append(f"{', '.join(filter(None, (sweep.name, name)))}: {'; '.join(points)}")
    lines += [
        f"{name}: {validation.mean:.1f}, {test.mean:.1f}"
        for name, (validation, test) in sweeps[0].references.items()
    ]
    return f"RSUM on validation and on test. {'. '.join(lines)}."


def _commands(comparison: Comparison) -> list[tuple[str, str]]:
    folder = quote_argument(comparison.folder)
    best = _best_run(comparison, comparison.best)
    run = quote_argument(best.folder)
    visavis = shell_command()
    seeds = max(run.seed for run in comparison.outcomes)
    return [
        (
            "Add seeds. Finished runs are not trained again.",
            f"{visavis} compare --resume {folder} --seeds {2 * seeds}",
        ),
        (
            "Train the best run again from its recipe.",
            f"{visavis} train {quote_argument(best.folder / 'run.toml')}",
        ),
        ("Count the contributing samples of the best model.", f"{visavis} papers diagnose {run}"),
        ("Search with the best model.", f"{visavis} search {run} 'a text query'"),
    ]


@with_own_style
def plot_differences(
    pairs: Sequence[tuple[PairedTest, BootstrapEstimate]], theme: PlotTheme = LIGHT_THEME
) -> bytes:
    """Plot the difference of the best setting to each other one, over seeds and over test images."""
    figure = new_figure(8.6, 1.1 + 0.42 * len(pairs), theme)
    axes = figure.add_subplot()
    for y, (test, estimate) in enumerate(reversed(pairs)):
        _plot_interval(axes, test.spread, y + 0.12, theme.lines[1], 3.2)
        _plot_interval(axes, estimate.interval, y - 0.14, theme.lines[0], 1.2)
        axes.plot([test.difference], [y + 0.12], "o", color=theme.lines[1], markersize=6)
        axes.plot([estimate.value], [y - 0.14], "o", color=theme.lines[0], markersize=3.5)
    axes.axvline(0, color=theme.foreground, linewidth=0.9, linestyle=DASH_PATTERN)
    axes.set_yticks(range(len(pairs)), [test.b.replace("$", r"\$") for test, _ in reversed(pairs)])
    axes.set_ylim(-0.6, len(pairs) - 0.4)
    style_axes(
        axes,
        "test RSUM of the best minus that of each other",
        theme,
        "thick: over seeds, thin: 95 % interval over test images",
    )
    figure.tight_layout()
    return figure_to_png(figure)


def _plot_interval(
    axes: Axes, interval: Interval | None, y: float, color: str, width: float
) -> None:
    if interval is not None:
        axes.plot(
            [interval.low, interval.high],
            [y, y],
            color=color,
            linewidth=width,
            solid_capstyle="round",
        )


@with_own_style
def plot_sweeps(sweeps: Sequence[Sweep], theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot mean RSUM against each value that was varied, with its spread over seeds, as in figure 5
    of the Unified loss.
    """
    references = sweeps[0].references
    columns = min(2, len(sweeps))
    rows = math.ceil(len(sweeps) / columns)
    legend = 0.1 + 0.2 * math.ceil((len(references) + 2) / 2)
    panel = 3.0 + 0.2 * max(len(sweep.curves) for sweep in sweeps)
    figure = new_figure(8.6, legend + rows * panel, theme)
    from matplotlib.lines import Line2D

    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    for sweep, axes in zip_longest(sweeps, panels):
        if sweep is None:
            axes.set_visible(False)
        else:
            _plot_sweep(axes, figure, sweep, theme)
    handles = [
        Line2D([], [], color=theme.foreground, linestyle=style, label=split)
        for split, style in SPLIT_STYLES
    ]
    handles += [
        Line2D([], [], color=_reference_color(number, theme), linewidth=2.4, label=name)
        for number, name in enumerate(references)
    ]
    figure.tight_layout(rect=(0, legend / figure.get_figheight(), 1, 1))
    figure.legend(handles=handles, loc="lower left", ncols=2, **legend_style(theme, 2.6))
    return figure_to_png(figure)


def _plot_sweep(axes: Axes, figure: Figure, sweep: Sweep, theme: PlotTheme) -> None:
    """Curves and horizontal reference lines. Lines are colored by setting, so that one name has one
    color in all panels.
    """
    from matplotlib.transforms import offset_copy

    step = 5 * min(1, 3 / len(sweep.curves))  # points between neighboring curves
    for number, (name, curve) in enumerate(sweep.curves.items()):
        for second, (points, (_, style)) in enumerate(zip(curve, SPLIT_STYLES, strict=True)):
            color = theme.lines[number % len(theme.lines)]
            # Bars at the same value are drawn next to each other.
            shifted = offset_copy(
                axes.transData, figure, x=step * (number + second / 2), units="points"
            )
            values = [point.value for point in points]
            means = [point.rsum.mean for point in points]
            lines = axes.plot(values, means, "o", linestyle=style, color=color, markersize=4)
            if name and not second:
                lines[0].set_label(name)
            for point in points:
                if point.rsum.spread is not None:
                    ends = point.rsum.spread.low, point.rsum.spread.high
                    lines += axes.plot(
                        [point.value] * 2, ends, color=color, linewidth=1.2, alpha=0.7
                    )
            for line in lines:
                line.set_transform(shifted)
    for number, splits in enumerate(sweep.references.values()):
        color = _reference_color(number, theme)
        for rsum, (_, style) in zip(splits, SPLIT_STYLES, strict=True):
            axes.axhline(rsum.mean, color=color, linestyle=style, linewidth=1.4)
            if rsum.spread is not None:
                ends = rsum.spread.low, rsum.spread.high
                axes.axhspan(*ends, color=color, alpha=0.08, linewidth=0)
    values = sorted(
        {point.value for validation, _ in sweep.curves.values() for point in validation}
    )
    if values[0] > 0 and values[-1] >= MIN_LOG_RATIO * values[0]:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    style_axes(axes, "RSUM", theme, sweep.name)
    # Panels share the axis, which matplotlib labels at the first one only.
    axes.tick_params(labelleft=True)
    if any(sweep.curves):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.06), **legend_style(theme, 2.6))


def _reference_color(number: int, theme: PlotTheme) -> str:
    """Color of a reference. Curves take the colors from the other end."""
    return theme.lines[-1 - number % len(theme.lines)]


@dataclass(frozen=True)
class ExampleQuery:
    """A caption and the first images for it.

    Attributes:
        text: The caption.
        target_image: Index of the image that the caption describes.
        target_rank: Rank of that image, as the mean over seeds.
        images: Index and score of the first images.
    """

    text: str
    target_image: int
    target_rank: float
    images: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ExampleQueries:
    """Example queries of one run.

    Attributes:
        run: Name of the run.
        data: The split that was searched.
        random: Captions sampled at random.
        hardest: Captions of different images whose image has the highest mean rank over the seeds
            of the setting.
    """

    run: str
    data: Dataset
    random: tuple[ExampleQuery, ...]
    hardest: tuple[ExampleQuery, ...]


def example_queries(comparison: Comparison, num_queries: int = 4) -> ExampleQueries | None:
    """Collect example queries of the best run of the best setting, chosen on validation."""
    best = _best_run(comparison, comparison.best)
    protocol = comparison.results.conditions.protocol
    # The test split with the candidates of the protocol.
    recipe = read_run_recipe(best.folder)
    data_module, matcher = open_run(best.folder, recipe, NoProgress())
    test = select_captions(
        data_module.data.split(recipe.evaluation.test), get_protocols(recipe.evaluation.protocols)
    )
    if not get_protocol(protocol).takes_unpaired:
        test = replace(test, unpaired=())
    visual, text = data_module.encode_gallery(matcher, test)
    ranks_of_runs = [
        read_query_ranks(RunFolder(run.folder).ranks)[protocol].text_ranks
        for run in comparison.runs(comparison.best)
    ]
    # The protocol does not rank the image of every caption.
    if any(len(ranks) != len(test.captions) for ranks in ranks_of_runs):
        return None
    mean_ranks = np.mean(ranks_of_runs, axis=0)  # [T], over the seeds
    # The same captions in every report of a data set.
    sampled = np.random.default_rng(0).permutation(len(test.captions))[:num_queries]
    worst_first = np.argsort(-mean_ranks, kind="stable")  # [T]
    # Only the worst caption of each image is shown.
    _, positions = np.unique(test.image_of[worst_first], return_index=True)
    hardest = worst_first[np.sort(positions)[:num_queries]]
    captions = torch.from_numpy(np.concatenate([sampled, hardest]))
    scores = score_all_pairs(matcher, visual, select_items(text, captions), recipe.memory or None)
    queries = []
    for caption, column in zip(captions.tolist(), scores.T, strict=True):
        top_images = column.argsort(descending=True, stable=True)[:NUM_IMAGES].tolist()
        queries.append(
            ExampleQuery(
                test.captions[caption],
                int(test.image_of[caption]),
                float(mean_ranks[caption]),
                tuple((image, column[image].item()) for image in top_images),
            )
        )
    gallery = replace(test, images=(*test.images, *test.unpaired_images))
    return ExampleQueries(
        best.folder.name, gallery, tuple(queries[: len(sampled)]), tuple(queries[len(sampled) :])
    )


def _best_run(comparison: Comparison, setting: Setting) -> RunOutcome:
    runs = comparison.runs(setting)
    if comparison.draws_validation:
        # The best one may have the easiest validation images.
        return runs[0]
    return max(runs, key=lambda run: run.validation_rsum)
