"""Figures of papers: curves of a training, from the logs of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from visavis.core.result import Result
from visavis.core.table import Cell, Column, Row, Table, Value
from visavis.core.table_formats import format_markdown
from visavis.evaluation.published_row import PublishedRow
from visavis.research.experiments.jobs import RunOutcome
from visavis.research.reports.html_report import (
    DASH_PATTERN,
    LIGHT_THEME,
    PlotTheme,
    figure_to_png,
    legend_style,
    new_figure,
    style_axes,
    with_own_style,
)
from visavis.training.recipes.published_tables import row_objective
from visavis.training.runs.run_folder import RunFolder

MAX_PRINTED_POINTS = 10
"""Points of a curve in printed tables. The JSON file has all."""
COLUMNS = {
    "convergence": {"loss": "loss, untrained = 1", "rsum": "RSUM"},
    "similarities": {"positive": "positive pairs", "hardest": "hardest negatives"},
}
"""Titles of the values that each kind of figure shows."""


@dataclass(frozen=True)
class FigurePoint:
    """Point of a curve: measurements of the validation split at one step, the mean over runs.

    Attributes:
        curve: Id of the curve.
        epoch: Epoch.
        step: Number of training steps.
        loss: Loss on the first validation batches, divided by that of the untrained model.
        rsum: RSUM.
        positive: Mean score of positive pairs. None for a model with two stages.
        positive_std: Standard deviation of these scores over pairs.
        hardest: Mean score of the hardest negatives of images and of texts.
        hardest_std: Standard deviation of these scores over queries.
    """

    curve: str
    epoch: float
    step: int
    loss: float
    rsum: float
    positive: float | None
    positive_std: float | None
    hardest: float | None
    hardest_std: float | None


@dataclass(frozen=True)
class ReproducedFigure(Result):
    """Curves of a figure with their runs.

    Attributes:
        folder: Folder of the experiment.
        figure: Id of the figure.
        plot: Loss and RSUM ("convergence"), or similarities of pairs.
        substitution: Difference from the setting of the paper. "": none.
        curves: Curves by id.
        outcomes: Outcomes by id of the curve, by seed.
    """

    ROWS: ClassVar[str] = "points"

    folder: Path
    figure: str
    plot: Literal["convergence", "similarities"]
    substitution: str
    curves: Mapping[str, PublishedRow]
    outcomes: Mapping[str, Sequence[RunOutcome]]

    @cached_property
    def points(self) -> list[FigurePoint]:
        """All points, curve by curve: means of its runs at the steps that all of them have."""
        points = []
        for curve, runs in self.outcomes.items():
            logs = [RunFolder(run.folder).read_log() for run in runs if not run.failure]
            by_step = [{record["step"]: record for record in log} for log in logs]
            for step in by_step[0] if by_step else ():
                # Runs may have stopped at different steps.
                if not all(step in records for records in by_step):
                    continue
                records = [records[step] for records in by_step]
                losses = [
                    record["val"]["loss"] / log[0]["val"]["loss"]
                    for record, log in zip(records, logs, strict=True)
                ]
                similarities = [record.get("similarity") or {} for record in records]
                points.append(
                    FigurePoint(
                        curve,
                        records[0]["epoch"],
                        step,
                        statistics.fmean(losses),
                        statistics.fmean(record["rsum"] for record in records),
                        _mean_of(similarities, "positive_mean"),
                        _mean_of(similarities, "positive_std"),
                        _mean_of(similarities, "hardest_i2t_mean", "hardest_t2i_mean"),
                        _mean_of(similarities, "hardest_i2t_std", "hardest_t2i_std"),
                    )
                )
        return points

    def objective(self, curve: str) -> str:
        """Return the name of the objective of a curve, without parameters."""
        return row_objective(curve).partition("(")[0]

    @property
    def remarks(self) -> list[str]:
        """Sentences that readers of the curves need."""
        rows = self.curves.values()
        objectives = ", ".join(map(row_objective, self.curves))
        runs = max(sum(not run.failure for run in each) for each in self.outcomes.values())
        number = "one run" if runs == 1 else f"the mean of {runs} runs"
        return [
            f"{next(iter(rows)).source}. Each curve: {number} on the validation split. {objectives}.",
            *(f"{row.id}: not reported: {row.unreported}." for row in rows if row.unreported),
            *(
                f"{run.setting}, seed {run.seed} failed: {run.failure}"
                for runs in self.outcomes.values()
                for run in runs
                if run.failure
            ),
        ]

    def point_table(self) -> Table:
        """Make a table of points at equal distances of each curve."""
        rows: list[Row] = []
        for curve in self.outcomes:
            points = [point for point in self.points if point.curve == curve]
            last = len(points) - 1
            shown = min(len(points), MAX_PRINTED_POINTS)
            # The first, the last, and points at equal distances between them.
            positions = {round(i * last / max(1, shown - 1)) for i in range(shown)}
            for position in sorted(positions):
                point = points[position]
                values: list[Value | Cell] = [point.loss, point.rsum]
                if self.plot == "similarities":
                    pairs = (point.positive, point.positive_std), (point.hardest, point.hardest_std)
                    values = [
                        None if mean is None or std is None else Cell(mean, (std,))
                        for mean, std in pairs
                    ]
                rows.append((self.objective(curve), point.epoch, *values))
        columns = [Column("objective", is_text=True), Column("epoch", "g")]
        columns += [
            Column(title, ".1f" if key == "rsum" else ".3f", missing="-", spread=" ± {}")
            for key, title in COLUMNS[self.plot].items()
        ]
        return Table(tuple(columns), tuple(rows))

    def markdown(self) -> str:
        """Format the substitution, the points and the remarks."""
        table = format_markdown(self.point_table())
        above = f"**{self.substitution}**\n\n" if self.substitution else ""
        remarks = "".join(f"- {sentence}\n" for sentence in self.remarks)
        return f"# {self.figure}\n\n{above}![](figure.png)\n\n{table}\n{remarks}"

    def tables(self) -> list[Table]:
        """Return the substitution, the points and the remarks."""
        above = [Table(notes=(self.substitution,))] if self.substitution else []
        notes = (*self.remarks, f"Figure: {self.folder / 'figure.png'}")
        return [*above, replace(self.point_table(), notes=notes)]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {
            "reproduction": str(self.folder),
            "figure": self.figure,
            "substitution": self.substitution,
            "objectives": {curve: row_objective(curve) for curve in self.curves},
            "points": [asdict(point) for point in self.points],
            "runs": {
                curve: [run.to_json() for run in runs] for curve, runs in self.outcomes.items()
            },
        }


def _mean_of(records: Sequence[Mapping[str, float]], *keys: str) -> float | None:
    values = [record[key] for record in records for key in keys if key in record]
    return statistics.fmean(values) if values else None


def plot_figure(figure: ReproducedFigure, theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot loss and RSUM of all objectives, or the similarities of each, as in figures 3 and 4 of
    the Unified loss.
    """
    by_curve = {
        curve: [point for point in figure.points if point.curve == curve]
        for curve in figure.outcomes
    }
    if figure.plot == "convergence":
        return _plot_convergence(figure, by_curve, theme)
    return _plot_similarities(figure, by_curve, theme)


@with_own_style
def _plot_convergence(
    figure: ReproducedFigure, by_curve: Mapping[str, Sequence[FigurePoint]], theme: PlotTheme
) -> bytes:
    drawn = new_figure(7.2, 2.9, theme)
    for panel, (key, title) in enumerate(COLUMNS["convergence"].items()):
        axes = drawn.add_axes((0.07 + 0.49 * panel, 0.17, 0.42, 0.7))
        for number, (curve, points) in enumerate(by_curve.items()):
            axes.plot(
                [point.epoch for point in points],
                [getattr(point, key) for point in points],
                color=theme.lines[number % len(theme.lines)],
                label=figure.objective(curve),
            )
        style_axes(axes, title, theme, "epoch")
        axes.set_ylim(bottom=0)
        axes.legend(**legend_style(theme))
    return figure_to_png(drawn)


@with_own_style
def _plot_similarities(
    figure: ReproducedFigure, by_curve: Mapping[str, Sequence[FigurePoint]], theme: PlotTheme
) -> bytes:
    drawn = new_figure(2.9 * len(by_curve), 2.9, theme)
    panels = drawn.subplots(1, len(by_curve), sharey=True, squeeze=False)[0]
    for axes, (curve, points) in zip(panels, by_curve.items(), strict=True):
        for key, color, style in (
            ("positive", theme.positive, "-"),
            ("hardest", theme.lines[0], DASH_PATTERN),
        ):
            measured = [point for point in points if getattr(point, key) is not None]
            axes.plot(
                [point.epoch for point in measured],
                [getattr(point, key) for point in measured],
                color=color,
                linestyle=style,
                label=COLUMNS["similarities"][key],
            )
        style_axes(axes, figure.objective(curve), theme, "epoch")
        axes.legend(**legend_style(theme))
    drawn.tight_layout()
    return figure_to_png(drawn)
