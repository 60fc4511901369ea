"""Pictures of lists side by side, and of CS@K against K."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from visavis.comparison.lists import Item, Query, TopList
from visavis.comparison.measure import SHOWN, Measured
from visavis.data.dataset import Dataset
from visavis.report.figures import LIGHT, Theme, dress, new_figure, png, quoted
from visavis.report.thumbnails import Thumbnails
from visavis.types import DIRECTIONS, Direction

BANDS = {"light": ("#c22f20", "#b5d2f0", "#6fa8e0", "#2b6cd1", "#123a80"), "dark": ("#ff8a78", "#34527d", "#4679bd", "#6fabf7", "#cfe4ff")}
"""A color for each band of relevance, by the page's; the first is that of the totally irrelevant."""

ACROSS, WIDTH, OWN = 15, 12.0, 1.5
"""Items in a row, and the inches of the picture and of a query's own image."""


def lists_picture(queries: Sequence[Query], data: Dataset, thumbnails: Thumbnails) -> bytes:
    """Each caption with its own image, and beside it the top of every run's list: degrees as bars, the own image framed, totally
    irrelevant ones hatched.
    """
    side = (WIDTH - OWN - 0.5) / ACROSS
    rows = -(-max(len(top_list.items) for query in queries for top_list in query.lists) // ACROSS)
    block = 0.3 + rows * (side + 0.1)
    heights = [0.5 + max(len(query.lists) * block, OWN + 0.1) for query in queries]
    height = sum(heights) + 0.35
    figure = new_figure(WIDTH, height, LIGHT)
    canvas = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, height), aspect="auto")
    canvas.set_axis_off()
    top = height
    for query, taken in zip(queries, heights, strict=True):
        canvas.text(0.15, top - 0.33, quoted(data.captions[query.index], 130), size=13, color=LIGHT.ink, weight="bold")
        _tile(canvas, query.image(data), (0.15, top - 0.5 - OWN, OWN - 0.1), data, thumbnails)
        for index, top_list in enumerate(query.lists):
            _strip(canvas, top_list, (OWN + 0.3, top - 0.5 - index * block), side, data, thumbnails)
        top -= taken
    key = "bar: the longer and darker, the more relevant      green frame: the caption's own image      red and hatched: totally irrelevant"
    canvas.text(0.15, 0.14, key, size=10, color=LIGHT.ink, alpha=0.75)
    canvas.set(xlim=(0, WIDTH), ylim=(0, height))
    return png(figure)


def _strip(canvas: Any, top_list: TopList, corner: tuple[float, float], side: float, data: Dataset, thumbnails: Thumbnails) -> None:
    left, top = corner
    own = f"own image at rank {top_list.own_rank:,}"
    heading = f"{top_list.run}: {top_list.num_irrelevant} of {len(top_list.items)} totally irrelevant, {own}"
    canvas.text(left, top - 0.17, heading.replace("$", r"\$"), size=10, color=LIGHT.ink)
    for index, item in enumerate(top_list.items):
        row, column = divmod(index, ACROSS)
        spot = (left + column * side, top - 0.25 - (row + 1) * side - row * 0.1, side - 0.06)
        _tile(canvas, item.index, spot, data, thumbnails)
        _mark(canvas, item, spot)


def _tile(canvas: Any, image: int, spot: tuple[float, float, float], data: Dataset, thumbnails: Thumbnails) -> None:
    """An image in a square, or its first caption where its pixels are not there."""
    left, bottom, side = spot
    picture = thumbnails.picture(image)
    if picture is not None:
        canvas.imshow(picture, extent=(left, left + side, bottom, bottom + side), interpolation="lanczos", aspect="auto")
        return
    words = textwrap.fill(data.captions[data.captions_of[image][0]], 14, max_lines=6, placeholder=" …").replace("$", r"\$")
    canvas.text(left + 0.02, bottom + side - 0.02, words, size=4.5, color=LIGHT.ink, va="top")


def _mark(canvas: Any, item: Item, spot: tuple[float, float, float]) -> None:
    from matplotlib.patches import Rectangle

    left, bottom, side = spot
    color = BANDS["light"][item.band]
    if item.irrelevant:
        canvas.add_patch(Rectangle((left, bottom), side, side, fill=False, edgecolor=color, linewidth=0, hatch="////", alpha=0.6, zorder=2))
        canvas.add_patch(Rectangle((left, bottom), side, side, fill=False, edgecolor=color, linewidth=2, zorder=3))
    else:
        canvas.add_patch(Rectangle((left, bottom - 0.075), side * item.band / 4, 0.055, facecolor=color, linewidth=0, zorder=3))
    if item.own:
        canvas.add_patch(Rectangle((left, bottom), side, side, fill=False, edgecolor=LIGHT.right, linewidth=3.5, zorder=4))


def scores_picture(names: Sequence[str], measured: Mapping[Direction, Sequence[Measured]], theme: Theme = LIGHT) -> bytes:
    """CS@K against K in both directions: a line for each ranker, its 95 % interval as a band; the last one is the random order."""
    figure = new_figure(8.6, 3.4, theme)
    for number, way in enumerate(SHOWN):
        panel = figure.add_axes((0.07 + 0.49 * number, 0.155, 0.425, 0.7))
        dress(panel, f"CS@K, {DIRECTIONS[way]}", theme, "K")
        panel.set_xscale("log")
        for index, (name, result) in enumerate(zip(names, measured[way], strict=True)):
            last = index == len(names) - 1
            color = theme.ink if last else theme.lines[index % len(theme.lines)]
            cuts = list(result.scores)
            means, halves = ([getattr(result.scores[k], what) for k in cuts] for what in ("mean", "half"))
            style, marker = (":", "") if last else ("-", "os^Dv"[index % 5])
            panel.plot(cuts, means, color=color, linestyle=style, marker=marker, markersize=4, linewidth=1.8, label=name)
            low, high = ([mean + sign * half for mean, half in zip(means, halves, strict=True)] for sign in (-1, 1))
            panel.fill_between(cuts, low, high, color=color, alpha=0.1 if last else 0.2, linewidth=0)
        panel.set_xticks(cuts, [f"{k:,}" if k in cuts[::2] else "" for k in cuts], minor=False)
        panel.set_xticks([], minor=True)
        if not number:
            panel.legend(loc="best", fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return png(figure)
