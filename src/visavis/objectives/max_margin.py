"""The max-margin ranking loss of video-text retrieval: the mean of all hinges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from visavis.objectives.base import Objective, Reduction
from visavis.objectives.pairs import of_pair, pairs_of
from visavis.targets import Targets


@dataclass(frozen=True, kw_only=True)
class MaxMargin(Objective):
    r"""Bidirectional max-margin ranking loss: the mean hinge over all negatives.

    Formula: ``(1 / N_i) sum_j [margin + s_ij - s_ip]_+`` over positive pairs p = (i, p) and the N_i negatives of i; for B pairs
    the mean over 2 B (B - 1) hinges. With ``fix_norm=False`` the pair's own hinge, which is the margin, is averaged in:
    2 B^2 hinges. dL/ds_ij is 1 / N_i where the hinge is open, dL/ds_ip minus their sum, each over twice the number of pairs.
    Advice: to compare with the video papers; all open hinges weigh the same, so the gradient becomes small once most are closed.
    Source: Liu et al., Collaborative Experts (2019), its margin on MSR-VTT; Gabeur et al., MMT (2020), with margin 0.05.
    Special cases: Triplet divided by the number of its hinges. Reads ``query_margin`` (adaptive margins).
    Memory: ``[pairs x candidates]``.
    Differs from: the released code at a single pair: there ``fix_norm`` is 0 / 0, here 0.
    """

    wide: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("query_margin",)

    margin: float = 0.0938
    fix_norm: bool = True
    reduction: Reduction = "half_mean"

    def one_way(self, scores: Tensor, targets: Targets) -> Tensor:
        pairs = pairs_of(scores, targets)
        margin = of_pair(targets.margin_or(self.margin, "MaxMargin"), pairs.query)
        total = (pairs.gap.T + margin).relu().sum(0)
        number = pairs.negative.sum(-1)[pairs.query]
        if self.fix_norm:
            return total / number.clamp(min=1)
        own = (torch.zeros_like(total) + margin).relu()
        return (total + own) / (number + 1)
