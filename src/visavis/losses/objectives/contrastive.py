"""Contrastive losses: softmax, sigmoid and the unified loss of pair similarity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from visavis.core.fields import Auto, PositiveFloat
from visavis.losses.auto_scale import number
from visavis.losses.objective import Objective, PairwiseObjective, Reduction, SummaryObjective
from visavis.losses.pair_summaries import (
    NEG_INF,
    NegativeLogSumExp,
    PositivePairs,
    anchor_margins,
    find_positive_pairs,
    log1p_exp,
)
from visavis.losses.targets import Targets


@dataclass(frozen=True, kw_only=True)
class NTXent(SummaryObjective):
    r"""Normalized temperature-scaled cross entropy (InfoNCE, the loss of CLIP with a fixed temperature).

    Args:
        tau: Temperature.
        denominator: Whether the denominator has all candidates or only negatives.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $-log(e^(s_ip / tau) / (e^(s_ip / tau) + sum_j e^(s_ij / tau)))$, the mean of both directions.

    Gradient:
        $dL/ds_ij = softmax_j / tau$ and $dL/ds_ip = -(1 - softmax_p) / tau$, each over the number of queries of both directions.

    Advice:
        With large batches. The smaller tau, the more the hardest negatives count.

    Source:
        COCOS, eq. 4 as its code trains it. Van den Oord et al. (2018).

    Special cases:
        VLC with gamma = 1 / tau, another reduction. tau is 1 / "scale" elsewhere.

    Differs from:
        The printed eq. 4 of COCOS, whose denominator has negatives only: ``denominator="negatives"``, which can be
        negative. Other positives of a query are left out of its denominator.
    """

    scores_held: ClassVar[float] = 5.0

    tau: PositiveFloat | Auto = 0.1
    denominator: Literal["all", "negatives"] = "all"
    reduction: Reduction = "half_mean"

    @property
    def gradient_scale(self) -> float:
        return 1 / number(self.tau)

    def with_scale(self, scale: float) -> NTXent:
        return replace(self, tau=round(1 / scale, 6))

    def summary(self, targets: Targets) -> NegativeLogSumExp | None:
        return NegativeLogSumExp(1 / number(self.tau))

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        log_odds = negatives - positive / number(self.tau)
        if self.denominator == "all":
            return log1p_exp(log_odds)
        return torch.where(negatives != NEG_INF, log_odds, 0.0)


@dataclass(frozen=True, kw_only=True)
class InfoNCE(Objective):
    r"""Softmax cross entropy whose target is shared among all positives of a query: the loss of CLIP and X-VLM.

    Args:
        tau: Temperature.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $-(1 / |P_i|) sum_{p in P_i} log(e^(s_ip / tau) / (sum_j e^(s_ij / tau)))$, j over positives and negatives.

    Gradient:
        $dL/ds_ij = softmax_j / tau$, less $1 / (|P_i| tau)$ at a positive. One term for each query that has a positive.

    Advice:
        To fine-tune a model that was pretrained with a learned temperature, by ``PairLoss(scale=...)``.

    Source:
        Radford et al., CLIP (2021). With several positives: Zeng et al., X-VLM (2022), image-text contrast.

    Special cases:
        NTXent where each query has one positive. MMT's convention is ``reduction="mean"``, without the half. With
        ``PairLoss(scale=)`` the temperature is learned.

    Differs from:
        The rest of this family in that the positives of a query compete, so that a query without negatives has a term too:
        it makes the softmax over its positives uniform.
    """

    scores_held: ClassVar[float] = 4.0

    tau: PositiveFloat | Auto = 0.07
    reduction: Reduction = "half_mean"

    @property
    def gradient_scale(self) -> float:
        return 1 / number(self.tau)

    def with_scale(self, scale: float) -> InfoNCE:
        return replace(self, tau=round(1 / scale, 6))

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = self._scaled_pairs(scores, targets)
        return self._cross_entropy(pairs, pairs.scores.log_softmax(1))

    def both_ways(self, scores: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        pairs = self._scaled_pairs(scores, targets)
        return (
            self._cross_entropy(pairs, pairs.scores.log_softmax(1)),
            self._cross_entropy(pairs.T, pairs.scores.log_softmax(0).T),
        )

    def _scaled_pairs(self, scores: Tensor, targets: Targets) -> PositivePairs:
        logits = scores / number(self.tau)
        if targets.ignore is not None:
            logits = logits.masked_fill(targets.pairwise("ignore").bool(), NEG_INF)
        return find_positive_pairs(logits, targets)

    def _cross_entropy(self, pairs: PositivePairs, log_softmax: Tensor) -> Tensor:
        """Mean over the positives of each query that has one: ``[Q, C] -> [Q']``."""
        num_positives = pairs.num_positives
        sums = log_softmax.new_zeros(len(log_softmax)).index_add(
            0, pairs.query, log_softmax[pairs.query, pairs.candidate]
        )
        if not torch.compiler.is_compiling() and num_positives.all():
            return -sums / num_positives
        return (-sums / num_positives.clamp(min=1))[num_positives > 0]


@dataclass(frozen=True, kw_only=True)
class VLC(SummaryObjective):
    r"""Vision-language contrastive loss: softmax cross entropy at a fixed scale, summed.

    Args:
        gamma: Scale of the scores, 1 / temperature.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_p log(1 + sum_j e^(gamma (s_ij - s_ip)))$ over positive pairs, both directions.

    Gradient:
        $dL/ds_ij = gamma p_ij$ with $p_ij$ the softmax weight of the negative, $dL/ds_ip = -gamma sum_j p_ij$.

    Advice:
        As NTXent, but summed: choose gamma (20 to 100) together with the learning rate.

    Source:
        Unified loss, eqs. 3 and 4.

    Special cases:
        gamma times Unified with margin 0. For B pairs, 2 B times the loss of CLIP at scale gamma.

    Differs from:
        CLIP, whose scale is learned. See InfoNCE.
    """

    scores_held: ClassVar[float] = 5.0

    gamma: PositiveFloat | Auto = 50.0
    reduction: Reduction = "sum"

    @property
    def gradient_scale(self) -> float:
        return number(self.gamma)

    def summary(self, targets: Targets) -> NegativeLogSumExp | None:
        return NegativeLogSumExp(number(self.gamma))

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        return log1p_exp(negatives - number(self.gamma) * positive)


@dataclass(frozen=True, kw_only=True)
class Sigmoid(PairwiseObjective):
    r"""Pairwise sigmoid loss of SigLIP: a binary decision for each pair, at a scale and a bias.

    Args:
        scale: Scale of the scores.
        bias: Added after the scale.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_j log(1 + e^(-z_ij (scale s_ij + bias)))$ over positives ($z = 1$) and negatives ($z = -1$), one term for each
        query with a positive. A query without negatives adds nothing.

    Gradient:
        $dL/ds_ij = -z_ij scale / (1 + e^(z_ij (scale s_ij + bias)))$, over the number of queries of both directions. The
        gradient of a pair does not depend on other pairs.

    Advice:
        Where batches are small, or a pair has several captions: no softmax makes them compete. The bias starts near minus
        the log of a query's negatives. Learn both by ``PairLoss(scale=, bias=)`` or ``model.scale="learned"``.

    Source:
        Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023), eq. 1 and algorithm 1, with its first scale and
        bias.

    Special cases:
        With one positive a query, scale times BinomialDeviance with ``negatives="all"``, alpha and beta of scale and lam of
        -bias / scale. With ``PairLoss(scale=, bias=)`` both are learned, the bias added after the scale.

    Differs from:
        The paper where the batch is one pair, or queries have no positive: it counts all pairs there. It takes the mean
        over images, which are as many as texts. Here it is the mean of both directions' means.
    """

    scores_held: ClassVar[float] = 4.0

    scale: PositiveFloat | Auto = 10.0
    bias: float = -10.0
    reduction: Reduction = "half_mean"

    @property
    def gradient_scale(self) -> float:
        return number(self.scale)

    def with_scale(self, scale: float) -> Sigmoid:
        return replace(self, scale=round(scale, 6))

    def with_bias(self, bias: float) -> Sigmoid:
        return replace(self, bias=bias)

    def pair_losses(self, pairs: PositivePairs, targets: Targets) -> Tensor:
        logits = number(self.scale) * pairs.scores + self.bias
        positive = pairs.query, pairs.candidate
        logits = logits.index_put(positive, -logits[positive])
        if targets.ignore is not None:
            logits = logits.masked_fill(targets.pairwise("ignore").bool(), NEG_INF)
        return log1p_exp(logits)

    def is_counted(self, num_positives: Tensor, num_negatives: Tensor) -> Tensor:
        return (num_positives > 0) & (num_negatives > 0)


@dataclass(frozen=True, kw_only=True)
class Unified(SummaryObjective):
    r"""Unified loss of pair similarity: a softmax over negatives, with the margin of a triplet.

    Args:
        margin: Margin.
        gamma: Scale of the scores.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $(1 / gamma) sum_p log(1 + sum_j e^(gamma (s_ij - s_ip + margin)))$ over positive pairs, both directions.

    Gradient:
        $dL/ds_ij = p_ij$, the weight of the negative in the softmax. $dL/ds_ip = -sum_j p_ij$. No factor $gamma$.

    Advice:
        A good first choice, like VLC and InfoNCE. Margin 0.2 and gamma 50 suit most models, a smaller gamma where the hardest negatives are
        often false negatives.

    Source:
        Unified loss, eq. 5. With ``targets.weight`` (s -> w s on both sides): eq. 24. With ``query_margin``: eq. 26. With
        ``pair_margin``: eq. 26 with a margin for each negative.

    Special cases:
        margin = 0 is VLC / gamma. Gamma -> infinity is TripletHN, and 0 <= Unified - TripletHN <= (2 B / gamma) log B for B
        pairs.

    Differs from:
        Nothing released. No code accompanies the paper. Weights are not detached here: their supplier decides.
    """

    scores_held: ClassVar[float] = 6.0
    used_annotations: ClassVar[tuple[str, ...]] = ("weight", "query_margin", "pair_margin")

    margin: float | Auto = 0.2
    gamma: PositiveFloat | Auto = 50.0
    reduction: Reduction = "sum"

    def summary(self, targets: Targets) -> NegativeLogSumExp | None:
        if targets.weight is not None or _has_pair_margins_only(targets):
            return None
        return NegativeLogSumExp(number(self.gamma))

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        gamma = number(self.gamma)
        margin = anchor_margins(self.margin, query, targets, "Unified")
        return log1p_exp(negatives + gamma * (margin - positive)) / gamma

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        if targets.weight is not None:
            scores = targets.pairwise("weight") * scores
        gamma = number(self.gamma)
        pairs = find_positive_pairs(scores, targets)
        if not _has_pair_margins_only(targets):
            return self.pair_terms(pairs.log_sum_exp(gamma), pairs.positive, pairs.query, targets)
        with_margins = pairs._replace(scores=scores + targets.pairwise("pair_margin", "Unified"))
        gaps = with_margins.log_sum_exp(gamma) - gamma * pairs.positive
        return log1p_exp(gaps) / gamma


def _has_pair_margins_only(targets: Targets) -> bool:
    """Whether margins are given for pairs, and not for anchors, which come first."""
    is_for_anchors = targets.query_margin is not None or targets.candidate_margin is not None
    return targets.pair_margin is not None and not is_for_anchors
