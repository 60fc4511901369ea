"""Objective profiles: the gradient of an objective without any data, for single triplets and for
vectors on a circle.

Triplet diagram: how strongly an objective pulls the positive and pushes the negative, as a function
of their similarities to the query.

Rotation: one query, its positive and four negatives as unit vectors on a circle, and the angles by
which one gradient step rotates them. The hardest negative is closer to the query than the positive,
as early in training, when all embeddings are similar.

Source: Unified loss, section 3.3 and figure 2. Norms with the corrected eqs. 15 and 17 (see
`pair_gradients.tangent_norms`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.environment import quote_argument, shell_command
from visavis.core.errors import SpecError
from visavis.core.result import Result
from visavis.core.table import Column, Table
from visavis.losses import objectives
from visavis.losses.objectives import Goal, Objective
from visavis.losses.pair_gradients import pair_weights, tangent_norms_of_slopes
from visavis.losses.targets import Targets
from visavis.research.reports.html_report import (
    DASH_PATTERN,
    LIGHT_THEME,
    PlotTheme,
    ThemedImage,
    figure_to_png,
    legend_style,
    new_figure,
    render_report,
    style_axes,
    with_own_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


VECTOR_NAMES = ("query", "positive", "negative 1", "negative 2", "negative 3", "negative 4")
"""Names of the vectors on the circle."""
INITIAL_ANGLES = (0.0, -14.0, 8.0, 16.0, 30.0, 60.0)
"""Angle between each vector and the query, in degrees."""
STEP_LENGTH = 0.5
"""Length of the step along the gradient."""
ROTATION_COLUMNS = (
    Column("vector", is_text=True),
    Column("from the query", ".1f", unit="°"),
    Column("tangent norm", ".3f"),
    Column("rotated by", "+.1f", unit="°"),
    Column("from the query, after", ".1f", unit="°"),
)
NEGATIVE_ANGLES = tuple(range(41))
"""Angles of the hardest negative at which norms are computed, in degrees. The other negatives are
8, 22 and 52 degrees further.
"""
FIXED_SIMILARITIES = (0.2, 0.5, 0.8)
"""Similarities of one pair of a triplet while the other one varies."""


LINE_STYLES = ("-", (0, (4, 1.4)), (0, (1, 1.2)))
"""Line styles of the fixed similarities."""


@dataclass(frozen=True)
class TripletWeights:
    """Pair weights of a triplet over a grid of similarities, in the units of `pair_weights`.

    Attributes:
        positive: Similarities of query and positive, shape ``[A]``.
        negative: Similarities of query and negative, shape ``[B]``.
        pull: -dL/ds of the positive, shape ``[A, B]``.
        push: dL/ds of the negative, shape ``[A, B]``.
    """

    positive: Tensor
    negative: Tensor
    pull: Tensor
    push: Tensor

    @property
    def magnitude(self) -> Tensor:
        """Length of the gradient, shape ``[A, B]``. 1 where both weights are 1."""
        return (self.pull.square() + self.push.square()).div(2).sqrt()


def triplet_weights(objective: Objective, positive: Tensor, negative: Tensor) -> TripletWeights:
    """Compute the weights of the positive and the negative of one query, as in figure 2 of GOAL
    (after Xuan et al., "Hard negative examples are hard, but useful", 2020).
    """
    # Objectives that read all positives (GOAL with lin_ms, sig_ms) are differentiated one positive
    # similarity at a time: the other positives of the batch score the same. A second negative
    # scores as the first one and shares its push.
    num_negatives, batches = (
        (2, positive[:, None]) if objective.needs_positive_scores else (1, positive[None])
    )
    weights = torch.cat([_weights(objective, batch, negative, num_negatives) for batch in batches])
    weights = weights.unflatten(0, (len(positive), len(negative)))
    return TripletWeights(positive, negative, -weights[..., 0], weights[..., 1:].sum(-1))


def _weights(
    objective: Objective, positive: Tensor, negative: Tensor, num_negatives: int
) -> Tensor:
    """Weights of each positive with each negative, the latter in several columns: ``[A B, 1 +
    num_negatives]``.
    """
    # [A B] each
    positive_scores, negative_scores = torch.cartesian_prod(positive, negative).unbind(1)
    scores = torch.stack([positive_scores, *[negative_scores] * num_negatives], 1)
    ids = torch.zeros(len(scores), dtype=torch.long)
    targets = Targets(
        query_ids=ids,
        candidate_ids=torch.arange(1 + num_negatives),
        **_neutral_annotations(objective, scores),
    )
    return pair_weights(objective, scores, targets)


def _neutral_annotations(objective: Objective, scores: Tensor) -> dict[str, Any]:
    """The annotations that an objective needs, for scores whose column 0 is the positive."""
    relevance = torch.zeros_like(scores)
    relevance[:, 0] = 1
    annotations = {
        "relevance": relevance,
        # Two offline negatives score as the hardest negative.
        "query_offline_scores": scores[:, 1:].amax(1, keepdim=True).expand(-1, 2),
        "pair_margin": torch.full_like(scores, getattr(objective, "margin", 0.0)),
    }
    return {
        name: annotation
        for name, annotation in annotations.items()
        if name in objective.used_annotations
    }


@dataclass(frozen=True)
class Rotation:
    """Rotation of vectors on a circle by one step along the gradient. The order of vectors is that
    of `VECTOR_NAMES`.

    Attributes:
        angle: Angle of each vector before the step, in degrees, shape ``[6]``.
        angle_after: Angle of each vector after the step, in degrees, shape ``[6]``.
        norm: Tangent norm of the query's loss term on each vector, shape ``[6]``.
        norm_by_angle: Tangent norms by the angle of the hardest negative, shape
            ``[len(NEGATIVE_ANGLES), 6]``.
    """

    angle: Tensor
    angle_after: Tensor
    norm: Tensor
    norm_by_angle: Tensor

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object. Angles are in degrees."""
        vectors = zip(
            VECTOR_NAMES,
            *(values.tolist() for values in (self.angle, self.angle_after, self.norm)),
            strict=True,
        )
        return {
            "vectors": [
                {"name": name, "angle": angle, "angle_after": after, "norm": norm}
                for name, angle, after, norm in vectors
            ],
            "angle_of_negative_1": list(NEGATIVE_ANGLES),
            "norms": dict(zip(VECTOR_NAMES, self.norm_by_angle.T.tolist(), strict=True)),
        }


def rotation(objective: Objective, angles: Tensor | None = None) -> Rotation:
    """Compute the rotation of a query, its positive and four negatives at angles in degrees."""
    start = torch.tensor(INITIAL_ANGLES, dtype=torch.float64) if angles is None else angles
    gradient, norm = _tangent_gradient(objective, start)
    moved = _unit_vectors(start) - STEP_LENGTH * gradient  # [6, 2]
    after = torch.rad2deg(torch.atan2(moved[:, 1], moved[:, 0]))
    # The negatives rotate together, by the angle of the hardest one.
    norm_by_angle = [
        _tangent_gradient(objective, torch.cat([start[:2], start[2:] - start[2] + angle]))[1]
        for angle in NEGATIVE_ANGLES
    ]
    return Rotation(start, after, norm, torch.stack(norm_by_angle))


def _tangent_gradient(objective: Objective, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Tangent gradient of the query's loss term on each vector ``[6, 2]``, and its norm."""
    units = _unit_vectors(angles)
    query = units[:1]
    candidates = units[1:]
    scores = query @ candidates.T
    ids = torch.arange(len(candidates))
    slopes = pair_weights(
        objective,
        scores,
        Targets(query_ids=ids[:1], candidate_ids=ids, **_neutral_annotations(objective, scores)),
    )
    # [6, 2]: the query sums over candidates, each candidate has one term.
    gradient = torch.cat([slopes @ candidates, slopes.T * query])
    tangent = gradient - (gradient * units).sum(1, keepdim=True) * units
    norms = tangent_norms_of_slopes(slopes, query, candidates)
    return tangent, torch.cat([norms.anchor, norms.candidate[0]])


def _unit_vectors(angles: Tensor) -> Tensor:
    radians = torch.deg2rad(angles)
    return torch.stack([radians.cos(), radians.sin()], 1)


@dataclass(frozen=True)
class ObjectiveProfile:
    """Gradient profile of one objective.

    Attributes:
        objective: The objective.
        triplet_diagram: Weights over the plane of both similarities.
        by_positive: Weights by the similarity of the positive, for each of `FIXED_SIMILARITIES` of
            the negative.
        by_negative: Weights by the similarity of the negative, for each of `FIXED_SIMILARITIES` of
            the positive.
        rotation: Rotation of vectors on a circle.
    """

    objective: Objective
    triplet_diagram: TripletWeights
    by_positive: TripletWeights
    by_negative: TripletWeights
    rotation: Rotation

    @property
    def name(self) -> str:
        """The objective with the values that differ from its defaults."""
        values = (
            (field.name, getattr(self.objective, field.name), field.default)
            for field in fields(self.objective)  # type: ignore[arg-type]
        )
        return f"{type(self.objective).__name__}({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "objective": repr(self.objective),
            "triplets": {
                name: _rounded(getattr(self.triplet_diagram, name))
                for name in ("positive", "negative", "pull", "push")
            },
            "pairs": {
                "similarity": _rounded(self.by_positive.positive),
                "partner": list(FIXED_SIMILARITIES),
                "pull": _rounded(self.by_positive.pull.T),
                "push": _rounded(self.by_negative.push),
            },
            "circle": self.rotation.to_json(),
        }


@dataclass(frozen=True)
class ObjectiveProfiles(Result):
    """Profiles of several objectives.

    Attributes:
        profiles: The profiles, in the given order.
        folder: Folder of the report.
    """

    ROWS: ClassVar[str] = "objectives"

    profiles: tuple[ObjectiveProfile, ...]
    folder: Path

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The first objective GOAL of each kind of pair weight."""
        goals: dict[str, Goal] = {}
        for profile in self.profiles:
            if isinstance(profile.objective, Goal):
                goals.setdefault(pair_weight_name(profile.objective), profile.objective)
        return tuple(goals.values())

    def tables(self) -> list[Table]:
        """Return the tangent norms of a query, its positive and four negatives."""
        vectors = zip(VECTOR_NAMES, INITIAL_ANGLES, strict=True)
        columns = (
            Column(f"{name.removeprefix('negative ')} {angle:g}°", ".3f") for name, angle in vectors
        )
        rows = [(profile.name, *profile.rotation.norm.tolist()) for profile in self.profiles]
        note = (
            "A query, its positive and four negatives on a circle. Triplets and weights of pairs: "
            f"{self.folder / 'report.html'}"
        )
        return [Table((Column("tangent norm on", is_text=True), *columns), tuple(rows), (note,))]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        similarity = torch.linspace(0, 1, 101, dtype=torch.float64)
        weights = [
            (pair_weight_name(goal), goal.pair_weights(similarity, similarity))
            for goal in self.goals
        ]
        return {
            "folder": str(self.folder),
            "objectives": [profile.to_json() for profile in self.profiles],
            "pair_weights": [
                {
                    "name": name,
                    "similarity": _rounded(similarity),
                    "positive": _rounded(positive),
                    "negative": _rounded(negative),
                }
                for name, (positive, negative) in weights
            ],
        }


def pair_weight_name(goal: Goal) -> str:
    """Name the pair weight of an objective GOAL, with its parameters."""
    slopes = (
        f", alpha={goal.alpha:g}, beta={goal.beta:g}, lam={goal.lam:g}"
        if goal.pair.startswith("sig")
        else ""
    )
    return f"{goal.pair}{slopes}{', m=0.1' if goal.needs_positive_scores else ''}"


def profile_objectives(specs: Sequence[str]) -> tuple[ObjectiveProfile, ...]:
    """Profile several objectives, each once, for similarities from -1 to 1: 45 of each pair in the
    plane, 201 along one of them.
    """
    unique = list(dict.fromkeys(objectives.parse(text) for text in specs))
    if not unique:
        raise SpecError(
            'objective: expected at least one objective such as "Unified(gamma=50)", got none.'
        )
    plane, line = (torch.linspace(-1, 1, number, dtype=torch.float64) for number in (45, 201))
    fixed = torch.tensor(FIXED_SIMILARITIES, dtype=torch.float64)
    return tuple(
        ObjectiveProfile(
            objective,
            triplet_diagram=triplet_weights(objective, plane, plane),
            by_positive=triplet_weights(objective, line, fixed),
            by_negative=triplet_weights(objective, fixed, line),
            rotation=rotation(objective),
        )
        for objective in unique
    )


def _rounded(values: Tensor) -> Any:
    return values.round(decimals=6).tolist()


def write_profile_report(result: ObjectiveProfiles, folder: Path) -> None:
    """Write ``report.html``, ``profiles.json`` and a plot of each objective, such as
    ``1-Unified.png``.
    """
    names = [type(profile.objective).__name__ for profile in result.profiles]
    images = [
        ThemedImage.draw(partial(plot_objective_profile, profile), folder / f"{number}-{name}.png")
        for number, (name, profile) in enumerate(zip(names, result.profiles, strict=True), 1)
    ]
    storage.write_json(folder / "profiles.json", result.to_json())
    # The pair weights of all objectives GOAL are in one plot.
    pair_weights = (
        ThemedImage.draw(partial(plot_pair_weights, result.goals), folder / "pair-weights.png")
        if result.goals
        else None
    )
    note = f"Before and after a step of length {STEP_LENGTH:g} along the gradient, as drawn on the circle."
    sections = []
    for profile, image in zip(result.profiles, images, strict=True):
        rotation = profile.rotation
        columns = (rotation.angle, rotation.norm, rotation.angle_after)
        vectors = [*zip(VECTOR_NAMES, *(column.tolist() for column in columns), strict=True)]
        query_after = rotation.angle_after[0].item()
        sections.append(
            {
                "name": profile.name,
                "image": image,
                "norms": [f"{name} {norm:.2f}" for name, _, norm, _ in vectors],
                "rotation": Table(
                    ROTATION_COLUMNS,
                    tuple(
                        (name, angle, norm, after - angle, after - query_after)
                        for name, angle, norm, after in vectors
                    ),
                    (note,),
                ),
            }
        )
    page = render_report(
        "profiles",
        package="visavis.papers",
        pair_weights=pair_weights,
        pair_weights_alt=f"Weights of positives and of negatives: {'; '.join(map(pair_weight_name, result.goals))}.",
        profiles=sections,
        names=list(dict.fromkeys(names)),
        positive_angle=f"{-INITIAL_ANGLES[1]:g}",
        negative_angles=", ".join(f"{angle:g}" for angle in INITIAL_ANGLES[2:]),
        command=f"{shell_command()} papers anatomy {' '.join(quote_argument(profile.name) for profile in result.profiles)}",
    )
    storage.write_text(folder / "report.html", page)


@with_own_style
def plot_objective_profile(profile: ObjectiveProfile, theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot the profile of one objective. Top: triplets and weights of pairs. Bottom: rotations."""
    figure = new_figure(8.6, 6.0, theme)
    # Left, bottom, width and height of each panel, as shares of the figure.
    diagram, color_bar, push, pull, circle, norms = map(
        figure.add_axes,
        (
            (0.065, 0.6, 0.235, 0.337),
            (0.308, 0.6, 0.012, 0.337),
            (0.408, 0.6, 0.25, 0.337),
            (0.724, 0.6, 0.25, 0.337),
            (0.02, 0.05, 0.52, 0.4),
            (0.61, 0.09, 0.35, 0.36),
        ),
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


@with_own_style
def plot_pair_weights(goals: Sequence[Goal], theme: PlotTheme = LIGHT_THEME) -> bytes:
    """Plot the pair weights of objectives GOAL against similarity, as in figure 3 of GOAL."""
    similarity = torch.linspace(0, 1, 201, dtype=torch.float64)
    figure = new_figure(8.6, 3.3 + 0.2 * math.ceil(len(goals) / 2), theme)
    panels = figure.subplots(1, 2)
    # Dashed: weights that depend on the other positives. Their means are 0.1 here.
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

    magnitude = triplets.magnitude
    low = triplets.positive[0].item()
    high = triplets.positive[-1].item()
    # A few extreme weights must not turn the rest of the plot white.
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
    # An arrow at every fourth point, 0.18 apart. The arrow of a weight `top` is 0.17 long.
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
    # Space for the legend above the curves.
    bottom = min(0.0, axes.get_ylim()[0])
    top = axes.get_ylim()[1]
    axes.set(xlim=(-1, 1), xticks=(-1, 0, 1), ylim=(bottom, top + 0.34 * (top - bottom)))
    axes.legend(
        loc="upper right" if varied == "positive" else "upper left",
        **legend_style(theme, 2.2, font_size=8),
    )


def _plot_circle(axes: Axes, rotation: Rotation, theme: PlotTheme) -> None:
    """Vectors before a step, their movement along the tangent (green), and vectors after it
    (dashed). The query points up.
    """
    # The part of the circle that has vectors.
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
        # The point of the vector before the step.
        x, y = _point_on_circle(angle)
        end = _point_on_circle(after)
        axes.annotate("", (x, y), (0, 0), arrowprops=arrow | {"color": color, "linewidth": 1.6})
        axes.plot([0, end[0]], [0, end[1]], color=color, linestyle=DASH_PATTERN, linewidth=1.0)
        # A vector that hardly moves has no arrow.
        if norm > 1e-3:
            # The tangent at (x, y) is (-y, x).
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
    # Space for the legend above the curves.
    axes.set(xlim=(NEGATIVE_ANGLES[0], NEGATIVE_ANGLES[-1]), ylim=(0, 1.3 * axes.get_ylim()[1]))
    axes.legend(loc="upper left", ncols=2, **legend_style(theme, 2.0, font_size=8))


def _point_on_circle(angle: float) -> tuple[float, float]:
    """End of a unit vector at an angle from the query, which points up. Negatives are on the left."""
    radians = np.deg2rad(90 + angle)
    return float(np.cos(radians)), float(np.sin(radians))
