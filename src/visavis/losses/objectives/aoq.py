"""AOQ: hinges on negatives of the batch, and on offline negatives from the whole training set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from visavis.core.fields import Auto, PositiveFloat
from visavis.losses.objective import Reduction, SummaryObjective
from visavis.losses.pair_summaries import NEG_INF, anchor_margins
from visavis.losses.targets import Targets, missing_annotation


@dataclass(frozen=True, kw_only=True)
class AOQ(SummaryObjective):
    r"""Adaptive offline quintuplet loss: a triplet loss weighted by how hard its negative is compared with the offline ones, plus their hinges.

    Args:
        margin: Margin of online negatives.
        offline_margin: Margin of offline negatives.
        alpha: Temperature of the weight.
        beta: Offset of the weight.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $sum_p w_i [margin + max_j s_ij - s_ip]_+ + sum_k [offline_margin + o_ik - s_ip]_+$ over positive pairs, both
        directions, with $w_i = beta - (o_i0 - max_j s_ij) / alpha$. $o$, shape ``[Q, K]``, are ``query_offline_scores``: column 0,
        the anchor's score with its offline negative, enters the weight. Every column has a hinge.

    Gradient:
        $dL/ds_ij = w_i + hinge / alpha$ at the hardest negative and $dL/ds_ip = -w_i$ where the online hinge is open, less 1
        for each open offline hinge. $dL/do_ik$ is 1 where its hinge is open, less $hinge / alpha$ for column 0.

    Advice:
        For a second round of training, once batches contain no hard negatives anymore. Train with
        OfflineNegativeSupervision.

    Source:
        Chen et al., AOQ (2020), and its code.

    Special cases:
        TripletHN times w where w is constant and no offline hinge is open. A query without negatives keeps its offline
        hinges. Reads ``query_margin`` (adaptive margins).

    Differs from:
        Nothing. As in the released code, the weight has a gradient too and may be negative.
    """

    scores_held: ClassVar[float] = 4.0
    used_annotations: ClassVar[tuple[str, ...]] = ("query_offline_scores", "query_margin")

    margin: float | Auto = 0.2
    offline_margin: float = 0.0
    alpha: PositiveFloat = 0.3
    beta: float = 1.5
    reduction: Reduction = "sum"

    def pair_terms(
        self, negatives: Tensor, positive: Tensor, query: Tensor, targets: Targets
    ) -> Tensor:
        if targets.query_offline_scores is None or not targets.query_offline_scores.shape[1]:
            raise missing_annotation("AOQ", "query_offline_scores")
        offline = targets.query_offline_scores[query]
        online = (anchor_margins(self.margin, query, targets, "AOQ") + negatives - positive).relu()
        weight = (
            self.beta
            - (offline[:, 0] - negatives.masked_fill(negatives == NEG_INF, 0.0)) / self.alpha
        )
        return weight * online + (self.offline_margin + offline - positive[:, None]).relu().sum(-1)
