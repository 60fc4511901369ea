"""Scale and bias that turn scores into logits before an objective reads them. A scale can be
learned by its logarithm.

>>> scale = LearnedScale(20.0)
>>> round(scale().item(), 4)
20.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from visavis.core.errors import SpecError, format_value
from visavis.core.fields import is_valid_parameter

OptionalScalar: TypeAlias = Tensor | float | None
MAX_SCALE = 100.0
"""Upper bound of a learned scale, as in CLIP."""


class LearnedScale(nn.Module):
    """A scale that is learned by its logarithm: ``scale = e^log``. An optimizer step changes it by
    a relative amount.

    The parameter ``log`` is clamped to the bounds at each call. It is saved with the ``state_dict``
    of the loss.

    Args:
        initial_scale: Scale before the first step, 1 / temperature, > 0 and at most 100.
        min_scale: Lower bound.
        max_scale: Upper bound.

    Raises:
        SpecError: If the initial scale is out of bounds.

    Source:
        Radford et al., CLIP (2021), section 2.5, which sets only the upper bound of 100.
    """

    def __init__(
        self, initial_scale: float, *, min_scale: float = 0.0, max_scale: float = MAX_SCALE
    ) -> None:
        super().__init__()
        self.min_scale = float(min_scale)
        self.max_scale = float(max_scale)
        self.initial_scale = self.validate(initial_scale)
        self.log = nn.Parameter(torch.tensor(math.log(initial_scale)))

    @classmethod
    def containing(cls, initial_scale: float, bounds: Sequence[float]) -> LearnedScale:
        """Make a scale whose bounds are widened to its initial value, where that is outside.

        Args:
            initial_scale: Scale before the first step.
            bounds: Lower and upper bound.

        Returns:
            The scale.
        """
        return cls(
            initial_scale,
            min_scale=min(bounds[0], initial_scale),
            max_scale=max(bounds[1], initial_scale),
        )

    def validate(self, scale: float) -> float:
        """Check that a number is a scale within the bounds.

        Args:
            scale: The number.

        Returns:
            The number.

        Raises:
            SpecError: If it is not.
        """
        if not (
            is_valid_scale(scale)
            and isinstance(scale, int | float)
            and self.min_scale <= scale <= self.max_scale
        ):
            lower = f">= {self.min_scale:g}" if self.min_scale > 0 else "> 0"
            raise SpecError(
                f"initial_scale: expected a number {lower} and <= {self.max_scale:g}, got "
                f"{format_value(scale)}. It is 1 / temperature."
            )
        return float(scale)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound."""
        return self.min_scale, self.max_scale

    def forward(self) -> Tensor:
        """Clamp the parameter and return the current scale.

        Returns:
            A scalar.
        """
        self.log.data.clamp_(
            math.log(self.min_scale) if self.min_scale > 0 else None, math.log(self.max_scale)
        )
        return self.log.exp()

    def extra_repr(self) -> str:
        """Show the initial scale in ``repr``.

        Returns:
            The argument and its value.
        """
        return f"initial_scale={self.initial_scale:g}"


Scale: TypeAlias = float | Tensor | LearnedScale | None


def is_valid_scale(scale: Any) -> bool:
    """Return whether a value can scale scores: None, a number from 1e-12 to 1e12, a floating-point
    tensor of one element, or a LearnedScale.
    """
    if scale is None or isinstance(scale, LearnedScale):
        return True
    return is_valid_bias(scale) and (isinstance(scale, Tensor) or scale > 0)


def promote_half(scores: Tensor) -> Tensor:
    """Convert half precision to float32. Wider tensors stay."""
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


class ScaleAndBias(NamedTuple):
    """Scale and bias of one call. None means not scaled or not shifted.

    Attributes:
        scale: Factor of the scores.
        bias: Added after the scale.
    """

    scale: OptionalScalar = None
    bias: OptionalScalar = None

    def apply(self, scores: Tensor) -> Tensor:
        """Scale and shift scores. A bias is added in float32 or wider."""
        scores = scores if self.scale is None else scores * self.scale
        return scores if self.bias is None else promote_half(scores) + self.bias


def resolve_scale_and_bias(
    defaults: tuple[Scale, OptionalScalar], overrides: tuple[OptionalScalar, OptionalScalar]
) -> ScaleAndBias:
    """Choose the scale and bias of one call: the overrides of the call, else the defaults of the
    loss.
    """
    for name, default, override, is_valid in zip(
        ("scale", "bias"), defaults, overrides, (is_valid_scale, is_valid_bias), strict=True
    ):
        if override is not None and default is None:
            raise SpecError(
                f"{name}: expected None, got {format_value(override)}. Make the loss with a {name} "
                "to override it in a call."
            )
        if override is not None and not is_valid(override):
            raise SpecError(f"{name}: expected one valid number, got {format_value(override)}.")
    scale, bias = overrides
    if scale is None:
        default_scale = defaults[0]
        if isinstance(default_scale, nn.Parameter):
            # In place: outside a bound, a clamped copy would have no gradient that could bring the
            # parameter back.
            default_scale.data.clamp_(0, MAX_SCALE)
        scale = default_scale() if isinstance(default_scale, LearnedScale) else default_scale
    if bias is None:
        bias = defaults[1]
    return ScaleAndBias(scale, bias.reshape(()) if isinstance(bias, Tensor) else bias)


def is_valid_bias(bias: Any) -> bool:
    """Return whether a value can shift scores: None, a number up to 1e12, or a floating-point
    tensor of one element.
    """
    if isinstance(bias, Tensor):
        return bias.numel() == 1 and bias.is_floating_point()
    return bias is None or (
        isinstance(bias, int | float) and not isinstance(bias, bool) and is_valid_parameter(bias)
    )
