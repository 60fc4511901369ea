"""dL/dS: how much an objective pushes or pulls every pair, for any objective, by automatic differentiation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from visavis.engine import cosine
from visavis.memory import Items, Memory
from visavis.objectives import Objective
from visavis.scoring import Score, score_by_rows
from visavis.targets import Targets

HELD = 64.0
"""Bytes of a pair while the weights of a block are formed: the largest of the catalog's objectives hold about 50."""


def pair_weights(objective: Objective, scores: Tensor, targets: Targets) -> Tensor:
    """The derivative of one direction's summed terms with respect to every score: ``[Q, C]``, above 0 where a pair is pushed apart.

    It is of the sum, whatever the reduction, so it has no factor 1 / B; and it is divided by the objective's ``slope``
    (1 / tau for NTXent, gamma for VLC), so that a weight of 1 is the largest that one positive pair can give: what the
    COCOS paper calls the weight of a candidate. Multiply by ``objective.slope`` for the derivative itself.
    """
    scores, targets = objective.prepare(scores, targets)
    with torch.enable_grad():
        leaf = scores.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(objective.terms(leaf, targets).sum(), leaf)
    return slopes / objective.slope


def weights_by_blocks(
    objective: Objective, queries: Items, candidates: Items, targets: Targets, *, score: Score = cosine, memory: Memory = None
) -> Iterator[tuple[slice, Tensor]]:
    """``pair_weights`` for embeddings, a block of queries after the other: the rows, and their weights ``[rows, C]``.

    score: ``(queries, candidates) -> [Q, C]``. memory: what a block may take, in bytes or as "2GiB"; None: a share of what is free.
    """

    def blocks() -> Iterator[tuple[slice, Tensor]]:
        return score_by_rows(score, queries, candidates, "i2t", held=HELD, memory=memory)

    if objective.needs_positive_scores and targets.positive_scores is None:
        positives = [scores[targets[rows].positive] for rows, scores in blocks()]
        targets = replace(targets, positive_scores=torch.cat(positives))
    for rows, scores in blocks():
        yield rows, pair_weights(objective, scores, targets[rows])
