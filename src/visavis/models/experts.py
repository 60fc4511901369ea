"""What matchers of several experts share: the text's side, a mixture of embeddings, and the score against the experts that are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.memory import ScoreCost
from visavis.models.base import Matcher, vectors
from visavis.models.gating import GatedEmbedding
from visavis.models.net_vlad import NetVLAD
from visavis.models.text import RecurrentWords, pool_words
from visavis.models.text_backbone import TextBackbone
from visavis.models.words import WordsConfig
from visavis.spec import Count, Dropout, require
from visavis.types import Encoded


@dataclass(frozen=True)
class Expert:
    """What one expert says of some videos: features ``[N, L, D]``, and where they hold something ``[N, L]``."""

    features: Tensor
    mask: Tensor

    @classmethod
    def of(cls, features: Tensor, mask: Tensor) -> Expert:
        """With 0 where nothing is."""
        return cls(features.masked_fill(~mask[..., None], 0.0), mask)

    @cached_property
    def present(self) -> Tensor:
        """Which videos have anything of it ``[N]``."""
        return self.mask.any(1)

    def pool(self, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """One vector a video ``[N, D]``, by ``how`` of features and mask; 0 where the expert is missing."""
        first = torch.arange(self.mask.shape[1], device=self.mask.device) == 0
        return how(self.features, self.mask | (first & ~self.present[:, None]))


class ExpertMatcher(Matcher):
    """A matcher of named experts of a video with an embedding of the text for each of them, weighted by the text.

    Formula: ``S = sum_e p_e w_e <v_e, t_e> / sum_e p_e w_e`` with p_e = 1 where the video has expert e, else 0, and
    ``w = softmax(M h)`` of the text's vector h; ``t_e`` a gated embedding of h. A video without experts scores 0.
    Texts: a vector of a frozen encoder ("pooled"), or words, of which ``word_pool`` makes one vector: frozen ("words"), learned through
    a GRU of ``hidden`` units, or the states of a text backbone that is trained ("tokens"), whose "first" is BERT's own of the whole.
    Source: Miech et al., Learning a Text-Video Embedding from Incomplete and Heterogeneous Data (2018), equations 3 to 5.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(WordsConfig):
        visual_view: Literal["experts"] = "experts"
        experts: dict[str, Count]
        width: Count = 512
        hidden: Count = 512
        bidirectional: bool = False
        word_pool: Literal["vlad", "first", "last", "max", "mean"] = "last"
        text_clusters: Count = 32
        dropout: Dropout = 0.0

        def __post_init__(self) -> None:
            super().__post_init__()
            require(bool(self.experts), self, "experts", "the name and width of one expert at least")
            require(self.visual_width == sum(self.experts.values()), self, "visual_width", "the sum of the experts' widths")

    visual_views = ("experts",)
    text_views = ("pooled", "words", "tokens")
    config: Config
    visual: nn.Module
    """From the experts, in the order of the config, to unit rows ``[N, E, width]``, 0 where one is missing."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.text_backbone: nn.Module = nn.Identity()
        self.words, width = None, config.text_width
        if config.text_backbone:
            self.text_backbone = backbone = TextBackbone(config.text_backbone, config.noise)
            width = backbone.width
        elif config.text_view == "tokens":
            width = config.hidden
            self.words = RecurrentWords(
                config.text_width, config.word_width, width, bidirectional=config.bidirectional, dropout=config.dropout
            )
        self.word_clusters = NetVLAD(width, config.text_clusters) if config.word_pool == "vlad" and config.text_view != "pooled" else None
        width = width if self.word_clusters is None else self.word_clusters.out_width
        self.text_gates = nn.ModuleList(GatedEmbedding(width, config.width) for _ in config.experts)
        self.mixture = nn.Linear(width, len(config.experts))

    def parts(self) -> dict[str, list[nn.Module]]:
        read = [module for module in (self.words, self.word_clusters) if module is not None]
        return {"visual": [self.visual], "text": [*read, self.text_gates, self.mixture], "text_backbone": [self.text_backbone]}

    def encode_visual(self, items: Encoded) -> Encoded:
        """``v_e`` ``[V, E, width]``, 0 where the expert is missing, and ``p_e``."""
        assert isinstance(items.vectors, dict)
        assert isinstance(items.mask, dict)
        experts = [Expert.of(items.vectors[name], items.mask[name]) for name in self.config.experts]
        embeddings = _single(self.visual(experts))
        return Encoded(embeddings, weights=torch.stack([expert.present for expert in experts], 1).to(embeddings.dtype))

    def encode_text(self, items: Encoded) -> Encoded:
        """``w_e t_e`` ``[T, E, width]``, and the weights."""
        text = self._text(items)
        weights = _single(self.mixture(text)).softmax(-1)
        return Encoded(torch.stack([_single(gate(text)) for gate in self.text_gates], 1) * weights[..., None], weights=weights)

    def _text(self, items: Encoded) -> Tensor:
        """One vector a text ``[N, D]``."""
        items = self.text_backbone(items)
        words, mask = vectors(items) if self.words is None else self.words(items), items.mask
        assert not isinstance(mask, dict)
        if self.config.text_view == "pooled":
            return words
        return pool_words(words, mask, self.config.word_pool) if self.word_clusters is None else self.word_clusters(words, mask)

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        (experts, present), (weighted, weights) = _with_weights(visual), _with_weights(text)
        return experts.flatten(1) @ weighted.flatten(1).T / (present @ weights.T).add_(_nothing(present))

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        (experts, present), (weighted, weights) = _with_weights(visual), _with_weights(text)
        return (experts * weighted).sum((-2, -1)) / ((present * weights).sum(-1) + _nothing(present)[:, 0])

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost | None:
        """Products, sums of weights and their quotient; in training all of them, and a gradient of each."""
        number = vectors(visual).dtype.itemsize
        return ScoreCost(scored=3 * number, trained=9 * number)


def _with_weights(items: Encoded) -> tuple[Tensor, Tensor]:
    assert items.weights is not None
    return vectors(items), items.weights


def _single(values: Tensor) -> Tensor:
    """In float32 at least (half precision loses ranks)."""
    return values if values.dtype.itemsize >= 4 else values.float()


def _nothing(present: Tensor) -> Tensor:
    """1 for a video without any expert, else 0: ``[V, 1]``; added to sums of weights, so that its score and gradient are 0, not 0 / 0."""
    return (present.sum(-1, keepdim=True) == 0).to(present.dtype)
