"""Counting contributing samples: how many negatives push a query, how strongly, and which queries nothing moves.

Source: Bleeker and de Rijke, "Do Lessons from Metric Learning Generalize to Image-Caption Retrieval?" (COCOS, 2022),
section 4; here for any objective, from the weights of its pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from visavis.diagnosis.weights import pair_weights
from visavis.objectives import Objective, SmoothAP, Triplet
from visavis.objectives.pairs import NEVER, pairs_of
from visavis.targets import Targets

Semantics = Literal["paper", "reference"]
CAPTIONS = 5
"""Captions of an image in the released code of the paper, where it is a constant."""


@dataclass(frozen=True)
class Cocos:
    """What moves the queries of one direction of a batch; each ``[Q]``.

    count: negatives whose weight is above epsilon, the paper's C^q. push: their weights added, W^-. rest: the weights of
    negatives below epsilon. pull: the weights of the positives, W^+. Weights count by their size.
    """

    count: Tensor
    push: Tensor
    rest: Tensor
    pull: Tensor

    @property
    def in_batch(self) -> float:
        """C^B: the counts of all queries."""
        return self.count.sum().item()

    @property
    def idle(self) -> int:
        """C^0: queries that no negative moves."""
        return int((self.count == 0).sum())

    @property
    def per_moved(self) -> float:
        """The mean count of the queries that have one, as the paper's tables 2 and 4 print; NaN if none has."""
        return self.in_batch / moved if (moved := len(self.count) - self.idle) else float("nan")

    @property
    def per_query(self) -> float:
        """The mean count of all queries, as its table 3 prints."""
        return self.count.double().mean().item()


def contributing(objective: Objective, scores: Tensor, targets: Targets, *, epsilon: float = 0.01) -> Cocos:
    """The contributing samples of one direction, by the weights of ``pair_weights``."""
    return count(pair_weights(objective, scores, targets), targets, epsilon=epsilon)


def count(weights: Tensor, targets: Targets, *, epsilon: float = 0.01) -> Cocos:
    """The contributing samples of one direction, by weights ``[Q, C]`` of any origin."""
    size = weights.abs()
    push = size.masked_fill(~targets.negative, 0.0)
    above = push > epsilon
    return Cocos(
        above.sum(1).to(size),
        push.masked_fill(~above, 0.0).sum(1),
        push.masked_fill(push >= epsilon, 0.0).sum(1),
        size.masked_fill(~targets.positive, 0.0).sum(1),
    )


def contributing_by_direction(
    objective: Objective, scores: Tensor, targets: Targets, *, epsilon: float = 0.01, semantics: Semantics = "paper"
) -> dict[str, Cocos]:
    """The contributing samples of images ("i2t") and of texts ("t2i") as queries. scores ``[V, T]``.

    SmoothAP's counts are those of its own eq. 13. semantics "reference": as the code released with the paper counts, where
    it differs: ``Triplet`` and ``SmoothAP`` with texts as queries; see the two functions ``released_*``.
    """
    facts = {"i2t": (scores, targets), "t2i": (scores.T, targets.T)}
    found = {way: contributing(objective, *both, epsilon=epsilon) for way, both in facts.items()}
    counts: dict[str, Tensor] = {}
    if isinstance(objective, SmoothAP):
        counts = {way: smooth_ap_counts(*both, tau=objective.tau, epsilon=epsilon) for way, both in facts.items()}
        if semantics == "reference":
            counts["t2i"] = released_smooth_ap_counts(scores.T, tau=objective.tau, epsilon=epsilon)
    elif semantics == "reference" and isinstance(objective, Triplet):
        counts = released_triplet_counts(scores, targets, margin=objective.margin)
    return {way: replace(of_way, count=counts.get(way, of_way.count)) for way, of_way in found.items()}


def smooth_ap_counts(scores: Tensor, targets: Targets, *, tau: float = 0.01, epsilon: float = 0.01, with_slope: bool = False) -> Tensor:
    """The count of SmoothAP by its own rule, a mean over a query's positives: ``[Q]``.

    Formula: ``(1 / |P|) sum_{i in P} #{j != i: sim(s_j - s_i) / R_i^2 > epsilon}``, R_i = 1 + sum_j sigmoid((s_j - s_i) / tau),
    sim(d) = sigma (1 - sigma). Source: COCOS, eq. 13. It drops two factors of the gradient and counts triplets, so it is
    not a count of pair weights. with_slope: sim divided by tau, as the derivation in the paper's appendix has it; the
    released code, and so the paper's table 4, leaves it out.
    """
    query, candidate = targets.positive.nonzero(as_tuple=True)
    known = targets.positive | targets.negative
    near = _near(scores[query].masked_fill(~known[query], NEVER), candidate, tau, epsilon * (tau if with_slope else 1))
    positives = targets.positive.sum(1).clamp(min=1)
    return scores.new_zeros(len(scores)).index_add_(0, query, near.to(scores)) / positives


def released_smooth_ap_counts(scores: Tensor, *, tau: float = 0.01, epsilon: float = 0.01) -> Tensor:
    """What the released code of COCOS counts for texts as queries of SmoothAP: ``[T]``. scores ``[T, V]``.

    For text q it takes the images 5 q to 5 q + 4 for its positives, as if texts were images, and adds their counts; the
    image of text q is q // 5. So no text from V / 5 on is ever counted: "without a gradient" in the paper's table 4.
    """
    texts, images = scores.shape
    candidate = torch.arange(min(CAPTIONS * texts, images), device=scores.device)
    query = candidate // CAPTIONS
    near = _near(scores[query], candidate, tau, epsilon)
    return scores.new_zeros(texts).index_add_(0, query, near.to(scores))


def released_triplet_counts(scores: Tensor, targets: Targets, *, margin: float = 0.2) -> dict[str, Tensor]:
    """What the released code of COCOS counts for Triplet: ``{"i2t": [V], "t2i": [V]}``. scores ``[V, T]``.

    With texts as queries the hinges are added along the wrong axis: those in an image's row, not in a text's column.
    """
    forth, back = pairs_of(scores, targets), pairs_of(scores.T, targets.T)
    opened = [(margin + of.scores[of.query] - of.positive[:, None] > 0) & of.negative[of.query] for of in (forth, back)]
    by_query = scores.new_zeros(len(scores)).index_add_(0, forth.query, opened[0].sum(1).to(scores))
    return {"i2t": by_query, "t2i": opened[1].sum(0).to(scores)}


def _near(scores: Tensor, own: Tensor, tau: float, epsilon: float) -> Tensor:
    """For each row, how many entries j have ``sim(s_j - s_own) / R_own^2`` above epsilon: ``[N, C], [N] -> [N]``."""
    gap = (scores - scores.gather(1, own[:, None])).scatter(1, own[:, None], NEVER)
    step = (gap / tau).sigmoid()
    rank = 1 + step.sum(1, keepdim=True)
    return (step * (1 - step) / rank**2 > epsilon).sum(1)
