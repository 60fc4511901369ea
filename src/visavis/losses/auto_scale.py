"""Scales and margins that are set to "auto": how they follow from the spread of the scores of
negatives.

>>> from visavis.losses.objectives import VLC
>>> VLC(gamma="auto").at_spread(0.2)
VLC(gamma=25.0, reduction='sum')
"""

from __future__ import annotations

from torch import Tensor

from visavis.core.errors import SpecError
from visavis.core.fields import AUTO, Auto
from visavis.losses.targets import Targets

SCALE_TIMES_SPREAD = 5.0
"""Product of the scale of a softmax and the spread of the negatives. Measured with
``studies/auto_scale.py``.
"""
MARGIN_IN_SPREADS = 1.5
"""Margin of a hinge, in spreads of the negatives."""

AUTO_FIELDS = ("gamma", "scale", "tau", "margin")
"""Names of the fields that can be "auto"."""


def number(value: float | Auto) -> float:
    """Return the number of a scale or margin, or refuse "auto", which only a training replaces."""
    if isinstance(value, str):
        raise SpecError(
            f"objective: expected a number for each scale and margin, got {value!r}, which only "
            "visavis train measures. Set a number, or call objective.at_spread(spread) with the "
            "result of negative_spread(scores, targets)."
        )
    return value


def auto_value(name: str, product: float, spread: float) -> float:
    """Compute the value of a field from the product of a scale and the spread, with two digits, so
    that it does not depend on the last bits of a measurement.
    """
    scale = product / spread
    margin = MARGIN_IN_SPREADS * spread
    values = {"gamma": scale, "scale": scale, "tau": 1 / scale, "margin": margin}
    return float(f"{values[name]:.2g}")


def is_auto(name: str, value: object) -> bool:
    """Return whether a field is a scale or margin that is set to "auto"."""
    return name in AUTO_FIELDS and isinstance(value, str) and value == AUTO


def negative_spread(scores: Tensor, targets: Targets) -> float:
    """Compute the spread of negatives: the standard deviation of the scores of a query's negatives,
    averaged over the queries of both directions.

    Args:
        scores: Scores of shape ``[Q, C]``.
        targets: Targets of the same shape.

    Returns:
        The spread. NaN if no query has a negative.

    Example:
        >>> import torch
        >>> negative_spread(torch.tensor([[9.0, 1.0, 3.0], [1.0, 9.0, 3.0], [1.0, 3.0, 9.0]]), Targets.paired(3))
        0.6666666666666666
    """
    directions = ((scores.double(), targets.negative), (scores.double().T, targets.negative.T))
    spreads = list[float]()
    for values, negative in directions:
        count = negative.sum(1)
        mean = (values * negative).sum(1) / count
        variance = ((values - mean[:, None]).square() * negative).sum(1) / count
        spreads.append(variance.sqrt()[count > 0].mean().item())
    return sum(spreads) / 2
