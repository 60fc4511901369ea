"""Triplet losses: hinges on the difference between the scores of a negative and a positive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from visavis.core.fields import Auto, PositiveInt
from visavis.losses.objective import Objective, Reduction, SummaryObjective
from visavis.losses.pair_summaries import anchor_margins, find_positive_pairs
from visavis.losses.targets import Targets


@dataclass(frozen=True, kw_only=True)
class Triplet(Objective):
    r"""Triplet loss summed over all negatives: a hinge for each negative within the margin.

    Args:
        margin: Margin.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_p sum_j [margin + s_ij - s_ip]_+$ over positive pairs $p = (i, p)$ and negatives $j$, both directions.

    Gradient:
        $dL/ds_ij$ is 1 where the hinge is open (strictly above 0), $dL/ds_ip$ is minus their number.

    Advice:
        As a stable start before TripletHN. Alone, most of its gradient goes to many easy violations.

    Source:
        Faghri et al., VSE++ (2018), eq. 5. Ladder loss, eqs. 3 and 4. COCOS, eqs. 3a and 3b.

    Special cases:
        Equals TripletHN where each query has one negative. Reads ``query_margin`` (adaptive margins).

    Differs from:
        The released codes, which take other captions of the same image as negatives. Do so with Targets.paired.
    """

    scores_held: ClassVar[float] = 4.0
    needs_pair_matrix: ClassVar[bool] = True
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float | Auto = 0.2
    reduction: Reduction = "sum"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        margin = anchor_margins(self.margin, pairs.query, targets, "Triplet")
        if isinstance(margin, Tensor):
            margin = margin[:, None]
        return (margin + pairs.gap).relu().sum(-1)


@dataclass(frozen=True, kw_only=True)
class TripletHN(SummaryObjective):
    r"""Triplet loss with the hardest negative of the batch: only the best-scoring wrong candidate is pushed.

    Args:
        margin: Margin.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_p [margin + max_j s_ij - s_ip]_+$ over positive pairs, both directions.

    Gradient:
        $dL/ds$ is 1 at the hardest negative and -1 at the positive where the hinge is open, else 0.

    Advice:
        The usual choice of the VSE++ family. From random weights it needs a small learning rate, a warm-up or large
        batches, else it collapses.

    Source:
        Faghri et al., VSE++ (2018), eq. 6. Unified loss, eq. 1, and with ``query_margin`` eq. 27. COCOS, eqs. 1 and 2.

    Special cases:
        The limit of Unified for gamma -> infinity. COCOS calls it "semi-hard". It is the hardest.

    Differs from:
        The released codes, which take other captions of the same image as negatives. Do so with Targets.paired.
    """

    scores_held: ClassVar[float] = 4.0
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float | Auto = 0.2
    reduction: Reduction = "sum"

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        margin = anchor_margins(self.margin, query, targets, "TripletHN")
        return (margin + negatives - positive).relu()


@dataclass(frozen=True, kw_only=True)
class TripletTopK(Objective):
    r"""Triplet loss with the k hardest negatives of the batch: between TripletHN and Triplet.

    Args:
        k: Number of hardest negatives.
        margin: Margin.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_p sum_{j in H_i} [margin + s_ij - s_ip]_+$ over positive pairs $p = (i, p)$, $H_i$ the ``k`` negatives of $i$
        with the highest scores, or all where there are fewer. Both directions. $dL/ds_ij$ is 1 where the hinge of one of
        them is open, $dL/ds_ip$ minus their number.

    Advice:
        Where TripletHN collapses or learns from false negatives, and Triplet stops learning: k of 4 to 16.

    Source:
        This package, between the two sums of Faghri et al., VSE++ (2018), eqs. 5 and 6.

    Special cases:
        TripletHN for k = 1, Triplet from the number of negatives on. Reads ``query_margin`` (adaptive margins).
    """

    scores_held: ClassVar[float] = 4.0
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    k: PositiveInt = 8
    margin: float | Auto = 0.2
    reduction: Reduction = "sum"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        hardest = pairs.negatives().topk(min(self.k, scores.shape[1])).values
        margin = anchor_margins(self.margin, pairs.query, targets, "TripletTopK")
        if isinstance(margin, Tensor):
            margin = margin[:, None]
        return (margin + hardest[pairs.query] - pairs.positive[:, None]).relu().sum(-1)


@dataclass(frozen=True, kw_only=True)
class MaxMargin(Objective):
    r"""Bidirectional max-margin ranking loss: the mean hinge over all negatives.

    Args:
        margin: Margin.
        fix_norm: Whether to leave out the hinge of the pair with itself.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $(1 / N_i) sum_j [margin + s_ij - s_ip]_+$ over positive pairs $p = (i, p)$ and the $N_i$ negatives of $i$. For $B$
        pairs the mean over $2 B (B - 1)$ hinges. With ``fix_norm=False`` the pair's own hinge, which is the margin, is averaged in:
        $2 B^2$ hinges. $dL/ds_ij$ is $1 / N_i$ where the hinge is open, $dL/ds_ip$ minus their sum, each over twice the number of
        pairs.

    Advice:
        To compare with the video papers. All open hinges weigh the same, so the gradient becomes small once most are
        closed.

    Source:
        Liu et al., Collaborative Experts (2019), its margin on MSR-VTT. Gabeur et al., MMT (2020), with margin 0.05.

    Special cases:
        Triplet divided by the number of its hinges. Reads ``query_margin`` (adaptive margins).

    Memory:
        ``[pairs x candidates]``.

    Differs from:
        The released code at a single pair: there ``fix_norm`` is 0 / 0, here 0.
    """

    scores_held: ClassVar[float] = 4.0
    needs_pair_matrix: ClassVar[bool] = True
    used_annotations: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float | Auto = 0.0938
    fix_norm: bool = True
    reduction: Reduction = "half_mean"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = find_positive_pairs(scores, targets)
        margin = anchor_margins(self.margin, pairs.query, targets, "MaxMargin")
        hinges = (pairs.gap.T + margin).relu().sum(0)
        num_negatives = pairs.num_negatives[pairs.query]
        if self.fix_norm:
            return hinges / num_negatives.clamp(min=1)
        hinge_with_itself = (torch.zeros_like(hinges) + margin).relu()
        return (hinges + hinge_with_itself) / (num_negatives + 1)
