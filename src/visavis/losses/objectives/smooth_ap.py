"""Smooth average precision: the metric with its step function replaced by a sigmoid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from visavis.core.fields import Auto, PositiveFloat
from visavis.losses.auto_scale import number
from visavis.losses.objective import Objective, Reduction
from visavis.losses.targets import Targets


@dataclass(frozen=True, kw_only=True)
class SmoothAP(Objective):
    r"""One minus the smoothed average precision of a query. Made for several positives a query.

    Args:
        tau: Temperature of the sigmoid.
        reduction: How terms become a scalar, see `Objective`.

    Formula:
        $1 - (1 / |P|) sum_{i in P} R_P(i) / R(i)$, one term for each query with a positive, where
        $R(i) = 1 + sum_{j != i} sigmoid((s_j - s_i) / tau)$ is the smoothed rank among all candidates, $R_P(i)$ among
        positives.

    Gradient:
        $dL/ds$ has the factor $sigma (1 - sigma) / tau$ of each pair of scores, with $sigma = sigmoid((s_j - s_i) / tau)$:
        about 0 where no two are within a few $tau$.

    Advice:
        With several captions of an image in a batch. At a small tau few queries have a gradient, so train longer.

    Source:
        Brown et al. (2020). COCOS, eqs. 5 to 8.

    Special cases:
        $tau -> 0$ is 1 - AP. With one positive, $1 - 1 / rank$. Without a negative, AP is 1. Positives of a query compete with
        each other, as published.

    Memory:
        ``[pairs x candidates]``.

    Differs from:
        COCOS, eq. 8, the mean over all queries of a batch. With five captions per image, its texts weigh five times as much
        as its images. The default ``half_mean`` weighs both directions equally, and ``mean`` is their sum.
        COCOS as printed, whose $D_ij = s_i - s_j$ counts the candidates below. Brown et al., where the query is one of its
        own positives. The code, which clamps exponents at 50, where a sigmoid is 2e-22.
    """

    scores_held: ClassVar[float] = 5.0
    needs_pair_matrix: ClassVar[bool] = True

    tau: PositiveFloat | Auto = 0.01
    reduction: Reduction = "half_mean"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        positive, negative = targets.masks
        query, candidate = positive.nonzero(as_tuple=True)
        smoothed_step = (
            (scores[query] - scores[query, candidate][:, None]) / number(self.tau)
        ).sigmoid()
        other_positives = positive[query].scatter(1, candidate[:, None], False)
        rank_among_positives = 1 + torch.where(other_positives, smoothed_step, 0.0).sum(-1)
        negatives_above = torch.where(negative[query], smoothed_step, 0.0).sum(-1)
        # 1 - R_P / R, which keeps its digits where the two ranks are almost equal.
        precision_losses = negatives_above / (rank_among_positives + negatives_above)
        total = scores.new_zeros(len(scores)).index_add(0, query, precision_losses)
        num_positives = positive.sum(-1)
        return (total / num_positives.clamp(min=1))[num_positives > 0]
