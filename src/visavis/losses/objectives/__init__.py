"""Catalog of objectives, and parsing of their specs.

>>> import torch
>>> from visavis import Targets
>>> scores = torch.eye(3)
>>> Unified(margin=0.2, gamma=50.0)(scores, Targets.paired(3)) < TripletHN(margin=1.2)(scores, Targets.paired(3))
tensor(True)
>>> parse("Unified(margin=0.2)") == Unified()
True
"""

from visavis.core import own_code, spec
from visavis.losses.objective import Objective
from visavis.losses.objectives.aoq import AOQ
from visavis.losses.objectives.contrastive import VLC, InfoNCE, NTXent, Sigmoid, Unified
from visavis.losses.objectives.goal import Goal
from visavis.losses.objectives.graded_losses import Distillation, GradedVLC, Ladder
from visavis.losses.objectives.metric_learning import BinomialDeviance, Circle, MultiSimilarity
from visavis.losses.objectives.ncr import NCR
from visavis.losses.objectives.polynomial import RSP, SSP
from visavis.losses.objectives.robust import CRCL, RCL, RINCE
from visavis.losses.objectives.smooth_ap import SmoothAP
from visavis.losses.objectives.triplet import MaxMargin, Triplet, TripletHN, TripletTopK

CATALOG: tuple[type[Objective], ...] = (
    Triplet,
    TripletHN,
    TripletTopK,
    NTXent,
    VLC,
    InfoNCE,
    Unified,
    MaxMargin,
    SSP,
    RSP,
    NCR,
    AOQ,
    Ladder,
    GradedVLC,
    Distillation,
    SmoothAP,
    Goal,
    BinomialDeviance,
    MultiSimilarity,
    Circle,
    Sigmoid,
    RCL,
    CRCL,
    RINCE,
)

__all__ = [
    "AOQ",
    "CATALOG",
    "CRCL",
    "BinomialDeviance",
    "Circle",
    "Distillation",
    "Goal",
    "GradedVLC",
    "InfoNCE",
    "Ladder",
    "MaxMargin",
    "MultiSimilarity",
    "NCR",
    "NTXent",
    "Objective",
    "RCL",
    "RINCE",
    "RSP",
    "SSP",
    "Sigmoid",
    "SmoothAP",
    "Triplet",
    "TripletHN",
    "TripletTopK",
    "Unified",
    "VLC",
    "named_scale_and_bias",
    "parse",
]


def parse(text: str) -> Objective:
    """Parse an objective. ``repr`` returns such a text.

    Args:
        text: A spec such as "Unified(margin=0.2, gamma=60)", or "soft_hn.py:SoftHN(margin=0.1)" for
            an own class in a file, whose code is run. A name without parentheses takes all defaults.

    Returns:
        The objective.

    Raises:
        SpecError: For an unknown name or field, with the nearest valid one, or a value out of
            range.
    """
    with own_code.named_by_user(text):
        return spec.parse(text, CATALOG, Objective, "objectives")


def named_scale_and_bias(text: str) -> list[str]:
    """Find out whether the text of an objective names its scale or bias, even if the value is its
    default.

    Args:
        text: A spec.

    Returns:
        "scale", also for the temperature 1 / scale, and "bias", each only if the text names it.
        Empty for an objective with a fixed gamma or margin.

    Raises:
        SpecError: If the text is not an objective.

    Example:
        >>> named_scale_and_bias("InfoNCE(tau=0.05)"), named_scale_and_bias("Sigmoid(bias=-10)"), named_scale_and_bias("Sigmoid()")
        (['scale'], ['bias'], [])
    """
    objective = spec.parse(text, CATALOG, Objective, "objectives")
    _, named = spec.parse_call(text)
    has_scale = objective.without_scale() is not None
    has_bias = objective.without_bias() is not None
    return ["scale"] * (has_scale and bool(named.keys() & {"scale", "tau"})) + ["bias"] * (
        has_bias and "bias" in named
    )
