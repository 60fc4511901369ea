"""Pictures for reports, as PNG bytes, for light and for dark pages."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visavis.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from visavis.degrees.thresholds import Distribution


@dataclass(frozen=True)
class Theme:
    """The colors of a page. lines: those of the curves, in order, distinguishable with color blindness too."""

    paper: str
    ink: str
    faint: str
    right: str
    lines: tuple[str, ...]


LEGEND = 120
"""Characters that a line of a legend holds over the whole width."""
LIGHT = Theme("#ffffff", "#1d2330", "#c9cfd9", "#158a4e", ("#d1662b", "#2b6cd1", "#0f8f7f", "#9a4fc4", "#8a6d1a"))
DARK = Theme("#171b24", "#e4e8f0", "#475062", "#3fc380", ("#f0955f", "#77aaff", "#4fd0be", "#cf9bf2", "#d9bd6a"))


@dataclass(frozen=True)
class Curve:
    """The log of one run: the rows of its ``metrics.jsonl``; runs of one name share a color."""

    name: str
    rows: Sequence[Mapping[str, Any]]


def require_matplotlib() -> None:
    """Raises MissingExtra if pictures cannot be drawn."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise MissingExtra("matplotlib", "report", "a report with pictures") from None


def curves_picture(curves: Sequence[Curve], theme: Theme = LIGHT) -> bytes:
    """Loss, RSUM and similarities of the validation split over steps; a thin line a run, a thick one the mean of a name.

    The loss is that of the probed batches; similarities are those of the whole split where all logs have them.
    Source: Unified loss, figures 3 and 4.
    """
    names = list(dict.fromkeys(curve.name for curve in curves))
    across = max(1, LEGEND // (max(map(len, names)) + 8))
    below = 0.53 + 0.2 * math.ceil(len(names) / across)
    figure = new_figure(8.6, below + 2.37, theme)
    bottom, height = below / figure.get_figheight(), 1.98 / figure.get_figheight()
    panels: list[Any] = [figure.add_axes((left, bottom, 0.262, height)) for left in (0.06, 0.392, 0.724)]
    titles = ("loss, untrained = 1", "RSUM", "similarity")
    colors = dict(zip(names, theme.lines * len(names), strict=False))
    for panel, title in zip(panels, titles, strict=True):
        dress(panel, title, theme)
    loss, rsum, similarity = panels
    of = "similarity" if all("similarity" in row for curve in curves for row in curve.rows) else "val"
    for name in names:
        runs = [curve.rows for curve in curves if curve.name == name]
        color = colors[name]
        _lines(loss, runs, lambda row, first: row["val"]["loss"] / first["val"]["loss"], color, "-", name)
        _lines(rsum, runs, lambda row, _: row["rsum"], color, "-", name)
        _lines(similarity, runs, lambda row, _: row[of]["positive_mean"], color, "-")
        _lines(similarity, runs, lambda row, _: (row[of]["hardest_i2t_mean"] + row[of]["hardest_t2i_mean"]) / 2, color, (0, (2, 1.4)))
    loss.set_ylim(bottom=0)
    similarity.plot([], [], color=theme.ink, label="positive pairs")
    similarity.plot([], [], color=theme.ink, linestyle=(0, (2, 1.4)), label="hardest negatives")
    lowest, highest = similarity.get_ylim()
    similarity.set_ylim(lowest, highest + 0.28 * (highest - lowest))
    similarity.legend(loc="upper left", **legend(theme))
    figure.legend(*rsum.get_legend_handles_labels(), loc="lower left", bbox_to_anchor=(0.05, 0), ncols=across, **legend(theme))
    return png(figure)


def degrees_picture(rows: Sequence[Distribution], theme: Theme = LIGHT) -> bytes:
    """How each estimator's degrees are distributed: suggested thresholds as lines, the ladder paper's 0.63 dashed."""
    figure = new_figure(8.6, 0.35 + 1.25 * len(rows), theme)
    for number, (row, axes) in enumerate(zip(rows, figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0], strict=True)):
        bins, least = len(row.histogram), row.histogram[0] / row.pairs
        axes.bar([(i + 0.5) / bins for i in range(bins)], row.histogram, 1 / bins, color=theme.lines[number % len(theme.lines)])
        for value in row.quantiles:
            axes.axvline(value, color=theme.ink, linewidth=0.9)
        axes.axvline(0.63, color=theme.ink, linewidth=0.9, linestyle=(0, (2, 1.4)))
        dress(axes, row.degrees if least < 0.1 else f"{row.degrees}   (cut: {least:.0%} lie below 0.01)", theme)
        top = 1.1 * max(row.histogram if least < 0.1 else row.histogram[1:])
        axes.set(xlim=(0, 1), ylim=(0, top or 1), yticks=[], xlabel="degree of a random pair" if number == len(rows) - 1 else "")
    figure.tight_layout()
    return png(figure)


def _lines(axes: Any, runs: Sequence[Sequence[Mapping[str, Any]]], value: Any, color: str, style: Any, label: str | None = None) -> None:
    """A thin line for each run, and the mean of all over the steps that every run has."""
    series = [{row["step"]: value(row, rows[0]) for row in rows} for rows in runs]
    for curve in series:
        axes.plot(list(curve), list(curve.values()), color=color, linestyle=style, linewidth=0.8, alpha=0.45)
    common = [step for step in series[0] if all(step in curve for curve in series)]
    mean = [sum(curve[step] for curve in series) / len(series) for step in common]
    axes.plot(common, mean, color=color, linestyle=style, linewidth=2.0, label=label)


def legend(theme: Theme) -> dict[str, Any]:
    """How the legends of all reports look."""
    return {"fontsize": 8.5, "frameon": False, "labelcolor": theme.ink, "handlelength": 1.8}


def dress(axes: Any, title: str, theme: Theme, across: str = "step") -> None:
    """Give axes the style of all reports. across: the label of the horizontal axis."""
    axes.set_title(title, loc="left", size=11, color=theme.ink, weight="bold")
    axes.set_xlabel(across, size=9, color=theme.ink)
    axes.tick_params(colors=theme.ink, labelsize=8.5, length=0)
    axes.set_facecolor(theme.paper)
    axes.grid(color=theme.faint, linewidth=0.5, alpha=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.faint)


def quoted(query: str, longest: int = 84) -> str:
    """A text in quotation marks, cut between words if it is too long; dollar signs are escaped from matplotlib's mathtext."""
    return f"“{textwrap.shorten(query, longest, placeholder=' …')}”".replace("$", r"\$")


def new_figure(width: float, height: float, theme: Theme) -> Figure:
    """An empty figure of so many inches, without any global state of matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, facecolor=theme.paper)


def png(figure: Figure, colors: int | None = None) -> bytes:
    """The figure's PNG. colors: reduce it to a palette, a third of the bytes for pictures of many colors."""
    from PIL import Image

    raw = io.BytesIO()
    figure.savefig(raw, format="png", metadata={"Software": None})
    if colors is None:
        return raw.getvalue()
    small = io.BytesIO()
    Image.open(raw).convert("RGB").quantize(colors, dither=Image.Dither.FLOYDSTEINBERG).save(small, "png", optimize=True)
    return small.getvalue()
