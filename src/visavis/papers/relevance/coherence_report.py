"""Report on ranking coherence: irrelevant items, ranked lists side by side, and CS@K against K."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from visavis.core import storage
from visavis.core.encoded import DIRECTIONS, Direction
from visavis.core.table import Column, Table
from visavis.data.dataset import Dataset
from visavis.papers.relevance.ranked_lists import (
    DIRECTION_ORDER,
    ClusteredMean,
    ListItem,
    ListStatistics,
    QueryLists,
    RankedListComparison,
    mean_column,
)
from visavis.research.reports.html_report import (
    LIGHT_THEME,
    PlotTheme,
    ThemedImage,
    Thumbnails,
    figure_to_png,
    legend_style,
    new_figure,
    quote_shortened,
    render_report,
    style_axes,
    with_own_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RELEVANCE_COLORS = {
    "light": ("#c22f20", "#b5d2f0", "#6fa8e0", "#2b6cd1", "#123a80"),
    "dark": ("#ff8a78", "#34527d", "#4679bd", "#6fabf7", "#cfe4ff"),
}
"""Color of each band of relevance, for light and dark pages. The first is that of totally
irrelevant items.
"""
TABLE_CUTOFFS = (100, 1000)
"""Values of K for which the table has CS@K, besides the whole list."""
MEANS = "means over queries with 95 % intervals"
EXPANDED_CAPTIONS = 10
"""Number of captions of a list that are visible before it is expanded."""
TILES_PER_ROW = 15
FIGURE_WIDTH, QUERY_IMAGE_SIDE = 12.0, 1.5
"""Inches of the plot of ranked lists, and of the image of a query."""
AGGREGATIONS = {
    "paired": "the relevance of a caption to the image's first caption",
    "max": "the maximum relevance of a caption to the image's captions",
    "mean": "the mean relevance of a caption to the image's captions",
}


def write_coherence_report(comparison: RankedListComparison, folder: Path) -> None:
    """Write ``report.html``, ``coherence.json``, ``scores.png`` and, for caption queries,
    ``lists.png``.
    """
    thumbnails = Thumbnails(comparison.data)
    names = [ranker.name for ranker in comparison.rankers]
    scores = ThemedImage.draw(
        partial(plot_coherence_scores, names, comparison.statistics), folder / "scores.png"
    )
    storage.write_json(folder / "coherence.json", comparison.to_json())
    if caption_queries := [query for query in comparison.queries if query.direction == "t2i"]:
        storage.write_bytes(
            folder / "lists.png", plot_ranked_lists(caption_queries, comparison.data, thumbnails)
        )
    storage.write_text(folder / "report.html", render_coherence(comparison, scores, thumbnails))


def render_coherence(
    comparison: RankedListComparison, scores: ThemedImage, thumbnails: Thumbnails
) -> str:
    """Render the report as an HTML page, with the plot of CS@K."""
    statistics = comparison.statistics
    top = comparison.top
    shares = [f"{100 * share:.4g}" for share in comparison.bands.quantiles]
    # The largest K of each data set is the whole list.
    cutoffs = [
        k
        for k in statistics["t2i"][0].coherence_by_k
        if k in TABLE_CUTOFFS or k == len(comparison.data.images)
    ]
    undefined = max(
        score.undefined
        for results in statistics.values()
        for result in results
        for score in result.coherence_by_k.values()
    )
    undefined_note = (
        f"Up to {undefined:,} queries per mean have no CS@K, because the relevance of their top K "
        "items is constant."
        if undefined
        else "CS@K is defined for all queries."
    )
    first = f"minus {comparison.rankers[0].name}"
    charts = []
    for direction in DIRECTION_ORDER:
        results = zip(comparison.rankers, statistics[direction], strict=True)
        means = [
            f"{ranker.name} {result.full_list_coherence.mean:.2f}" for ranker, result in results
        ]
        charts.append(f"{DIRECTIONS[direction]}: {', '.join(means)}")
    return render_report(
        "coherence",
        package="visavis.papers",
        comparison=comparison,
        data=comparison.data,
        thumbnails=thumbnails,
        colors=RELEVANCE_COLORS,
        num_runs=len(comparison.rankers) - 1,
        estimator=repr(comparison.estimator),
        aggregation=AGGREGATIONS[comparison.caption_aggregation],
        irrelevant_percent=f"{100 * comparison.bands.irrelevant_share:.4g} %",
        band_labels=[
            *(f"{low} to {high} %" for low, high in pairwise(shares)),
            f"over {shares[-1]} %",
        ],
        facts=[
            (
                f"{result.irrelevant.mean:.1f}",
                f"{ranker.name}: totally irrelevant items in the top {top} images of a caption",
            )
            for ranker, result in zip(comparison.rankers, statistics["t2i"], strict=True)
        ],
        irrelevant=_statistics_table(
            comparison,
            {f"of {top}": 2, first: 2},
            lambda result: [result.irrelevant, result.irrelevant_difference],
            f"Totally irrelevant items in the top {top}: {MEANS}, clustered by image. The variance "
            "over training seeds is not included.",
        ),
        no_match=_statistics_table(
            comparison,
            {"nDCG@10": 3, first: 3},
            lambda result: [result.no_match, result.no_match_difference],
            "nDCG@10 by relevance, where the query's own images or captions are not among the "
            f"candidates (long-tail queries): {MEANS}, clustered by image.",
        ),
        queries={
            direction: [query for query in comparison.queries if query.direction == direction]
            for direction in DIRECTION_ORDER
        },
        expanded_captions=EXPANDED_CAPTIONS,
        scores=scores,
        scores_alt=f"Two charts of CS@K against K. Over the whole list, {'; '.join(charts)}.",
        coherence=_statistics_table(
            comparison,
            {f"CS@{k:,}": 3 for k in cutoffs},
            lambda result: [result.coherence_by_k[k] for k in cutoffs],
            f"{MEANS.capitalize()}, with the first caption of each image only. {undefined_note} "
            "coherence.json has all K.",
        ),
    )


def _statistics_table(
    comparison: RankedListComparison,
    columns: Mapping[str, int],
    select: Callable[[ListStatistics], list[ClusteredMean]],
    note: str,
) -> Table:
    """A row for each run, a group of columns, with their number of decimals, for each direction."""
    means = [
        mean_column(title, digits=digits, group=DIRECTIONS[direction])
        for direction in DIRECTION_ORDER
        for title, digits in columns.items()
    ]
    rows = comparison.mean_rows(select, with_objective=True)
    return Table((Column("run", is_text=True), *means), rows, (note,))


@with_own_style
def plot_coherence_scores(
    names: Sequence[str],
    statistics: Mapping[Direction, Sequence[ListStatistics]],
    theme: PlotTheme = LIGHT_THEME,
) -> bytes:
    """Plot CS@K against K in both directions with 95 % intervals. The last ranker is random."""
    figure = new_figure(8.6, 3.4, theme)
    for number, direction in enumerate(DIRECTION_ORDER):
        axes = figure.add_axes((0.07 + 0.49 * number, 0.155, 0.425, 0.7))
        style_axes(axes, f"CS@K, {DIRECTIONS[direction]}", theme, "K")
        axes.set_xscale("log")
        for index, (name, result) in enumerate(zip(names, statistics[direction], strict=True)):
            # The random order is dotted and has no markers.
            is_random = index == len(names) - 1
            color = theme.foreground if is_random else theme.lines[index % len(theme.lines)]
            style, marker = (":", "") if is_random else ("-", "os^Dv"[index % 5])
            cutoffs = list(result.coherence_by_k)
            scores = list(result.coherence_by_k.values())
            means = [score.mean for score in scores]
            axes.plot(
                cutoffs,
                means,
                color=color,
                linestyle=style,
                marker=marker,
                markersize=4,
                linewidth=1.8,
                label=name,
            )
            low, high = (
                [score.mean + sign * score.half_width for score in scores] for sign in (-1, 1)
            )
            axes.fill_between(
                cutoffs, low, high, color=color, alpha=0.1 if is_random else 0.2, linewidth=0
            )
        axes.set_xticks(
            cutoffs, [f"{k:,}" if k in cutoffs[::2] else "" for k in cutoffs], minor=False
        )
        axes.set_xticks([], minor=True)
        if number == 0:
            axes.legend(loc="best", **legend_style(theme, 2.0))
    return figure_to_png(figure)


@with_own_style
def plot_ranked_lists(
    queries: Sequence[QueryLists], data: Dataset, thumbnails: Thumbnails
) -> bytes:
    """Plot each caption with its image and the top images of every run."""
    side = (FIGURE_WIDTH - QUERY_IMAGE_SIDE - 0.5) / TILES_PER_ROW
    # Of the longest list, rounded up.
    rows = -(
        -max(len(top_list.items) for query in queries for top_list in query.lists) // TILES_PER_ROW
    )
    # Inches: a heading and rows of images with bars.
    list_height = 0.3 + rows * (side + 0.1)
    heights = [
        0.5 + max(len(query.lists) * list_height, QUERY_IMAGE_SIDE + 0.1) for query in queries
    ]
    height = sum(heights) + 0.35
    figure = new_figure(FIGURE_WIDTH, height, LIGHT_THEME)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, FIGURE_WIDTH), ylim=(0, height), aspect="auto")
    axes.set_axis_off()
    top = height
    for query, query_height in zip(queries, heights, strict=True):
        caption = quote_shortened(data.captions[query.index], 130)
        axes.text(0.15, top - 0.33, caption, size=13, color=LIGHT_THEME.foreground, weight="bold")
        _draw_tile(
            axes,
            query.image(data),
            (0.15, top - 0.5 - QUERY_IMAGE_SIDE, QUERY_IMAGE_SIDE - 0.1),
            thumbnails,
        )
        for index, top_list in enumerate(query.lists):
            left = QUERY_IMAGE_SIDE + 0.3
            list_top = top - 0.5 - index * list_height
            rank = f"image at rank {top_list.best_positive_rank:,}"
            heading = f"{top_list.run}: {top_list.num_irrelevant} of {len(top_list.items)} totally irrelevant, {rank}"
            color = LIGHT_THEME.foreground
            axes.text(left, list_top - 0.17, heading.replace("$", r"\$"), size=10, color=color)
            for number, item in enumerate(top_list.items):
                row, column = divmod(number, TILES_PER_ROW)
                bottom = list_top - 0.25 - (row + 1) * side - row * 0.1
                tile = left + column * side, bottom, side - 0.06
                _draw_tile(axes, item.index, tile, thumbnails)
                _draw_marks(axes, item, tile)
        top -= query_height
    key = "bar: relevance      green frame: the caption's image      red and hatched: totally irrelevant"
    axes.text(0.15, 0.14, key, size=10, color=LIGHT_THEME.foreground, alpha=0.75)
    axes.set(xlim=(0, FIGURE_WIDTH), ylim=(0, height))
    return figure_to_png(figure)


def _draw_tile(
    axes: Axes, image: int, tile: tuple[float, float, float], thumbnails: Thumbnails
) -> None:
    """An image in a square, or its first caption if the data set has no pixels."""
    left, bottom, side = tile
    thumbnail = thumbnails.image(image)
    if thumbnail is not None:
        axes.imshow(
            thumbnail,
            extent=(left, left + side, bottom, bottom + side),
            interpolation="lanczos",
            aspect="auto",
        )
        return
    caption = thumbnails.data.captions[thumbnails.data.captions_of[image][0]]
    text = textwrap.fill(caption, 14, max_lines=6, placeholder=" …").replace("$", r"\$")
    axes.text(
        left + 0.02, bottom + side - 0.02, text, size=4.5, color=LIGHT_THEME.foreground, va="top"
    )


def _draw_marks(axes: Axes, item: ListItem, tile: tuple[float, float, float]) -> None:
    """The relevance as a bar below an image, or a red frame with hatching, and a green frame."""
    from matplotlib.patches import Rectangle

    left, bottom, side = tile
    color = RELEVANCE_COLORS["light"][item.band]
    frame = partial(Rectangle, (left, bottom), side, side, fill=False)
    # The hatching is lighter than the frame.
    if item.irrelevant:
        axes.add_patch(frame(edgecolor=color, linewidth=0, hatch="////", alpha=0.6, zorder=2))
        axes.add_patch(frame(edgecolor=color, linewidth=2, zorder=3))
    else:
        corner = (left, bottom - 0.075)
        width = side * item.band / 4
        axes.add_patch(Rectangle(corner, width, 0.055, facecolor=color, linewidth=0, zorder=3))
    if item.is_positive:
        axes.add_patch(frame(edgecolor=LIGHT_THEME.positive, linewidth=3.5, zorder=4))
