"""Positive pairs and summaries of negatives, which objectives share.

The negatives of a query are reduced once and then compared with each of its positive pairs. With k
positives per query, a matrix [pairs x candidates] would cost k times as much. Only sums of hinges
need this wider matrix: ``gap``.

Rules: one term per positive pair. Other positives of a query are never its negatives. A pair whose
query has no negative counts with term 0. Masked scores are set to -inf last, which also stops their
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from visavis.core.fields import Auto
from visavis.losses.auto_scale import number
from visavis.losses.targets import Targets

NEG_INF = float("-inf")


class PositivePairs(NamedTuple):
    """Every positive pair, and the negatives of its query.

    Attributes:
        query: Row of each positive pair, shape ``[P]``.
        candidate: Column of each positive pair, shape ``[P]``.
        positive: Its score $s_ip$, shape ``[P]``.
        scores: Scores $s_ij$, shape ``[Q, C]``.
        negative_mask: Negative pairs, bool ``[Q, C]``. None: all pairs that are not positive.
    """

    query: Tensor
    candidate: Tensor
    positive: Tensor
    scores: Tensor
    negative_mask: Tensor | None

    @property
    def negative(self) -> Tensor:
        """Negative pairs, bool ``[Q, C]``."""
        if self.negative_mask is not None:
            return self.negative_mask
        negative = self.scores.new_ones(self.scores.shape, dtype=torch.bool)
        negative[self.query, self.candidate] = False
        return negative

    def negatives(self, scale: float = 1.0) -> Tensor:
        """Scores $scale s_ij$, -inf where j is not a negative of i, ``[Q, C]``."""
        scores = self.scores if scale == 1 else scale * self.scores
        if self.negative_mask is not None:
            return scores.masked_fill(~self.negative_mask, NEG_INF)
        # Setting the pairs takes an eighth of the time of a mask.
        return scores.index_put((self.query, self.candidate), scores.new_tensor(NEG_INF))

    @property
    def T(self) -> PositivePairs:
        """The pairs with queries and candidates exchanged, in the same order."""
        negative = None if self.negative_mask is None else self.negative_mask.T
        return PositivePairs(self.candidate, self.query, self.positive, self.scores.T, negative)

    @property
    def num_positives(self) -> Tensor:
        """Number of positives of each query, shape ``[Q]``."""
        # Not bincount, whose shape a compiler does not know.
        counts = self.query.new_zeros(self.scores.shape[0])
        return counts.index_add_(0, self.query, torch.ones_like(self.query))

    @property
    def num_negatives(self) -> Tensor:
        """Number of negatives of each query, shape ``[Q]``."""
        if self.negative_mask is None:
            return self.scores.shape[1] - self.num_positives
        return self.negative_mask.sum(-1)

    @property
    def hardest(self) -> Tensor:
        """$max_j s_ij$ over the negatives of the query of each pair, shape ``[P]``, -inf without
        negatives.
        """
        return self.negatives().max(-1).values[self.query]

    def log_sum_exp(self, scale: float) -> Tensor:
        """Log-sum-exp of $scale s_ij$ over the negatives of each pair's query, ``[P]``, -inf without."""
        return self.negatives(scale).logsumexp(-1)[self.query]

    @property
    def gap(self) -> Tensor:
        """$s_ij - s_ip$ where j is a negative, else -inf, shape ``[P, C]``."""
        return self.negatives().index_select(0, self.query) - self.positive[:, None]

    @property
    def has_negative(self) -> Tensor:
        """Whether the query of each pair has a negative, bool ``[P]``."""
        return (self.num_negatives > 0)[self.query]


def find_positive_pairs(scores: Tensor, targets: Targets) -> PositivePairs:
    """Find the positive pairs of a score matrix, with the negatives of their queries.

    Args:
        scores: Scores of shape ``[Q, C]``.
        targets: Targets of the same shape.

    Returns:
        The pairs.

    Example:
        >>> pairs = find_positive_pairs(torch.tensor([[0.9, 0.1], [0.4, 0.8]]), Targets.paired(2))
        >>> pairs.positive.tolist(), pairs.hardest.tolist()
        ([0.8999999761581421, 0.800000011920929], [0.10000000149011612, 0.4000000059604645])
    """
    negative = None
    if targets.is_defined_by_ids:
        query, candidate = targets.positive_pairs([])
    else:
        positive, negative = targets.masks
        query, candidate = positive.nonzero(as_tuple=True)
    return PositivePairs(query, candidate, scores[query, candidate], scores, negative)


def anchor_margins(
    margin: float | Auto, query: Tensor, targets: Targets, objective: str
) -> Tensor | float:
    """Return the margin of the anchor of each positive pair: the adaptive margin of its query, or
    the margin of the objective.
    """
    margins = targets.query_margin_or(number(margin), objective)
    return margins[query] if isinstance(margins, Tensor) else margins


def log1p_exp(x: Tensor) -> Tensor:
    """Compute $log(1 + e^x)$, exact everywhere (``softplus`` is linear above 20).

    Args:
        x: A tensor.

    Returns:
        A tensor of the same shape.
    """
    # From 50 on, log(1 + e^x) is x in float64, and e^50 does not overflow in float32.
    return softplus(x, threshold=50.0)


@dataclass(frozen=True)
class HardestNegative:
    """Summary $max_j s_ij$ over the negatives of a query, -inf without negatives."""

    def compute(self, pairs: PositivePairs) -> Tensor:
        """Compute the summary for the query of each pair, ``[P]``, from all scores."""
        return pairs.hardest


@dataclass(frozen=True)
class NegativeLogSumExp:
    """Summary $log sum_j exp(scale s_ij)$ over the negatives of a query, -inf without negatives.

    Attributes:
        scale: Factor of the scores.
    """

    scale: float

    def compute(self, pairs: PositivePairs) -> Tensor:
        """Compute the summary for the query of each pair, ``[P]``, from all scores."""
        return pairs.log_sum_exp(self.scale)


NegativeSummary = HardestNegative | NegativeLogSumExp
