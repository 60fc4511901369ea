"""Degrees as cosines of one vector a caption."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis.degrees.base import CaptionDegrees


@dataclass(frozen=True, eq=False)
class CosineDegrees(CaptionDegrees):
    """Degrees as cosines of unit vectors, one per caption; negative ones are 0, and a zero vector has degree 0 even with itself."""

    vectors: Tensor
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, vectors: Tensor, notes: tuple[str, ...] = ()) -> CosineDegrees:
        """Of vectors of any length ``[N, D]``."""
        return cls(normalize(vectors.float(), dim=-1), notes)

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        return (self.vectors[rows] @ self.vectors[columns].T).clamp(0, 1)

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        parts = zip(first.split(_PART), second.split(_PART), strict=True)
        return torch.cat([(self.vectors[left] * self.vectors[right]).sum(-1) for left, right in parts]).clamp(0, 1)


_PART = 16_384  # pairs at once: their vectors stay in tens of megabytes
