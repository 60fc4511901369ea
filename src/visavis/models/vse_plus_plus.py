"""VSE++: the last state of a GRU against one linear map of the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from visavis.models.base import GlobalMatcher, unit, vectors
from visavis.models.layers import linear
from visavis.models.pooling import max_pool, mean_pool
from visavis.models.text import pool_words
from visavis.models.words import WordsConfig, read_words
from visavis.spec import Count, Dropout, require
from visavis.types import Encoded


class VSEPlusPlus(GlobalMatcher):
    """VSE++: one linear map of the image, the last state of a GRU over the words.

    Images: pooled features; regions, mapped and then pooled by ``region_pool`` ("max" as in the Unified paper's VSE++ on
    regions); or pixels through ``backbone``, a tower that a recipe may train: its regions, or with region_pool = "tower" the one vector
    that it gives itself (of VGG19 the layer fc7, of a ViT the class token or what its pooler makes of it). Source: Faghri et al. (2018).
    Differs from: the released code, which normalizes features of a trained CNN before the linear map; here never.
    """

    name = "VSE++"

    @dataclass(frozen=True, kw_only=True)
    class Config(WordsConfig):
        width: Count = 1024
        bidirectional: bool = False
        word_pool: Literal["last", "max", "mean"] = "last"
        region_pool: Literal["max", "mean", "tower"] = "max"
        dropout: Dropout = 0.0
        backbone: str = ""

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.region_pool != "tower" or self.visual_view == "pixels", self, "region_pool", 'max or mean: "tower" is for pixels')

        @property
        def tower_view(self) -> Literal["pooled", "grid"]:
            return "pooled" if self.region_pool == "tower" else "grid"

    visual_views = ("pooled", "grid", "pixels")
    text_views = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        if config.visual_view == "pixels":
            from visavis.models.towers import TowerSpec

            self.backbone = TowerSpec("visual", config.backbone, config.tower_view).open()
        self.visual = linear(config.visual_width, config.width)
        self.text_backbone, self.text = read_words(config, config.width, bidirectional=config.bidirectional, dropout=config.dropout)

    def parts(self) -> dict[str, list[nn.Module]]:
        parts: dict[str, list[nn.Module]] = {"visual": [self.visual], "text": [self.text], "text_backbone": [self.text_backbone]}
        return parts | {"backbone": [self.backbone]} if self.config.visual_view == "pixels" else parts

    def encode_visual(self, items: Encoded) -> Encoded:
        items = self.backbone(vectors(items)) if self.config.visual_view == "pixels" else items
        assert not isinstance(items.mask, dict)
        mapped = self.visual(vectors(items))
        if mapped.dim() == 3:
            mapped = (max_pool if self.config.region_pool == "max" else mean_pool)(mapped, items.mask)
        return unit(mapped)

    def encode_text(self, items: Encoded) -> Encoded:
        items = self.text_backbone(items)
        assert not isinstance(items.mask, dict)
        return unit(pool_words(self.text(items), items.mask, self.config.word_pool))
