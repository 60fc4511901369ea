"""MMT: a transformer over the features of all experts at all times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.core.encoded import unit_rows
from visavis.core.errors import ShapeError
from visavis.core.spec import DropoutRate, LayerCount, PositiveInt, require_field
from visavis.models.layers import max_pool
from visavis.models.video_text.expert_matcher import ExpertFeatures, ExpertMatcher


class MMT(ExpertMatcher):
    """MMT: multi-modal transformer. The features of all experts at all times attend to one another.

    Each expert's features go through a linear layer to length 1, plus an embedding of the expert
    and one of the time. The sequence starts with a video token and one aggregate token per expert,
    the projection of its maximum over time. The encoder's state of this token is the vector of the
    expert. Texts and score are those of every ``ExpertMatcher``.

    Args:
        config: The architecture.

    Source:
        Gabeur et al., Multi-modal Transformer for Video Retrieval (2020), section 3.

    Differs from:
        In the released code, missing experts count in the score of MSR-VTT, and all weights start
        at a standard deviation of 0.02, at which a narrow model does not start to use the order.
        The paper has further embeddings for aggregates and unknown times. In the code, and with
        ``time_unit="second"`` here, both have the embedding of the first second.
    """

    name = "MMT"

    @dataclass(frozen=True, kw_only=True)
    class Config(ExpertMatcher.Config):
        """Architecture of ``MMT``.

        Attributes:
            layers: Layers of the transformer.
            heads: Attention heads.
            feedforward_dim: Hidden dimensions of the feed-forward layers.
            attention_dropout: Dropout of the transformer.
            max_length: Maximum number of features per expert. ``visual.max_length`` samples longer
                ones.
            time_unit: Time of a feature: its position in the sequence, or its second in the video.
            max_seconds: Number of embeddings of seconds. Later features share the last one.
        """

        layers: LayerCount = 4
        heads: PositiveInt = 4
        feedforward_dim: PositiveInt = 3072
        attention_dropout: DropoutRate = 0.1
        max_length: PositiveInt = 30
        time_unit: Literal["position", "second"] = "position"
        max_seconds: PositiveInt = 32

        def __post_init__(self) -> None:
            super().__post_init__()
            require_field(
                self.embedding_dim % self.heads == 0,
                self,
                "heads",
                f"a divisor of embedding_dim, {self.embedding_dim}",
            )

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = ExpertTransformer(config)


class ExpertTransformer(nn.Module):
    """Encoder of videos with one vector per expert.

    Args:
        config: The architecture.
    """

    def __init__(self, config: MMT.Config):
        super().__init__()
        dim, self.max_length, self.reads_seconds = (
            config.embedding_dim,
            config.max_length,
            config.time_unit == "second",
        )
        self.projections = nn.ModuleList(
            nn.Linear(inputs, dim) for inputs in config.experts.values()
        )
        self.video_token = nn.Parameter(torch.zeros(dim))
        self.expert_embeddings = nn.Embedding(len(config.experts), dim)
        # 0: the aggregate token
        self.time_embeddings = nn.Embedding(
            config.max_seconds if self.reads_seconds else 1 + config.max_length, dim
        )
        self.norm, self.dropout = nn.LayerNorm(dim, eps=1e-12), nn.Dropout(config.attention_dropout)
        layer = nn.TransformerEncoderLayer(
            dim,
            config.heads,
            config.feedforward_dim,
            config.attention_dropout,
            "gelu",
            layer_norm_eps=1e-12,
            batch_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        # Length 1 on average, as the features.
        for embedding in (self.expert_embeddings, self.time_embeddings):
            nn.init.normal_(embedding.weight, std=dim**-0.5)

    def forward(self, experts: Sequence[ExpertFeatures]) -> Tensor:
        """Encode videos.

        Args:
            experts: Features of each expert, in the order of the config.

        Returns:
            Unit vectors, shape ``[N, E, embedding_dim]``, 0 where an expert is missing.

        Raises:
            ShapeError: If an expert has more than ``max_length`` features, or seconds are needed
                and no expert has them.
        """
        if self.reads_seconds and all(expert.seconds is None for expert in experts):
            raise ShapeError(
                "MMT: expected features with seconds for time_unit='second', got none. Convert "
                "published features with times, or set "
                "model.time_unit=position."
            )
        present = torch.stack([expert.present for expert in experts], 1)
        aggregates, tokens, masks = list[Tensor](), list[Tensor](), list[Tensor]()
        for index, (project, expert) in enumerate(zip(self.projections, experts, strict=True)):
            features = expert.features
            if features.shape[1] > self.max_length:
                raise ShapeError(
                    f"MMT: expected at most {self.max_length} features per expert, got "
                    f"{features.shape[1]}. Set visual.max_length to "
                    "sample them at equal intervals, or a larger model.max_length."
                )
            embedding = self.expert_embeddings.weight[index]
            aggregates.append(
                unit_rows(project(expert.pool(max_pool)))
                + embedding
                + self.time_embeddings.weight[0]
            )
            # Row 0 of the time embeddings is that of aggregates, and of unknown seconds.
            if not self.reads_seconds:
                times = torch.arange(1, 1 + features.shape[1], device=features.device)
            elif expert.seconds is None:
                times = torch.zeros_like(expert.mask, dtype=torch.long)
            else:
                times = expert.seconds.clamp(0, self.time_embeddings.num_embeddings - 1).long()
            tokens.append(unit_rows(project(features)) + embedding + self.time_embeddings(times))
            masks.append(expert.mask)
        video_token = self.video_token.expand(len(present), 1, -1)
        states = self.dropout(
            self.norm(torch.cat([video_token, torch.stack(aggregates, 1), *tokens], 1))
        )
        # The video token is always present: attention over nothing would be NaN.
        present_tokens = torch.cat([torch.ones_like(present[:, :1]), present, *masks], 1)
        encoded = self.encoder(states, src_key_padding_mask=~present_tokens)
        return unit_rows(encoded[:, 1 : 1 + len(experts)]) * present[..., None]
