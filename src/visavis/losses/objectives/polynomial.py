"""Polynomial losses: the weight of a pair is a polynomial of its score, or of its difference from
the positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from visavis.core.fields import Auto, PositiveFloat
from visavis.losses.auto_scale import number
from visavis.losses.objective import Reduction, SummaryObjective
from visavis.losses.pair_summaries import (
    NEG_INF,
    HardestNegative,
    anchor_margins,
    find_positive_pairs,
    log1p_exp,
)
from visavis.losses.targets import Targets

SATURATED_SCORE = 1 - 1e-5
"""Score of a positive from which SSP skips the pair."""


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """$c_0 + c_1 x + c_2 x^2 + ...$"""
    value = 0 * x  # in the autograd graph even without a coefficient
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value


@dataclass(frozen=True, kw_only=True)
class SSP(SummaryObjective):
    r"""Universal weighting by self-similarity polynomials: a polynomial of the positive's score plus one of its hardest negative's.

    Args:
        margin: Margin.
        positive: Coefficients of F, lowest order first.
        negative: Coefficients of G.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $[F(s_ip)]_+ + [G(max_j s_ij)]_+$ over positive pairs with $max_j s_ij + margin > s_ip$, else 0. $F$ and $G$ have
        the coefficients ``positive`` and ``negative``, lowest order first. The mean of both directions, added.

    Gradient:
        $dL/ds_ip = F'(s_ip)$ and $dL/ds_ij = G'(s_ij)$ at the hardest negative where they are above 0, each over the number of
        pairs. The loss jumps where the condition begins to hold. With the defaults G is 0 between 0.0955 and 0.3489, and
        below that its slope is negative: such a negative is pulled.

    Advice:
        Only with coefficients tuned to the scores of your model.

    Source:
        Wei et al., Universal weighting metric learning (2020), with the coefficients of its code (SCAN on Flickr30K).

    Special cases:
        A positive of 1 - 1e-5 or more is skipped. Reads ``query_margin`` (adaptive margins).

    Differs from:
        The released code, which fails at such a positive.
    """

    scores_held: ClassVar[float] = 4.0
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float | Auto = 0.2
    positive: tuple[float, ...] = (0.5, -0.7, 0.2)
    negative: tuple[float, ...] = (0.03, -0.4, 0.9)
    reduction: Reduction = "mean"

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        margin = anchor_margins(self.margin, query, targets, "SSP")
        is_inactive = (negatives + margin <= positive) | (positive >= SATURATED_SCORE)
        # A polynomial of -inf, the hardest of no negatives, has a NaN as its gradient.
        hardest = negatives.masked_fill(is_inactive, 0.0)
        return (
            _polynomial(self.positive, positive).relu() + _polynomial(self.negative, hardest).relu()
        ).masked_fill(is_inactive, 0.0)


@dataclass(frozen=True, kw_only=True)
class RSP(SummaryObjective):
    r"""Triplet loss under a polynomial of the relative similarity, with the hardest negative or a softmax over all.

    Args:
        coefficients: Coefficients of G, lowest order first.
        margin: Margin.
        gamma: Scale of the softmax. None: the hardest negative.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $[margin + G(max_j s_ij - s_ip)]_+$ over positive pairs, both directions, $G$ with ``coefficients``, lowest order
        first. With ``gamma``: $(1 / gamma) log(1 + sum_j e^(gamma (G(s_ij - s_ip) + margin)))$.

    Gradient:
        $dL/ds_ij = G'(s_ij - s_ip)$ at the hardest negative where the hinge is open, or times its weight in the softmax.
        $dL/ds_ip$ is minus their sum.

    Advice:
        To try another penalty for the gap $s_ij - s_ip$ than the linear one. Keep the polynomial increasing.

    Source:
        Unified loss, eq. 25. The polynomials of Wei et al., Universal weighting metric learning (2021), were never printed.

    Special cases:
        Coefficients (0, 1) are TripletHN, with ``gamma`` Unified. Reads ``query_margin`` (adaptive margins).

    Memory:
        ``[pairs x candidates]`` with ``gamma``.

    Differs from:
        eq. 25 as printed, whose two sides agree for $gamma -> infinity$ only where $G$ increases: the limit is
        $max_j G(s_ij - s_ip)$, the hinge has $G$ at the hardest negative. An extension, not a reproduction.
    """

    needs_pair_matrix: ClassVar[bool] = True
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    coefficients: tuple[float, ...] = (0.0, 1.0)
    margin: float | Auto = 0.2
    gamma: PositiveFloat | Auto | None = None
    reduction: Reduction = "sum"

    @property
    def scores_held(self) -> float:  # type: ignore[override]
        return 4.0 if self.gamma is None else 6.0 + len(self.coefficients)

    def summary(self, targets: Targets) -> HardestNegative | None:
        return HardestNegative() if self.gamma is None else None

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        margin = anchor_margins(self.margin, query, targets, "RSP")
        return (margin + self._penalty(negatives - positive)).relu()

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        assert self.gamma is not None
        gamma = number(self.gamma)
        pairs = find_positive_pairs(scores, targets)
        margin = anchor_margins(self.margin, pairs.query, targets, "RSP")
        return log1p_exp((gamma * self._penalty(pairs.gap)).logsumexp(-1) + gamma * margin) / gamma

    def _penalty(self, gap: Tensor) -> Tensor:
        """G of a gap, -inf without negatives."""
        no_negative = gap == NEG_INF
        return _polynomial(self.coefficients, gap.masked_fill(no_negative, 0.0)).masked_fill(
            no_negative, NEG_INF
        )
