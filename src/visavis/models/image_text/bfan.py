"""BFAN: bidirectional focal attention, which removes irrelevant fragments from the attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from visavis.models.image_text.cross_attention import EPSILON, RegionWordMatcher, RegionWordSimilarity, SimilarityMatcher, attention_weights
from visavis.spec import PositiveFloat


class BFAN(SimilarityMatcher):
    """BFAN: bidirectional focal attention of words over regions and of regions over words.

    Formula:
        Attention a as in SCAN is kept where ``a_i C - sum_j a_j > 0`` ("equal") or ``sum_j (a_i - a_j) sqrt(a_j) > 0`` ("prob"), and
        divided by its sum. The score is the mean cosine of words plus that of regions, in [-2, 2].

    Source:
        Liu et al., Focus Your Attention (2019), equations 3 to 9. BFAN* in tables is the mean of both variants.
    """

    name = "BFAN"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``BFAN``.

        Attributes:
            focus: Which fragments keep their attention.
            inverse_temperature: Factor of similarities in the softmax.
        """

        focus: Literal["equal", "prob"] = "prob"
        inverse_temperature: PositiveFloat = 20.0

    config: Config

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        by_words, by_regions = (self._score_direction(direction) for direction in (products, products.T))
        return by_words + by_regions

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        weights = attention_weights(products, self.config.inverse_temperature)
        kept = weights * (above_mean_attention(weights, products) if self.config.focus == "equal" else above_weighted_attention(weights))
        return kept / kept.sum(1, keepdim=True).clamp(min=EPSILON)

    def _score_direction(self, products: RegionWordSimilarity) -> Tensor:
        return products.mean(products.attended_cosines(self.attention_weights(products)))


def above_mean_attention(weights: Tensor, products: RegionWordSimilarity) -> Tensor:
    """Mark fragments with more than the mean attention.

    Args:
        weights: Attention weights, shape ``[A, C, B, Q]``.
        products: Similarities of the same fragments.

    Returns:
        Boolean tensor of the same shape.
    """
    return weights * products.context_mask.sum(1, keepdim=True) > weights.sum(1, keepdim=True)


def above_weighted_attention(weights: Tensor) -> Tensor:
    """Mark fragments whose attention exceeds that of the others, where each difference is weighted by the root of the other's attention.

    Args:
        weights: Attention weights, shape ``[A, C, B, Q]``.

    Returns:
        Boolean tensor of the same shape.
    """
    roots = weights.sqrt()
    return weights * roots.sum(1, keepdim=True) > (weights * roots).sum(1, keepdim=True)
