"""What the objectives share: a query's negatives are reduced once, then compared with each of its positive pairs.

With k positives a query, a matrix [pairs x candidates] would cost k times as much; reducing per query keeps every
objective of this family at O(Q C). Only sums of hinges need the wider matrix: ``gap``.

Rules for all of them: one term per positive pair; other positives of a query are never its negatives; a pair whose
query has no negative counts, with term 0; masked scores are set to -inf last, which also stops their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visavis.targets import Targets

NEVER = float("-inf")


class Pairs(NamedTuple):
    """Every positive pair, and the negatives of its query.

    query ``[P]``: the row of each positive pair. positive ``[P]``: its score s_ip. scores ``[Q, C]``: s_ij.
    negative: bool ``[Q, C]``.
    """

    query: Tensor
    positive: Tensor
    scores: Tensor
    negative: Tensor

    def negatives(self, scale: float = 1.0) -> Tensor:
        """``scale * s_ij`` where j is a negative of i, else -inf: ``[Q, C]``."""
        return (scale * self.scores).masked_fill(~self.negative, NEVER)

    @property
    def hardest(self) -> Tensor:
        """``max_j s_ij`` over the query's negatives, for each pair: ``[P]``; -inf where there is none."""
        return self.negatives().max(-1).values[self.query]

    def log_sum_exp(self, scale: float) -> Tensor:
        """``log sum_j exp(scale s_ij)`` over the query's negatives, for each pair: ``[P]``; -inf where there is none."""
        return self.negatives(scale).logsumexp(-1)[self.query]

    @property
    def gap(self) -> Tensor:
        """``s_ij - s_ip`` where j is a negative, else -inf: ``[P, C]``, the wide form."""
        gap = self.scores.index_select(0, self.query) - self.positive[:, None]
        return gap.masked_fill(~self.negative.index_select(0, self.query), NEVER)

    @property
    def has_negative(self) -> Tensor:
        """Bool ``[P]``: the pair's query has a negative at all."""
        return self.negative.any(-1)[self.query]


def pairs_of(scores: Tensor, targets: Targets) -> Pairs:
    """The positive pairs of ``scores [Q, C]`` with the negatives of their queries.

    >>> pairs = pairs_of(torch.tensor([[0.9, 0.1], [0.4, 0.8]]), Targets.paired(2))
    >>> pairs.positive.tolist(), pairs.hardest.tolist()
    ([0.8999999761581421, 0.800000011920929], [0.10000000149011612, 0.4000000059604645])
    """
    query, candidate = targets.positive.nonzero(as_tuple=True)
    return Pairs(query, scores[query, candidate], scores, targets.negative)


def of_pair(value: Tensor | float, query: Tensor) -> Tensor | float:
    """The value of each pair ``[P]`` from those of the queries ``[Q]``; a single number stays as it is."""
    return value[query] if isinstance(value, Tensor) else value


def log1p_exp(x: Tensor) -> Tensor:
    """``log(1 + e^x)``, exact everywhere (softplus turns linear above 20)."""
    return torch.logaddexp(x, x.new_zeros(()))
