"""SCAN: stacked cross attention between words and regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from visavis.models.attention import SMALLEST, Normalization, Products, attention
from visavis.models.fragments import AttentionMatcher, FragmentMatcher
from visavis.spec import Positive


class SCAN(AttentionMatcher):
    """SCAN: stacked cross attention; every word attends over the regions of an image ("t2i"), or every region over the words ("i2t").

    Formula: ``a_cq = softmax_c(sharpness n(s_cq))``, ``r_q = cos(q, sum_c a_cq c)``; the score is the mean of r over the fragments that
    attend ("mean"), or ``log sum_q exp(pool_sharpness r_q) / pool_sharpness`` ("lse"). n: see ``attention``.
    sharpness: 9 for t2i and 4 for i2t in the paper. pool_sharpness: 6 for t2i; 5 (Flickr30K) or 20 (COCO) for i2t.
    Source: Lee et al., Stacked Cross Attention for Image-Text Matching (2018), equations 1 to 8.
    Differs from: the released code, which forms every attended vector and loops over captions; the scores are the same.
    """

    name = "SCAN"

    @dataclass(frozen=True, kw_only=True)
    class Config(FragmentMatcher.Config):
        direction: Literal["t2i", "i2t"] = "t2i"
        pool: Literal["mean", "lse"] = "mean"
        sharpness: Positive = 9.0
        pool_sharpness: Positive = 6.0
        normalization: Normalization = "clipped_l2norm"

    config: Config

    def attended(self, products: Products) -> Tensor:
        """Of regions that ask the words ("i2t") their attention, divided by its sum over the regions."""
        config = self.config
        if config.direction == "t2i":
            return attention(products, config.sharpness, config.normalization)
        by_regions = attention(products.T, config.sharpness, config.normalization).permute(2, 3, 0, 1) * products.query_mask
        return by_regions / by_regions.sum(1, keepdim=True).clamp(min=SMALLEST)

    def from_products(self, products: Products) -> Tensor:
        config = self.config
        products = products if config.direction == "t2i" else products.T
        cosines = products.cosines(attention(products, config.sharpness, config.normalization))
        return products.mean(cosines) if config.pool == "mean" else products.log_sum_exp(cosines, config.pool_sharpness)
