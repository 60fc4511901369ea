"""SGRAF: similarity vectors of image and text, combined by graph reasoning (SGR) or attention
filtration (SAF).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.core.encoded import Encoded
from visavis.core.errors import ShapeError
from visavis.core.fields import (
    DropoutRate,
    LayerCount,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from visavis.models.base import get_part, get_vectors, valid_mask
from visavis.models.image_text.cross_attention import (
    RegionWordMatcher,
    RegionWordSimilarity,
    attention_weights,
    l2_normalize,
)
from visavis.models.layers import EPSILON, mean_pool, xavier_linear


class SGRAF(RegionWordMatcher):
    """SGRAF: similarity vectors of the whole pair and of each word with its attended regions,
    combined into a score in (0, 1).

    Advice: train with all negatives at first (Unified), or at a small learning rate. Initial scores
    are close together. Hard negatives alone (TripletHN, Ladder) can then push every node of SGR's
    last step below its ReLU, more so for a small ``similarity_dim``. All scores are then equal
    permanently.

    Args:
        config: The architecture.

    Formula:
        $s(x, y) = unit(W (x - y)^2)$ between the global vectors, and between word w and
        $unit(sum_r a_rw r)$ with SCAN's attention. These are the nodes. SGR: ``reasoning_steps``
        of $ReLU(W softmax(Q N (K N)^T) N)$, then the first node. SAF: the mean of the nodes
        weighted by $sigmoid(w n)$ over their sum, at length 1. The score is $sigmoid(w s)$.
        Global vectors: regions, or words, with attention by their mean.

    Source:
        Diao et al., Similarity Reasoning and Filtration for Image-Text Matching (2021), equations 1
        to 11, and its code. SGRAF* in tables is the mean of both modules.

    Differs from:
        The released SAF passes weights through a batch norm over all nodes of a block, so that a
        score would depend on the other pairs. Here this is a learned scale and shift, which a batch
        norm becomes after training. The released code reads 36 regions only.
    """

    name = "SGRAF"
    listed_after = "BFAN"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``SGRAF``.

        Attributes:
            similarity_module: SGR or SAF.
            num_regions: Regions of every image, for a batch norm per region position. 0: any
                number, with one batch norm for all positions.
            similarity_dim: Dimensions of a similarity vector.
            reasoning_steps: Steps of SGR.
            inverse_temperature: Factor of similarities in the softmax of the attention.
            global_dropout: Dropout in the attention of the global vectors.
        """

        similarity_module: Literal["SGR", "SAF"] = "SGR"
        num_regions: NonNegativeInt = 36
        similarity_dim: PositiveInt = 256
        reasoning_steps: LayerCount = 3
        inverse_temperature: PositiveFloat = 9.0
        global_dropout: DropoutRate = 0.4

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual_global = GlobalAttentionPooling(
            config.embedding_dim, config.global_dropout, num_regions=config.num_regions
        )
        self.text_global = GlobalAttentionPooling(config.embedding_dim, config.global_dropout)
        self.local_similarity, self.global_similarity = (
            xavier_linear(config.embedding_dim, config.similarity_dim) for _ in range(2)
        )
        self.similarity_module: nn.Module = (
            AttentionFiltration(config.similarity_dim)
            if config.similarity_module == "SAF"
            else GraphReasoning(config.similarity_dim, config.reasoning_steps)
        )
        self.score_layer = xavier_linear(config.similarity_dim, 1)

    def parts(self) -> dict[str, list[nn.Module]]:
        shared: list[nn.Module] = [
            self.local_similarity,
            self.global_similarity,
            self.similarity_module,
            self.score_layer,
        ]
        parts = super().parts()
        return parts | {
            "visual": [*parts["visual"], self.visual_global],
            "text": [*parts["text"], self.text_global],
            "similarity": shared,
        }

    def encode_visual(self, items: Encoded) -> Encoded:
        """Encode regions as the parts "fragments" and "global"."""
        if self.config.num_regions and get_vectors(items).shape[1] != self.config.num_regions:
            raise ShapeError(
                f"SGRAF: expected {self.config.num_regions} regions per image, got "
                f"{get_vectors(items).shape[1]}. "
                "Set model.num_regions. 0 allows any number."
            )
        return add_global_vectors(super().encode_visual(items), self.visual_global)

    def encode_text(self, items: Encoded) -> Encoded:
        return add_global_vectors(super().encode_text(items), self.text_global)

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        return attention_weights(products, self.config.inverse_temperature)

    def similarity(
        self, visual: Encoded, text: Encoded, *, paired: bool = False
    ) -> RegionWordSimilarity:
        return super().similarity(
            get_part(visual, "fragments"), get_part(text, "fragments"), paired=paired
        )

    def score_block(self, visual: Encoded, text: Encoded, *, paired: bool = False) -> Tensor:
        products = self.similarity(visual, text, paired=paired)
        image, caption = (get_vectors(side.named_part("global")) for side in (visual, text))
        # [V, R, T, W], the share of each region in a word.
        weights = self.attention_weights(products)
        regions = get_vectors(products.context)
        words = get_vectors(products.query)
        words, caption = (
            (words[:, None], caption[:, None]) if paired else (words[None], caption[None])
        )
        # SGRAF needs the attended vectors themselves, [V, T, W, D].
        attended = l2_normalize(
            (weights.flatten(2).transpose(1, 2) @ regions).unflatten(1, weights.shape[2:])
        )
        # Shape [V, T, words, similarity_dim].
        local = l2_normalize(self.local_similarity((attended - words).square()))
        overall = l2_normalize(self.global_similarity((image[:, None] - caption).square()))
        # The whole pair is node 0, which GraphReasoning returns.
        nodes = torch.cat([overall[:, :, None], local], 2)
        mask = torch.cat(
            [torch.ones_like(products.query_mask[:, 0, :, :1]), products.query_mask[:, 0]], -1
        ).expand(nodes.shape[:3])
        return self.score_layer(self.similarity_module(nodes, mask)).squeeze(-1).sigmoid()


class GlobalAttentionPooling(nn.Module):
    """Pool fragments with weights by their similarity to the mean.

    Args:
        dim: Dimensions of a fragment.
        dropout: Dropout of both inputs of the weights.
        num_regions: None for texts, 0 for images with any number of regions.

    Formula:
        $unit(sum_i softmax_i(w (tanh(A x_i) tanh(B mean))) x_i)$, with a batch norm before each
        tanh for images.
    """

    def __init__(self, dim: int, dropout: float, num_regions: int | None = None):
        super().__init__()
        self.local_projection = xavier_linear(dim, dim)
        self.global_projection = xavier_linear(dim, dim)
        self.attention = xavier_linear(dim, 1)
        self.local_norm: nn.Module = nn.Identity()
        self.global_norm: nn.Module = nn.Identity()
        if num_regions is not None:
            self.local_norm = nn.BatchNorm1d(num_regions) if num_regions else SharedBatchNorm(1)
            self.global_norm = nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        """Pool the fragments ``[N, L, D]`` to unit vectors ``[N, D]``."""
        local = self.local_projection(fragments)
        local = (
            self.local_norm(local, mask)
            if isinstance(self.local_norm, SharedBatchNorm)
            else self.local_norm(local)
        )
        local = self.dropout(local.tanh())
        # The mean of the valid fragments is the query of the attention.
        overall = self.dropout(
            self.global_norm(self.global_projection(mean_pool(fragments, mask))).tanh()
        )
        weights = (
            self.attention(local * overall[:, None])
            .squeeze(-1)
            .masked_fill(~mask, float("-inf"))
            .softmax(-1)
        )
        return l2_normalize((weights[..., None] * fragments).sum(1))


class SharedBatchNorm(nn.BatchNorm1d):
    """Batch norm with one mean and standard deviation for all valid positions."""

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        """Normalize the valid ones of fragments ``[N, L, D]``. The others are 0."""
        return torch.zeros_like(fragments).masked_scatter(
            mask[..., None], super().forward(fragments[mask][:, None])
        )


class GraphReasoning(nn.Module):
    """SGR: nodes exchange information in several steps.

    Args:
        dim: Dimensions of a node.
        steps: Number of steps.
    """

    def __init__(self, dim: int, steps: int):
        super().__init__()
        self.queries, self.keys, self.outputs = (
            nn.ModuleList(xavier_linear(dim, dim) for _ in range(steps)) for _ in range(3)
        )

    def forward(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """Return the first of the nodes ``[V, T, N, S]`` after the last step."""
        for query, key, output in zip(self.queries, self.keys, self.outputs, strict=True):
            # Shape [V, T, nodes, nodes].
            edges = query(nodes) @ key(nodes).transpose(-1, -2)
            edges = edges.masked_fill(~mask[..., None, :], float("-inf")).softmax(-1)
            nodes = output(edges @ nodes).relu()
        return nodes[:, :, 0]


class AttentionFiltration(nn.Module):
    """SAF: the mean of nodes by learned weights in (0, 1), at length 1.

    Args:
        dim: Dimensions of a node.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.weight = xavier_linear(dim, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """Pool the nodes ``[V, T, N, S]`` to unit vectors ``[V, T, S]``."""
        # Shape [V, T, nodes], 0 at padding.
        weights = (self.scale * self.weight(nodes).squeeze(-1) + self.shift).sigmoid() * mask
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
        return l2_normalize((weights[..., None, :] @ nodes).squeeze(-2))


def add_global_vectors(fragments: Encoded, pool: nn.Module) -> Encoded:
    """Join fragments ``[N, L, D]`` with the global vector of each item, ``[N, D]``."""
    mask = valid_mask(fragments)
    return Encoded(
        {"fragments": get_vectors(fragments), "global": pool(get_vectors(fragments), mask)},
        {"fragments": mask},
    )
