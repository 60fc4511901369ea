"""Softmax losses: a positive against the log-sum-exp of its negatives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from visavis.objectives.base import Objective, Reduction, SummaryObjective
from visavis.objectives.pairs import NEVER, log1p_exp
from visavis.objectives.summary import LogSumExp
from visavis.spec import require
from visavis.targets import Targets


@dataclass(frozen=True, kw_only=True)
class NTXent(SummaryObjective):
    r"""Normalized temperature-scaled cross entropy (InfoNCE, the loss of CLIP with a fixed temperature).

    Formula: ``-log( e^(s_ip / tau) / (e^(s_ip / tau) + sum_j e^(s_ij / tau)) )``, the mean of both directions.
    dL/ds_ij is softmax_j / tau, dL/ds_ip = -(1 - softmax_p) / tau, each over the number of queries.
    Advice: with large batches; the smaller tau, the more the hardest negatives count.
    Source: COCOS, eq. 4 as its code trains it; van den Oord et al. (2018).
    Special cases: VLC with gamma = 1 / tau, another reduction. tau is 1 / "scale" elsewhere.
    Differs from: the printed eq. 4 of COCOS, whose denominator has negatives only: ``denominator="negatives"``, which
    can be negative. Other positives of a query are left out of its denominator.
    """

    tau: float = 0.1
    denominator: Literal["all", "negatives"] = "all"
    reduction: Reduction = "half_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tau > 0, self, "tau", "a number above 0")

    @property
    def slope(self) -> float:
        return 1 / self.tau

    def at_scale(self, scale: float) -> NTXent:
        return replace(self, tau=round(1 / scale, 6))

    def summary(self, targets: Targets) -> LogSumExp:
        return LogSumExp(1 / self.tau)

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        log_odds = negatives - positive / self.tau
        if self.denominator == "all":
            return log1p_exp(log_odds)
        return torch.where(negatives != NEVER, log_odds, 0.0)


@dataclass(frozen=True, kw_only=True)
class InfoNCE(Objective):
    r"""Softmax cross entropy whose target is shared among all positives of a query: the loss of CLIP and X-VLM.

    Formula: ``-(1 / |P_i|) sum_{p in P_i} log( e^(s_ip / tau) / sum_j e^(s_ij / tau) )``, j over positives and negatives.
    dL/ds_ij = softmax_j / tau, less 1 / (|P_i| tau) at a positive. One term for each query that has a positive.
    Advice: to fine-tune a model that was pretrained with a learned temperature, by ``PairLoss(scale=...)``.
    Source: Radford et al., CLIP (2021); with several positives: Zeng et al., X-VLM (2022), image-text contrast.
    Special cases: NTXent where each query has one positive. MMT's convention is ``reduction="mean"``, without the half.
    With ``PairLoss(scale=)`` the temperature is learned.
    Differs from: the rest of this family in that the positives of a query compete, so that a query without negatives
    has a term too: it makes the softmax over its positives uniform.
    """

    tau: float = 0.07
    reduction: Reduction = "half_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tau > 0, self, "tau", "a number above 0")

    @property
    def slope(self) -> float:
        return 1 / self.tau

    def at_scale(self, scale: float) -> InfoNCE:
        return replace(self, tau=round(1 / scale, 6))

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        positive = targets.positive
        log_softmax = (scores / self.tau).masked_fill(~(positive | targets.negative), NEVER).log_softmax(-1)
        number = positive.sum(-1)
        terms = -log_softmax.masked_fill(~positive, 0.0).sum(-1) / number.clamp(min=1)
        return terms[number > 0]


@dataclass(frozen=True, kw_only=True)
class VLC(SummaryObjective):
    r"""Vision-language contrastive loss: softmax cross entropy at a fixed scale, summed.

    Formula: ``sum_p log(1 + sum_j e^(gamma (s_ij - s_ip)))`` over positive pairs, both directions.
    dL/ds_ij = gamma p_ij with p_ij the softmax weight of the negative, dL/ds_ip = -gamma sum_j p_ij.
    Advice: as NTXent, but summed: choose gamma (20 to 100) together with the learning rate.
    Source: Unified loss, eqs. 3 and 4.
    Special cases: gamma times Unified with margin 0; for B pairs, 2 B times the loss of CLIP at scale gamma.
    Differs from: CLIP, whose scale is learned; see InfoNCE.
    """

    gamma: float = 50.0
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gamma > 0, self, "gamma", "a number above 0")

    @property
    def slope(self) -> float:
        return self.gamma

    def summary(self, targets: Targets) -> LogSumExp:
        return LogSumExp(self.gamma)

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        return log1p_exp(negatives - self.gamma * positive)
