"""Triplet losses: hinges on the gap between a negative and a positive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from visavis.objectives.base import Objective, Reduction, SummaryObjective
from visavis.objectives.pairs import of_pair, pairs_of
from visavis.objectives.summary import Hardest
from visavis.spec import require
from visavis.targets import Targets


@dataclass(frozen=True, kw_only=True)
class Triplet(Objective):
    r"""Triplet loss summed over all negatives: a hinge for each negative within the margin.

    Formula: ``sum_p sum_j [margin + s_ij - s_ip]_+`` over positive pairs p = (i, p) and negatives j, both directions.
    dL/ds_ij is 1 where the hinge is open (strictly above 0), dL/ds_ip is minus their number.
    Advice: as a stable start before TripletHN; alone, most of its gradient goes to many easy violations.
    Source: Faghri et al., VSE++ (2018), eq. 5; Unified loss, eq. 1; COCOS, eq. 3a.
    Special cases: equals TripletHN where each query has one negative. Reads ``query_margin`` (adaptive margins).
    Differs from: the released codes, which take other captions of the same image as negatives; do so with Targets.paired.
    """

    wide: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float = 0.2
    reduction: Reduction = "sum"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = pairs_of(scores, targets)
        margin = targets.margin_or(self.margin, "Triplet")
        if isinstance(margin, Tensor):
            margin = margin[pairs.query, None]
        return (margin + pairs.gap).relu().sum(-1)


@dataclass(frozen=True, kw_only=True)
class TripletHN(SummaryObjective):
    r"""Triplet loss with the hardest negative of the batch: only the best-scoring wrong candidate is pushed.

    Formula: ``sum_p [margin + max_j s_ij - s_ip]_+`` over positive pairs, both directions.
    dL/ds is 1 at the hardest negative and -1 at the positive where the hinge is open, else 0.
    Advice: the usual choice of the VSE++ family; from random weights it needs a small learning rate, a warm-up or large batches, else it
    collapses.
    Source: Faghri et al., VSE++ (2018), eq. 6; Unified loss, eq. 1; with ``query_margin``: its eq. 27.
    Special cases: the limit of Unified for gamma -> infinity. COCOS calls it "semi-hard"; it is the hardest.
    Differs from: the released codes, which take other captions of the same image as negatives; do so with Targets.paired.
    """

    reads: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float = 0.2
    reduction: Reduction = "sum"

    def summary(self, targets: Targets) -> Hardest:
        return Hardest()

    def pair_terms(self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets) -> Tensor:
        margin = of_pair(targets.margin_or(self.margin, "TripletHN"), query)
        return (margin + negatives - positive).relu()


@dataclass(frozen=True, kw_only=True)
class TripletTopK(Objective):
    r"""Triplet loss with the k hardest negatives of the batch: between TripletHN and Triplet.

    Formula: ``sum_p sum_{j in H_i} [margin + s_ij - s_ip]_+`` over positive pairs p = (i, p), H_i the ``k`` negatives of i with the highest
    scores, or all where there are fewer; both directions. dL/ds_ij is 1 where the hinge of one of them is open, dL/ds_ip minus their number.
    Advice: where TripletHN collapses or hangs on false negatives, and Triplet stops learning: k of 4 to 16.
    Source: this package, between the two sums of Faghri et al., VSE++ (2018), eqs. 5 and 6.
    Special cases: TripletHN for k = 1, Triplet from the number of negatives on. Reads ``query_margin`` (adaptive margins).
    """

    reads: ClassVar[tuple[str, ...]] = ("query_margin",)

    k: int = 8
    margin: float = 0.2
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.k > 0, self, "k", "a number above 0")

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = pairs_of(scores, targets)
        hardest = pairs.negatives().topk(min(self.k, scores.shape[1])).values
        margin = of_pair(targets.margin_or(self.margin, "TripletTopK"), pairs.query)
        if isinstance(margin, Tensor):
            margin = margin[:, None]
        return (margin + hardest[pairs.query] - pairs.positive[:, None]).relu().sum(-1)
