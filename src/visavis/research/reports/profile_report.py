"""Report of objective profiles: triplet diagrams, weights of pairs, and rotation of vectors, with a
plot of each objective.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from visavis.core import storage
from visavis.core.environment import shell_command
from visavis.research.diagnostics.objective_profile import (
    FIXED_SIMILARITIES,
    INITIAL_ANGLES,
    NEGATIVE_ANGLES,
    STEP_LENGTH,
    VECTOR_NAMES,
    ObjectiveProfile,
    ObjectiveProfiles,
    Rotation,
    TripletWeights,
    pair_weight_name,
)
from visavis.research.reports.html_report import ThemedImage, render_report
from visavis.research.reports.plotting import (
    DASH_PATTERN,
    LIGHT_THEME,
    PlotTheme,
    figure_to_png,
    legend_style,
    new_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from visavis.losses.objectives import Goal


LINE_STYLES = ("-", (0, (4, 1.4)), (0, (1, 1.2)))
"""Line styles of the fixed similarities."""


def write_profile_report(result: ObjectiveProfiles) -> None:
    """Write ``report.html``, ``profiles.json`` and a plot of each objective, such as
    ``1-Unified.png``, to the folder.

    With objectives GOAL, ``pair-weights.png`` has their pair weights in one plot.

    Args:
        result: Profiles and their folder.
    """
    names = [type(profile.objective).__name__ for profile in result.profiles]
    images = [
        ThemedImage.draw(
            partial(plot_objective_profile, profile), result.folder / f"{number}-{name}.png"
        )
        for number, (name, profile) in enumerate(zip(names, result.profiles, strict=True), 1)
    ]
    storage.write_json(result.folder / "profiles.json", result.to_json())
    pair_weights = (
        ThemedImage.draw(
            partial(plot_pair_weights, result.goals), result.folder / "pair-weights.png"
        )
        if result.goals
        else None
    )
    page = render_report(
        "profiles",
        pair_weights=pair_weights,
        pair_weights_alt=f"Weights of positives and of negatives: {'; '.join(map(pair_weight_name, result.goals))}.",
        profiles=[
            _section(profile, image) for profile, image in zip(result.profiles, images, strict=True)
        ],
        names=list(dict.fromkeys(names)),
        step_length=f"{STEP_LENGTH:g}",
        positive_angle=f"{-INITIAL_ANGLES[1]:g}",
        negative_angles=", ".join(f"{angle:g}" for angle in INITIAL_ANGLES[2:]),
        command=f"{shell_command()} anatomy {' '.join(shlex.quote(profile.name) for profile in result.profiles)}",
    )
    storage.write_text(result.folder / "report.html", page)


def _section(profile: ObjectiveProfile, image: ThemedImage) -> dict[str, Any]:
    """Name, plot, tangent norms and table of one objective."""
    rotation, query_after = profile.rotation, profile.rotation.angle_after[0].item()
    vectors = list(
        zip(
            VECTOR_NAMES,
            rotation.angle.tolist(),
            rotation.norm.tolist(),
            rotation.angle_after.tolist(),
            strict=True,
        )
    )
    rows = [
        [
            name,
            f"{angle:.1f}°",
            f"{norm:.3f}",
            f"{after - angle:+.1f}°",
            f"{after - query_after:.1f}°",
        ]
        for name, angle, norm, after in vectors
    ]
    return {
        "name": profile.name,
        "image": image,
        "norms": [f"{name} {norm:.2f}" for name, _, norm, _ in vectors],
        "rows": rows,
    }


def plot_objective_profile(profile: ObjectiveProfile, theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot the profile of one objective.

    Args:
        profile: Weights and rotations.
        theme: Colors.

    Returns:
        A PNG. Top: triplet diagram, weights of the negative and of the positive. Bottom: vectors on
        a circle, tangent norms.
    """
    figure = new_figure(8.6, 6.0, theme)
    diagram, color_bar = (
        figure.add_axes((0.065, 0.6, 0.235, 0.337)),
        figure.add_axes((0.308, 0.6, 0.012, 0.337)),
    )
    push, pull = (figure.add_axes((left, 0.6, 0.25, 0.337)) for left in (0.408, 0.724))
    circle, norms = (
        figure.add_axes((0.02, 0.05, 0.52, 0.4)),
        figure.add_axes((0.61, 0.09, 0.35, 0.36)),
    )
    _plot_triplets(diagram, color_bar, profile.triplet_diagram, theme)
    _plot_weights(
        push,
        profile.by_negative.negative.numpy(),
        profile.by_negative.push.numpy(),
        ("negative", "positive"),
        theme,
    )
    _plot_weights(
        pull,
        profile.by_positive.positive.numpy(),
        profile.by_positive.pull.T.numpy(),
        ("positive", "negative"),
        theme,
    )
    _plot_circle(circle, profile.rotation, theme)
    _plot_norms(norms, profile.rotation, theme)
    return figure_to_png(figure, colors=256)


def plot_pair_weights(goals: Sequence[Goal], theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot the pair weights of objectives GOAL against similarity.

    Args:
        goals: The objectives, at least one.
        theme: Colors.

    Returns:
        A PNG. Left: weights of positives. Right: weights of negatives. The means of "lin_ms" and
        "sig_ms" are 0.1.

    Source:
        GOAL, figure 3.
    """
    similarity = torch.linspace(0, 1, 201, dtype=torch.float64)
    figure = new_figure(8.6, 3.3 + 0.2 * math.ceil(len(goals) / 2), theme)
    panels = figure.subplots(1, 2)
    for number, goal in enumerate(goals):
        style = LINE_STYLES[1 if goal.needs_positive_scores else 0]
        for axes, weights in zip(panels, goal.pair_weights(similarity, similarity), strict=True):
            color = theme.lines[number % len(theme.lines)]
            axes.plot(
                similarity.numpy(),
                weights.numpy(),
                color=color,
                linestyle=style,
                linewidth=1.8,
                label=pair_weight_name(goal),
            )
    for axes, name in zip(panels, ("positive", "negative"), strict=True):
        style_axes(axes, f"weight of the {name}", theme, f"similarity of the {name}")
    figure.tight_layout(
        rect=(0, (0.1 + 0.2 * math.ceil(len(goals) / 2)) / figure.get_figheight(), 1, 1)
    )
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="lower left",
        ncols=2,
        **legend_style(theme, 2.2),
    )
    return figure_to_png(figure)


def _plot_triplets(axes: Axes, color_bar: Axes, triplets: TripletWeights, theme: PlotTheme) -> None:
    """Norm of the gradient as color, and the direction of both similarities as arrows."""
    from matplotlib.colors import LinearSegmentedColormap

    magnitude, (low, high) = (
        triplets.magnitude,
        (triplets.positive[0].item(), triplets.positive[-1].item()),
    )
    top = 1.0 if magnitude.max() <= 1.6 else torch.quantile(magnitude, 0.98).item()
    colors = LinearSegmentedColormap.from_list("weights", [theme.background, theme.lines[1]])
    image = axes.imshow(
        magnitude.T.numpy(),
        origin="lower",
        extent=(low, high, low, high),
        vmin=0,
        vmax=top,
        cmap=colors,
        alpha=0.8,
        aspect="auto",
    )
    every_fourth = slice(2, None, 4)
    right, up = (
        weights[every_fourth, every_fourth].T.clamp(-top, top).numpy()
        for weights in (triplets.pull, -triplets.push)
    )
    axes.quiver(
        *np.meshgrid(
            triplets.positive[every_fourth].numpy(), triplets.negative[every_fourth].numpy()
        ),
        right,
        up,
        color=theme.foreground,
        angles="xy",
        scale_units="xy",
        scale=top / 0.17,
        width=0.006,
    )
    style_axes(axes, "triplets", theme, "similarity of the positive")
    axes.set_ylabel("similarity of the negative", size=9, color=theme.foreground, labelpad=1)
    axes.set(xlim=(low, high), ylim=(low, high), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    axes.grid(visible=False)
    axes.figure.colorbar(image, cax=color_bar).outline.set_visible(False)
    color_bar.tick_params(colors=theme.foreground, labelsize=7.5, length=0, pad=2)


def _plot_weights(
    axes: Axes,
    similarity: np.ndarray,
    weights: np.ndarray,
    names: tuple[str, str],
    theme: PlotTheme,
) -> None:
    """Weight of a pair against its similarity, with a curve for each fixed similarity of the other
    pair.
    """
    varied, fixed = names
    color = theme.lines[0 if varied == "positive" else 1]
    for curve, value, style in zip(weights, FIXED_SIMILARITIES, LINE_STYLES, strict=True):
        axes.plot(
            similarity,
            curve,
            color=color,
            linestyle=style,
            linewidth=1.8,
            label=f"{fixed} {value:g}",
        )
    style_axes(axes, f"weight of the {varied}", theme, f"similarity of the {varied}")
    bottom, top = min(0.0, axes.get_ylim()[0]), axes.get_ylim()[1]
    axes.set(xlim=(-1, 1), xticks=(-1, 0, 1), ylim=(bottom, top + 0.34 * (top - bottom)))
    axes.legend(
        loc="upper right" if varied == "positive" else "upper left",
        **legend_style(theme, 2.2, font_size=8),
    )


def _plot_circle(axes: Axes, rotation: Rotation, theme: PlotTheme) -> None:
    """Vectors before a step, their movement along the tangent (green), and vectors after it
    (dashed). The query points up.
    """
    radians = np.deg2rad(np.linspace(65, 162, 98))
    axes.plot(np.cos(radians), np.sin(radians), color=theme.grid, linewidth=1)
    colors = [theme.lines[0], theme.lines[3], *[theme.lines[1]] * 4]
    arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0}
    for angle, after, norm, color in zip(
        rotation.angle.tolist(),
        rotation.angle_after.tolist(),
        rotation.norm.tolist(),
        colors,
        strict=True,
    ):
        (x, y), end = _point_on_circle(angle), _point_on_circle(after)
        axes.annotate("", (x, y), (0, 0), arrowprops=arrow | {"color": color, "linewidth": 1.6})
        axes.plot([0, end[0]], [0, end[1]], color=color, linestyle=DASH_PATTERN, linewidth=1.0)
        if norm > 1e-3:
            sign = 1 if after > angle else -1
            tip = x - sign * STEP_LENGTH * norm * y, y + sign * STEP_LENGTH * norm * x
            axes.annotate(
                "",
                tip,
                (x, y),
                arrowprops=arrow | {"color": theme.positive, "linewidth": 1.8, "mutation_scale": 7},
            )
    labels = (
        ("query", colors[0]),
        ("positive", colors[1]),
        ("negatives", colors[2]),
        ("step along the tangent", theme.positive),
    )
    for label, color in labels:
        axes.plot([], [], color=color, linewidth=2, label=label)
    axes.plot(
        [], [], color=theme.foreground, linestyle=DASH_PATTERN, linewidth=1, label="after the step"
    )
    axes.legend(loc="lower right", **legend_style(theme, 1.8, font_size=8))
    style_axes(axes, "  rotation by a step", theme, "")
    axes.set(xlim=(-1.0, 1.16), ylim=(-0.02, 1.16), aspect="equal", xticks=(), yticks=())
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def _plot_norms(axes: Axes, rotation: Rotation, theme: PlotTheme) -> None:
    """Tangent norms against the angle of the hardest negative."""
    query, positive, hardest, *others = rotation.norm_by_angle.T.numpy()
    curves = (
        ("query", query, 0, "-"),
        ("positive", positive, 3, "-"),
        ("hardest negative", hardest, 1, "-"),
    )
    for label, norms, number, style in (
        *curves,
        ("maximum of the other negatives", np.max(others, axis=0), 1, DASH_PATTERN),
    ):
        axes.plot(
            NEGATIVE_ANGLES,
            norms,
            color=theme.lines[number],
            linestyle=style,
            linewidth=1.8,
            label=label,
        )
    style_axes(axes, "tangent norms", theme, "angle from the query to the hardest negative (°)")
    axes.set(xlim=(NEGATIVE_ANGLES[0], NEGATIVE_ANGLES[-1]), ylim=(0, 1.3 * axes.get_ylim()[1]))
    axes.legend(loc="upper left", ncols=2, **legend_style(theme, 2.0, font_size=8))


def _point_on_circle(angle: float) -> tuple[float, float]:
    """End of a unit vector at an angle from the query, which points up. Negatives are on the left."""
    radians = np.deg2rad(90 + angle)
    return float(np.cos(radians)), float(np.sin(radians))
