"""Diagnostics of objectives and models: pair weights, contributing samples, objective profiles and
attention maps.

Example:
    >>> import torch
    >>> from visavis import Targets
    >>> from visavis.losses.objectives import TripletHN
    >>> scores = torch.tensor([[0.5, 0.4], [0.0, 0.5]])
    >>> pair_weights(TripletHN(margin=0.2), scores, Targets.paired(2))
    tensor([[-1.,  1.],
            [ 0.,  0.]])
    >>> contributing_samples(TripletHN(margin=0.2), scores, Targets.paired(2)).idle
    1
"""

from visavis.losses.pair_gradients import TangentNorms, pair_weights, tangent_norms
from visavis.papers.diagnostics.contributing_samples import (
    ContributingSamples,
    contributing_samples,
)

__all__ = [
    "ContributingSamples",
    "TangentNorms",
    "contributing_samples",
    "pair_weights",
    "tangent_norms",
]
