"""MMT: a transformer over the features of all experts at all times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.errors import ShapeError
from visavis.models.experts import Expert, ExpertMatcher
from visavis.models.pooling import max_pool
from visavis.spec import Count, Dropout, require


class MMT(ExpertMatcher):
    """MMT: multi-modal transformer; the features of all experts at all times attend to one another.

    Videos: each expert's features through a linear map to length 1, with an embedding of the expert and one of the place in time; before
    them one token an expert, the map of their maximum over time, whose state after ``layers`` of a transformer encoder is the expert's
    vector; and one token of its own.
    longest: the most features of an expert there may be (``visual.longest`` thins them).
    Texts and score: as every mixture of experts.
    Source: Gabeur et al., Multi-modal Transformer for Video Retrieval (2020), section 3.
    Differs from: the released code, whose embeddings of time are of the second that a feature was taken at, and whose settings for
    MSR-VTT give missing experts their share of the score; and all of whose weights begin at a deviation of 0.02, at which a narrow
    model does not begin to see order.
    """

    name = "MMT"

    @dataclass(frozen=True, kw_only=True)
    class Config(ExpertMatcher.Config):
        layers: Count = 4
        heads: Count = 4
        feedforward: Count = 3072
        attention_dropout: Dropout = 0.1
        longest: Count = 30

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.width % self.heads == 0, self, "heads", f"a divisor of the width, {self.width}")

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = ExpertTransformer(config)


class ExpertTransformer(nn.Module):
    """The experts of videos, one vector each: ``[N, E, width]``."""

    def __init__(self, config: MMT.Config):
        super().__init__()
        width, self.longest = config.width, config.longest
        self.projections = nn.ModuleList(nn.Linear(inputs, width) for inputs in config.experts.values())
        self.video = nn.Parameter(torch.zeros(width))
        self.experts = nn.Embedding(len(config.experts), width)
        self.times = nn.Embedding(1 + config.longest, width)  # 0: the whole
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(config.attention_dropout)
        layer = nn.TransformerEncoderLayer(
            width, config.heads, config.feedforward, config.attention_dropout, "gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        for embedding in (self.experts, self.times):
            nn.init.normal_(embedding.weight, std=width**-0.5)  # of length 1, as the features

    def forward(self, experts: Sequence[Expert]) -> Tensor:
        present = torch.stack([expert.present for expert in experts], 1)
        wholes, tokens, valid = list[Tensor](), list[Tensor](), list[Tensor]()
        for number, (project, expert) in enumerate(zip(self.projections, experts, strict=True)):
            features = expert.features
            if features.shape[1] > self.longest:
                raise ShapeError(
                    f"MMT was made for {self.longest} features of an expert in a row, found {features.shape[1]}: set visual.longest "
                    "(some of them, evenly spaced) or model.longest."
                )
            wholes.append(normalize(project(expert.pool(max_pool)), dim=-1) + self.experts.weight[number] + self.times.weight[0])
            tokens.append(normalize(project(features), dim=-1) + self.experts.weight[number] + self.times.weight[1 : 1 + features.shape[1]])
            valid.append(expert.mask)
        video = self.video.expand(len(present), 1, -1)
        states = self.dropout(self.norm(torch.cat([video, torch.stack(wholes, 1), *tokens], 1)))
        there = torch.cat([torch.ones_like(present[:, :1]), present, *valid], 1)
        encoded = self.encoder(states, src_key_padding_mask=~there)
        return normalize(encoded[:, 1 : 1 + len(experts)], dim=-1) * present[..., None]
