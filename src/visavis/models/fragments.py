"""What matchers of regions and words share: one unit vector for every region and every word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.models.attention import Products
from visavis.models.base import Matcher, vectors
from visavis.models.layers import linear
from visavis.models.lengths import by_length
from visavis.models.words import LinearWords, WordsConfig, read_words
from visavis.spec import Count, Dropout
from visavis.types import Attention, Encoded


class FragmentMatcher(Matcher):
    """A matcher that keeps every region and every word as a unit vector, and scores sets of them.

    Images: regions (grid) through a linear map. Texts: token ids through a bidirectional GRU whose directions are averaged; word
    vectors of a frozen encoder, or of a text backbone that is trained with it, through a linear map. Source: SCAN (Lee et al., 2018), sections 3.2 and 3.3.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(WordsConfig):
        visual_view: Literal["grid"] = "grid"
        width: Count = 1024
        dropout: Dropout = 0.0

    visual_views = ("grid",)
    text_views = ("words", "tokens")
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = linear(config.visual_width, config.width)
        self.text_backbone, self.text = (
            read_words(config, config.width, bidirectional=True, dropout=config.dropout)
            if config.text_view == "tokens"
            else (nn.Identity(), linear(config.text_width, config.width, LinearWords))
        )

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"visual": [self.visual], "text": [self.text], "text_backbone": [self.text_backbone]}

    def attended(self, products: Products) -> Tensor:
        """How much each fragment that asks attends to each of those it asks: as ``products.values``, with sum 1 over the context."""
        raise NotImplementedError

    def attention(self, visual: Encoded, text: Encoded) -> Attention:
        products = self.products(self.encode_visual(visual), self.encode_text(text))
        weights = self.attended(products)
        return Attention(weights[0, :, 0].T, products.cosines(weights)[0, 0])

    def products(self, visual: Encoded, text: Encoded) -> Products:
        """Words ask the regions of every image, both encoded."""
        return Products.of(visual, text)

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        return by_length(self.score_block, visual, text)

    def score_block(self, visual: Encoded, text: Encoded) -> Tensor:
        """The scores ``[V, T]``, every text taken as long as the longest."""
        raise NotImplementedError

    def encode_visual(self, items: Encoded) -> Encoded:
        return _unit_fragments(self.visual(vectors(items)), items)

    def encode_text(self, items: Encoded) -> Encoded:
        items = self.text_backbone(items)
        return _unit_fragments(self.text(items), items)


class AttentionMatcher(FragmentMatcher):
    """A matcher whose score follows from the products of regions with words, and what attends to what."""

    def from_products(self, products: Products) -> Tensor:
        """The scores ``[V, T]``, or of pairs ``[N, 1]``."""
        raise NotImplementedError

    def score_block(self, visual: Encoded, text: Encoded) -> Tensor:
        return self.from_products(Products.of(visual, text))

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        return self.from_products(Products.of_pairs(visual, text))[:, 0]


def _unit_fragments(fragments: Tensor, items: Encoded) -> Encoded:
    """Each at length 1, in float32 at least; 0 where nothing is."""
    fragments = normalize(fragments if fragments.dtype.itemsize >= 4 else fragments.float(), dim=-1)
    if isinstance(items.mask, Tensor):
        fragments = fragments.masked_fill(~items.mask[..., None], 0.0)
    return Encoded(fragments, items.mask)
