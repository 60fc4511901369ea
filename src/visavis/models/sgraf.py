"""SGRAF: similarity as a vector for the whole and for each word, reasoned over (SGR) or filtered (SAF)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.errors import ShapeError
from visavis.models.attention import SMALLEST, Products, at_length_one, attention, mask_of
from visavis.models.base import vectors
from visavis.models.fragments import FragmentMatcher
from visavis.models.layers import linear
from visavis.spec import Count, CountOrZero, Dropout, Positive
from visavis.types import Encoded


class SGRAF(FragmentMatcher):
    """SGRAF: similarity vectors of image and text as wholes and of each word with what it attends to, made into one score in (0, 1).

    Formula: ``s(x, y) = unit(W (x - y)^2)`` between the global vectors, and between word w and ``unit(sum_r a_rw r)`` with SCAN's attention;
    these are the nodes. SGR: ``steps`` of ``ReLU(W softmax(Q N (K N)^T) N)``, the first node of the last is kept. SAF: the nodes' mean, weighted by
    ``sigmoid(w n)`` over their sum, at length 1. The score is ``sigmoid(w s)``. Global vectors: attention of regions, or words, by their mean.
    regions: how many every image has, for a batch norm of its own at each of their places; 0: any number, whose places share one.
    SGRAF* of the tables is the mean of both kinds.
    Advice: learn from all negatives at first (Unified), or at a small rate. Scores lie close together at first, where hard negatives alone (TripletHN,
    Ladder) can push every node of SGR's last step below its ReLU, the more so the narrower nodes are; all scores are then equal for good.
    Source: Diao et al., Similarity Reasoning and Filtration for Image-Text Matching (2021), equations 1 to 11, and its code.
    Differs from: the released SAF, which passes weights through a batch norm over all nodes of a block, so that a score
    would depend on the other pairs; here that is a learned scale and shift, which is what it becomes after training. It reads 36 regions only.
    """

    name = "SGRAF"

    @dataclass(frozen=True, kw_only=True)
    class Config(FragmentMatcher.Config):
        module: Literal["SGR", "SAF"] = "SGR"
        regions: CountOrZero = 36
        similarity_width: Count = 256
        steps: Count = 3
        sharpness: Positive = 9.0
        global_dropout: Dropout = 0.4

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual_global = GlobalAttention(config.width, config.global_dropout, regions=config.regions)
        self.text_global = GlobalAttention(config.width, config.global_dropout)
        self.local_similarity, self.global_similarity = (linear(config.width, config.similarity_width) for _ in range(2))
        self.nodes: nn.Module = (
            Filtration(config.similarity_width) if config.module == "SAF" else Reasoning(config.similarity_width, config.steps)
        )
        self.last = linear(config.similarity_width, 1)

    def parts(self) -> dict[str, list[nn.Module]]:
        shared: list[nn.Module] = [self.local_similarity, self.global_similarity, self.nodes, self.last]
        visual, text = [self.visual, self.visual_global], [self.text, self.text_global]
        return {"visual": visual, "text": text, "text_backbone": [self.text_backbone], "similarity": shared}

    def encode_visual(self, items: Encoded) -> Encoded:
        if self.config.regions and vectors(items).shape[1] != self.config.regions:
            raise ShapeError(
                f"SGRAF was made for {self.config.regions} regions an image, found {vectors(items).shape[1]}: set model.regions, to 0 for any number."
            )
        return self.with_global(super().encode_visual(items), self.visual_global)

    def encode_text(self, items: Encoded) -> Encoded:
        return self.with_global(super().encode_text(items), self.text_global)

    def with_global(self, fragments: Encoded, pool: nn.Module) -> Encoded:
        """Fragments ``[N, L, D]`` together with the global vector of each item ``[N, D]``."""
        whole = pool(vectors(fragments), mask_of(fragments))
        return Encoded({"fragments": vectors(fragments), "whole": whole}, {"fragments": mask_of(fragments)})

    def attended(self, products: Products) -> Tensor:
        return attention(products, self.config.sharpness)

    def products(self, visual: Encoded, text: Encoded) -> Products:
        return Products.of(_parts(visual)[0], _parts(text)[0])

    def score_block(self, visual: Encoded, text: Encoded) -> Tensor:
        (images, image), (texts, sentence) = _parts(visual), _parts(text)
        return self._scores(Products.of(images, texts), image[:, None], sentence[None])

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        (images, image), (texts, sentence) = _parts(visual), _parts(text)
        return self._scores(Products.of_pairs(images, texts), image[:, None], sentence[:, None])[:, 0]

    def _scores(self, products: Products, image: Tensor, sentence: Tensor) -> Tensor:
        """The scores ``[V, T]``, or of pairs ``[N, 1]``."""
        weights = self.attended(products)
        regions, words = vectors(products.context), vectors(products.query)
        attended = at_length_one((weights.flatten(2).transpose(1, 2) @ regions).unflatten(1, weights.shape[2:]))
        local = at_length_one(self.local_similarity((attended - (words[:, None] if products.paired else words[None])).square()))
        whole = at_length_one(self.global_similarity((image - sentence).square()))
        nodes = torch.cat([whole[:, :, None], local], 2)
        mask = torch.cat([torch.ones_like(products.query_mask[:, 0, :, :1]), products.query_mask[:, 0]], -1).expand(nodes.shape[:3])
        return self.last(self.nodes(nodes, mask)).squeeze(-1).sigmoid()


class GlobalAttention(nn.Module):
    """One vector of fragments: they are weighted by how they fit their mean. ``[N, L, D], [N, L] -> [N, D]``.

    Formula: ``unit(sum_i softmax_i(w (tanh(A x_i) tanh(B mean))) x_i)``, with a batch norm before each tanh for images.
    regions: None for texts; 0 for images of any number of regions.
    """

    def __init__(self, width: int, dropout: float, regions: int | None = None):
        super().__init__()
        self.local, self.whole, self.common = linear(width, width), linear(width, width), linear(width, 1)
        self.local_norm: nn.Module = nn.Identity() if regions is None else nn.BatchNorm1d(regions) if regions else SharedNorm(1)
        self.whole_norm: nn.Module = nn.Identity() if regions is None else nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        mean = (fragments * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        local = self.local(fragments)
        local = self.local_norm(local, mask) if isinstance(self.local_norm, SharedNorm) else self.local_norm(local)
        local = self.dropout(local.tanh())
        whole = self.dropout(self.whole_norm(self.whole(mean)).tanh())
        weights = self.common(local * whole[:, None]).squeeze(-1).masked_fill(~mask, float("-inf")).softmax(-1)
        return at_length_one((weights[..., None] * fragments).sum(1))


class SharedNorm(nn.BatchNorm1d):
    """A batch norm of one mean and deviation for all places that hold something: ``[N, L, D], [N, L] -> [N, L, D]``."""

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(fragments).masked_scatter(mask[..., None], super().forward(fragments[mask][:, None]))


class Reasoning(nn.Module):
    """SGR: nodes ``[V, T, N, S]`` exchange what they hold in several steps; the first one is given, ``[V, T, S]``."""

    def __init__(self, width: int, steps: int):
        super().__init__()
        self.queries, self.keys, self.maps = (nn.ModuleList(linear(width, width) for _ in range(steps)) for _ in range(3))

    def forward(self, nodes: Tensor, mask: Tensor) -> Tensor:
        for query, key, after in zip(self.queries, self.keys, self.maps, strict=True):
            edges = query(nodes) @ key(nodes).transpose(-1, -2)
            nodes = after(edges.masked_fill(~mask[..., None, :], float("-inf")).softmax(-1) @ nodes).relu()
        return nodes[:, :, 0]


class Filtration(nn.Module):
    """SAF: the mean of nodes ``[V, T, N, S]`` by learned weights in (0, 1), at length 1, ``[V, T, S]``."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = linear(width, 1)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, nodes: Tensor, mask: Tensor) -> Tensor:
        weights = (self.scale * self.weight(nodes).squeeze(-1) + self.shift).sigmoid() * mask
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST)
        return at_length_one((weights[..., None, :] @ nodes).squeeze(-2))


def _parts(items: Encoded) -> tuple[Encoded, Tensor]:
    """The fragments and the global vectors."""
    assert isinstance(items.vectors, dict)
    assert isinstance(items.mask, dict)
    return Encoded(items.vectors["fragments"], items.mask["fragments"]), items.vectors["whole"]
