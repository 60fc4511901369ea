"""Positive pairs without a matrix: found by sorting ids, or, where a relation or ignored pairs decide, by blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visavis.targets import Targets


def positive_pairs(targets: Targets, blocks: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """``(query [P], candidate [P])``, ordered by query, then by candidate.

    >>> positive_pairs(Targets(query_ids=[7, 8, 7], candidate_ids=[8, 7, 7]), [slice(0, 3)])
    (tensor([0, 0, 1, 2, 2]), tensor([1, 2, 0, 1, 2]))
    """
    if not by_ids_alone(targets):
        by_block = [(targets[rows].positive.nonzero() + torch.tensor([rows.start, 0], device=targets.query_ids.device)) for rows in blocks]
        query, candidate = torch.cat(by_block).T.contiguous() if by_block else targets.query_ids.new_zeros(2, 0)
        return query, candidate
    order, first, counts = _runs(targets)
    query = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    place = torch.arange(len(query), device=counts.device) + (first - counts.cumsum(0) + counts)[query]
    return query, order[place]


def positive_counts(targets: Targets, blocks: Sequence[slice]) -> Tensor:
    """How many positives each query has: ``[Q]``."""
    if by_ids_alone(targets):
        return _runs(targets)[2]
    return positive_pairs(targets, blocks)[0].bincount(minlength=targets.shape[0])


def _runs(targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates in the order of their ids, and, for each query, where its own begin there and how many they are."""
    ids, order = targets.candidate_ids.sort(stable=True)
    first = torch.searchsorted(ids, targets.query_ids)
    return order, first, torch.searchsorted(ids, targets.query_ids, right=True) - first


def by_ids_alone(targets: Targets) -> bool:
    return targets.relation is None and targets.ignore is None
