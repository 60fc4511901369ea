"""Losses that tolerate wrong pairs: a wrong pair has a bounded or a small gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from visavis.core.fields import (
    Auto,
    NonNegativeFloat,
    PositiveFloat,
    require_field,
)
from visavis.losses.auto_scale import number
from visavis.losses.objective import Objective, Reduction, SummaryObjective
from visavis.losses.pair_summaries import (
    NEG_INF,
    NegativeLogSumExp,
    PositivePairs,
    find_positive_pairs,
    log1p_exp,
)
from visavis.losses.targets import Targets

MAX_EXPONENT = 80.0
"""Maximum exponent of RINCE for cosines. Its exponential fits into float32."""


def _logits(pairs: PositivePairs, tau: float) -> Tensor:
    """Logits of each positive pair, which are 0, and of the negatives of its query: ``[P, 1 + C]``,
    -inf elsewhere.
    """
    return torch.cat([torch.zeros_like(pairs.positive)[:, None], pairs.gap / tau], 1)


@dataclass(frozen=True, kw_only=True)
class RCL(Objective):
    r"""Robust complementary learning: pushes negatives only, because they are right where a pair is wrong.

    Args:
        tau: Temperature.
        form: Function of the probability of a negative.
        q: Exponent of the form "gce".
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_j f(p_ij)$ over positive pairs $p = (i, p)$ and negatives $j$, both directions, with $p_ij = e^(s_ij / tau) /
        (e^(s_ip / tau) + sum_j e^(s_ij / tau))$.

        Form $f(x)$:

        - "log": $-log(1 - x)$
        - "tan": $tan(x)$
        - "abs": $x$
        - "exp": $e^(x - 1) - e^(-1)$
        - "gce": $(1 - (1 - x)^q) / q$

    Gradient:
        $dL/ds_ij = p_ij (f'(p_ij) - sum_k p_ik f'(p_ik)) / tau$ over negatives $k$, and $dL/ds_ip$ is minus the sum over $j$.
        With "abs" a pair far below its negatives has almost none.

    Advice:
        Where many captions belong to other images, and without an estimate which ones.

    Source:
        Hu et al., Cross-Modal Retrieval with Partially Mismatched Pairs (RCL, 2023), with its code.

    Special cases:
        "gce" with q of 1 is "abs". "log" is the limit of "gce" for q -> 0. With one negative, "log" is NTXent.

    Memory:
        ``[pairs x candidates]``.

    Differs from:
        The released code, which adds 1e-10 to the logarithm, so that it is at most 23, and can sample the negatives. "exp" is
        less by $e^(-1)$ for each negative, which changes no gradient.
    """

    scores_held: ClassVar[float] = 10.0
    needs_pair_matrix: ClassVar[bool] = True

    tau: PositiveFloat | Auto = 0.05
    form: Literal["log", "tan", "abs", "exp", "gce"] = "log"
    q: Annotated[float, Interval(gt=0, le=1)] = 0.5
    reduction: Reduction = "mean"

    @property
    def gradient_scale(self) -> float:
        return 1 / number(self.tau)

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        logits = _logits(find_positive_pairs(scores, targets), number(self.tau))
        probability = logits.softmax(1)[:, 1:]
        if self.form == "tan":
            return probability.tan().sum(1)
        if self.form == "abs":
            return probability.sum(1)
        if self.form == "exp":
            return ((probability - 1).exp() - math.exp(-1)).sum(1)
        log_rest = self._log_rest(logits, probability)
        return -(log_rest if self.form == "log" else (self.q * log_rest).expm1() / self.q).sum(1)

    @staticmethod
    def _log_rest(logits: Tensor, probability: Tensor) -> Tensor:
        """$log(1 - p_ij)$, exact where a probability is near 1: of the hardest negative, from the
        sum of the others.
        """
        hardest = logits[:, 1:].max(1, keepdim=True).indices
        # The first logit is 0. A compiler cannot take logsumexp of an unknown number of pairs.
        others = -logits.scatter(1, 1 + hardest, NEG_INF).log_softmax(1)[:, :1]
        of_hardest = -log1p_exp(logits.gather(1, 1 + hardest) - others)
        log_rest = torch.log1p(-probability.scatter(1, hardest, 0.0))
        return log_rest.scatter(1, hardest, of_hardest)


@dataclass(frozen=True, kw_only=True)
class CRCL(Objective):
    r"""Active complementary loss: a softmax loss of each pair by its label, and a complementary loss that grows robust as the label falls.

    Args:
        tau: Temperature.
        lam: Weight of the complementary loss.
        estimate: Whether the label of a pair without a given one is its own probability instead of 1.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $-y_ip log(p_ip) + lam sum_j tan(p_ij) / (tan(p_ip) + sum_j tan(p_ij))^(1 - y_ip)$ over positive pairs $p = (i, p)$
        and negatives $j$, both directions. $p_ip = e^(s_ip / tau) / (e^(s_ip / tau) + sum_j e^(s_ij / tau))$, $p_ij$
        likewise. The label $y_ip$ is ``targets.relevance`` of the pair, from 0 (wrong) to 1 (right).

    Gradient:
        $dL/ds$ is $y_ip$ times that of NTXent, plus $lam$ times that of the second part, with the label as a constant.

    Advice:
        Where many captions belong to other images. Train a first phase with ``CRCL()``, then ``CRCL(estimate=True)``.

    Source:
        Qin et al., Cross-modal Active Complementary Learning with Self-refining Correspondence (CRCL, 2023), with its code.

    Special cases:
        With labels of 1, NTXent plus lam times RCL with the form "tan". With labels of 0, about the mean absolute error.

    Memory:
        ``[pairs x candidates]``.

    Differs from:
        The released code, whose estimated labels are means of both directions and of earlier epochs, below 0.1 set to 0. Here they are of
        each direction and of this step. Pass such labels as ``targets.relevance``.
    """

    scores_held: ClassVar[float] = 10.0
    needs_pair_matrix: ClassVar[bool] = True
    used_annotations: ClassVar[tuple[str, ...]] = ("relevance",)

    tau: PositiveFloat | Auto = 0.05
    lam: NonNegativeFloat = 5.0
    estimate: bool = False
    reduction: Reduction = "mean"

    @property
    def gradient_scale(self) -> float:
        return 1 / number(self.tau)

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        logits = _logits(pairs, number(self.tau))
        log_probability = logits.log_softmax(1)[:, 0]
        label = self._labels(log_probability, pairs, targets)
        # Not from the logarithms: the gradients of both parts would cancel for a large lam.
        tangents = logits.softmax(1).tan()
        complement = tangents[:, 1:].sum(1)
        total = complement + tangents[:, 0]
        return self.lam * complement / total ** (1 - label) - label * log_probability

    def _labels(self, log_probability: Tensor, pairs: PositivePairs, targets: Targets) -> Tensor:
        """Label of each positive pair."""
        if targets.relevance is not None:
            relevance = targets.pairwise("relevance", "CRCL")[pairs.query, pairs.candidate]
            return relevance.detach().to(log_probability.dtype)
        probability = log_probability.detach().exp()
        return probability if self.estimate else torch.ones_like(probability)


@dataclass(frozen=True, kw_only=True)
class RINCE(SummaryObjective):
    r"""Robust InfoNCE: between InfoNCE and a loss that is symmetric in right and wrong pairs.

    Args:
        tau: Temperature.
        q: Robustness, from near 0 (InfoNCE) to 1 (symmetric).
        lam: Weight of the candidates.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $((lam (e^(s_ip / tau) + sum_j e^(s_ij / tau)))^q - e^(q s_ip / tau)) / q$ over positive pairs $p = (i, p)$ and
        negatives $j$, both directions.

    Gradient:
        $dL/ds_ip = ((lam Z)^q p_ip - e^(q s_ip / tau)) / tau$ and $dL/ds_ij = (lam Z)^q p_ij / tau$, with $Z$ the sum in the
        formula and $p$ the softmax. A pair with a low score, which is often wrong, pulls less.

    Advice:
        Where wrong pairs have low scores. Start from a trained model or a small q, because q near 1 ignores hard right pairs.

    Source:
        Chuang et al., Robust Contrastive Learning against Noisy Views (RINCE, 2022), with the q and lam of its code.

    Special cases:
        The limit for q -> 0 is NTXent plus log lam. A query without negatives adds nothing.

    Differs from:
        Other softmax losses in that a constant added to all scores of a query changes it. Needs q <= 80 tau, so that it
        fits into float32.
    """

    scores_held: ClassVar[float] = 5.0

    tau: PositiveFloat | Auto = 0.1
    q: Annotated[float, Interval(gt=0, le=1)] = 0.1
    lam: PositiveFloat = 0.01
    reduction: Reduction = "half_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tau, str):
            expected = f"at most {MAX_EXPONENT * self.tau:g} with tau={self.tau:g}"
            require_field(self.q <= MAX_EXPONENT * self.tau, self, "q", expected)

    @property
    def gradient_scale(self) -> float:
        # At a score of 1, the largest cosine.
        tau = number(self.tau)
        return math.exp(self.q / tau) / tau

    def summary(self, targets: Targets) -> NegativeLogSumExp | None:
        return NegativeLogSumExp(1 / number(self.tau))

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        scaled = positive / number(self.tau)
        # Logarithm of lam Z / e^(s_ip / tau), whose power keeps its digits for a small q.
        log_ratio = math.log(self.lam) + log1p_exp(negatives - scaled)
        terms = (self.q * scaled).exp() * (self.q * log_ratio).expm1() / self.q
        return torch.where(negatives != NEG_INF, terms, 0.0)
