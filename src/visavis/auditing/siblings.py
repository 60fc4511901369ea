"""What the other captions of a picture say beside a caption: how much they agree with it, and with one another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Siblings:
    """Of each caption ``[C]``, beside some picture: agreement, its mean cosine with the other captions of the picture; among, the mean cosine
    of these with one another. NaN where there are no others, or just one.
    """

    agreement: Tensor
    among: Tensor

    @classmethod
    def of(cls, vectors: Tensor, own: Tensor, image: Tensor) -> Siblings:
        """vectors ``[C, D]``: unit vectors of captions. own ``[C]``: the pictures that they stand beside. image ``[C]``: those asked about:
        beside another picture than its own, a caption is thought to stand in the place of the last one of that picture.
        """
        images = int(torch.cat([own, image]).max()) + 1
        total = vectors.new_zeros(images, vectors.shape[1]).index_add_(0, own, vectors)
        left_out, count = _left_out(own, image, images)
        others = total[image] - torch.where((left_out >= 0)[:, None], vectors[left_out], 0.0)
        agreement = (others * vectors).sum(1) / count
        among = (others.square().sum(1) - count) / (count * (count - 1))
        return cls(agreement.where(count > 0, torch.nan), among.where(count > 1, torch.nan))


def mean_of_others(values: Tensor, own: Tensor, image: Tensor) -> Tensor:
    """The mean of ``values [C]``, each of a caption beside its own picture, over the others of ``image``, as in ``Siblings.of``."""
    images = int(torch.cat([own, image]).max()) + 1
    total = values.new_zeros(images).index_add_(0, own, values)
    left_out, count = _left_out(own, image, images)
    rest = total[image] - torch.where(left_out >= 0, values[left_out], 0.0)
    return (rest / count).where(count > 0, torch.nan)


def _left_out(own: Tensor, image: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Of each caption, which one of the picture asked about is not one of the others (-1: none), and how many others there are."""
    last = np.full(images, -1)
    last[own.numpy()] = np.arange(len(own))  # of several, the last one stays
    left_out = torch.where(own == image, torch.arange(len(own)), torch.from_numpy(last)[image])
    counts = torch.bincount(own, minlength=images)
    return left_out, (counts[image] - (left_out >= 0).long()).float()


def other_pictures(own: np.ndarray, groups: np.ndarray, seed: int) -> np.ndarray:
    """Another picture for each caption ``[C]``, at random, and no copy of its own where there is one. groups: equal for copies ``[images]``."""
    random = np.random.default_rng([seed, len(own), len(groups)])
    other = random.integers(len(groups), size=len(own))
    for _ in range(100):
        same = groups[other] == groups[own]
        if not same.any():
            break
        other[same] = random.integers(len(groups), size=int(same.sum()))
    return other
