"""Counting contributing samples: how many negatives push a query, how strongly, and which queries nothing moves.

Source: Bleeker and de Rijke, "Do Lessons from Metric Learning Generalize to Image-Caption Retrieval?" (COCOS, 2022),
section 4; here for any objective, from the weights of its pairs. A count depends on the epsilon from which a weight counts; the
effective number of negatives does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from visavis.diagnosis.counting import rule_of
from visavis.diagnosis.weights import pair_weights
from visavis.objectives import Objective
from visavis.targets import Targets

Semantics = Literal["paper", "reference"]


@dataclass(frozen=True)
class Cocos:
    """What moves the queries of one direction of a batch; each ``[Q]``.

    count: negatives whose weight is above epsilon, the paper's C^q. push: their weights added, W^-. rest: the weights of
    negatives below epsilon. pull: the weights of the positives, W^+. effective: the ``effective_number`` of negatives, of all weights,
    whatever epsilon. Weights count by their size.
    """

    count: Tensor
    push: Tensor
    rest: Tensor
    pull: Tensor
    effective: Tensor

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

    @property
    def effective_negatives(self) -> float:
        """The mean effective number of the queries whose negatives have any weight; NaN if none has."""
        return self.effective[self.effective > 0].double().mean().item()


def effective_number(weights: Tensor) -> Tensor:
    """How many candidates share the weight of a query, ``[Q]``, for weights ``[Q, C]`` of at least 0; 0 for a query without any weight.

    Formula: ``(sum_j w_j)^2 / sum_j w_j^2``, which is 1 where one candidate has all the weight and n where n share it equally. It says how
    many, not how strongly: a factor on a row changes nothing.
    Source: Kish, Survey Sampling (1965), the effective sample size; as of shares, the inverse participation ratio, or Hill number of order 2.
    """
    total = weights.sum(1)
    concentration = (weights / total[:, None]).square().sum(1)
    return torch.where(total > 0, 1 / concentration, 0.0)


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
        effective_number(push),
    )


def contributing_by_direction(
    objective: Objective, scores: Tensor, targets: Targets, *, epsilon: float = 0.01, semantics: Semantics = "paper"
) -> dict[str, Cocos]:
    """The contributing samples of images ("i2t") and of texts ("t2i") as queries. scores ``[V, T]``.

    An objective with a rule of its own (``counting.RULES``) is counted by it: SmoothAP by eq. 13. semantics "reference": as the
    code released with the paper counts, where it differs: ``Triplet`` and ``SmoothAP`` with texts as queries.
    """
    (found,) = contributing_by_epsilon(objective, scores, targets, [epsilon], semantics=semantics)
    return found


def contributing_by_epsilon(
    objective: Objective, scores: Tensor, targets: Targets, epsilons: Sequence[float], *, semantics: Semantics = "paper"
) -> list[dict[str, Cocos]]:
    """``contributing_by_direction`` for each epsilon, by one differentiation."""
    facts = {"i2t": (scores, targets), "t2i": (scores.T, targets.T)}
    weights = {way: pair_weights(objective, *both) for way, both in facts.items()}
    rule = rule_of(objective)
    counting = rule and (rule.released if semantics == "reference" else rule.paper)
    found = []
    for epsilon in epsilons:
        counts = counting(objective, scores, targets, epsilon) if counting else {}
        by_weights = {way: count(weights[way], told, epsilon=epsilon) for way, (_, told) in facts.items()}
        found.append({way: replace(cocos, count=counts.get(way, cocos.count)) for way, cocos in by_weights.items()})
    return found
