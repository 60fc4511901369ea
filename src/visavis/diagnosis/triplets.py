"""What an objective does with one triplet: how strongly it pulls the positive and pushes the negative, by their two similarities.

Drawn over the plane of both, this is the triplet diagram; along one of them, the weight of a pair against its similarity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visavis.diagnosis.weights import pair_weights
from visavis.objectives import Objective
from visavis.targets import Targets


@dataclass(frozen=True)
class Triplets:
    """Weights over a grid of similarities. positive ``[A]``, negative ``[B]``: of the query with its positive and its negative. pull
    ``[A, B]``: -dL/ds of the positive. push ``[A, B]``: dL/ds of the negative. Both divided by the objective's slope, as ``pair_weights`` is.
    """

    positive: Tensor
    negative: Tensor
    pull: Tensor
    push: Tensor

    @property
    def size(self) -> Tensor:
        """The length of the gradient ``[A, B]``, 1 where both weights are 1."""
        return (self.pull.square() + self.push.square()).div(2).sqrt()


def triplet_weights(objective: Objective, positive: Tensor, negative: Tensor) -> Triplets:
    """The weights of a query's positive and negative, one of each, for similarities ``[A]`` and ``[B]``.

    An objective that looks at the rest of the batch (GOAL with lin_ms, sig_ms) stands in a batch in which everything scores the same: other
    positives as the positive, and a second negative as the negative, with which it shares the push. Facts beside the scores are those of
    ``neutral_facts``. Source of the diagram: GOAL, figure 2, after Xuan et al., "Hard negative examples are hard, but useful" (2020).
    """
    negatives, batches = (2, positive[:, None]) if objective.needs_positive_scores else (1, positive[None])
    weights = torch.cat([_weights(objective, batch, negative, negatives) for batch in batches]).unflatten(0, (len(positive), len(negative)))
    return Triplets(positive, negative, -weights[..., 0], weights[..., 1:].sum(-1))


def _weights(objective: Objective, positive: Tensor, negative: Tensor, negatives: int) -> Tensor:
    """Those of each positive with each negative, the latter in so many columns: ``[A B, 1 + negatives]``."""
    own, other = torch.cartesian_prod(positive, negative).unbind(1)
    scores = torch.stack([own, *[other] * negatives], 1)
    ids = torch.zeros(len(scores), dtype=torch.long)
    targets = Targets(query_ids=ids, candidate_ids=torch.arange(1 + negatives), **neutral_facts(objective, scores))
    return pair_weights(objective, scores, targets)


def neutral_facts(objective: Objective, scores: Tensor) -> dict[str, Any]:
    """The facts without which an objective cannot be computed, for scores whose column 0 is the positive.

    Degrees of relevance: 1 for the positive, 0 for the others. Offline negatives: two, which score as the hardest negative does. Margins of
    pairs: the objective's own.
    """
    relevance = torch.zeros_like(scores)
    relevance[:, 0] = 1
    facts = {
        "relevance": relevance,
        "query_offline_scores": scores[:, 1:].amax(1, keepdim=True).expand(-1, 2),
        "pair_margin": torch.full_like(scores, getattr(objective, "margin", 0.0)),
    }
    return {name: fact for name, fact in facts.items() if name in objective.reads}
