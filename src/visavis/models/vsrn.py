"""VSRN: regions reason over a graph of their own before they become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.models.base import GlobalMatcher, unit, vectors
from visavis.models.layers import linear
from visavis.models.text import pool_words
from visavis.models.words import WordsConfig, read_words
from visavis.types import Encoded


class VSRN(GlobalMatcher):
    """VSRN: visual semantic reasoning; graph convolutions among regions, then a GRU over them whose last state is the image.

    Images: regions (grid) through a linear map, ``steps`` of ``GraphConvolution``, each dimension at length 1 over the regions
    (``normalize_over`` "regions", as the released code does; "features" as the paper writes), a GRU in the order of the regions.
    batch_norm: of the image's vector, as the released code has for Flickr30K. Texts: the last state of a GRU.
    Source: Li et al., Visual Semantic Reasoning for Image-Text Matching (2019), equations 1 to 6.
    Differs from: the released model, which also learns to caption images by their regions; the decoder is not here.
    """

    name = "VSRN"

    @dataclass(frozen=True, kw_only=True)
    class Config(WordsConfig):
        visual_view: Literal["grid"] = "grid"
        text_view: Literal["tokens"] = "tokens"
        width: int = 2048
        steps: int = 4
        normalize_over: Literal["regions", "features"] = "regions"
        batch_norm: bool = False
        dropout: float = 0.0

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

    def parts(self) -> dict[str, list[nn.Module]]:
        visual = [self.visual, self.reasoning, self.fusion, self.norm]
        return {"visual": visual, "text": [self.text], "text_backbone": [self.text_backbone]}

    def encode_visual(self, items: Encoded) -> Encoded:
        assert items.mask is None or isinstance(items.mask, Tensor)
        regions = self.visual(vectors(items))
        if self.config.normalize_over == "features":
            regions = normalize(regions, dim=-1)
        for convolution in self.reasoning:
            regions = convolution(regions, items.mask)
        if self.config.normalize_over == "regions":
            regions = normalize(regions, dim=1)
        states = self.fusion(regions)[0]
        return unit(self.norm(pool_words(states, items.mask, "last")))

    def encode_text(self, items: Encoded) -> Encoded:
        items = self.text_backbone(items)
        assert items.mask is None or isinstance(items.mask, Tensor)
        return unit(pool_words(self.text(items), items.mask, "last"))


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
