"""HTML reports from Jinja2 templates, and their plots as PNG: single files without network access,
with light and dark mode.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from PIL import Image as Pillow
from PIL import ImageOps
from PIL.Image import Image

from visavis.core import storage
from visavis.core.data_uris import data_uri, jpeg_uri
from visavis.core.environment import package_versions, shell_command
from visavis.core.table_html import format_html
from visavis.data.dataset import Dataset

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure


P = ParamSpec("P")
T = TypeVar("T")

THUMBNAIL_SIDE = 128
"""Side length of thumbnails in pixels."""
DASH_PATTERN = (0, (2, 1.4))
"""Style of dashed lines."""
LEGEND_CHARS = 120
"""Characters that fit into one line of a legend."""


@dataclass(frozen=True)
class ThemedImage:
    """An image for light and for dark pages.

    Attributes:
        light: PNG for light pages.
        dark: PNG for dark pages.
    """

    light: bytes
    dark: bytes

    @classmethod
    def draw(cls, plot: Callable[[PlotTheme], bytes], file: Path | None = None) -> ThemedImage:
        """Draw a plot with both themes. The file is the light one."""
        image = cls(plot(LIGHT_THEME), plot(DARK_THEME))
        if file is not None:
            storage.write_bytes(file, image.light)
        return image


REPORTS_PACKAGE = "visavis.research.reports"


@cache
def template_environment(package: str) -> Environment:
    """Return the environment of the templates of this package and of another one. Values are
    escaped, and an undefined variable is an error.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(REPORTS_PACKAGE), PackageLoader(package)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["visavis"] = shell_command
    environment.filters["data_uri"] = data_uri
    environment.filters["html_table"] = lambda table: Markup(format_html(table))
    return environment


def render_report(template: str, *, package: str = REPORTS_PACKAGE, **values: Any) -> str:
    """Render a template of a package as one page of HTML, with its images and styles inside."""
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return (
        template_environment(package)
        .get_template(f"{template}.html.j2")
        .render(versions=versions, **values)
    )


class Thumbnails:
    """Square thumbnails of a data set, cropped at the center. Each image is read once.

    Args:
        data: Data set.
    """

    def __init__(self, data: Dataset):
        self.data = data
        self._thumbnails: dict[int, Image] = {}

    def image(self, index: int) -> Image | None:
        """Return the thumbnail of an image. None if the data set has features instead of pixels."""
        if self.data.images[index].location is None:
            return None
        if index not in self._thumbnails:
            self._thumbnails[index] = ImageOps.fit(
                self.data.images[index].preview(), (THUMBNAIL_SIDE, THUMBNAIL_SIDE)
            )
        return self._thumbnails[index]

    def uri(self, index: int) -> str | None:
        """Return the thumbnail as a data URI of a JPEG, or None if the data set has features
        instead of pixels.
        """
        image = self.image(index)
        return None if image is None else jpeg_uri(image)


@dataclass(frozen=True)
class PlotTheme:
    """Colors of a page.

    Attributes:
        background: Color of the page.
        foreground: Color of text.
        grid: Color of grid lines.
        positive: Color of positives.
        lines: Colors of curves, distinguishable with color blindness.
    """

    background: str
    foreground: str
    grid: str
    positive: str
    lines: tuple[str, ...]


LIGHT_THEME = PlotTheme(
    "#ffffff",
    "#1d2330",
    "#c9cfd9",
    "#158a4e",
    ("#d1662b", "#2b6cd1", "#0f8f7f", "#9a4fc4", "#8a6d1a", "#c2386f", "#5b6675", "#5f8a12"),
)
DARK_THEME = PlotTheme(
    "#171b24",
    "#e4e8f0",
    "#475062",
    "#3fc380",
    ("#f0955f", "#77aaff", "#4fd0be", "#cf9bf2", "#d9bd6a", "#f58fb4", "#a9b4c4", "#a9d65c"),
)


@dataclass(frozen=True)
class TrainingCurve:
    """Log of one run. Runs of the same name have the same color.

    Attributes:
        name: Name in the legend.
        records: Rows of ``metrics.jsonl``.
    """

    name: str
    records: Sequence[Mapping[str, Any]]


def with_own_style(plot: Callable[P, T]) -> Callable[P, T]:
    """Draw with the default style of matplotlib. A matplotlibrc of the user, or of the current
    folder, may need programs that are missing, such as LaTeX.
    """

    @wraps(plot)
    def draw(*args: P.args, **kwargs: P.kwargs) -> T:
        from matplotlib import style

        with style.context("default"):
            return plot(*args, **kwargs)

    return draw


@with_own_style
def plot_training_curves(curves: Sequence[TrainingCurve], theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot loss, RSUM and similarities of the validation split over steps, as in figures 3 and 4 of
    the Unified loss.
    """
    names = list(dict.fromkeys(curve.name for curve in curves))
    # Eight characters for the line and the gap.
    columns = max(1, LEGEND_CHARS // (max(map(len, names)) + 8))
    legend_height = 0.53 + 0.2 * math.ceil(len(names) / columns)
    figure = new_figure(8.6, legend_height + 2.37, theme)
    bottom = legend_height / figure.get_figheight()
    height = 1.98 / figure.get_figheight()
    loss, rsum, similarity = panels = [
        figure.add_axes((left, bottom, 0.262, height)) for left in (0.06, 0.392, 0.724)
    ]
    for panel, title in zip(panels, ("loss, untrained = 1", "RSUM", "similarity"), strict=True):
        style_axes(panel, title, theme)
    for name, color in zip(names, cycle(theme.lines), strict=False):
        runs = [curve.records for curve in curves if curve.name == name]
        _lines(
            loss,
            runs,
            lambda row, first: row["val"]["loss"] / first["val"]["loss"],
            color,
            "-",
            name,
        )
        _lines(rsum, runs, lambda row, _: row["rsum"], color, "-", name)
        _lines(similarity, runs, lambda row, _: row["similarity"]["positive_mean"], color, "-")
        _lines(
            similarity,
            runs,
            lambda row, _: (
                (row["similarity"]["hardest_i2t_mean"] + row["similarity"]["hardest_t2i_mean"]) / 2
            ),
            color,
            DASH_PATTERN,
        )
    loss.set_ylim(bottom=0)
    similarity.plot([], [], color=theme.foreground, label="positive pairs")
    similarity.plot(
        [], [], color=theme.foreground, linestyle=DASH_PATTERN, label="hardest negatives"
    )
    lowest, highest = similarity.get_ylim()
    # Space for the legend.
    similarity.set_ylim(lowest, highest + 0.28 * (highest - lowest))
    similarity.legend(loc="upper left", **legend_style(theme))
    figure.legend(
        *rsum.get_legend_handles_labels(),
        loc="lower left",
        bbox_to_anchor=(0.05, 0),
        ncols=columns,
        **legend_style(theme),
    )
    return figure_to_png(figure)


def _lines(
    axes: Any,
    runs: Sequence[Sequence[Mapping[str, Any]]],
    value: Any,
    color: str,
    style: Any,
    label: str | None = None,
) -> None:
    """Draw a thin line for each run, and the mean over the steps that all runs have."""
    series = [{row["step"]: value(row, rows[0]) for row in rows} for rows in runs]
    for curve in series:
        axes.plot(
            list(curve),
            list(curve.values()),
            color=color,
            linestyle=style,
            linewidth=0.8,
            alpha=0.45,
        )
    # Runs may have stopped at different steps.
    common = [step for step in series[0] if all(step in curve for curve in series)]
    mean = [sum(curve[step] for curve in series) / len(series) for step in common]
    axes.plot(common, mean, color=color, linestyle=style, linewidth=2.0, label=label)


def legend_style(
    theme: PlotTheme, handle_length: float = 1.8, font_size: float = 8.5
) -> dict[str, Any]:
    """Return the style of legends. The length of the lines is in units of the font size."""
    return {
        "fontsize": font_size,
        "frameon": False,
        "labelcolor": theme.foreground,
        "handlelength": handle_length,
    }


def style_axes(axes: Any, title: str, theme: PlotTheme, x_label: str = "step") -> None:
    """Apply the style of all reports."""
    axes.set_title(title, loc="left", size=11, color=theme.foreground, weight="bold")
    axes.set_xlabel(x_label, size=9, color=theme.foreground)
    axes.tick_params(colors=theme.foreground, labelsize=8.5, length=0)
    axes.set_facecolor(theme.background)
    axes.grid(color=theme.grid, linewidth=0.5, alpha=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)


def quote_shortened(query: str, max_chars: int = 84) -> str:
    """Quote a text, shortened between words. Dollar signs are escaped, because matplotlib would
    read them as math.
    """
    return f"“{textwrap.shorten(query, max_chars, placeholder=' …')}”".replace("$", r"\$")


def new_figure(width: float, height: float, theme: PlotTheme) -> Figure:
    """Create an empty figure of a size in inches, without global state of matplotlib."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, facecolor=theme.background)


def figure_to_png(figure: Figure, colors: int | None = None) -> bytes:
    """Render a figure as PNG."""
    raw = io.BytesIO()
    # Without the version of matplotlib, equal plots are equal files.
    figure.savefig(raw, format="png", metadata={"Software": None})
    # A palette reduces plots of many colors to a third of the bytes.
    if colors is None:
        return raw.getvalue()
    small = io.BytesIO()
    Pillow.open(raw).convert("RGB").quantize(colors, dither=Pillow.Dither.FLOYDSTEINBERG).save(
        small, "png", optimize=True
    )
    return small.getvalue()
