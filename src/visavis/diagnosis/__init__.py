"""Which pairs an objective pushes and pulls, how many of them, and how strongly: the same for every objective.

>>> import torch
>>> from visavis import Targets
>>> from visavis.objectives import TripletHN
>>> scores = torch.tensor([[0.5, 0.4], [0.0, 0.5]])
>>> pair_weights(TripletHN(margin=0.2), scores, Targets.paired(2))
tensor([[-1.,  1.],
        [ 0.,  0.]])
>>> contributing(TripletHN(margin=0.2), scores, Targets.paired(2)).idle
1
"""

from visavis.diagnosis.closed_forms import closed_weights
from visavis.diagnosis.cocos import Cocos, contributing, contributing_by_direction, contributing_by_epsilon, count, effective_number
from visavis.diagnosis.counting import smooth_ap_counts
from visavis.diagnosis.tangents import Tangents, tangent_norms, tangents_of
from visavis.diagnosis.weights import pair_weights, weights_by_blocks

__all__ = [
    "Cocos",
    "Tangents",
    "contributing_by_direction",
    "contributing_by_epsilon",
    "closed_weights",
    "contributing",
    "count",
    "effective_number",
    "pair_weights",
    "smooth_ap_counts",
    "tangent_norms",
    "tangents_of",
    "weights_by_blocks",
]
