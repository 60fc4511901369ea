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
        ways = {"both": (products, products.T), "t2i": (products,), "i2t": (products.T,)}[self.config.direction]
        means = [way.mean(way.values.masked_fill(~way.context_mask, float("-inf")).amax(1)) for way in ways]
        return means[0] if len(means) == 1 else (means[0] + means[1]) / 2
