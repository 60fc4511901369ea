"""The nearest others of every item, a block of rows at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from visavis.memory import spans
from visavis.scoring import rows_at_once


def nearest_others(vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Dot products and indices ``[N, count]`` of the nearest other rows of ``vectors [N, D]``, the nearest first."""
    count = min(count, len(vectors) - 1)
    values, places = list[Tensor](), list[Tensor]()
    for rows in spans(len(vectors), rows_at_once(len(vectors), 16.0)):
        scores = vectors[rows] @ vectors.T
        own = torch.arange(rows.start, rows.start + len(scores))
        scores[torch.arange(len(scores)), own] = -torch.inf
        best = scores.topk(count, dim=1)
        values.append(best.values)
        places.append(best.indices)
    return torch.cat(values), torch.cat(places)


def pairs_above(vectors: Tensor, least: float, count: int) -> np.ndarray:
    """The pairs ``[P, 2]``, the smaller index first, of rows with a dot product of at least ``least``, among the nearest ``count`` of either."""
    if len(vectors) < 2:
        return np.empty((0, 2), np.int64)
    values, places = nearest_others(vectors, count)
    rows, columns = (values >= least).nonzero(as_tuple=True)
    return unique_pairs(np.stack([rows.numpy(), places[rows, columns].numpy()], 1))


def unique_pairs(pairs: np.ndarray) -> np.ndarray:
    """Each pair once, the smaller index first, in order.

    >>> unique_pairs(np.array([[3, 1], [1, 3], [0, 2]])).tolist()
    [[0, 2], [1, 3]]
    """
    return np.unique(np.sort(pairs.reshape(-1, 2), axis=1), axis=0)


def groups_of(pairs: np.ndarray, count: int) -> np.ndarray:
    """The group ``[count]`` of each item, where the two of every pair are in the same one; an item without a pair is one by itself.

    >>> groups_of(np.array([[0, 2], [2, 3]]), 4).tolist()
    [0, 1, 0, 0]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    groups: np.ndarray = connected_components(links, directed=False)[1]
    return groups
