"""Metric-learning losses from which GOAL takes its pair and triplet weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from visavis.core.fields import Auto, PositiveFloat
from visavis.losses.auto_scale import number
from visavis.losses.objective import Objective, Reduction
from visavis.losses.pair_summaries import NEG_INF, find_positive_pairs, log1p_exp
from visavis.losses.targets import Targets


@dataclass(frozen=True, kw_only=True)
class BinomialDeviance(Objective):
    r"""Binomial deviance: a logistic loss that is small where positives score above and negatives below a fixed threshold.

    Args:
        alpha: Slope for positives.
        beta: Slope for negatives.
        lam: Threshold of scores.
        negatives: Whether the hardest or all negatives count.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_p log(1 + e^(-alpha (s_ip - lam))) / alpha + max_j log(1 + e^(beta (s_ij - lam))) / beta$ over positive
        pairs, both directions. With ``negatives="all"`` the sum over j. A query without negatives adds nothing.

    Gradient:
        $dL/ds_ip = -1 / (1 + e^(alpha (s_ip - lam)))$ and $dL/ds_ij = 1 / (1 + e^(-beta (s_ij - lam)))$.

    Advice:
        As a baseline that compares scores with a threshold instead of with each other.

    Source:
        Yi et al. (2014). In this form GOAL, eq. 11.

    Special cases:
        The gradient is that of Goal(con, sig) where every hinge is open.

    Differs from:
        Yi et al., who take the mean over each kind of pair.
    """

    scores_held: ClassVar[float] = 4.0

    alpha: PositiveFloat = 2.0
    beta: PositiveFloat = 10.0
    lam: float = 0.5
    negatives: Literal["hardest", "all"] = "hardest"
    reduction: Reduction = "sum"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        pushed = (
            pairs.negatives()
            if self.negatives == "all"
            else pairs.negatives().max(-1, keepdim=True).values
        )
        push = log1p_exp(self.beta * (pushed - self.lam)).sum(-1)[pairs.query] / self.beta
        pull = log1p_exp(self.alpha * (self.lam - pairs.positive)) / self.alpha
        return torch.where(pairs.has_negative, pull + push, 0.0)


@dataclass(frozen=True, kw_only=True)
class MultiSimilarity(Objective):
    r"""Multi-similarity loss: binomial deviance over those pairs of a query that are not yet separated by epsilon.

    Args:
        alpha: Slope for positives.
        beta: Slope for negatives.
        lam: Threshold of scores.
        epsilon: Range within which pairs count.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $log(1 + sum_p e^(-alpha (s_p - lam))) / alpha + log(1 + sum_n e^(beta (s_n - lam))) / beta$, one term for each
        query with a positive, over its positives $s_p < max_n s_n + epsilon$ and its negatives
        $s_n > min_p s_p - epsilon$.

    Gradient:
        $dL/ds_p = -x_p / (1 + sum_p x_p)$ with $x_p = e^(-alpha (s_p - lam))$. $dL/ds_n$ likewise, with the other sign.

    Advice:
        As a baseline with many positives in a batch. Its epsilon mines both sides.

    Source:
        Wang et al., Multi-Similarity Loss (2019).

    Special cases:
        With one positive and one negative, neither of them left out, the gradient is that of Goal(con, sig). Positives of a
        query share a term, as published.

    Differs from:
        The released code, which leaves out positives of 1 and takes the mean over queries.
    """

    scores_held: ClassVar[float] = 8.0

    alpha: PositiveFloat = 2.0
    beta: PositiveFloat = 50.0
    lam: Annotated[float, Interval(ge=-1000, le=1000)] = 0.5
    epsilon: float = 0.1
    reduction: Reduction = "sum"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        positive, negative = targets.masks
        highest_negative = scores.masked_fill(~negative, NEG_INF).amax(-1, keepdim=True)
        lowest_positive = scores.masked_fill(~positive, math.inf).amin(-1, keepdim=True)
        easy_positive = scores >= highest_negative + self.epsilon
        easy_negative = scores <= lowest_positive - self.epsilon
        pulled = (self.alpha * (self.lam - scores)).masked_fill(~positive | easy_positive, NEG_INF)
        pushed = (self.beta * (scores - self.lam)).masked_fill(~negative | easy_negative, NEG_INF)
        terms = (
            log1p_exp(pulled.logsumexp(-1)) / self.alpha
            + log1p_exp(pushed.logsumexp(-1)) / self.beta
        )
        return terms[positive.any(-1)]


@dataclass(frozen=True, kw_only=True)
class Circle(Objective):
    r"""Circle loss: every score is weighted by its distance from its optimum: 1 + margin, or -margin for a negative.

    Args:
        margin: Margin.
        gamma: Scale of the scores.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $log(1 + sum_n e^(gamma a_n (s_n - margin)) sum_p e^(-gamma a_p (s_p - 1 + margin)))$, one term for each query
        with a positive, with $a_n = [s_n + margin]_+$ and $a_p = [1 + margin - s_p]_+$ taken as constants.

    Gradient:
        $dL/ds_n = Z gamma a_n q_n$ and $dL/ds_p = -Z gamma a_p q_p$. $q$ are softmax weights among a query's negatives and among its
        positives, $Z = 1 - e^(-L)$. As $a_n$ and $a_p$ are constants, it is not the gradient of the value.

    Advice:
        As a baseline that pulls a positive harder the farther it is from 1, and pushes a negative harder the farther it is
        from 0.

    Source:
        Sun et al., Circle Loss (2020).

    Special cases:
        Not Goal(cir, lin), whose weights have no margin. See there. Positives of a query share a term, as published.

    Differs from:
        Other implementations, which take the mean over queries. The default here is the sum.
    """

    scores_held: ClassVar[float] = 8.0
    integrable: ClassVar[bool] = False

    margin: float = 0.25
    gamma: PositiveFloat | Auto = 64.0
    reduction: Reduction = "sum"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        positive, negative = targets.masks
        detached = scores.detach()
        gamma = number(self.gamma)
        pushed = gamma * (detached + self.margin).relu() * (scores - self.margin)
        pulled = gamma * (1 + self.margin - detached).relu() * (1 - self.margin - scores)
        push = pushed.masked_fill(~negative, NEG_INF).logsumexp(-1)
        pull = pulled.masked_fill(~positive, NEG_INF).logsumexp(-1)
        return log1p_exp(push + pull)[positive.any(-1)]
