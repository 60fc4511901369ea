"""The unified loss of pair similarity: triplet and contrastive losses as two limits of one formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from visavis.objectives.base import Reduction, SummaryObjective
from visavis.objectives.pairs import log1p_exp, of_pair, pairs_of
from visavis.objectives.summary import LogSumExp
from visavis.spec import require
from visavis.targets import Targets


@dataclass(frozen=True, kw_only=True)
class Unified(SummaryObjective):
    r"""Unified loss of pair similarity: a softmax over negatives, with the margin of a triplet.

    Formula: ``(1 / gamma) sum_p log(1 + sum_j e^(gamma (s_ij - s_ip + margin)))`` over positive pairs, both directions.
    dL/ds_ij = p_ij, the weight of the negative in the softmax; dL/ds_ip = -sum_j p_ij. No factor gamma.
    Advice: the one to try first; margin 0.2 and gamma 50 suit most models, a smaller gamma where the hardest negatives are often
    false negatives.
    Source: Unified loss, eq. 5; with ``targets.weight`` (s -> w s on both sides): eq. 24; with ``query_margin``: eq. 26.
    Special cases: margin = 0 is VLC / gamma; gamma -> infinity is TripletHN, and
    0 <= Unified - TripletHN <= (2 B / gamma) log B for B pairs.
    Differs from: nothing released; no code accompanies the paper. Weights are not detached here: their supplier decides.
    """

    reads: ClassVar[tuple[str, ...]] = ("weight", "query_margin")

    margin: float = 0.2
    gamma: float = 50.0
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gamma > 0, self, "gamma", "a number above 0")

    def summary(self, targets: Targets) -> LogSumExp | None:
        return LogSumExp(self.gamma) if targets.weight is None else None

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        margin = of_pair(targets.margin_or(self.margin, "Unified"), query)
        return log1p_exp(negatives + self.gamma * (margin - positive)) / self.gamma

    def row_terms(self, scores: Tensor, targets: Targets) -> Tensor:
        weighted = pairs_of(targets.pairwise("weight") * scores, targets)
        return self.pair_terms(weighted.log_sum_exp(self.gamma), weighted.positive, weighted.query, targets)
