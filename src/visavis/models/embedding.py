"""Matchers with one vector an item: heads on cached features, VSE++ and VSE-infinity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.models.base import GlobalMatcher, MatcherConfig, unit, vectors
from visavis.models.pooling import GeneralizedPooling, max_pool, mean_pool
from visavis.models.text import RecurrentWords, pool_words
from visavis.types import Encoded


class Heads(GlobalMatcher):
    """A small tower a side on cached features of frozen encoders.

    depth 0: one linear map a side, the fine-tuning of CLIP in the Unified paper (appendix B). depth n: n hidden layers of
    ``hidden`` units with ReLU and dropout before it. bilinear: depth 0 with the image side left as it is, so that the
    score is ``unit(v) . unit(W t)``, one map between the two spaces. input_dropout: of the features themselves.
    """

    name = "Heads"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        width: int = 1024
        depth: int = 1
        hidden: int = 2048
        dropout: float = 0.5
        input_dropout: float = 0.0
        bilinear: bool = False

    visual_views = ("pooled",)
    text_views = ("pooled",)

    def __init__(self, config: Config):
        super().__init__(config)
        width = config.visual_width if config.bilinear else config.width
        layers = {key: getattr(config, key) for key in ("depth", "hidden", "dropout", "input_dropout")}
        self.visual = nn.Identity() if config.bilinear else head(config.visual_width, width, **layers)
        self.text = head(config.text_width, width, **layers)

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"visual": [self.visual], "text": [self.text]}

    def encode_visual(self, items: Encoded) -> Encoded:
        return unit(self.visual(vectors(items)))

    def encode_text(self, items: Encoded) -> Encoded:
        return unit(self.text(vectors(items)))


def head(inputs: int, outputs: int, *, depth: int, hidden: int, dropout: float, input_dropout: float) -> nn.Sequential:
    """The layers of one tower on one vector an item: ``depth`` hidden ones, and a linear map."""
    layers: list[nn.Module] = [nn.Dropout(input_dropout)] if input_dropout else []
    for _ in range(depth):
        layers += [nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout)]
        inputs = hidden
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class VSEPlusPlus(GlobalMatcher):
    """VSE++: one linear map of the image, the last state of a GRU over the words.

    Images: pooled features; regions, mapped and then pooled by ``region_pool`` ("max" as in the Unified paper's VSE++ on
    regions); or pixels through ``backbone``, a tower that a recipe may train. Source: Faghri et al. (2018).
    Differs from: the released code, which normalizes features of a trained CNN before the linear map; here never.
    """

    name = "VSE++"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        width: int = 1024
        word_width: int = 300
        bidirectional: bool = False
        word_pool: Literal["last", "max", "mean"] = "last"
        region_pool: Literal["max", "mean"] = "max"
        dropout: float = 0.0
        backbone: str = ""

    visual_views = ("pooled", "grid", "pixels")
    text_views = ("tokens",)

    def __init__(self, config: Config):
        super().__init__(config)
        if config.visual_view == "pixels":
            from visavis.models.towers import TowerSpec

            self.backbone = TowerSpec("visual", config.backbone, "grid").open()
        self.visual = linear(config.visual_width, config.width)
        self.text = RecurrentWords(
            config.text_width, config.word_width, config.width, bidirectional=config.bidirectional, dropout=config.dropout
        )

    def parts(self) -> dict[str, list[nn.Module]]:
        parts: dict[str, list[nn.Module]] = {"visual": [self.visual], "text": [self.text]}
        return parts | {"backbone": [self.backbone]} if self.config.visual_view == "pixels" else parts

    def encode_visual(self, items: Encoded) -> Encoded:
        config: VSEPlusPlus.Config = self.config  # type: ignore[assignment]
        items = self.backbone(vectors(items)) if config.visual_view == "pixels" else items
        assert not isinstance(items.mask, dict)
        mapped = self.visual(vectors(items))
        if mapped.dim() == 3:
            mapped = (max_pool if config.region_pool == "max" else mean_pool)(mapped, items.mask)
        return unit(mapped)

    def encode_text(self, items: Encoded) -> Encoded:
        config: VSEPlusPlus.Config = self.config  # type: ignore[assignment]
        assert not isinstance(items.mask, dict)
        return unit(pool_words(self.text(items), items.mask, config.word_pool))


class VSEInfinity(GlobalMatcher):
    """VSE-infinity: generalised pooling over regions and over words.

    Images: regions (grid) through a ResidualMap, then the pooling operator. Texts: token ids through a bidirectional GRU, or
    word vectors of a frozen encoder through a ResidualMap, then a pooling operator of their own. In training each region,
    and each word, is left out with probability ``size_augmentation``; ``dropout`` falls on hidden layers,
    ``region_dropout`` on the regions' features, ``word_dropout`` on word vectors and states, ``pooled_dropout`` on what the
    operators give. temperature: of the operators; the larger, the nearer they begin and stay to the mean. hidden: 0 maps
    regions and word vectors before they are pooled; n pools them as they are and maps what comes of it, by one hidden layer of
    n units with ReLU and dropout. The states of the GRU are pooled and not mapped, either way.
    region_pool: "mean" is the control that learns nothing of how regions are pooled.
    Source: Chen et al. (2021); VSE-infinity with Bi-GRU as in the Unified paper's tables.
    Differs from: the released code, whose words are masked or replaced as well as left out (only words of its trainable
    BERT can be), has no dropout, temperature 0.1, nothing after the pooling (hidden = 0), and maps BERT's words by one linear
    layer; at least one region or word always survives here.
    """

    name = "VSEInfinity"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        visual_view: Literal["grid"] = "grid"
        width: int = 1024
        word_width: int = 300
        dropout: float = 0.0
        region_dropout: float = 0.0
        word_dropout: float = 0.0
        pooled_dropout: float = 0.0
        size_augmentation: float = 0.2
        temperature: float = 0.1
        hidden: int = 0
        region_pool: Literal["generalized", "mean"] = "generalized"

    visual_views = ("grid",)
    text_views = ("words", "tokens")

    def __init__(self, config: Config):
        super().__init__(config)
        self.region_dropout, self.word_dropout = nn.Dropout(config.region_dropout), nn.Dropout(config.word_dropout)
        self.visual = self._map(config.visual_width)
        self.visual_pool = mean_pool if config.region_pool == "mean" else GeneralizedPooling(temperature=config.temperature)
        self.visual_head = self._head(config.visual_width)
        self.text: nn.Module = (
            RecurrentWords(config.text_width, config.word_width, config.width, bidirectional=True, dropout=config.word_dropout)
            if config.text_view == "tokens"
            else self._map(config.text_width)
        )
        self.text_pool = GeneralizedPooling(temperature=config.temperature)
        self.text_head = nn.Dropout(config.pooled_dropout) if config.text_view == "tokens" else self._head(config.text_width)

    def _map(self, inputs: int) -> nn.Module:
        """What happens to regions or word vectors before they are pooled."""
        config: VSEInfinity.Config = self.config  # type: ignore[assignment]
        return nn.Identity() if config.hidden else ResidualMap(inputs, config.width, config.dropout)

    def _head(self, inputs: int) -> nn.Module:
        """What happens to what was pooled."""
        config: VSEInfinity.Config = self.config  # type: ignore[assignment]
        if not config.hidden:
            return nn.Dropout(config.pooled_dropout)
        return head(inputs, config.width, depth=1, hidden=config.hidden, dropout=config.dropout, input_dropout=config.pooled_dropout)

    def parts(self) -> dict[str, list[nn.Module]]:
        visual = [self.visual, *([self.visual_pool] if isinstance(self.visual_pool, nn.Module) else []), self.visual_head]
        return {"visual": visual, "text": [self.text, self.text_pool, self.text_head]}

    def encode_visual(self, items: Encoded) -> Encoded:
        regions = self.visual(self.region_dropout(vectors(items)))
        return unit(self.visual_head(self.visual_pool(regions, self._left_in(items))))

    def encode_text(self, items: Encoded) -> Encoded:
        words = self.text(items) if self.config.text_view == "tokens" else self.text(self.word_dropout(vectors(items)))
        return unit(self.text_head(self.text_pool(self.word_dropout(words), self._left_in(items))))

    def _left_in(self, items: Encoded) -> Tensor | None:
        """The mask of an item's positions; in training each falls out by chance, but never an item's last one."""
        config: VSEInfinity.Config = self.config  # type: ignore[assignment]
        assert items.mask is None or isinstance(items.mask, Tensor)
        if not self.training or not config.size_augmentation:
            return items.mask
        given = vectors(items)
        valid = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device) if items.mask is None else items.mask
        chance = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, 0.0)
        return (chance > config.size_augmentation) | (valid & (chance == chance.amax(1, keepdim=True)))


class ResidualMap(nn.Module):
    """``Linear(x) + MLP(x)`` on every region or word, the MLP with one hidden layer of half the width, batch norm and ReLU.

    Shapes: ``[N, L, inputs] -> [N, L, outputs]``. Source: Chen et al. (2021), section 4, for features of frozen encoders.
    """

    def __init__(self, inputs: int, outputs: int, dropout: float):
        super().__init__()
        self.linear = linear(inputs, outputs)
        hidden = outputs // 2
        self.mlp = nn.Sequential(
            nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, outputs)
        )

    def forward(self, items: Tensor) -> Tensor:
        flat = items.flatten(0, 1)
        return (self.linear(flat) + self.mlp(flat)).unflatten(0, items.shape[:2])


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map as the VSE family starts it: uniform by Glorot's bound, bias 0."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
