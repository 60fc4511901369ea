"""Counting contributing samples: how many negatives push a query, how strongly, and which queries nothing moves.

Source: Bleeker and de Rijke, "Do Lessons from Metric Learning Generalize to Image-Caption Retrieval?" (COCOS, 2022),
section 4; here for any objective, from the weights of its pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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

    An objective with a rule of its own (``counting.RULES``) is counted by it: SmoothAP by eq. 13. semantics "reference": as the
    code released with the paper counts, where it differs: ``Triplet`` and ``SmoothAP`` with texts as queries.
    """
    facts = {"i2t": (scores, targets), "t2i": (scores.T, targets.T)}
    by_weights = {way: contributing(objective, *both, epsilon=epsilon) for way, both in facts.items()}
    rule = rule_of(objective)
    counting = rule and (rule.released if semantics == "reference" else rule.paper)
    counts = counting(objective, scores, targets, epsilon) if counting else {}
    return {way: replace(cocos, count=counts.get(way, cocos.count)) for way, cocos in by_weights.items()}
