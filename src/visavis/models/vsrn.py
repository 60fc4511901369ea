"""VSRN: regions reason over a graph of their own before they become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.models.attention import mask_of
from visavis.models.base import GlobalMatcher, unit, vectors
from visavis.models.caption_decoder import CaptionDecoder
from visavis.models.layers import linear
from visavis.models.text import pool_words
from visavis.models.words import WordsConfig, read_words
from visavis.spec import Count, CountOrZero, Dropout, PositiveOrZero
from visavis.targets import Targets
from visavis.types import Encoded

DECODED = "decoder"
"""The part of a matcher that the decoder is, and of encoded items what it reads."""


class VSRN(GlobalMatcher):
    """VSRN: visual semantic reasoning; graph convolutions among regions, then a GRU over them whose last state is the image.

    Images: regions (grid) through a linear map, ``steps`` of ``GraphConvolution``, each dimension at length 1 over the regions
    (``normalize_over`` "regions", as the released code does; "features" as the paper writes), a GRU in the order of the regions.
    normalize_mapped: the mapped regions, too, before they reason (over the regions), as the released code does for all data but Flickr30K.
    batch_norm: of the image's vector, as it has for Flickr30K. Texts: the last state of a GRU.
    generation: the weight of the loss of a ``CaptionDecoder`` of ``decoder_width``, which tells each caption by the regions of its image
    after they have reasoned, beside any objective; 1 in the paper, 0: none is made. It serves training alone, as the part "decoder".
    Source: Li et al., Visual Semantic Reasoning for Image-Text Matching (2019), section 3.
    """

    name = "VSRN"

    @dataclass(frozen=True, kw_only=True)
    class Config(WordsConfig):
        visual_view: Literal["grid"] = "grid"
        text_view: Literal["tokens"] = "tokens"
        width: Count = 2048
        steps: CountOrZero = 4
        normalize_over: Literal["regions", "features"] = "regions"
        normalize_mapped: bool = False
        batch_norm: bool = False
        dropout: Dropout = 0.0
        generation: PositiveOrZero = 0.0
        decoder_width: Count = 512

    visual_views = ("grid",)
    text_views = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = linear(config.visual_width, config.width)
        self.reasoning = nn.ModuleList(GraphConvolution(config.width) for _ in range(config.steps))
        self.fusion = nn.GRU(config.width, config.width, batch_first=True)
        self.norm: nn.Module = nn.BatchNorm1d(config.width) if config.batch_norm else nn.Identity()
        self.text_backbone, self.text = read_words(config, config.width, bidirectional=False, dropout=config.dropout)
        sizes = config.width, config.text_width, config.word_width, config.decoder_width
        self.decoder = CaptionDecoder(*sizes) if config.generation else None

    def parts(self) -> dict[str, list[nn.Module]]:
        visual = [self.visual, self.reasoning, self.fusion, self.norm]
        parts = {"visual": visual, "text": [self.text], "text_backbone": [self.text_backbone]}
        return parts if self.decoder is None else parts | {DECODED: [self.decoder]}

    def encode_visual(self, items: Encoded) -> Encoded:
        assert items.mask is None or isinstance(items.mask, Tensor)
        regions = self.visual(vectors(items))
        if self.config.normalize_over == "features":
            regions = normalize(regions, dim=-1)
        elif self.config.normalize_mapped:
            regions = normalize(regions * mask_of(items)[..., None], dim=1)
        for convolution in self.reasoning:
            regions = convolution(regions, items.mask)
        if self.config.normalize_over == "regions":
            regions = normalize(regions, dim=1)
        states = self.fusion(regions)[0]
        image = unit(self.norm(pool_words(states, items.mask, "last")))
        return self._with_decoded(image, Encoded(regions, items.mask))

    def encode_text(self, items: Encoded) -> Encoded:
        words = self.text_backbone(items)
        assert words.mask is None or isinstance(words.mask, Tensor)
        return self._with_decoded(unit(pool_words(self.text(words), words.mask, "last")), items)

    def extra_loss(self, visual: Encoded, text: Encoded, targets: Targets) -> Tensor | None:
        """The decoder's, times its weight; a text is told by the first image that it belongs to."""
        if self.decoder is None:
            return None
        own = targets.positive.long().argmax(0)
        loss: Tensor = self.decoder(_decoded(visual[own]), _decoded(text))
        return self.config.generation * loss

    def _with_decoded(self, embedding: Encoded, decoded: Encoded) -> Encoded:
        """Beside the "embedding", in training, what the decoder reads."""
        if self.decoder is None or not self.training:
            return embedding
        return Encoded({"embedding": vectors(embedding), DECODED: vectors(decoded)}, {DECODED: mask_of(decoded)})


def _decoded(items: Encoded) -> Encoded:
    """What the decoder reads of items, encoded in training."""
    assert isinstance(items.vectors, dict) and isinstance(items.mask, dict)
    return Encoded(items.vectors[DECODED], items.mask[DECODED])


class GraphConvolution(nn.Module):
    """One step of reasoning: every region gathers from all, weighted by affinity.

    Formula: ``V + BN(W R g(V))`` with ``R = theta(V) phi(V)^T / N``, not normalized further. BN begins at 0, so that the step does nothing
    at first. Shapes: regions ``[N, R, D]``, mask ``[N, R]`` -> ``[N, R, D]``; regions that are masked give nothing and stay 0.
    Source: VSRN (Li et al., 2019), equations 2 to 4, and its code.
    """

    def __init__(self, width: int):
        super().__init__()
        self.theta, self.phi, self.g, self.W = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        nn.init.zeros_(self.norm.weight)

    def forward(self, regions: Tensor, mask: Tensor | None = None) -> Tensor:
        valid = torch.ones(regions.shape[:2], dtype=torch.bool, device=regions.device) if mask is None else mask
        there = valid[..., None].to(regions.dtype)
        regions = regions * there
        affinity = self.theta(regions) @ self.phi(regions).transpose(1, 2) / there.sum(1, keepdim=True)
        gathered = torch.zeros_like(regions)
        gathered[valid] = self.norm(self.W(affinity @ (self.g(regions) * there))[valid])
        return regions + gathered
