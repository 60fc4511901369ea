"""GOAL: a prescribed gradient, the product of a triplet weight and the weights of its two pairs.

There are three triplet weights and five pair weights, each a small function of detached scores.
Some of the fifteen products are the gradient of a known loss, the others of none.

>>> import torch
>>> scores = torch.tensor([[0.75, 0.5], [0.25, 0.75]], requires_grad=True)
>>> value = Goal(triplet="con", pair="lin", margin=1.0)(scores, Targets.paired(2))
>>> value.backward()
>>> value.item(), scores.grad.tolist()          # (1 - s_p) pulls, s_n pushes, once in each direction
(-1.5, [[-0.5, 1.0], [0.5, -0.5]])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from visavis.core.fields import PositiveFloat, require_field
from visavis.losses.objective import Reduction, SummaryObjective, add_positive_scores
from visavis.losses.pair_summaries import (
    NEG_INF,
    HardestNegative,
    PositivePairs,
    find_positive_pairs,
)
from visavis.losses.targets import Targets

MAX_EXPONENT = 80.0
"""Maximum exponent of a weight "sig_ms" for cosines. Its exponential fits into float32."""


@dataclass(frozen=True, kw_only=True)
class Goal(SummaryObjective):
    r"""Gradient-based objective analysis (GOAL): prescribes the gradient of a positive and its hardest negative.

    Args:
        triplet: Triplet weight $T$.
        pair: Pair weights $(P_p, P_n)$.
        tau: Scale of the triplet weight.
        margin: Margin of the triplet weight "con".
        alpha: Slope of the weight of positives.
        beta: Slope of the weight of negatives.
        lam: Threshold of the pair weights.
        epsilon: Range of the means $m_p$ and $m_n$.
        semantics: Whether to follow the paper or the released code.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        With $s_p$ a positive and $s_n$ the hardest negative of its query, $dL/ds_n = T P_n$ and $dL/ds_p = -T P_p$.

        Triplet weight $T$:

        - "con": 1 where $margin + s_n - s_p > 0$
        - "nca": $1 / (1 + e^(tau (s_p - s_n)))$
        - "cir": $1 / (1 + e^(tau (s_p (2 - s_p) - s_n^2)))$

        Pair weights $(P_p, P_n)$:

        - "con": $(1, 1)$
        - "lin": $(1 - s_p, s_n)$
        - "sig": $1 / (1 + e^(alpha (s_p - lam)))$ and $1 / (1 + e^(-beta (s_n - lam)))$
        - "lin_ms": the weights of lin, times $1 - m_p$ and $1 + m_n$
        - "sig_ms": the weights of sig, with $m_p$ and $m_n$ in place of the first 1 of each denominator

        $m_p$ is the mean of $s_p - R$ ("sig_ms": $e^(alpha (s_p - R))$) over the other positives $R <= s_n + epsilon$ of the
        batch, of any query. $m_n$ is the mean of $s_n - R$ ("sig_ms": $e^(-beta (s_n - R))$) over the query's other negatives
        $R >= s_min - epsilon$, with $s_min$ the smallest positive of the batch. An empty mean is 0.

        The value, $s_n - s_p$, only monitors training. It is not a loss and cannot be compared between objectives.

    Advice:
        To choose separately how hard positives are pulled and negatives pushed. The default is the one its authors
        recommend.

    Source:
        Xuan and Chen, Dissecting Deep Metric Learning Losses for Image-Text Retrieval (GOAL, 2023), eqs. 3 to 13.

    Special cases:
        As gradients, (con, con) is TripletHN. (nca, con) hard-mined NT-Xent (eq. 6) / tau. (con, sig), where every hinge is
        open, BinomialDeviance. (cir, lin) that of $softplus(tau (s_n^2 - s_p (2 - s_p))) / (2 tau)$. (cir, lin) is not Circle
        and (con, sig_ms) is not MultiSimilarity, in contrast to table 1. (nca, lin), (nca, sig), (cir, con) and (cir,
        sig) belong to no loss at all.

    Differs from:
        The printed eqs. 3 and 4, whose gradient of the mined negative is 0. It is pushed here, as in the released code. Eq.
        12 has < and > where <= and >= stand above, as in that code. ``semantics="reference"`` takes that code's weights:
        $T_con$ is 1 without a margin, $T_cir$ has $s_n^2 + 0.5$, the means of lin_ms do not count differences of exactly 0. There
        tau is 1 unless given, and the gradient ignores factors of the loss.
    """

    scores_held: ClassVar[float] = 5.0
    integrable: ClassVar[bool] = False

    triplet: Literal["con", "nca", "cir"] = "cir"
    pair: Literal["con", "lin", "sig", "lin_ms", "sig_ms"] = "sig_ms"
    tau: PositiveFloat = 10.0
    margin: float = 0.2
    alpha: PositiveFloat = 2.0
    beta: PositiveFloat = 10.0
    lam: float = 0.5
    epsilon: float = 0.1
    semantics: Literal["paper", "reference"] = "paper"
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pair == "sig_ms":
            limit = MAX_EXPONENT / (1 + abs(self.lam))
            for name in ("alpha", "beta"):
                require_field(
                    getattr(self, name) <= limit,
                    self,
                    name,
                    f"at most {limit:.3g} with pair='sig_ms' and lam={self.lam:g}",
                )

    @classmethod
    def all(cls, **fields: Any) -> tuple[Goal, ...]:
        """Make the fifteen combinations of weights.

        Args:
            **fields: Further fields of each.

        Returns:
            The objectives.
        """
        return tuple(
            cls(triplet=triplet, pair=pair, **fields)  # type: ignore[arg-type]
            for triplet in TRIPLET_WEIGHTS
            for pair in PAIR_WEIGHTS
        )

    def pair_weights(
        self, positive: Tensor, negative: Tensor, mean: float = 0.1
    ) -> tuple[Tensor, Tensor]:
        """Compute the pair weights without a batch.

        Args:
            positive: Similarities of positives, any shape.
            negative: Similarities of negatives, any shape.
            mean: Value of $m_p$ and $m_n$. Only "lin_ms" and "sig_ms" use it.

        Returns:
            $P_p$ and $P_n$, in the shape of the similarities.

        Source:
            GOAL, figure 3, in which $m_p$ and $m_n$ are 0.1.
        """
        if self.pair in WEIGHTS_BY_MEANS:
            return WEIGHTS_BY_MEANS[self.pair](self, positive, negative, mean, mean)
        return PAIR_WEIGHTS[self.pair](self, _DetachedScores(positive, negative, None))

    @property
    def needs_positive_scores(self) -> bool:
        return self.pair in WEIGHTS_BY_MEANS

    def summary(self, targets: Targets) -> HardestNegative | None:
        return None if self.needs_positive_scores else HardestNegative()

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        return self._prescribed_terms(negatives, positive)

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        all_positives = add_positive_scores(self, scores, targets).positive_scores
        assert all_positives is not None
        batch = _BatchPairs(pairs._replace(scores=scores.detach()), all_positives)
        return self._prescribed_terms(pairs.hardest, pairs.positive, batch)

    def _prescribed_terms(
        self, hardest: Tensor, positive: Tensor, batch: _BatchPairs | None = None
    ) -> Tensor:
        """$s_n - s_p$ of each positive pair, with the prescribed gradient: ``[P]``."""
        has_negative = hardest != NEG_INF
        hardest = torch.where(has_negative, hardest, positive)
        detached = _DetachedScores(positive.detach(), hardest.detach(), batch)
        weight = TRIPLET_WEIGHTS[self.triplet](self, detached) * has_negative
        pull, push = PAIR_WEIGHTS[self.pair](self, detached)
        return _prescribe(hardest - positive, weight * (push * hardest - pull * positive))


def _prescribe(value: Tensor, surrogate: Tensor) -> Tensor:
    """A tensor with this value and the gradient of ``surrogate``."""
    return value.detach() + (surrogate - surrogate.detach())


class _BatchPairs(NamedTuple):
    """The positive pairs with detached scores, and the scores ``[M]`` of all positives of the
    batch, in any order.
    """

    pairs: PositivePairs
    all_positives: Tensor


class _DetachedScores(NamedTuple):
    """The detached scores from which weights are computed. A weight must not add a gradient.

    Attributes:
        positive: Score s_p of each positive pair, shape ``[P]``.
        hardest: Score s_n of the hardest negative of its query, shape ``[P]``. s_p without
            negatives.
        batch: Scores of the batch, for the weights "lin_ms" and "sig_ms" only.
    """

    positive: Tensor
    hardest: Tensor
    batch: _BatchPairs | None


def _triplet_con(goal: Goal, detached: _DetachedScores) -> Tensor:
    """Eq. 5."""
    if goal.semantics == "reference":
        return torch.ones_like(detached.positive)
    return (goal.margin + detached.hardest - detached.positive > 0).to(detached.positive)


def _triplet_nca(goal: Goal, detached: _DetachedScores) -> Tensor:
    """Eq. 7."""
    return (goal.tau * (detached.hardest - detached.positive)).sigmoid()


def _triplet_cir(goal: Goal, detached: _DetachedScores) -> Tensor:
    """Eq. 8."""
    shift = 0.5 if goal.semantics == "reference" else 0.0
    return (
        goal.tau * (detached.hardest**2 + shift - detached.positive * (2 - detached.positive))
    ).sigmoid()


def _pair_con(_goal: Goal, detached: _DetachedScores) -> tuple[Tensor, Tensor]:
    """Eq. 9."""
    return torch.ones_like(detached.positive), torch.ones_like(detached.hardest)


def _pair_lin(_goal: Goal, detached: _DetachedScores) -> tuple[Tensor, Tensor]:
    """Eq. 10."""
    return 1 - detached.positive, detached.hardest


def _pair_sig(goal: Goal, detached: _DetachedScores) -> tuple[Tensor, Tensor]:
    """Eq. 11."""
    return (goal.alpha * (goal.lam - detached.positive)).sigmoid(), (
        goal.beta * (detached.hardest - goal.lam)
    ).sigmoid()


def _pair_lin_ms(goal: Goal, detached: _DetachedScores) -> tuple[Tensor, Tensor]:
    """Eq. 13."""
    ascending, count, is_counted = _other_positives(goal, detached)
    sum_of_differences = count * detached.positive - pad(ascending.cumsum(0), (1, 0))[count]
    distance, query = _distance_to_hardest(goal, detached)
    in_mean = distance.isfinite()
    if goal.semantics == "reference":
        # Differences of exactly 0 are not counted.
        num_equal = torch.searchsorted(
            ascending, detached.positive, right=True
        ) - torch.searchsorted(ascending, detached.positive)
        is_counted = is_counted * num_equal.clamp(min=1)
        in_mean &= distance > 0
    m_p = _mean_or_zero(sum_of_differences, count - is_counted)
    m_n = _mean_or_zero(torch.where(in_mean, distance, 0.0).sum(-1), in_mean.sum(-1))[query]
    return _lin_ms_weights(goal, detached.positive, detached.hardest, m_p, m_n)


def _pair_sig_ms(goal: Goal, detached: _DetachedScores) -> tuple[Tensor, Tensor]:
    """Eq. 12."""
    ascending, count, is_counted = _other_positives(goal, detached)
    log_sums = pad((-goal.alpha * ascending).logcumsumexp(0), (1, 0), value=NEG_INF)
    m_p = _mean_or_zero(
        (goal.alpha * detached.positive + log_sums[count]).exp() - is_counted, count - is_counted
    ).clamp(min=0)
    distance, query = _distance_to_hardest(goal, detached)
    m_n = _mean_or_zero((-goal.beta * distance).exp().sum(-1), distance.isfinite().sum(-1))[query]
    return _sig_ms_weights(goal, detached.positive, detached.hardest, m_p, m_n)


def _lin_ms_weights(
    _goal: Goal, positive: Tensor, negative: Tensor, m_p: Tensor | float, m_n: Tensor | float
) -> tuple[Tensor, Tensor]:
    return (1 - m_p) * (1 - positive), (1 + m_n) * negative


def _sig_ms_weights(
    goal: Goal, positive: Tensor, negative: Tensor, m_p: Tensor | float, m_n: Tensor | float
) -> tuple[Tensor, Tensor]:
    return 1 / (m_p + (goal.alpha * (positive - goal.lam)).exp()), 1 / (
        m_n + (goal.beta * (goal.lam - negative)).exp()
    )


def _other_positives(goal: Goal, detached: _DetachedScores) -> tuple[Tensor, Tensor, Tensor]:
    """All positives in ascending order ``[M]``, the number of them that each pair averages over
    ``[P]``, and whether it is one of these.
    """
    assert detached.batch is not None
    # A pair averages over a prefix of these, so the sum is a prefix sum, from which the value of the
    # pair itself is subtracted.
    ascending = detached.batch.all_positives.sort().values
    upper_bound = detached.hardest + goal.epsilon
    return (
        ascending,
        torch.searchsorted(ascending, upper_bound, right=True),
        (detached.positive <= upper_bound).long(),
    )


def _distance_to_hardest(goal: Goal, detached: _DetachedScores) -> tuple[Tensor, Tensor]:
    """$s_n - s_ij$ for the other negatives of each query that m_n averages, inf elsewhere: ``[Q,
    C]``. Also the query of each pair.
    """
    assert detached.batch is not None
    negatives = detached.batch.pairs.negatives()
    hardest, position = negatives.max(-1, keepdim=True)
    others = negatives.scatter(-1, position, NEG_INF)
    lower_bound = pad(detached.batch.all_positives, (0, 1), value=math.inf).min() - goal.epsilon
    return torch.where(
        others >= lower_bound, hardest - others, math.inf
    ), detached.batch.pairs.query


def _mean_or_zero(total: Tensor, count: Tensor) -> Tensor:
    """``total / count``, and 0 where the count is 0."""
    return torch.where(count > 0, total / count.clamp(min=1), 0.0)


TRIPLET_WEIGHTS: dict[str, Callable[[Goal, _DetachedScores], Tensor]] = {
    "con": _triplet_con,
    "nca": _triplet_nca,
    "cir": _triplet_cir,
}
PAIR_WEIGHTS: dict[str, Callable[[Goal, _DetachedScores], tuple[Tensor, Tensor]]] = {
    "con": _pair_con,
    "lin": _pair_lin,
    "sig": _pair_sig,
    "lin_ms": _pair_lin_ms,
    "sig_ms": _pair_sig_ms,
}
WEIGHTS_BY_MEANS = {"lin_ms": _lin_ms_weights, "sig_ms": _sig_ms_weights}
