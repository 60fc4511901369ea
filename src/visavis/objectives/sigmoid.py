"""The pairwise sigmoid loss: every pair is a question of its own, belongs together or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visavis.objectives.base import Objective, Reduction
from visavis.objectives.pairs import NEVER, log1p_exp
from visavis.spec import require
from visavis.targets import Targets


@dataclass(frozen=True, kw_only=True)
class Sigmoid(Objective):
    r"""Pairwise sigmoid loss of SigLIP: each pair is told apart by itself, at a scale and a bias.

    Formula: ``sum_j log(1 + e^(-z_ij (scale s_ij + bias)))`` over positives (z = 1) and negatives (z = -1), one term for each query
    with a positive. A query without negatives adds nothing.
    dL/ds_ij = -z_ij scale / (1 + e^(z_ij (scale s_ij + bias))), over the number of queries; no pair changes that of another.
    Advice: where batches are small, or a pair has several captions: no softmax makes them compete. The bias starts near minus
    the log of a query's negatives; learn both by ``PairLoss(scale=, bias=)``.
    Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023), eq. 1 and algorithm 1, with its first scale and bias.
    Special cases: with one positive a query, scale times BinomialDeviance with ``negatives="all"``, alpha and beta of scale and
    lam of -bias / scale. With ``PairLoss(scale=, bias=)`` both are learned, the bias added after the scale.
    Differs from: the paper where the batch is one pair, or queries have no positive: it counts all pairs there. It takes
    the mean over images, which are as many as texts; here it is the mean of both directions' means.
    """

    scale: float = 10.0
    bias: float = -10.0
    reduction: Reduction = "half_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.scale > 0, self, "scale", "a number above 0")

    @property
    def slope(self) -> float:
        return self.scale

    def at_scale(self, scale: float) -> Sigmoid:
        return replace(self, scale=round(scale, 6))

    def for_biased_scores(self) -> Sigmoid:
        return replace(self, bias=0.0)

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        positive, negative = targets.positive, targets.negative
        logits = self.scale * scores + self.bias
        against = torch.where(positive, -logits, logits).masked_fill(~(positive | negative), NEVER)
        terms = log1p_exp(against).sum(-1).where(negative.any(-1), 0.0)
        return terms[positive.any(-1)]
