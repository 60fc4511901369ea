"""Features at mean 0 and deviation 1 in every dimension, as those of the training split are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from visavis.types import Encoded

CONSTANT = 1e-6
"""A deviation up to this is that of a dimension which tells nothing; it is only centered."""


@dataclass(frozen=True)
class Standardization:
    """What features are standardized by; it is kept with the model, for new images too.

    Formula: ``(r(x) - mean) / deviation`` for each dimension, ``r(x) = sign(x) sqrt(|x|)`` if ``root``, else x. The root evens out features
    that are rarely large, as those after a ReLU are. mean, deviation: of r(x) over the training images (and their regions).
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    root: bool

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.deviation) or not min(self.deviation, default=0.0) > 0:
            raise ValueError("a standardization has as many deviations, all above 0, as means")

    @classmethod
    def of(cls, blocks: Iterable[Tensor], *, root: bool) -> Standardization:
        """That of features which come in blocks ``[N, ..., D]``."""
        count, total, squares = 0, torch.zeros(0), torch.zeros(0)
        for block in blocks:
            values = _root(block.double().flatten(0, -2)) if root else block.double().flatten(0, -2)
            first = count == 0
            count += len(values)
            total = values.sum(0) if first else total + values.sum(0)
            squares = values.square().sum(0) if first else squares + values.square().sum(0)
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        return cls(tuple(mean.tolist()), tuple(deviation.where(deviation > CONSTANT, 1.0).tolist()), root)

    def __call__(self, items: Encoded) -> Encoded:
        """Features of images, standardized; masks are kept."""
        assert isinstance(items.vectors, Tensor)
        values = _root(items.vectors) if self.root else items.vectors
        mean, deviation = (side.to(values.device) for side in self._tensors)
        return Encoded((values - mean) / deviation, items.mask)

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean, dtype=torch.float32), torch.tensor(self.deviation, dtype=torch.float32)


def _root(values: Tensor) -> Tensor:
    return values.sign() * values.abs().sqrt()
