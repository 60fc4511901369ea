"""Weights between a pretrained model and what a training made of it: how far to go is chosen on the validation split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visavis.models.base import Matcher
from visavis.models.lora import FIRST_FACTOR
from visavis.training.data_module import DataModule

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Interpolation:
    """share: of the trained weights that was taken. before: the validation RSUM of share 0. rsum: that of every share that was tried."""

    share: float
    before: float
    rsum: dict[float, float]

    def __str__(self) -> str:
        return (
            f"weights at {self.share:g} of the way from those before the training to the trained ones: validation RSUM {self.rsum[self.share]:.1f}, "
            f"{self.before:.1f} before and {self.rsum[max(self.rsum)]:.1f} at {max(self.rsum):g}."
        )

    def to_json(self) -> dict[str, Any]:
        return {"share": self.share, "before": self.before, "rsum": {f"{share:g}": rsum for share, rsum in self.rsum.items()}}


def interpolate(data_module: DataModule, matcher: Matcher, start: Weights, end: Weights, before: float) -> Interpolation:
    """Leave in a matcher the weights of the share that the recipe's ``interpolation`` chooses. before: the validation RSUM of ``start``."""
    settings, split = data_module.recipe.interpolation, data_module.validation
    rsum: dict[float, float] = {}
    for share in sorted(set(settings.shares)):
        matcher.load_state_dict(between(start, end, share))
        rsum[share] = data_module.evaluate(matcher, split).metrics["rsum"]
    share = smallest_share(before, rsum, settings.gain)
    matcher.load_state_dict(between(start, end, share))
    return Interpolation(share, before, rsum)


def between(start: Weights, end: Weights, share: float) -> dict[str, Tensor]:
    """``(1 - share) start + share end`` by name; of adapters the same of their product, as whose other factor begins at 0."""
    return {
        name: torch.lerp(start[name], weight, share) if weight.is_floating_point() and FIRST_FACTOR not in name else weight
        for name, weight in end.items()
    }


def smallest_share(before: float, rsum: Mapping[float, float], gain: float) -> float:
    """The smallest share with so much of the best gain over ``before``; the smallest of the best where nothing is gained.

    >>> smallest_share(100.0, {0.25: 150.0, 0.5: 192.0, 1.0: 200.0}, 0.9)
    0.5
    """
    best = max(rsum.values())
    enough = before + gain * (best - before) if best > before else best
    return min(share for share in rsum if rsum[share] >= enough)
