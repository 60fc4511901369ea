"""SCAN: stacked cross attention between words and regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from visavis.models.image_text.cross_attention import (
    EPSILON,
    Normalization,
    RegionWordMatcher,
    RegionWordSimilarity,
    SimilarityMatcher,
    attention_weights,
)
from visavis.spec import PositiveFloat


class SCAN(SimilarityMatcher):
    """SCAN: stacked cross attention. Words attend over the regions of an image ("t2i"), or regions over the words ("i2t").

    Formula:
        ``a_cq = softmax_c(inverse_temperature n(s_cq))`` and ``r_q = cos(q, sum_c a_cq c)``. The score is the mean of r over the fragments
        that attend ("mean"), or ``log sum_q exp(k r_q) / k`` with k = ``pool_inverse_temperature`` ("lse"). n: see ``attention_weights``.

    Source:
        Lee et al., Stacked Cross Attention for Image-Text Matching (2018), equations 1 to 8.

    Differs from:
        The released code, which forms every attended vector and loops over captions. The scores are the same.
    """

    name = "SCAN"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``SCAN``.

        Attributes:
            direction: Which side attends: words over regions ("t2i") or regions over words ("i2t").
            pool: Pooling of the cosines.
            inverse_temperature: Factor of similarities in the softmax, 9 for t2i and 4 for i2t in the paper.
            pool_inverse_temperature: Factor of the log-sum-exp, 6 for t2i, 5 (Flickr30K) or 20 (COCO) for i2t in the paper.
            normalization: Normalization n of similarities before the softmax.
        """

        direction: Literal["t2i", "i2t"] = "t2i"
        pool: Literal["mean", "lse"] = "mean"
        inverse_temperature: PositiveFloat = 9.0
        pool_inverse_temperature: PositiveFloat = 6.0
        normalization: Normalization = "clipped_l2norm"

    config: Config

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        """Return attention over regions. If regions attend over words, it is their attention divided by its sum over the regions."""
        config = self.config
        if config.direction == "t2i":
            return attention_weights(products, config.inverse_temperature, config.normalization)
        by_regions = (
            attention_weights(products.T, config.inverse_temperature, config.normalization).permute(2, 3, 0, 1) * products.query_mask
        )
        return by_regions / by_regions.sum(1, keepdim=True).clamp(min=EPSILON)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        config = self.config
        products = products if config.direction == "t2i" else products.T
        cosines = products.attended_cosines(attention_weights(products, config.inverse_temperature, config.normalization))
        return products.mean(cosines) if config.pool == "mean" else products.log_sum_exp(cosines, config.pool_inverse_temperature)
