"""VSE-infinity: generalised pooling over regions and over words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.models.attention import SMALLEST
from visavis.models.base import GlobalMatcher, unit, vectors
from visavis.models.layers import ResidualMap, head, keep_statistics, linear
from visavis.models.pooling import GeneralizedPooling, mean_pool
from visavis.models.towers import TowerSpec
from visavis.models.words import WordsConfig, read_words
from visavis.spec import Count, CountOrZero, Dropout, Positive, Share
from visavis.types import Attention, Encoded


class VSEInfinity(GlobalMatcher):
    """VSE-infinity: generalised pooling over regions and over words.

    Images: regions (grid) through a ResidualMap, or pixels through ``backbone``, a tower that a recipe may train (its batch norms keep their
    statistics), and a linear map of its regions; then the pooling operator. Texts: token ids through a bidirectional GRU, or through
    a text backbone that is trained with it and a linear map, or word vectors of a frozen encoder through a ResidualMap, then a pooling
    operator of their own. In training each region, and each word, is left out with probability ``size_augmentation`` (those of a
    text backbone are masked, replaced and left out before it reads them); ``dropout`` falls on hidden layers,
    ``region_dropout`` on the regions' features, ``word_dropout`` on word vectors and states, ``pooled_dropout`` on what the
    operators give. temperature: of the operators; the larger, the nearer they begin and stay to the mean. hidden: 0 maps
    regions and word vectors before they are pooled; n pools them as they are and maps what comes of it, by one hidden layer of
    n units with ReLU and dropout. The states of the GRU or the text backbone are pooled, either way.
    region_pool: "mean" is the control that learns nothing of how regions are pooled.
    Source: Chen et al. (2021); VSE-infinity with Bi-GRU as in the Unified paper's tables.
    Differs from: the released code, which has no GRU, no frozen words, no dropout but BERT's own, temperature 0.1 and nothing after the
    pooling (hidden = 0); at least one region, or word of a GRU, always survives here.
    """

    name = "VSEInfinity"

    @dataclass(frozen=True, kw_only=True)
    class Config(WordsConfig):
        visual_view: Literal["grid", "pixels"] = "grid"
        width: Count = 1024
        masked_words: Share = 0.1
        replaced_words: Share = 0.02
        omitted_words: Share = 0.08
        dropout: Dropout = 0.0
        region_dropout: Dropout = 0.0
        word_dropout: Dropout = 0.0
        pooled_dropout: Dropout = 0.0
        size_augmentation: Share = 0.2
        temperature: Positive = 0.1
        hidden: CountOrZero = 0
        region_pool: Literal["generalized", "mean"] = "generalized"
        backbone: str = ""

    visual_views = ("grid", "pixels")
    text_views = ("words", "tokens")
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.region_dropout, self.word_dropout = nn.Dropout(config.region_dropout), nn.Dropout(config.word_dropout)
        if pixels := config.visual_view == "pixels":
            self.backbone = TowerSpec("visual", config.backbone, "grid").open()
        self.visual = linear(config.visual_width, config.width) if pixels and not config.hidden else self._map(config.visual_width)
        self.visual_pool = mean_pool if config.region_pool == "mean" else GeneralizedPooling(temperature=config.temperature)
        self.visual_head = self._head(config.visual_width)
        self.text_backbone, self.text = (
            read_words(config, config.width, bidirectional=True, dropout=config.word_dropout)
            if config.text_view == "tokens"
            else (nn.Identity(), self._map(config.text_width))
        )
        self.text_pool = GeneralizedPooling(temperature=config.temperature)
        self.text_head = nn.Dropout(config.pooled_dropout) if config.text_view == "tokens" else self._head(config.text_width)

    def _map(self, inputs: int) -> nn.Module:
        """What happens to regions or word vectors before they are pooled."""
        return nn.Identity() if self.config.hidden else ResidualMap(inputs, self.config.width, self.config.dropout)

    def _head(self, inputs: int) -> nn.Module:
        """What happens to what was pooled."""
        config = self.config
        if not config.hidden:
            return nn.Dropout(config.pooled_dropout)
        return head(inputs, config.width, depth=1, hidden=config.hidden, dropout=config.dropout, input_dropout=config.pooled_dropout)

    def train(self, mode: bool = True) -> VSEInfinity:
        super().train(mode)
        if self.config.visual_view == "pixels":
            keep_statistics(self.backbone)
        return self

    def parts(self) -> dict[str, list[nn.Module]]:
        backbone: dict[str, list[nn.Module]] = {"backbone": [self.backbone]} if self.config.visual_view == "pixels" else {}
        visual = [self.visual, *([self.visual_pool] if isinstance(self.visual_pool, nn.Module) else []), self.visual_head]
        return {"visual": visual, "text": [self.text, self.text_pool, self.text_head], "text_backbone": [self.text_backbone], **backbone}

    def attention(self, visual: Encoded, text: Encoded) -> Attention | None:
        """The score is a sum over regions and words, as far as nothing is mapped after pooling; a word's answer is what adds to it."""
        if self.config.hidden:
            return None
        visual = self.backbone(vectors(visual)) if self.config.visual_view == "pixels" else visual
        regions = self.visual(vectors(visual))
        text = self.text_backbone(text)
        words = self.text(text) if self.config.text_view == "tokens" else self.text(vectors(text))
        of_regions = self.visual_pool.shares(regions) if isinstance(self.visual_pool, GeneralizedPooling) else regions / regions.shape[1]
        of_words = self.text_pool.shares(words)
        norms = of_regions.sum(1).norm() * of_words.sum(1).norm()
        parts = of_words[0] @ of_regions[0].T / norms
        adding = parts.clamp(min=0)
        return Attention(adding / adding.sum(1, keepdim=True).clamp(min=SMALLEST), parts.sum(1))

    def encode_visual(self, items: Encoded) -> Encoded:
        pixels = self.config.visual_view == "pixels"
        items = self.backbone(vectors(items)) if pixels else items
        regions = self.visual(self.region_dropout(vectors(items)))
        return unit(self.visual_head(self.visual_pool(regions, self._left_in(items, of_image=pixels))))

    def encode_text(self, items: Encoded) -> Encoded:
        items = self.text_backbone(items)
        words = self.text(items) if self.config.text_view == "tokens" else self.text(self.word_dropout(vectors(items)))
        left_in = items.mask if self.config.text_backbone else self._left_in(items)
        return unit(self.text_head(self.text_pool(self.word_dropout(words), left_in)))

    def _left_in(self, items: Encoded, *, of_image: bool = False) -> Tensor | None:
        """The mask of an item's positions; in training each falls out by chance, but never an item's last one.

        of_image: by chances of each image, u times ``size_augmentation`` with u from 0 to 1 at random, and 0 where u is below it.
        """
        assert items.mask is None or isinstance(items.mask, Tensor)
        if not self.training or not self.config.size_augmentation:
            return items.mask
        given = vectors(items)
        valid = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device) if items.mask is None else items.mask
        chance = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, 0.0)
        share: float | Tensor = self.config.size_augmentation
        if of_image:
            drawn = torch.rand(len(valid), 1, device=valid.device)
            share = share * drawn * (drawn > share)
        return (chance > share) | (valid & (chance == chance.amax(1, keepdim=True)))
