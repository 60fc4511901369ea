"""The catalog of objectives.

>>> import torch
>>> from visavis import Targets
>>> scores = torch.eye(3)
>>> Unified(margin=0.2, gamma=50.0)(scores, Targets.paired(3)) < TripletHN(margin=1.2)(scores, Targets.paired(3))
tensor(True)
>>> parse("Unified(margin=0.2)") == Unified()
True
"""

from visavis import spec
from visavis.objectives.base import Objective
from visavis.objectives.goal import Goal
from visavis.objectives.graded import GradedVLC
from visavis.objectives.ladder import Ladder
from visavis.objectives.max_margin import MaxMargin
from visavis.objectives.metric_learning import BinomialDeviance, Circle, MultiSimilarity
from visavis.objectives.noisy import NCR
from visavis.objectives.polynomial import RSP, SSP
from visavis.objectives.quintuplet import AOQ
from visavis.objectives.sigmoid import Sigmoid
from visavis.objectives.smooth_ap import SmoothAP
from visavis.objectives.softmax import VLC, InfoNCE, NTXent
from visavis.objectives.triplet import Triplet, TripletHN, TripletTopK
from visavis.objectives.unified import Unified

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
    SmoothAP,
    Goal,
    BinomialDeviance,
    MultiSimilarity,
    Circle,
    Sigmoid,
)

__all__ = [
    "AOQ",
    "CATALOG",
    "BinomialDeviance",
    "Circle",
    "Goal",
    "GradedVLC",
    "InfoNCE",
    "Ladder",
    "MaxMargin",
    "MultiSimilarity",
    "NCR",
    "NTXent",
    "Objective",
    "RSP",
    "SSP",
    "Sigmoid",
    "SmoothAP",
    "Triplet",
    "TripletHN",
    "TripletTopK",
    "Unified",
    "VLC",
    "parse",
]


def parse(text: str) -> Objective:
    """The objective that a text names: ``parse("Unified(margin=0.2, gamma=60)")``; ``repr`` gives such a text back.

    Raises SpecError for an unknown name or field, naming the nearest right one, and for values out of range.
    """
    return spec.parse(text, CATALOG)
