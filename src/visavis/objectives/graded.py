"""A contrastive loss that also orders the negatives: their degrees of relevance are the soft targets of a second softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from visavis.objectives.base import Reduction, SummaryObjective
from visavis.objectives.pairs import NEVER, log1p_exp, pairs_of
from visavis.objectives.summary import LogSumExp
from visavis.spec import require
from visavis.targets import Targets


@dataclass(frozen=True, kw_only=True)
class GradedVLC(SummaryObjective):
    r"""VLC plus a KL divergence that orders the negatives of a query by their degrees of relevance.

    Formula: ``sum_p log(1 + sum_j e^(gamma (s_ij - s_ip)))`` over positive pairs, and once for each query that has one
    ``beta sum_j p_ij log(p_ij / q_ij)`` over its negatives, both directions; p_ij is the softmax of ``R_ij / tau``, q_ij that of
    ``graded_gamma s_ij``, R being ``targets.relevance``.
    dL/ds_ij is that of VLC plus ``beta graded_gamma (q_ij - p_ij)``: a negative that scores higher than its degree says is
    pushed, one that scores lower is pulled.
    Advice: as Ladder, without thresholds; tau of about the spread of the best degrees; a larger beta favors order, a smaller one R@1.
    Source: this package; the second part is the top-one form of Cao et al., ListNet (2007), taken over the negatives.
    Special cases: beta 0 is VLC. The second part is 0 where ``R_ij / tau - graded_gamma s_ij`` is the same for all negatives.
    Differs from: Ladder, which sets margins between levels of relevance; here every two negatives are ordered by their own degrees.
    """

    reads: ClassVar[tuple[str, ...]] = ("relevance",)

    gamma: float = 40.0
    reduction: Reduction = "mean"
    beta: float = 1.0
    tau: float = 0.15
    graded_gamma: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gamma > 0, self, "gamma", "a number above 0")
        require(self.beta >= 0, self, "beta", "a number from 0 on")
        require(self.tau > 0, self, "tau", "a number above 0")
        require(self.graded_gamma > 0, self, "graded_gamma", "a number above 0")

    @property
    def slope(self) -> float:
        return self.gamma

    def summary(self, targets: Targets) -> LogSumExp | None:
        return LogSumExp(self.gamma) if self.beta == 0 else None

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        return log1p_exp(negatives - self.gamma * positive)

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = pairs_of(scores, targets)
        terms = self.pair_terms(pairs.log_sum_exp(self.gamma), pairs.positive, pairs.query, targets)
        share = self.beta / targets.positive.sum(-1).clamp(min=1)  # one divergence a query, shared among its pairs
        return terms + (share * self.divergence(scores, targets))[pairs.query]

    def divergence(self, scores: Tensor, targets: Targets) -> Tensor:
        """``sum_j p_ij log(p_ij / q_ij)`` over the negatives of each query: ``[Q]``; 0 where there is none."""
        negative = targets.negative
        outside = ~negative & negative.any(-1, keepdim=True)  # without negatives nothing is masked: no NaN, and the sum is 0
        log_p, log_q = (
            logits.masked_fill(outside, NEVER).log_softmax(-1).masked_fill(~negative, 0.0)
            for logits in (targets.pairwise("relevance", "GradedVLC") / self.tau, self.graded_gamma * scores)
        )
        return (log_p.exp() * (log_p - log_q)).masked_fill(~negative, 0.0).sum(-1)
