"""Objectives whose contributing samples COCOS, or the code released with it, counts by a rule of their own.

Every other objective is counted by the weights of its pairs. A new rule is one entry of RULES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visavis.objectives import Objective, SmoothAP, Triplet
from visavis.objectives.pairs import NEVER, pairs_of
from visavis.targets import Targets

CAPTIONS = 5
"""Captions of an image in the released code of the paper, where it is a constant."""

Counting = Callable[[Any, Tensor, Targets, float], dict[str, Tensor]]
"""The objective, scores ``[V, T]``, targets and epsilon to counts by direction; a direction left out is counted by weights."""


@dataclass(frozen=True, kw_only=True)
class CountingRule:
    """How the samples of one kind of objective are counted. paper: as COCOS defines it; None: by weights. released: as its code counts.

    captions: of an image in that code, which tells positives by position: caption j belongs to image j // captions.
    """

    objective: type[Objective]
    paper: Counting | None = None
    released: Counting
    captions: int

    def released_targets(self, images: int, texts: int) -> Targets | None:
        """Who belongs to whom in a batch, as the released code has it; None for a batch that it cannot take."""
        if texts != self.captions * images:
            return None
        ids = torch.arange(images)
        return Targets(query_ids=ids, candidate_ids=ids.repeat_interleave(self.captions))


def rule_of(objective: Objective) -> CountingRule | None:
    """The rule for an objective; None where it is counted by the weights of its pairs."""
    return next((rule for rule in RULES if rule.objective is type(objective)), None)


def _triplet_released(objective: Triplet, scores: Tensor, targets: Targets, _epsilon: float) -> dict[str, Tensor]:
    return released_triplet_counts(scores, targets, margin=objective.margin)


def _smooth_ap(objective: SmoothAP, scores: Tensor, targets: Targets, epsilon: float) -> dict[str, Tensor]:
    ways = {"i2t": (scores, targets), "t2i": (scores.T, targets.T)}
    return {way: smooth_ap_counts(*both, tau=objective.tau, epsilon=epsilon) for way, both in ways.items()}


def _smooth_ap_released(objective: SmoothAP, scores: Tensor, targets: Targets, epsilon: float) -> dict[str, Tensor]:
    counts = smooth_ap_counts(scores, targets, tau=objective.tau, epsilon=epsilon)
    return {"i2t": counts, "t2i": released_smooth_ap_counts(scores.T, tau=objective.tau, epsilon=epsilon)}


def smooth_ap_counts(scores: Tensor, targets: Targets, *, tau: float = 0.01, epsilon: float = 0.01, with_slope: bool = False) -> Tensor:
    """The count of SmoothAP by its own rule, a mean over a query's positives: ``[Q]``.

    Formula: ``(1 / |P|) sum_{i in P} #{j != i: sim(s_j - s_i) / R_i^2 > epsilon}``, R_i = 1 + sum_j sigmoid((s_j - s_i) / tau),
    sim(d) = sigma (1 - sigma). Source: COCOS, eq. 13. It drops two factors of the gradient and counts triplets, so it is
    not a count of pair weights. with_slope: sim divided by tau, as the derivation in the paper's appendix has it; the
    released code, and so the paper's table 4, leaves it out.
    """
    query, candidate = targets.positive.nonzero(as_tuple=True)
    known = targets.positive | targets.negative
    near = _near(scores[query].masked_fill(~known[query], NEVER), candidate, tau, epsilon * (tau if with_slope else 1))
    positives = targets.positive.sum(1).clamp(min=1)
    return scores.new_zeros(len(scores)).index_add_(0, query, near.to(scores)) / positives


def released_smooth_ap_counts(scores: Tensor, *, tau: float = 0.01, epsilon: float = 0.01) -> Tensor:
    """What the released code of COCOS counts for texts as queries of SmoothAP: ``[T]``. scores ``[T, V]``.

    For text q it takes the images 5 q to 5 q + 4 for its positives, as if texts were images, and adds their counts; the
    image of text q is q // 5. So no text from V / 5 on is ever counted: "without a gradient" in the paper's table 4.
    """
    texts, images = scores.shape
    candidate = torch.arange(min(CAPTIONS * texts, images), device=scores.device)
    query = candidate // CAPTIONS
    near = _near(scores[query], candidate, tau, epsilon)
    return scores.new_zeros(texts).index_add_(0, query, near.to(scores))


def released_triplet_counts(scores: Tensor, targets: Targets, *, margin: float = 0.2) -> dict[str, Tensor]:
    """What the released code of COCOS counts for Triplet: ``{"i2t": [V], "t2i": [V]}``. scores ``[V, T]``.

    With texts as queries the hinges are added along the wrong axis: those in an image's row, not in a text's column.
    """
    forth, back = pairs_of(scores, targets), pairs_of(scores.T, targets.T)
    opened = [(margin + of.scores[of.query] - of.positive[:, None] > 0) & of.negative[of.query] for of in (forth, back)]
    by_query = scores.new_zeros(len(scores)).index_add_(0, forth.query, opened[0].sum(1).to(scores))
    return {"i2t": by_query, "t2i": opened[1].sum(0).to(scores)}


def _near(scores: Tensor, own: Tensor, tau: float, epsilon: float) -> Tensor:
    """For each row, how many entries j have ``sim(s_j - s_own) / R_own^2`` above epsilon: ``[N, C], [N] -> [N]``."""
    gap = (scores - scores.gather(1, own[:, None])).scatter(1, own[:, None], NEVER)
    step = (gap / tau).sigmoid()
    rank = 1 + step.sum(1, keepdim=True)
    return (step * (1 - step) / rank**2 > epsilon).sum(1)


RULES: tuple[CountingRule, ...] = (
    CountingRule(objective=Triplet, released=_triplet_released, captions=1),
    CountingRule(objective=SmoothAP, paper=_smooth_ap, released=_smooth_ap_released, captions=CAPTIONS),
)
