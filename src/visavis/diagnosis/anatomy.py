"""The anatomy of an objective's gradient, without any data: what it does with a triplet, and what it turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis import objectives
from visavis.diagnosis.circle import Turned, turn
from visavis.diagnosis.triplets import Triplets, triplet_weights
from visavis.errors import SpecError
from visavis.objectives import Objective

PARTNERS = (0.2, 0.5, 0.8)
"""Similarities at which the other pair of a triplet is held while one is varied."""


@dataclass(frozen=True)
class Portrait:
    """One objective. diagram: over the plane of both similarities. pairs: over one of them in fine steps and PARTNERS of the other: of the
    positive, then of the negative. circle: what it turns.
    """

    objective: Objective
    diagram: Triplets
    by_positive: Triplets
    by_negative: Triplets
    circle: Turned

    @property
    def name(self) -> str:
        """The objective by what is not its default."""
        told = ((field.name, getattr(self.objective, field.name), field.default) for field in fields(self.objective))  # type: ignore[arg-type]
        return f"{type(self.objective).__name__}({', '.join(f'{name}={value!r}' for name, value, default in told if value != default)})"

    def to_json(self) -> dict[str, Any]:
        return {
            "objective": repr(self.objective),
            "triplets": {name: _rounded(getattr(self.diagram, name)) for name in ("positive", "negative", "pull", "push")},
            "pairs": {
                "similarity": _rounded(self.by_positive.positive),
                "partner": list(PARTNERS),
                "pull": _rounded(self.by_positive.pull.T),
                "push": _rounded(self.by_negative.push),
            },
            "circle": self.circle.to_json(),
        }


@dataclass(frozen=True)
class Anatomy:
    """Several objectives, in the order given. folder: where they were drawn."""

    portraits: tuple[Portrait, ...]
    folder: Path

    def to_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "objectives": [portrait.to_json() for portrait in self.portraits]}


def portraits_of(specs: Sequence[str]) -> tuple[Portrait, ...]:
    """Those of the objectives that texts name, each once. Raises SpecError for an unknown one, or where there is none."""
    named = list(dict.fromkeys(objectives.parse(text) for text in specs))
    if not named:
        raise SpecError('no objective is named: expected one or more, such as "Unified(gamma=50)".')
    return tuple(portrait(objective) for objective in named)


def portrait(objective: Objective) -> Portrait:
    """All that is drawn of one objective: similarities from -1 to 1, 45 of each in the plane, 201 along one."""
    plane, line = (torch.linspace(-1, 1, number, dtype=torch.float64) for number in (45, 201))
    partners = torch.tensor(PARTNERS, dtype=torch.float64)
    return Portrait(
        objective,
        triplet_weights(objective, plane, plane),
        triplet_weights(objective, line, partners),
        triplet_weights(objective, partners, line),
        turn(objective),
    )


def _rounded(values: Tensor) -> Any:
    return values.round(decimals=6).tolist()
