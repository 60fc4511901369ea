"""What scores become before an objective reads them: times a scale, plus a bias.

>>> from visavis.objectives import Sigmoid
>>> for_logits(Sigmoid(), 14.0, -8.0)
(Sigmoid(scale=1.0, bias=0.0, reduction='half_mean'), 14.0, -8.0)
>>> Logits(2.0, -1.0).of(torch.tensor([0.5, 1.0]))
tensor([0., 1.])
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visavis.engine.scale import Scale, is_scale, scale_now
from visavis.errors import SpecError
from visavis.objectives.base import Objective, promoted

Number = Tensor | float | None


class Logits(NamedTuple):
    """The numbers of one call; None: not multiplied, not shifted."""

    scale: Number
    bias: Number

    def of(self, scores: Tensor) -> Tensor:
        scores = scores if self.scale is None else scores * self.scale
        return scores if self.bias is None else promoted(scores) + self.bias

    @property
    def learned_bias(self) -> list[Tensor]:
        """The bias, where a gradient is needed of it."""
        return [self.bias] if isinstance(self.bias, Tensor) and self.bias.requires_grad and torch.is_grad_enabled() else []


def for_logits(objective: Objective, scale: Scale, bias: Number) -> tuple[Objective, Scale, Number]:
    """What is left of an objective whose scores are multiplied and shifted before it, and by what. Raises SpecError."""
    if bias is not None:
        unbiased = objective.for_biased_scores()
        if unbiased is None:
            raise SpecError(f"{objective!r} has no bias that could be given or learned: give PairLoss(bias=) only to Sigmoid.")
        if not is_bias(bias):
            raise SpecError(f"PairLoss got bias={bias!r}{_kind(bias)}, expected a finite number or an nn.Parameter of one number.")
        objective, scale = unbiased, objective.slope if scale is None else scale
    unscaled = objective if scale is None else objective.for_scaled_scores()
    if unscaled is None:
        raise SpecError(
            f"{objective!r} has a fixed gamma or margin, which a scale would change: "
            "give PairLoss(scale=) only to NTXent, InfoNCE or Sigmoid."
        )
    if not is_scale(scale):
        raise SpecError(f"PairLoss got scale={scale!r}{_kind(scale)}, expected a number above 0 or an nn.Parameter of one number.")
    return unscaled, scale, bias


def logits_now(own: tuple[Scale, Number], of_call: tuple[Number, Number]) -> Logits:
    """The loss' own numbers, or those of a call in their place, of which it has to have its own. Raises SpecError."""
    for name, mine, given, is_one in zip(("scale", "bias"), own, of_call, (is_scale, is_bias), strict=True):
        if given is not None and (mine is None or not is_one(given)):
            raise SpecError(f"PairLoss got {name}={given!r} in a call, expected one number, of a loss that was made with a {name}.")
    scale, bias = of_call
    bias = own[1] if bias is None else bias
    return Logits(scale_now(own[0]) if scale is None else scale, bias.reshape(()) if isinstance(bias, Tensor) else bias)


def is_bias(bias: Any) -> bool:
    if isinstance(bias, Tensor):
        return is_scale(bias)
    return bias is None or (isinstance(bias, int | float) and not isinstance(bias, bool) and math.isfinite(bias))


def _kind(number: Any) -> str:
    return f", of {number.dtype}" if isinstance(number, Tensor) and number.numel() == 1 else ""
