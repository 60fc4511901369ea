"""Gradients of an objective with respect to the score of every pair, and the part of a gradient
that rotates a unit vector.

A gradient component along a unit vector only changes the length of the vector, which normalization
removes. An objective can therefore have large pair weights and still rotate nothing: where all
embeddings are identical, every tangent norm is 0, for every objective.

Source: Unified loss, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visavis.losses.objectives import Objective
from visavis.losses.targets import Targets

BYTES_PER_PAIR = 64.0
"""Bytes per pair while the weights of a block are computed. The objective of the catalog with the
largest need takes about 50.
"""


def pair_weights(objective: Objective, scores: Tensor, targets: Targets) -> Tensor:
    """Compute the derivative of one direction's summed loss terms with respect to every score.

    Terms are summed for any reduction, so the derivative has no factor 1 / B. It is divided
    by the ``gradient_scale`` of the objective (1 / tau for NTXent, gamma for VLC), so 1 is the
    largest weight that one positive pair can cause: the weight of a candidate in the COCOS paper.
    Multiply by ``objective.gradient_scale`` for the derivative itself.

    Args:
        objective: The objective.
        scores: Scores of queries and candidates, shape ``[Q, C]``.
        targets: Targets of the direction.

    Returns:
        Weights, shape ``[Q, C]``. Positive where a pair is pushed apart.
    """
    scores, targets = objective.prepare(scores, targets)
    with torch.enable_grad():
        # The scores of the caller get no gradient.
        leaf = scores.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(objective.terms(leaf, targets).sum(), leaf)
    return slopes / objective.gradient_scale


@dataclass(frozen=True)
class TangentNorms:
    """Norms of the tangent gradients of each query's own loss terms.

    Attributes:
        anchor: Norm on the query, shape ``[Q]``.
        candidate: Norm on each candidate, including positives, shape ``[Q, C]``.
    """

    anchor: Tensor
    candidate: Tensor


def tangent_norms(
    objective: Objective, queries: Tensor, candidates: Tensor, targets: Targets
) -> TangentNorms:
    """Compute the tangent norms of one direction for unit vectors with dot-product scores.

    Formula:
        With $g_ij = dL_i/ds_ij$: $||P_{v_i} sum_j g_ij t_j||$ on the anchor and $|g_ij| ||P_{t_j}
        v_i||$ on a candidate, where $P_u x = x - (x . u) u$. With the weights of Unified these are
        eqs. 11, 12 and 18, and the corrected eqs. 15 and 17: the denominator of 15 is one plus the
        sum over all negatives, and 17, a sum of norms, is only an upper bound of the norm of the
        sum.

    Memory is one ``[C, D]`` at a time.

    Args:
        objective: The objective.
        queries: Unit vectors, shape ``[Q, D]``.
        candidates: Unit vectors, shape ``[C, D]``.
        targets: Targets of the direction.

    Returns:
        The norms.

    Source:
        Unified loss, section 3.3.
    """
    return tangent_norms_of_slopes(
        pair_weights(objective, queries @ candidates.T, targets) * objective.gradient_scale,
        queries,
        candidates,
    )


@torch.no_grad()
def tangent_norms_of_slopes(slopes: Tensor, queries: Tensor, candidates: Tensor) -> TangentNorms:
    """Compute `tangent_norms` from the derivatives of the scores ``[Q, C]`` and unit vectors."""
    # One query at a time: [C, D] instead of [Q, C, D].
    tangent_lengths = torch.stack(
        [_tangent(query.expand_as(candidates), candidates).norm(dim=-1) for query in queries]
    )
    return TangentNorms(
        _tangent(slopes @ candidates, queries).norm(dim=-1), slopes.abs() * tangent_lengths
    )


def _tangent(vectors: Tensor, unit: Tensor) -> Tensor:
    """The rows of ``vectors`` without their component along the rows of ``unit``."""
    # Subtracting the component is exact near 0. The root of a difference of squared norms is not.
    return vectors - (vectors * unit).sum(-1, keepdim=True) * unit
