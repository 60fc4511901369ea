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

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from visavis.core.errors import SpecError
from visavis.core.notebook import NotebookTable
from visavis.losses import objectives
from visavis.losses.objectives import Goal, Objective
from visavis.losses.targets import Targets
from visavis.research.diagnostics.pair_gradients import pair_weights, tangent_norms_of_slopes

VECTOR_NAMES = ("query", "positive", "negative 1", "negative 2", "negative 3", "negative 4")
"""Names of the vectors on the circle."""
INITIAL_ANGLES = (0.0, -14.0, 8.0, 16.0, 30.0, 60.0)
"""Angle between each vector and the query, in degrees."""
STEP_LENGTH = 0.5
"""Length of the step along the gradient."""
NEGATIVE_ANGLES = tuple(range(41))
"""Angles of the hardest negative at which norms are computed, in degrees. The other negatives are
8, 22 and 52 degrees further.
"""
FIXED_SIMILARITIES = (0.2, 0.5, 0.8)
"""Similarities of one pair of a triplet while the other one varies."""


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
    """Compute the weights of the positive and the negative of one query.

    An objective that depends on the rest of the batch (GOAL with lin_ms, sig_ms) is evaluated in a
    batch with equal scores: other positives score as the positive, and a second negative as the
    negative, with which it shares the push. Annotations are neutral.

    Args:
        objective: The objective.
        positive: Similarities of query and positive, shape ``[A]``.
        negative: Similarities of query and negative, shape ``[B]``.

    Returns:
        The weights.

    Source:
        GOAL, figure 2, after Xuan et al., "Hard negative examples are hard, but useful" (2020).
    """
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
    """The annotations that an objective needs, for scores whose column 0 is the positive.

    Relevance is 1 for the positive and 0 for the others, two offline negatives score as the hardest
    negative, and pairs have the objective's own margin.
    """
    relevance = torch.zeros_like(scores)
    relevance[:, 0] = 1
    annotations = {
        "relevance": relevance,
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
    """Compute the rotation of a query, its positive and four negatives.

    Args:
        objective: The objective.
        angles: Angle of each vector in degrees, shape ``[6]``. Default: `INITIAL_ANGLES`.

    Returns:
        Angles and norms.
    """
    start = torch.tensor(INITIAL_ANGLES, dtype=torch.float64) if angles is None else angles
    gradient, norm = _tangent_gradient(objective, start)
    moved = _unit_vectors(start) - STEP_LENGTH * gradient
    after = torch.rad2deg(torch.atan2(moved[:, 1], moved[:, 0]))
    norm_by_angle = [
        _tangent_gradient(objective, torch.cat([start[:2], start[2:] - start[2] + angle]))[1]
        for angle in NEGATIVE_ANGLES
    ]
    return Rotation(start, after, norm, torch.stack(norm_by_angle))


def _tangent_gradient(objective: Objective, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Tangent gradient of the query's loss term on each vector ``[6, 2]``, and its norm."""
    units = _unit_vectors(angles)
    query, candidates = units[:1], units[1:]
    scores = query @ candidates.T
    ids = torch.arange(len(candidates))
    slopes = pair_weights(
        objective,
        scores,
        Targets(query_ids=ids[:1], candidate_ids=ids, **_neutral_annotations(objective, scores)),
    )
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
class ObjectiveProfiles(NotebookTable):
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
    """Name the pair weight of an objective GOAL.

    Args:
        goal: The objective.

    Returns:
        The name with its parameters, such as ``"sig_ms, alpha=2, beta=10, lam=0.5, m=0.1"``.
    """
    slopes = (
        f", alpha={goal.alpha:g}, beta={goal.beta:g}, lam={goal.lam:g}"
        if goal.pair.startswith("sig")
        else ""
    )
    return f"{goal.pair}{slopes}{', m=0.1' if goal.needs_positive_scores else ''}"


def profile_objectives(specs: Sequence[str]) -> tuple[ObjectiveProfile, ...]:
    """Profile several objectives, each once.

    Args:
        specs: Specs of objectives.

    Returns:
        The profiles.

    Raises:
        SpecError: If an objective is unknown, or there is none.
    """
    unique = list(dict.fromkeys(objectives.parse(text) for text in specs))
    if not unique:
        raise SpecError(
            'objective: expected at least one objective such as "Unified(gamma=50)", got none.'
        )
    return tuple(profile_objective(objective) for objective in unique)


def profile_objective(objective: Objective) -> ObjectiveProfile:
    """Profile one objective for similarities from -1 to 1: 45 of each pair in the plane, 201 along
    one of them.

    Args:
        objective: The objective.

    Returns:
        The profile.
    """
    plane, line = (torch.linspace(-1, 1, number, dtype=torch.float64) for number in (45, 201))
    fixed = torch.tensor(FIXED_SIMILARITIES, dtype=torch.float64)
    return ObjectiveProfile(
        objective,
        triplet_weights(objective, plane, plane),
        triplet_weights(objective, line, fixed),
        triplet_weights(objective, fixed, line),
        rotation(objective),
    )


def _rounded(values: Tensor) -> Any:
    return values.round(decimals=6).tolist()
