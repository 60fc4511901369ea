"""Standardization of image features with the statistics of the training split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from visavis.core.encoded import Encoded

# A dimension with a smaller standard deviation is constant. It is centered and not scaled.
MIN_STD = 1e-6


@dataclass(frozen=True)
class Standardization:
    """Statistics that features are standardized by. They are saved with the model, for new images.

    Formula: $(r(x) - mean) / std$ in each dimension, with $r(x) = sign(x) sqrt(|x|)$ if
    ``signed_sqrt``, else $r(x) = x$. The square root reduces the skew of features that are rarely
    large, such as those after a ReLU.

    Attributes:
        mean: Mean of r(x) over the training images and their regions, in each dimension.
        std: Standard deviation of r(x) in each dimension, above 0.
        signed_sqrt: Whether to apply the signed square root.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    signed_sqrt: bool

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not min(self.std, default=0.0) > 0:
            raise ValueError(f"std: expected {len(self.mean)} values above 0, got {self.std}.")

    @classmethod
    def fit(cls, blocks: Iterable[Tensor], *, signed_sqrt: bool) -> Standardization:
        """Compute the statistics of features."""
        count = 0
        total = torch.zeros(())
        squares = torch.zeros(())
        for block in blocks:
            values = block.double().flatten(0, -2)  # [rows, D]
            values = _signed_sqrt(values) if signed_sqrt else values
            count += len(values)
            total = total + values.sum(0)
            squares = squares + values.square().sum(0)
        # In float64: the difference of two large numbers follows.
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        return cls(tuple(mean.tolist()), tuple(std.where(std > MIN_STD, 1.0).tolist()), signed_sqrt)

    def __call__(self, items: Encoded) -> Encoded:
        """Standardize features of images."""
        assert isinstance(items.vectors, Tensor)
        mean, std = self._tensors.to(items.vectors.device)
        # In place, because this is a part of each training step.
        values = (
            _signed_sqrt(items.vectors).sub_(mean) if self.signed_sqrt else items.vectors - mean
        )
        return Encoded(values.div_(std), items.mask)

    @cached_property
    def _tensors(self) -> Tensor:
        return torch.tensor([self.mean, self.std], dtype=torch.float32)


def _signed_sqrt(values: Tensor) -> Tensor:
    return values.abs().sqrt_().copysign_(values)
