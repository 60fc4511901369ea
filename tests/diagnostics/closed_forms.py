"""Pair weights as printed in papers, for the objectives whose derivative a paper prints.

They equal the weights that `pair_weights` computes by differentiation, in the published order of
operations. The order decides at the corner of a hinge, and for a weight that is exactly epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visavis.core.errors import SpecError
from visavis.losses.pair_summaries import NEG_INF, PositivePairs, find_positive_pairs, log1p_exp
from visavis.losses.targets import Targets
from visavis.objectives import VLC, NTXent, Objective, Triplet, TripletHN, Unified


def closed_weights(objective: Objective, scores: Tensor, targets: Targets) -> Tensor:
    """Compute `pair_weights` by a printed formula. Only the pairs of the targets are used, not
    their annotations.

    Args:
        objective: The objective.
        scores: Scores, shape ``[Q, C]``.
        targets: Targets of the direction.

    Returns:
        Weights, divided by the gradient scale of the objective, shape ``[Q, C]``.

    Raises:
        SpecError: If no paper prints the weights of the objective.

    Source:
        Triplet, TripletHN: COCOS, eqs. 9a and 9b, with the sign of a derivative (the paper prints
        the descent). NTXent: its eq. 11, in the same way. Unified, VLC: Unified loss, eqs. 14 to 16
        and 19. The denominator is one plus the sum over all negatives (eq. 15 prints only that of
        the candidate).
    """
    if type(objective) not in FORMULAS:
        known = ", ".join(kind.__name__ for kind in FORMULAS)
        raise SpecError(f"expected one of {known}, got {objective!r}. Use pair_weights.")
    pairs = find_positive_pairs(scores, targets)
    candidate = targets.positive.nonzero()[:, 1]
    push = FORMULAS[type(objective)](objective, pairs, candidate)
    weights = torch.zeros_like(scores).index_add_(0, pairs.query, push)
    return weights.index_put_((pairs.query, candidate), -push.sum(-1), accumulate=True)


# Each formula takes the positive pairs and the indices of their candidates [P], and returns the
# weights of the negatives [P, C].


def _triplet(objective: Triplet, pairs: PositivePairs, _candidate: Tensor) -> Tensor:
    return (-pairs.gap < objective.margin).to(pairs.scores)


def _triplet_hn(objective: TripletHN, pairs: PositivePairs, _candidate: Tensor) -> Tensor:
    best, hardest = (of_query[pairs.query, None] for of_query in pairs.negatives().max(-1))
    active = (pairs.positive[:, None] - best < objective.margin).to(pairs.scores)
    return torch.zeros(len(best), pairs.scores.shape[1]).to(best).scatter_(1, hardest, active)


def _nt_xent(objective: NTXent, pairs: PositivePairs, candidate: Tensor) -> Tensor:
    negative = pairs.negative[pairs.query]
    own = torch.zeros_like(negative).scatter_(1, candidate[:, None], objective.denominator == "all")
    share = (
        (pairs.scores / objective.tau)[pairs.query]
        .masked_fill(~(negative | own), NEG_INF)
        .softmax(-1)
    )
    return share.masked_fill(~negative, 0.0)


def _unified(objective: Unified, pairs: PositivePairs, _candidate: Tensor) -> Tensor:
    return _share_of_one_more(objective.gamma * (pairs.gap + objective.margin))


def _vlc(objective: VLC, pairs: PositivePairs, _candidate: Tensor) -> Tensor:
    return _share_of_one_more(objective.gamma * pairs.gap)


def _share_of_one_more(x: Tensor) -> Tensor:
    """``e^x_j / (1 + sum_k e^x_k)``, where e^x is the D of eqs. 16 and 19."""
    return (x - log1p_exp(x.logsumexp(-1, keepdim=True))).exp()


FORMULAS: dict[type[Objective], Callable[[Any, PositivePairs, Tensor], Tensor]] = {
    Triplet: _triplet,
    TripletHN: _triplet_hn,
    NTXent: _nt_xent,
    Unified: _unified,
    VLC: _vlc,
}
