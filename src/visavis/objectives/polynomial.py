"""Polynomial losses: the weight of a pair is a polynomial of its score, or of its distance to the positive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from visavis.objectives.base import Reduction, SummaryObjective
from visavis.objectives.pairs import NEVER, log1p_exp, of_pair, pairs_of
from visavis.objectives.summary import Hardest
from visavis.spec import require
from visavis.targets import Targets

SATURATED = 1 - 1e-5


def polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """``c_0 + c_1 x + c_2 x^2 + ...``

    >>> import torch
    >>> polynomial((1.0, 0.0, 2.0), torch.tensor(3.0))
    tensor(19.)
    """
    value = 0 * x  # in the autograd graph even without a coefficient
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value


@dataclass(frozen=True, kw_only=True)
class SSP(SummaryObjective):
    r"""Universal weighting by self-similarity polynomials: a polynomial of the positive's score plus one of its hardest negative's.

    Formula: ``[F(s_ip)]_+ + [G(max_j s_ij)]_+`` over positive pairs with ``max_j s_ij + margin > s_ip``, else 0; F and G have
    the coefficients ``positive`` and ``negative``, lowest order first. The mean of both directions, added.
    dL/ds_ip = F'(s_ip) and dL/ds_ij = G'(s_ij) at the hardest negative where they are above 0, each over the number of
    pairs. The loss jumps where the condition begins to hold. With the defaults G is 0 between 0.0955 and 0.3489, and below that
    its slope is negative: such a negative is pulled.
    Advice: only with coefficients tuned to the scores of the model at hand.
    Source: Wei et al., Universal weighting metric learning (2020), with the coefficients of its code (SCAN on Flickr30K).
    Special cases: a positive of 1 - 1e-5 or more is skipped. Reads ``query_margin`` (adaptive margins).
    Differs from: the released code, which fails at such a positive.
    """

    reads: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float = 0.2
    positive: tuple[float, ...] = (0.5, -0.7, 0.2)
    negative: tuple[float, ...] = (0.03, -0.4, 0.9)
    reduction: Reduction = "mean"

    def summary(self, targets: Targets) -> Hardest:
        return Hardest()

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        margin = of_pair(targets.margin_or(self.margin, "SSP"), query)
        idle = (negatives + margin <= positive) | (positive >= SATURATED)
        hardest = negatives.masked_fill(idle, 0.0)
        return (polynomial(self.positive, positive).relu() + polynomial(self.negative, hardest).relu()).masked_fill(idle, 0.0)


@dataclass(frozen=True, kw_only=True)
class RSP(SummaryObjective):
    r"""Triplet loss under a polynomial of the relative similarity, with the hardest negative or a softmax over all.

    Formula: ``[margin + G(max_j s_ij - s_ip)]_+`` over positive pairs, both directions, G with ``coefficients``, lowest order
    first; with ``gamma``: ``(1 / gamma) log(1 + sum_j e^(gamma (G(s_ij - s_ip) + margin)))``.
    dL/ds_ij = G'(s_ij - s_ip) at the hardest negative where the hinge is open, or times its weight in the softmax;
    dL/ds_ip is minus their sum.
    Advice: to try another penalty for the gap s_ij - s_ip than the linear one; keep the polynomial increasing.
    Source: Unified loss, eq. 25; the polynomials of Wei et al., Universal weighting metric learning (2021), were never printed.
    Special cases: coefficients (0, 1) are TripletHN, with ``gamma`` Unified. Reads ``query_margin`` (adaptive margins).
    Memory: ``[pairs x candidates]`` with ``gamma``.
    Differs from: eq. 25 as printed, whose two sides agree for gamma -> infinity only where G increases: the limit is
    max_j G(s_ij - s_ip), the hinge has G at the hardest negative. An extension, not a reproduction.
    """

    wide: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("query_margin",)

    coefficients: tuple[float, ...] = (0.0, 1.0)
    margin: float = 0.2
    gamma: float | None = None
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gamma is None or self.gamma > 0, self, "gamma", "a number above 0, or None")

    def summary(self, targets: Targets) -> Hardest | None:
        return Hardest() if self.gamma is None else None

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        margin = of_pair(targets.margin_or(self.margin, "RSP"), query)
        return (margin + self._penalty(negatives - positive)).relu()

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        assert self.gamma is not None
        pairs = pairs_of(scores, targets)
        margin = of_pair(targets.margin_or(self.margin, "RSP"), pairs.query)
        return log1p_exp((self.gamma * self._penalty(pairs.gap)).logsumexp(-1) + self.gamma * margin) / self.gamma

    def _penalty(self, gap: Tensor) -> Tensor:
        """G of a gap; -inf where there is no negative."""
        no_negative = gap == NEVER
        return polynomial(self.coefficients, gap.masked_fill(no_negative, 0.0)).masked_fill(no_negative, NEVER)
