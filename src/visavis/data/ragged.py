"""Sequences of unequal length, one after another in a flat array on the disk, read as padded blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def read_ragged(vectors: np.ndarray, offsets: np.ndarray, rows: np.ndarray, *, longest: int = 0, least: int = 0) -> tuple[Tensor, Tensor]:
    """The sequences of some rows as float32 ``[n, L, D]``, padded with zeros, and their mask ``[n, L]``.

    vectors ``[total, D]``: sequence i is ``vectors[offsets[i] : offsets[i + 1]]``. longest: of a longer sequence, so many of its
    vectors are read, evenly spaced from its first one on; 0: all. least: what L is at least.

    >>> vectors, mask = read_ragged(np.arange(5.0)[:, None], np.array([0, 4, 5]), np.array([1, 0]), longest=2)
    >>> vectors[..., 0].tolist(), mask.tolist()
    ([[4.0, 0.0], [0.0, 2.0]], [[True, False], [True, True]])
    """
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    kept = np.minimum(lengths, longest) if longest else lengths
    place = np.arange(kept.max(initial=least))
    mask = place < kept[:, None]
    spaced = place * lengths[:, None] // np.maximum(kept, 1)[:, None]
    padded = torch.zeros(*mask.shape, vectors.shape[-1])
    padded[torch.from_numpy(mask)] = torch.from_numpy(vectors[(starts[:, None] + spaced)[mask]]).float()
    return padded, torch.from_numpy(mask)
