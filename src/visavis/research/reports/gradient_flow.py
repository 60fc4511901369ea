"""Gradients during a training, from its log: norms at the scores, at the embeddings after and before
normalization, and at the parameters, over the steps of runs.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from operator import itemgetter
from pathlib import Path
from typing import Any

from visavis.core.errors import RunError
from visavis.core.table import Column, Row, Table
from visavis.research.reports.html_report import (
    DASH_PATTERN,
    LEGEND_CHARS,
    LIGHT_THEME,
    PlotTheme,
    ThemedImage,
    figure_to_png,
    legend_style,
    new_figure,
    style_axes,
    with_own_style,
)
from visavis.training.runs.open_run import read_run_recipe
from visavis.training.runs.run_folder import RunFolder

PANELS_PER_ROW = 3
PLACES = {
    "scores": "scores",
    "normalized": "normalized embeddings",
    "tangent": "tangent part",
    "embedding": "raw embeddings",
}
"""Titles of the places of a gradient. Norms of embeddings are over both encoders."""
PARAMETERS = "_parameters"


@dataclass(frozen=True)
class GradientFlow:
    """Norms of the gradients that a training has recorded.

    Attributes:
        run: Run folder.
        name: Objective of the run, or the setting of a comparison.
        records: Norms by name, with the ``step`` of each record.
    """

    run: Path
    name: str
    records: tuple[dict[str, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"run": str(self.run), "name": self.name, "records": list(self.records)}

    def series(self, place: str) -> dict[int, float]:
        """Select the norms at a place of `PLACES`, or of a name, by step."""
        # Norms of embeddings are over both encoders.
        names = [place] if place not in PLACES or place == "scores" else []
        names = names or [f"{encoder}_{place}" for encoder in ("visual", "text")]
        return {
            int(record["step"]): math.hypot(*(record[name] for name in names))
            for record in self.records
            if all(name in record for name in names)
        }


def read_gradient_flow(run: Path, name: str = "") -> GradientFlow | None:
    """Read the records of a run. None if it has none. The default name is its objectives."""
    files = RunFolder(run)
    rows = files.read_log() if os.path.exists(files.log) else []
    recorded = [row for row in rows if row.get("gradient_steps")]
    if not recorded:
        return None
    objectives = dict.fromkeys(row["objective"] for row in recorded)
    records = [record for row in recorded for record in row["gradient_steps"]]
    return GradientFlow(run, name or ", then ".join(objectives), tuple(records))


def read_gradient_flows(runs: Sequence[Path]) -> tuple[GradientFlow, ...]:
    """Read the records of runs that are compared. A single run may have none."""
    flows = list[GradientFlow]()
    for run in runs:
        if len(runs) > 1:
            # An error if it is not a run.
            read_run_recipe(run)
        flow = read_gradient_flow(run)
        if flow is not None:
            flows.append(flow)
        elif len(runs) > 1:
            raise RunError(
                f"{run}: expected recorded gradients to compare with other runs, found none. Train "
                "it with training.gradients_every=50, or leave it out."
            )
    # Names of objectives have no parameters where these are the same in all runs.
    specs = defaultdict[str, set[str]](set)
    for flow in flows:
        specs[_short(flow.name)].add(flow.name)
    return tuple(
        replace(flow, name=_short(flow.name)) if len(specs[_short(flow.name)]) == 1 else flow
        for flow in flows
    )


def _short(name: str) -> str:
    return ", then ".join(spec.partition("(")[0] for spec in name.split(", then "))


def flow_panels(flows: Sequence[GradientFlow]) -> dict[str, str]:
    """List the places that some of the runs have, with their titles."""
    names = dict.fromkeys(name for flow in flows for record in flow.records for name in record)
    parts = {
        name: f"{name.removesuffix(PARAMETERS)} parameters"
        for name in names
        if name.endswith(PARAMETERS)
    }
    return {
        place: title
        for place, title in (PLACES | parts).items()
        if any(flow.series(place) for flow in flows)
    }


def flow_table(flows: Sequence[GradientFlow]) -> Table:
    """Summarize the norms of each name, averaged over its runs, by their first, lowest and last
    value.
    """
    panels = flow_panels(flows)
    # Two lines, so that the table fits into 80 columns.
    columns = [Column(title.replace(" ", "\n"), ".3g", missing="-") for title in panels.values()]
    rows: list[Row] = []
    for name in dict.fromkeys(flow.name for flow in flows):
        means = [list(_mean_series(flows, name, place).values()) for place in panels]
        rows.append((name,))
        for label, pick in (("first", itemgetter(0)), ("lowest", min), ("last", itemgetter(-1))):
            rows.append((f"  {label}", *(pick(values) if values else None for values in means)))
    note = "Recorded during training (training.gradients_every). raw: before normalization."
    return Table((Column("gradient norm", is_text=True), *columns), tuple(rows), (note,))


def _series(flows: Sequence[GradientFlow], name: str, place: str) -> list[dict[int, float]]:
    """The norms of the runs of a name at the steps that all of them have."""
    runs = [flow.series(place) for flow in flows if flow.name == name]
    common = [step for step in runs[0] if all(step in run for run in runs)]
    return [{step: run[step] for step in common} for run in runs]


def _mean_series(flows: Sequence[GradientFlow], name: str, place: str) -> dict[int, float]:
    runs = _series(flows, name, place)
    return {step: sum(run[step] for run in runs) / len(runs) for step in runs[0]}


@with_own_style
def plot_gradient_flow(flows: Sequence[GradientFlow], theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot the norms of gradients over steps, on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    panels = flow_panels(flows)
    names = list(dict.fromkeys(flow.name for flow in flows))
    rows = math.ceil(len(panels) / PANELS_PER_ROW)
    legend_columns = max(1, LEGEND_CHARS // (max(map(len, names)) + 8))
    legend_height = 0.15 + 0.2 * math.ceil(len(names) / legend_columns)
    figure = new_figure(8.6, legend_height + 2.45 * rows, theme)
    height = figure.get_figheight()
    # More names than colors: the next ones are dashed.
    styles = list(product(("-", DASH_PATTERN), theme.lines))
    for number, (place, title) in enumerate(panels.items()):
        row, column = divmod(number, PANELS_PER_ROW)
        bottom = legend_height + 2.45 * (rows - 1 - row) + 0.5
        axes = figure.add_axes((0.06 + 0.332 * column, bottom / height, 0.262, 1.6 / height))
        for name, (style, color) in zip(names, cycle(styles), strict=False):
            series = _series(flows, name, place)
            steps = list(series[0])
            values = [list(run.values()) for run in series]
            columns = list(zip(*values, strict=True))
            # The line is the mean of the runs of a name, the area their range.
            axes.fill_between(
                steps, [*map(min, columns)], [*map(max, columns)], color=color, alpha=0.18, lw=0
            )
            means = _mean_series(flows, name, place)
            axes.plot(
                list(means), list(means.values()), color=color, linestyle=style, lw=1.8, label=name
            )
        style_axes(axes, title, theme)
        # A norm of 0 is at the lower edge.
        axes.set_yscale("log", nonpositive="clip")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        if number == 0:
            handles = axes.get_legend_handles_labels()
    figure.legend(
        *handles,
        loc="lower left",
        bbox_to_anchor=(0.05, 0),
        ncols=legend_columns,
        **legend_style(theme),
    )
    return figure_to_png(figure)


@dataclass(frozen=True)
class FlowSection:
    """Section of a report.

    Attributes:
        image: The plot.
        table: Summary of each name.
        num_runs: Largest number of runs of one name.
    """

    image: ThemedImage
    table: Table
    num_runs: int


def flow_section(flows: Sequence[GradientFlow], file: Path | None = None) -> FlowSection | None:
    """Draw the plot and the table of a report. None without records."""
    if not flows:
        return None
    names = [flow.name for flow in flows]
    return FlowSection(
        ThemedImage.draw(partial(plot_gradient_flow, flows), file),
        replace(flow_table(flows), notes=("First, lowest and last record of the training.",)),
        max(map(names.count, names)),
    )
