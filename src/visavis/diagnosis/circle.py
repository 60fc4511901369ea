"""One query, its positive and four negatives as unit vectors on a circle: what one step along the gradient turns, and how far.

Early in a training everything is similar to everything; so here, where the hardest negative is nearer to the query than its positive.
Source: Unified loss, section 3.3 and figure 2; the norms with eqs. 15 and 17 as they must read (see ``tangents``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visavis.diagnosis.tangents import tangents_of
from visavis.diagnosis.triplets import neutral_facts
from visavis.diagnosis.weights import pair_weights
from visavis.objectives import Objective
from visavis.targets import Targets

NAMES = ("query", "positive", "negative 1", "negative 2", "negative 3", "negative 4")
ANGLES = (0.0, -14.0, 8.0, 16.0, 30.0, 60.0)
"""Of each vector from the query, in degrees."""
STEP = 0.5
"""The length of the step along the gradient."""
NEAR = tuple(range(41))
"""Angles of the hardest negative, in degrees, along which the norms are followed; the other negatives stay 8, 22 and 52 further."""


@dataclass(frozen=True)
class Turned:
    """What a step turns. angle ``[6]``, turned ``[6]``: of each of NAMES before and after, in degrees. norm ``[6]``: of the tangent gradient
    of the query's term on each. along ``[len(NEAR), 6]``: these norms by the angle of the hardest negative. By weights divided by the slope.
    """

    angle: Tensor
    turned: Tensor
    norm: Tensor
    along: Tensor

    def to_json(self) -> dict[str, Any]:
        vectors = zip(NAMES, *(values.tolist() for values in (self.angle, self.turned, self.norm)), strict=True)
        return {
            "vectors": [{"name": name, "degrees": angle, "degrees_after": after, "norm": norm} for name, angle, after, norm in vectors],
            "degrees_of_negative_1": list(NEAR),
            "norms": dict(zip(NAMES, self.along.T.tolist(), strict=True)),
        }


def turn(objective: Objective, angles: Tensor | None = None) -> Turned:
    """What an objective turns at ANGLES, or at others in the same order."""
    at = torch.tensor(ANGLES, dtype=torch.float64) if angles is None else angles
    gradient, norm = _gradient(objective, at)
    moved = _units(at) - STEP * gradient
    after = torch.rad2deg(torch.atan2(moved[:, 1], moved[:, 0]))
    along = [_gradient(objective, torch.cat([at[:2], at[2:] - at[2] + near]))[1] for near in NEAR]
    return Turned(at, after, norm, torch.stack(along))


def _gradient(objective: Objective, angles: Tensor) -> tuple[Tensor, Tensor]:
    """The tangent gradient of the query's term on each vector ``[6, 2]``, and its norm."""
    units = _units(angles)
    query, candidates = units[:1], units[1:]
    scores = query @ candidates.T
    ids = torch.arange(len(candidates))
    slopes = pair_weights(objective, scores, Targets(query_ids=ids[:1], candidate_ids=ids, **neutral_facts(objective, scores)))
    free = torch.cat([slopes @ candidates, slopes.T * query])
    tangent = free - (free * units).sum(1, keepdim=True) * units
    norms = tangents_of(slopes, query, candidates)
    return tangent, torch.cat([norms.anchor, norms.candidate[0]])


def _units(angles: Tensor) -> Tensor:
    radians = torch.deg2rad(angles)
    return torch.stack([radians.cos(), radians.sin()], 1)
