"""Pair weights as the papers write them out, for the objectives whose derivative a paper prints.

They are what ``pair_weights`` finds by differentiation, in the published order of operations: at the very corner of a
hinge, or at a weight that is exactly epsilon, the order decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visavis.errors import SpecError
from visavis.objectives import VLC, NTXent, Objective, Triplet, TripletHN, Unified
from visavis.objectives.pairs import NEVER, Pairs, log1p_exp, pairs_of
from visavis.targets import Targets


def closed_weights(objective: Objective, scores: Tensor, targets: Targets) -> Tensor:
    """``pair_weights`` by a printed formula: ``[Q, C]``, divided by the objective's slope.

    Triplet, TripletHN: COCOS, eqs. 9a and 9b, with the sign of a derivative (printed is the descent). NTXent: its
    eq. 11, in the same way. Unified, VLC: Unified loss, eqs. 14 to 16 and 19; the denominator is one plus the sum over all
    negatives (eq. 15 prints only the candidate's own). Facts other than who belongs to whom are not read.
    Raises SpecError for other objectives.
    """
    if type(objective) not in FORMULAS:
        known = ", ".join(kind.__name__ for kind in FORMULAS)
        raise SpecError(f"no paper prints the weights of {objective!r}: use pair_weights, or one of {known}.")
    found = pairs_of(scores, targets)
    candidate = targets.positive.nonzero()[:, 1]
    push = FORMULAS[type(objective)](objective, found, candidate)
    weights = torch.zeros_like(scores).index_add_(0, found.query, push)
    return weights.index_put_((found.query, candidate), -push.sum(-1), accumulate=True)


# Each: the positive pairs, and the places of their candidates [P] -> the weights of the negatives [P, C]


def _triplet(objective: Triplet, found: Pairs, _candidate: Tensor) -> Tensor:
    return (-found.gap < objective.margin).to(found.scores)


def _triplet_hn(objective: TripletHN, found: Pairs, _candidate: Tensor) -> Tensor:
    best, place = (of_query[found.query, None] for of_query in found.negatives().max(-1))
    open_hinge = (found.positive[:, None] - best < objective.margin).to(found.scores)
    return torch.zeros(len(best), found.scores.shape[1]).to(best).scatter_(1, place, open_hinge)


def _nt_xent(objective: NTXent, found: Pairs, candidate: Tensor) -> Tensor:
    negative = found.negative[found.query]
    own = torch.zeros_like(negative).scatter_(1, candidate[:, None], objective.denominator == "all")
    share = (found.scores / objective.tau)[found.query].masked_fill(~(negative | own), NEVER).softmax(-1)
    return share.masked_fill(~negative, 0.0)


def _unified(objective: Unified, found: Pairs, _candidate: Tensor) -> Tensor:
    return _share_of_one_more(objective.gamma * (found.gap + objective.margin))


def _vlc(objective: VLC, found: Pairs, _candidate: Tensor) -> Tensor:
    return _share_of_one_more(objective.gamma * found.gap)


def _share_of_one_more(x: Tensor) -> Tensor:
    """``e^x_j / (1 + sum_k e^x_k)``; e^x is the D of eqs. 16 and 19."""
    return (x - log1p_exp(x.logsumexp(-1, keepdim=True))).exp()


FORMULAS: dict[type[Objective], Callable[[Any, Pairs, Tensor], Tensor]] = {
    Triplet: _triplet,
    TripletHN: _triplet_hn,
    NTXent: _nt_xent,
    Unified: _unified,
    VLC: _vlc,
}
