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

from visavis.losses.targets import Targets

NEG_INF = float("-inf")


class PositivePairs(NamedTuple):
    """Every positive pair, and the negatives of its query.

    Attributes:
        query: Row of each positive pair, shape ``[P]``.
        positive: Its score s_ip, shape ``[P]``.
        scores: Scores s_ij, shape ``[Q, C]``.
        negative: Negative pairs, bool ``[Q, C]``.
    """

    query: Tensor
    positive: Tensor
    scores: Tensor
    negative: Tensor

    def negatives(self, scale: float = 1.0) -> Tensor:
        """Mask the scores of pairs that are not negative.

        Args:
            scale: Factor of the scores.

        Returns:
            ``scale * s_ij`` where j is a negative of i, else -inf, shape ``[Q, C]``.
        """
        return (scale * self.scores).masked_fill(~self.negative, NEG_INF)

    @property
    def hardest(self) -> Tensor:
        """``max_j s_ij`` over the negatives of the query of each pair, shape ``[P]``, -inf without
        negatives.
        """
        return self.negatives().max(-1).values[self.query]

    def log_sum_exp(self, scale: float) -> Tensor:
        """Compute the log-sum-exp over the negatives of the query of each pair.

        Args:
            scale: Factor of the scores.

        Returns:
            ``log sum_j exp(scale s_ij)``, shape ``[P]``, -inf without negatives.
        """
        return self.negatives(scale).logsumexp(-1)[self.query]

    @property
    def gap(self) -> Tensor:
        """``s_ij - s_ip`` where j is a negative, else -inf, shape ``[P, C]``."""
        gap = self.scores.index_select(0, self.query) - self.positive[:, None]
        return gap.masked_fill(~self.negative.index_select(0, self.query), NEG_INF)

    @property
    def has_negative(self) -> Tensor:
        """Whether the query of each pair has a negative, bool ``[P]``."""
        return self.negative.any(-1)[self.query]


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
    query, candidate = targets.positive.nonzero(as_tuple=True)
    return PositivePairs(query, scores[query, candidate], scores, targets.negative)


def anchor_margins(
    margin: float, query: Tensor, targets: Targets, objective: str
) -> Tensor | float:
    """Return the margin of the anchor of each positive pair: the adaptive margin of its query, or
    the margin of the objective.

    Args:
        margin: Margin of the objective, for targets without adaptive margins.
        query: Query of each pair, shape ``[P]``.
        targets: The targets.
        objective: Name of the objective, for the error message.

    Returns:
        Margins of shape ``[P]``, or the margin of the objective.
    """
    margins = targets.query_margin_or(margin, objective)
    return margins[query] if isinstance(margins, Tensor) else margins


def log1p_exp(x: Tensor) -> Tensor:
    """Compute ``log(1 + e^x)``, exact everywhere (``softplus`` is linear above 20).

    Args:
        x: A tensor.

    Returns:
        A tensor of the same shape.
    """
    return torch.logaddexp(x, x.new_zeros(()))


@dataclass(frozen=True)
class HardestNegative:
    """Summary ``max_j s_ij`` over the negatives of a query, -inf without negatives."""

    def compute(self, pairs: PositivePairs) -> Tensor:
        """Compute the summary from all scores.

        Args:
            pairs: Positive pairs with the negatives of their queries.

        Returns:
            The summary for the query of each pair, shape ``[P]``.
        """
        return pairs.hardest


@dataclass(frozen=True)
class NegativeLogSumExp:
    """Summary ``log sum_j exp(scale s_ij)`` over the negatives of a query, -inf without negatives.

    Attributes:
        scale: Factor of the scores.
    """

    scale: float

    def compute(self, pairs: PositivePairs) -> Tensor:
        """Compute the summary from all scores.

        Args:
            pairs: Positive pairs with the negatives of their queries.

        Returns:
            The summary for the query of each pair, shape ``[P]``.
        """
        return pairs.log_sum_exp(self.scale)


NegativeSummary = HardestNegative | NegativeLogSumExp
