"""Logits: scores times a scale, plus a bias, before an objective reads them.

>>> from visavis.objectives import Sigmoid
>>> split_scale_and_bias(Sigmoid(), 14.0, -8.0)
(Sigmoid(scale=1.0, bias=0.0, reduction='half_mean'), 14.0, -8.0)
>>> Logits(2.0, -1.0).apply(torch.tensor([0.5, 1.0]))
tensor([0., 1.])
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visavis.errors import SpecError
from visavis.objectives.base import Objective, promote_half
from visavis.pair_loss.scale import Scale, current_scale, is_valid_scale

OptionalScalar = Tensor | float | None


class Logits(NamedTuple):
    """Scale and bias of one call. None means not scaled or not shifted.

    Attributes:
        scale: Factor of the scores.
        bias: Added after the scale.
    """

    scale: OptionalScalar
    bias: OptionalScalar

    def apply(self, scores: Tensor) -> Tensor:
        """Scale and shift scores.

        Args:
            scores: Scores of any shape.

        Returns:
            Logits. Half precision is promoted to float32 before the bias is added.
        """
        scores = scores if self.scale is None else scores * self.scale
        return scores if self.bias is None else promote_half(scores) + self.bias

    @property
    def trainable_bias(self) -> list[Tensor]:
        """The bias if it needs a gradient, else nothing."""
        return [self.bias] if isinstance(self.bias, Tensor) and self.bias.requires_grad and torch.is_grad_enabled() else []


def split_scale_and_bias(objective: Objective, scale: Scale, bias: OptionalScalar) -> tuple[Objective, Scale, OptionalScalar]:
    """Move the scale and the bias out of an objective, so that they can be applied to the scores before it.

    Args:
        objective: The objective.
        scale: Scale of the scores, or None.
        bias: Bias of the scores, or None.

    Returns:
        The objective without scale and bias, the scale and the bias.

    Raises:
        SpecError: If the objective has no scale or bias, or the value is invalid.
    """
    if bias is not None:
        unbiased = objective.without_bias()
        if unbiased is None:
            raise SpecError(f"bias: expected None, got {bias!r}. {objective!r} has no bias. Pass a bias only with Sigmoid.")
        if not is_valid_bias(bias):
            raise SpecError(f"bias: expected a finite number or an nn.Parameter of one number, got {bias!r}{_dtype_note(bias)}.")
        objective, scale = unbiased, objective.gradient_scale if scale is None else scale
    unscaled = objective if scale is None else objective.without_scale()
    if unscaled is None:
        raise SpecError(
            f"scale: expected None, got {scale!r}. {objective!r} has a fixed gamma or margin, which a scale would change. "
            "Pass a scale only with NTXent, InfoNCE or Sigmoid."
        )
    if not is_valid_scale(scale):
        raise SpecError(f"scale: expected a number > 0 or an nn.Parameter of one number, got {scale!r}{_dtype_note(scale)}.")
    return unscaled, scale, bias


def resolve_logits(defaults: tuple[Scale, OptionalScalar], overrides: tuple[OptionalScalar, OptionalScalar]) -> Logits:
    """Choose the scale and bias of one call: the overrides of the call, else the defaults of the loss.

    Args:
        defaults: Scale and bias of the loss.
        overrides: Scale and bias of the call. Only a loss that has the value can be overridden.

    Returns:
        The scale and bias to apply.

    Raises:
        SpecError: If an override is invalid, or the loss was made without this value.
    """
    for name, default, override, is_valid in zip(("scale", "bias"), defaults, overrides, (is_valid_scale, is_valid_bias), strict=True):
        if override is not None and default is None:
            raise SpecError(f"{name}: expected None, got {override!r}. Make the loss with a {name} to override it in a call.")
        if override is not None and not is_valid(override):
            raise SpecError(f"{name}: expected one valid number, got {override!r}.")
    scale, bias = overrides
    bias = defaults[1] if bias is None else bias
    return Logits(current_scale(defaults[0]) if scale is None else scale, bias.reshape(()) if isinstance(bias, Tensor) else bias)


def is_valid_bias(bias: Any) -> bool:
    """Return whether a value can shift scores: None, a finite number, or a floating-point tensor of one element.

    Args:
        bias: The value.

    Returns:
        Whether it is valid.
    """
    if isinstance(bias, Tensor):
        return is_valid_scale(bias)
    return bias is None or (isinstance(bias, int | float) and not isinstance(bias, bool) and math.isfinite(bias))


def _dtype_note(number: Any) -> str:
    return f" of {number.dtype}" if isinstance(number, Tensor) and number.numel() == 1 else ""
