"""MaxSim: late interaction of each word with its best region and of each region with its best word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visavis.models.image_text.cross_attention import RegionWordMatcher, RegionWordSimilarity, SimilarityMatcher


class MaxSim(SimilarityMatcher):
    """MaxSim: late interaction. Half the mean over words of the best region, plus half the mean over regions of the best word.

    A pair costs only its products, because no attended vector is needed.

    Formula:
        ``S = (mean_w max_r s_rw + mean_r max_w s_rw) / 2`` with cosines s. Direction "t2i" is the first mean alone, "i2t" the second.

    Source:
        Khattab and Zaharia, ColBERT (2020), for texts. Yao et al., FILIP (2022), section 3.1, for images and texts.

    Differs from:
        FILIP, whose two directions are two scores with a loss each. "t2i" and "i2t" give each of them.
    """

    name = "MaxSim"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``MaxSim``.

        Attributes:
            direction: Which means the score contains.
        """

        direction: Literal["both", "t2i", "i2t"] = "both"

    config: Config

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        """Return weight 1 for the best region, the first of equal ones."""
        best = products.values.masked_fill(~products.context_mask, float("-inf")).argmax(1, keepdim=True)
        return torch.zeros_like(products.values).scatter_(1, best, 1.0)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        functions = {"both": (_by_words, _by_regions), "t2i": (_by_words,), "i2t": (_by_regions,)}
        means = [mean(products) for mean in functions[self.config.direction]]
        return means[0] if len(means) == 1 else (means[0] + means[1]) / 2


def _by_words(products: RegionWordSimilarity) -> Tensor:
    """Return the mean over words of the best region."""
    return products.mean(products.values.masked_fill(~products.context_mask, float("-inf")).amax(1))


def _by_regions(products: RegionWordSimilarity) -> Tensor:
    """Return the mean over regions of the best word."""
    best = products.values.masked_fill(~products.query_mask, float("-inf")).amax(-1)
    present = products.context_mask[..., 0].to(best.dtype)
    return (best * present).sum(1) / present.sum(1)
