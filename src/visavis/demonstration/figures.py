"""The picture of what a demo's best run finds, as PNG bytes."""

from __future__ import annotations

from collections.abc import Sequence

from visavis.demonstration.retrievals import Retrieval
from visavis.report.figures import LIGHT, Theme, new_figure, png, quoted


def retrieval_picture(retrievals: Sequence[Retrieval], theme: Theme = LIGHT) -> bytes:
    """Each query above the scenes that came first, best on the left; right ones framed and ticked."""
    width, columns = 8.6, max(len(retrieval.scenes) for retrieval in retrievals)
    side, gap, head = (width - 0.24) / columns - 0.12, 0.12, 0.4
    height = len(retrievals) * (head + side + 0.16) + 0.42
    figure = new_figure(width, height, theme)
    for row, retrieval in enumerate(retrievals):
        top = height - 0.08 - row * (head + side + 0.16)
        figure.text(0.18 / width, (top - 0.27) / height, quoted(retrieval.query), size=12.5, color=theme.ink, va="baseline")
        for column, scene in enumerate(retrieval.scenes):
            left, bottom = 0.18 + column * (side + gap), top - head - side
            axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
            axes.imshow(scene.picture, interpolation="lanczos")
            axes.set(xticks=[], yticks=[])
            color = theme.right if scene.own or scene.fits else theme.faint
            for spine in axes.spines.values():
                spine.set(color=color, linewidth=4.0 if scene.own else 2.4 if scene.fits else 1.0)
            if scene.own or scene.fits:
                badge = {
                    "boxstyle": "circle,pad=0.22",
                    "facecolor": color if scene.own else theme.paper,
                    "edgecolor": color,
                    "linewidth": 1.6,
                }
                ink = theme.paper if scene.own else color
                axes.text(0.9, 0.1, "✓", transform=axes.transAxes, size=11, color=ink, bbox=badge, ha="center", va="center", weight="bold")
    key = "full tick: the picture the sentence was written for      open tick: another of which every word is true as well"
    figure.text(0.18 / width, 0.16 / height, key, size=9.5, color=theme.ink, alpha=0.75)
    return png(figure, colors=256)
