"""SCAN, BFAN and MaxSim: scores from the products of regions and words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visavis.core.encoded import MaxSimDirection
from visavis.core.spec import PositiveFloat
from visavis.models.image_text.cross_attention import (
    EPSILON,
    Normalization,
    RegionWordMatcher,
    RegionWordSimilarity,
    attention_weights,
)


class SCAN(RegionWordMatcher):
    """SCAN: stacked cross attention. Words attend over the regions of an image ("t2i"), or regions
    over the words ("i2t").

    Formula:
        ``a_cq = softmax_c(inverse_temperature n(s_cq))`` and ``r_q = cos(q, sum_c a_cq c)``. The
        score is the mean of r over the fragments that attend ("mean"), or ``log sum_q exp(k r_q) /
        k`` with k = ``pool_inverse_temperature`` ("lse"). n: see ``attention_weights``.

    Source:
        Lee et al., Stacked Cross Attention for Image-Text Matching (2018), equations 1 to 8.

    Differs from:
        The released code, which forms every attended vector and loops over captions. The scores are
        the same.
    """

    name = "SCAN"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``SCAN``.

        Attributes:
            direction: Which side attends: words over regions ("t2i") or regions over words ("i2t").
            pool: Pooling of the cosines.
            inverse_temperature: Factor of similarities in the softmax, 9 for t2i and 4 for i2t in
                the paper.
            pool_inverse_temperature: Factor of the log-sum-exp, 6 for t2i, 5 (Flickr30K) or 20
                (COCO) for i2t in the paper.
            normalization: Normalization n of similarities before the softmax.
        """

        direction: Literal["t2i", "i2t"] = "t2i"
        pool: Literal["mean", "lse"] = "mean"
        inverse_temperature: PositiveFloat = 9.0
        pool_inverse_temperature: PositiveFloat = 6.0
        normalization: Normalization = "clipped_l2norm"

    config: Config

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        """Return attention over regions. If regions attend over words, it is their attention
        divided by its sum over the regions.
        """
        if self.config.direction == "t2i":
            return self._weights(products)
        # [B, Q, A, C] back to [A, C, B, Q].
        weights = self._weights(products.T).permute(2, 3, 0, 1) * products.query_mask
        return weights / weights.sum(1, keepdim=True).clamp(min=EPSILON)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        products = products if self.config.direction == "t2i" else products.T
        cosines = products.attended_cosines(self._weights(products))
        if self.config.pool == "mean":
            return products.mean(cosines)
        return products.log_sum_exp(cosines, self.config.pool_inverse_temperature)

    def _weights(self, products: RegionWordSimilarity) -> Tensor:
        return attention_weights(
            products, self.config.inverse_temperature, self.config.normalization
        )


class BFAN(RegionWordMatcher):
    """BFAN: bidirectional focal attention of words over regions and of regions over words.

    Formula:
        Attention a as in SCAN is kept where ``a_i C - sum_j a_j > 0`` ("equal") or ``sum_j (a_i -
        a_j) sqrt(a_j) > 0`` ("prob"), and divided by its sum. The score is the mean cosine of words
        plus the mean cosine of regions, in [-2, 2].

    Source:
        Liu et al., Focus Your Attention (2019), equations 3 to 9. BFAN* in tables is the mean of
        both variants.
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

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        weights = attention_weights(products, self.config.inverse_temperature)
        if self.config.focus == "equal":
            kept = weights * products.context_mask.sum(1, keepdim=True) > weights.sum(
                1, keepdim=True
            )
        else:
            # sum_j (a_i - a_j) sqrt(a_j) > 0, without a matrix over i and j.
            roots = weights.sqrt()
            kept = weights * roots.sum(1, keepdim=True) > (weights * roots).sum(1, keepdim=True)
        focused = weights * kept
        return focused / focused.sum(1, keepdim=True).clamp(min=EPSILON)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        return self._mean_attended_cosine(products) + self._mean_attended_cosine(products.T)

    def _mean_attended_cosine(self, products: RegionWordSimilarity) -> Tensor:
        return products.mean(products.attended_cosines(self.attention_weights(products)))


class MaxSim(RegionWordMatcher):
    """MaxSim: late interaction. Half the mean over words of the best region, plus half the mean
    over regions of the best word.

    A pair costs only its products, because no attended vector is needed.

    Formula:
        ``S = (mean_w max_r s_rw + mean_r max_w s_rw) / 2`` with cosines s. Direction "t2i" is the
        first mean alone, "i2t" the second.

    Source:
        Khattab and Zaharia, ColBERT (2020), for texts. Yao et al., FILIP (2022), section 3.1, for
        images and texts.

    Differs from:
        FILIP, whose two directions are two scores with a loss each. "t2i" and "i2t" give each of
        them.
    """

    name = "MaxSim"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``MaxSim``.

        Attributes:
            direction: Which means the score contains.
        """

        direction: MaxSimDirection = "both"

    config: Config

    @property
    def late_interaction(self) -> MaxSimDirection:
        return self.config.direction

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        """Return weight 1 for the best region, the first of equal ones."""
        best = products.values.masked_fill(~products.context_mask, float("-inf")).argmax(
            1, keepdim=True
        )
        return torch.zeros_like(products.values).scatter_(1, best, 1.0)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        if self.config.direction == "t2i":
            return mean_best_region(products)
        if self.config.direction == "i2t":
            return _mean_best_word(products)
        return (mean_best_region(products) + _mean_best_word(products)) / 2


def mean_best_region(products: RegionWordSimilarity) -> Tensor:
    """Average the product with the best region over the words.

    Args:
        products: Products of regions with words.

    Returns:
        Scores, shape ``[V, T]``, or of pairs ``[N, 1]``.
    """
    return products.mean(products.values.masked_fill(~products.context_mask, float("-inf")).amax(1))


def _mean_best_word(products: RegionWordSimilarity) -> Tensor:
    """Return the mean over regions of the best word."""
    best = products.values.masked_fill(~products.query_mask, float("-inf")).amax(-1)
    present = products.context_mask[..., 0].to(best.dtype)
    return (best * present).sum(1) / present.sum(1)
