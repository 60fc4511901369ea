"""MaxSim: late interaction, each word with its best region and each region with its best word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visavis.models.attention import Products
from visavis.models.fragments import AttentionMatcher, FragmentMatcher


class MaxSim(AttentionMatcher):
    """MaxSim: late interaction; half the mean over words of the best region and half the mean over regions of the best word.

    Formula: ``S = (mean_w max_r s_rw + mean_r max_w s_rw) / 2`` with the cosines s; direction "t2i" and "i2t" are the first and the second
    mean alone. Nothing is attended to, so that a pair costs its products only.
    Source: Khattab and Zaharia, ColBERT (2020), for texts; Yao et al., FILIP (2022), section 3.1, for images and texts.
    Differs from: FILIP, whose two directions are two scores of which each has its own loss; "t2i" and "i2t" give each.
    """

    name = "MaxSim"

    @dataclass(frozen=True, kw_only=True)
    class Config(FragmentMatcher.Config):
        direction: Literal["both", "t2i", "i2t"] = "both"

    config: Config

    def attended(self, products: Products) -> Tensor:
        """All of it to the best region, the first of equal ones."""
        best = products.values.masked_fill(~products.context_mask, float("-inf")).argmax(1, keepdim=True)
        return torch.zeros_like(products.values).scatter_(1, best, 1.0)

    def from_products(self, products: Products) -> Tensor:
        means = [
            way(products) for way in {"both": (_by_words, _by_regions), "t2i": (_by_words,), "i2t": (_by_regions,)}[self.config.direction]
        ]
        return means[0] if len(means) == 1 else (means[0] + means[1]) / 2


def _by_words(products: Products) -> Tensor:
    """The mean over words of the best region."""
    return products.mean(products.values.masked_fill(~products.context_mask, float("-inf")).amax(1))


def _by_regions(products: Products) -> Tensor:
    """The mean over regions of the best word."""
    best = products.values.masked_fill(~products.query_mask, float("-inf")).amax(-1)
    there = products.context_mask[..., 0].to(best.dtype)
    return (best * there).sum(1) / there.sum(1)
