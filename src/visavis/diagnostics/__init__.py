"""Diagnostics of objectives and models: pair weights, contributing samples, objective profiles and attention maps.

Example:
    >>> import torch
    >>> from visavis import Targets
    >>> from visavis.objectives import TripletHN
    >>> scores = torch.tensor([[0.5, 0.4], [0.0, 0.5]])
    >>> pair_weights(TripletHN(margin=0.2), scores, Targets.paired(2))
    tensor([[-1.,  1.],
            [ 0.,  0.]])
    >>> contributing_samples(TripletHN(margin=0.2), scores, Targets.paired(2)).idle
    1
"""

from visavis.diagnostics.contributing_samples import (
    ContributingSamples,
    contributing_by_direction,
    contributing_by_epsilon,
    contributing_samples,
    count_contributing,
    effective_number,
    smooth_ap_counts,
)
from visavis.diagnostics.pair_gradients import TangentNorms, pair_weights, tangent_norms, tangent_norms_of_slopes, weights_by_blocks

__all__ = [
    "ContributingSamples",
    "TangentNorms",
    "contributing_by_direction",
    "contributing_by_epsilon",
    "contributing_samples",
    "count_contributing",
    "effective_number",
    "pair_weights",
    "smooth_ap_counts",
    "tangent_norms",
    "tangent_norms_of_slopes",
    "weights_by_blocks",
]
