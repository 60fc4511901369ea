"""What multiplies scores in place of a temperature: a number, a parameter as it stands, or one learned on a log scale.

>>> scale = LearnedScale(20.0)
>>> round(scale().item(), 4)
20.0
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from visavis.errors import SpecError

LARGEST_SCALE = 100.0


class LearnedScale(nn.Module):
    """A scale learned by its logarithm: ``scale = e^log``, so that a step changes it by a share, wherever it stands.

    start: the scale before the first step, 1 / temperature, above 0 and at most 100. smallest, largest: other bounds. ``log``: the
    parameter, put back within the bounds at each call; it is saved with the ``state_dict`` of the loss. Raises SpecError.
    Source: Radford et al., CLIP (2021), section 2.5, which bounds it by 100 from above alone.
    """

    def __init__(self, start: float, *, smallest: float = 0.0, largest: float = LARGEST_SCALE) -> None:
        super().__init__()
        if not (is_scale(start) and isinstance(start, int | float) and smallest <= start <= largest):
            least = f"a number from {smallest:g} up" if smallest > 0 else "a number above 0"
            raise SpecError(f"LearnedScale got start={start!r}, expected {least} and at most {largest:g}: 1 / temperature.")
        self.start, self.smallest, self.largest = float(start), float(smallest), float(largest)
        self.log = nn.Parameter(torch.tensor(math.log(start)))

    @property
    def bounds(self) -> tuple[float, float]:
        return self.smallest, self.largest

    def forward(self) -> Tensor:
        self.log.data.clamp_(math.log(self.smallest) if self.smallest > 0 else None, math.log(self.largest))
        return self.log.exp()

    def extra_repr(self) -> str:
        return f"start={self.start:g}"


Scale = float | Tensor | LearnedScale | None


def is_scale(scale: Any) -> bool:
    if isinstance(scale, Tensor):
        return scale.numel() == 1 and scale.is_floating_point()
    known = scale is None or isinstance(scale, LearnedScale)
    return known or (isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < float("inf"))


def scale_now(scale: Scale) -> Tensor | float | None:
    """The number that multiplies scores; a parameter is first put back within its bounds.

    In place: beyond a bound, a clamped copy would have no gradient to come back by.
    """
    if isinstance(scale, LearnedScale):
        return scale()
    if isinstance(scale, nn.Parameter):
        scale.data.clamp_(0, LARGEST_SCALE)
    return scale
