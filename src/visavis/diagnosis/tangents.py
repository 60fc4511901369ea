"""The part of a gradient that turns a unit vector: its component in the tangent plane of the sphere.

Along the vector a gradient only changes the length, which normalizing takes back; so an objective may have large weights
and still turn nothing: where all embeddings are identical every tangent norm is 0, for every objective.
Source: Unified loss, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visavis.diagnosis.weights import pair_weights
from visavis.objectives import Objective
from visavis.targets import Targets


@dataclass(frozen=True)
class Tangents:
    """Norms of tangent gradients of each query's own terms. anchor ``[Q]``: on the query. candidate ``[Q, C]``: on each
    candidate, positives included.
    """

    anchor: Tensor
    candidate: Tensor


def tangent_norms(objective: Objective, queries: Tensor, candidates: Tensor, targets: Targets) -> Tangents:
    """The tangent norms of one direction for unit rows ``[Q, D]``, ``[C, D]``, scored by their products.

    Formula: with g_ij = dL_i/ds_ij, ``||P_{v_i} sum_j g_ij t_j||`` on the anchor and ``|g_ij| ||P_{t_j} v_i||`` on a
    candidate, where P_u x = x - (x . u) u. With the weights of Unified these are eqs. 11, 12 and 18, and eqs. 15 and 17
    as they must read: the denominator of 15 is one plus the sum over all negatives, and 17, a sum of norms,
    is only an upper bound of the norm of the sum. Memory: one ``[C, D]`` at a time.
    """
    return tangents_of(pair_weights(objective, queries @ candidates.T, targets) * objective.slope, queries, candidates)


@torch.no_grad()
def tangents_of(slopes: Tensor, queries: Tensor, candidates: Tensor) -> Tangents:
    """The tangent norms for any slopes ``[Q, C]``: ``tangent_norms`` with the derivative already known."""
    turned = torch.stack([_tangent(query.expand_as(candidates), candidates).norm(dim=-1) for query in queries])
    return Tangents(_tangent(slopes @ candidates, queries).norm(dim=-1), slopes.abs() * turned)


def _tangent(vectors: Tensor, unit: Tensor) -> Tensor:
    """Rows of ``vectors`` without their component along the rows of ``unit``; no root of a difference, so exact near 0."""
    return vectors - (vectors * unit).sum(-1, keepdim=True) * unit
