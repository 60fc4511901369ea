"""Heads on features of encoders, frozen or, for images, trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from visavis.models.base import GlobalMatcher, MatcherConfig, unit, vectors
from visavis.models.convolutional_text import ConvolutionalText
from visavis.models.layers import head
from visavis.spec import Count, CountOrZero, Dropout
from visavis.types import Encoded


class Heads(GlobalMatcher):
    """A small tower a side on cached features of frozen encoders; the images' may be trained with it, from pixels.

    depth 0: one linear map a side, the fine-tuning of CLIP in the Unified paper (appendix B). depth n: n hidden layers of
    ``hidden`` units with ReLU and dropout before it. bilinear: depth 0 with the image side left as it is, so that the
    score is ``unit(v) . unit(W t)``, one map between the two spaces. input_dropout: of the features themselves.
    Texts are features, or token ids of words learned from scratch, which go through a ``ConvolutionalText`` of ``filters`` and one linear
    map; word_dropout falls on word vectors and on what the filters say.
    backbone: the image encoder that pixels go through, a tower that a recipe may train.
    """

    name = "Heads"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        width: Count = 1024
        depth: CountOrZero = 1
        hidden: Count = 2048
        dropout: Dropout = 0.5
        input_dropout: Dropout = 0.0
        bilinear: bool = False
        word_width: Count = 300
        filters: Count = 512
        word_dropout: Dropout = 0.4
        backbone: str = ""

        @property
        def tower_view(self) -> Literal["pooled"]:
            return "pooled"

    visual_views = ("pooled", "pixels")
    text_views = ("pooled", "tokens")
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        if config.visual_view == "pixels":
            from visavis.models.towers import TowerSpec

            self.backbone = TowerSpec("visual", config.backbone, config.tower_view).open()
        width = config.visual_width if config.bilinear else config.width
        layers = {key: getattr(config, key) for key in ("depth", "hidden", "dropout", "input_dropout")}
        self.visual = nn.Identity() if config.bilinear else head(config.visual_width, width, **layers)
        self.text = head(config.text_width, width, **layers) if config.text_view == "pooled" else self._text_from_scratch(width)

    def _text_from_scratch(self, width: int) -> nn.Module:
        config, dropout = self.config, self.config.word_dropout
        words = ConvolutionalText(config.text_width, config.word_width, config.filters, dropout=dropout)
        return nn.Sequential(words, nn.Dropout(dropout), nn.Linear(words.width, width))

    def parts(self) -> dict[str, list[nn.Module]]:
        parts: dict[str, list[nn.Module]] = {"visual": [self.visual], "text": [self.text]}
        return parts | {"backbone": [self.backbone]} if self.config.visual_view == "pixels" else parts

    def encode_visual(self, items: Encoded) -> Encoded:
        items = self.backbone(vectors(items)) if self.config.visual_view == "pixels" else items
        return unit(self.visual(vectors(items)))

    def encode_text(self, items: Encoded) -> Encoded:
        return unit(self.text(vectors(items) if self.config.text_view == "pooled" else items))
