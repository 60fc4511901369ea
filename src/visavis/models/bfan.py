"""BFAN: bidirectional focal attention, which leaves out fragments that matter less than the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from visavis.models.attention import SMALLEST, Products, attention
from visavis.models.fragments import AttentionMatcher, FragmentMatcher
from visavis.spec import Positive


class BFAN(AttentionMatcher):
    """BFAN: bidirectional focal attention; words attend over regions and regions over words, each only to what stands out.

    Formula: attention a as in SCAN, then kept where ``a_i C - sum_j a_j > 0`` ("equal") or ``sum_j (a_i - a_j) sqrt(a_j) > 0``
    ("prob"), and divided by its sum; the score is the mean cosine of words plus that of regions, in [-2, 2].
    Source: Liu et al., Focus Your Attention (2019), equations 3 to 9. BFAN* of the tables is the mean of both kinds.
    """

    name = "BFAN"

    @dataclass(frozen=True, kw_only=True)
    class Config(FragmentMatcher.Config):
        focus: Literal["equal", "prob"] = "prob"
        sharpness: Positive = 20.0

    config: Config

    def from_products(self, products: Products) -> Tensor:
        by_words, by_regions = (self._one_way(way) for way in (products, products.T))
        return by_words + by_regions

    def attended(self, products: Products) -> Tensor:
        weights = attention(products, self.config.sharpness)
        kept = weights * (focus_equal(weights, products) if self.config.focus == "equal" else focus_prob(weights))
        return kept / kept.sum(1, keepdim=True).clamp(min=SMALLEST)

    def _one_way(self, products: Products) -> Tensor:
        return products.mean(products.cosines(self.attended(products)))


def focus_equal(weights: Tensor, products: Products) -> Tensor:
    """Where a fragment has more than the mean share of the attention."""
    return weights * products.context_mask.sum(1, keepdim=True) > weights.sum(1, keepdim=True)


def focus_prob(weights: Tensor) -> Tensor:
    """Where a fragment stands out by the differences to the others, each by the root of the other's share."""
    roots = weights.sqrt()
    return weights * roots.sum(1, keepdim=True) > (weights * roots).sum(1, keepdim=True)
