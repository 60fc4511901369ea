"""The picture of one objective: its triplet diagram, the weights of pairs, and what it turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from visavis.diagnosis.anatomy import PARTNERS, Portrait
from visavis.diagnosis.circle import NEAR, STEP, Turned
from visavis.diagnosis.triplets import Triplets
from visavis.report.figures import LIGHT, Theme, dress, new_figure, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHED = (0, (2, 1.4))
STYLES = ("-", (0, (4, 1.4)), (0, (1, 1.2)))
"""Of the lines of PARTNERS."""


def portrait_picture(portrait: Portrait, theme: Theme = LIGHT) -> bytes:
    """Above the triplet diagram and the weights of the negative and the positive, below the vectors on a circle and the tangent norms."""
    figure = new_figure(8.6, 6.0, theme)
    diagram, bar = figure.add_axes((0.065, 0.6, 0.235, 0.337)), figure.add_axes((0.308, 0.6, 0.012, 0.337))
    push, pull = (figure.add_axes((left, 0.6, 0.25, 0.337)) for left in (0.408, 0.724))
    circle, norms = figure.add_axes((0.02, 0.05, 0.52, 0.4)), figure.add_axes((0.61, 0.09, 0.35, 0.36))
    _diagram(diagram, bar, portrait.diagram, theme)
    _pairs(push, portrait.by_negative.negative.numpy(), portrait.by_negative.push.numpy(), ("negative", "positive"), theme)
    _pairs(pull, portrait.by_positive.positive.numpy(), portrait.by_positive.pull.T.numpy(), ("positive", "negative"), theme)
    _circle(circle, portrait.circle, theme)
    _norms(norms, portrait.circle, theme)
    return png(figure, colors=256)


def _diagram(axes: Axes, bar: Axes, triplets: Triplets, theme: Theme) -> None:
    """How long the gradient is, and arrows to where both similarities go."""
    from matplotlib.colors import LinearSegmentedColormap

    size, (low, high) = triplets.size, (triplets.positive[0].item(), triplets.positive[-1].item())
    top = 1.0 if size.max() <= 1.6 else torch.quantile(size, 0.98).item()
    colors = LinearSegmentedColormap.from_list("weights", [theme.paper, theme.lines[1]])
    shown = axes.imshow(
        size.T.numpy(), origin="lower", extent=(low, high, low, high), vmin=0, vmax=top, cmap=colors, alpha=0.8, aspect="auto"
    )
    part = slice(2, None, 4)
    right, up = (weights[part, part].T.clamp(-top, top).numpy() for weights in (triplets.pull, -triplets.push))
    axes.quiver(
        *np.meshgrid(triplets.positive[part].numpy(), triplets.negative[part].numpy()),
        right,
        up,
        color=theme.ink,
        angles="xy",
        scale_units="xy",
        scale=top / 0.17,
        width=0.006,
    )
    dress(axes, "triplets", theme, "similarity of the positive")
    axes.set_ylabel("similarity of the negative", size=9, color=theme.ink, labelpad=1)
    axes.set(xlim=(low, high), ylim=(low, high), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    axes.grid(visible=False)
    drawn = axes.figure.colorbar(shown, cax=bar)
    drawn.outline.set_visible(False)
    bar.tick_params(colors=theme.ink, labelsize=7.5, length=0, pad=2)


def _pairs(axes: Axes, similarity: np.ndarray, weights: np.ndarray, names: tuple[str, str], theme: Theme) -> None:
    varied, held = names
    for line, partner, style in zip(weights, PARTNERS, STYLES, strict=True):
        axes.plot(
            similarity,
            line,
            color=theme.lines[0 if varied == "positive" else 1],
            linestyle=style,
            linewidth=1.8,
            label=f"{held} {partner:g}",
        )
    dress(axes, f"weight of the {varied}", theme, f"similarity of the {varied}")
    bottom, top = min(0.0, axes.get_ylim()[0]), axes.get_ylim()[1]
    axes.set(xlim=(-1, 1), xticks=(-1, 0, 1), ylim=(bottom, top + 0.34 * (top - bottom)))
    axes.legend(
        loc="upper right" if varied == "positive" else "upper left", fontsize=8, frameon=False, labelcolor=theme.ink, handlelength=2.2
    )


def _circle(axes: Axes, turned: Turned, theme: Theme) -> None:
    """The query upright: vectors before, their way along the tangent in green, and after, dashed."""
    radians = np.deg2rad(np.linspace(65, 162, 98))
    axes.plot(np.cos(radians), np.sin(radians), color=theme.faint, linewidth=1)
    colors = [theme.lines[0], theme.lines[3], *[theme.lines[1]] * 4]
    for angle, after, norm, color in zip(turned.angle.tolist(), turned.turned.tolist(), turned.norm.tolist(), colors, strict=True):
        (x, y), new = _place(angle), _place(after)
        axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0})
        axes.plot([0, new[0]], [0, new[1]], color=color, linestyle=DASHED, linewidth=1.0)
        if norm > 1e-3:
            sign = 1 if after > angle else -1
            tip = x - sign * STEP * norm * y, y + sign * STEP * norm * x
            axes.annotate(
                "",
                tip,
                (x, y),
                arrowprops={"arrowstyle": "-|>", "color": theme.right, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7},
            )
    labels = (("query", colors[0]), ("positive", colors[1]), ("negatives", colors[2]), ("step along the tangent", theme.right))
    for label, color in labels:
        axes.plot([], [], color=color, linewidth=2, label=label)
    axes.plot([], [], color=theme.ink, linestyle=DASHED, linewidth=1, label="after the step")
    axes.legend(loc="lower right", fontsize=8, frameon=False, labelcolor=theme.ink, handlelength=1.8)
    dress(axes, "  what a step turns", theme, "")
    axes.set(xlim=(-1.0, 1.16), ylim=(-0.02, 1.16), aspect="equal", xticks=(), yticks=())
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def _norms(axes: Axes, turned: Turned, theme: Theme) -> None:
    query, positive, hardest, *others = turned.along.T.numpy()
    axes.plot(NEAR, query, color=theme.lines[0], linewidth=1.8, label="query")
    axes.plot(NEAR, positive, color=theme.lines[3], linewidth=1.8, label="positive")
    axes.plot(NEAR, hardest, color=theme.lines[1], linewidth=1.8, label="hardest negative")
    axes.plot(NEAR, np.max(others, axis=0), color=theme.lines[1], linestyle=DASHED, linewidth=1.8, label="most turned other negative")
    dress(axes, "tangent norms", theme, "degrees from the query to its hardest negative")
    axes.set(xlim=(NEAR[0], NEAR[-1]), ylim=(0, 1.3 * axes.get_ylim()[1]))
    axes.legend(loc="upper left", ncols=2, fontsize=8, frameon=False, labelcolor=theme.ink, handlelength=2.0)


def _place(angle: float) -> tuple[float, float]:
    """Where a vector at so many degrees from the query ends, the query upright and negatives on the left."""
    radians = np.deg2rad(90 + angle)
    return float(np.cos(radians)), float(np.sin(radians))
