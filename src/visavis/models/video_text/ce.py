"""CE: collaborative experts, with a vector per expert that the other experts gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.core.encoded import unit_rows
from visavis.core.spec import PositiveInt, require_field
from visavis.models.layers import mean_pool
from visavis.models.video_text.expert_matcher import (
    CollaborativeGating,
    ExpertFeatures,
    ExpertMatcher,
    NetVLAD,
)


class CE(ExpertMatcher):
    """CE: collaborative experts. Features are averaged over time, or pooled by NetVLAD, and gated
    by the other experts.

    Each expert goes through a linear layer to length 1, then through ``CollaborativeGating``. The
    order of frames has no effect. Texts and score are those of every ``ExpertMatcher``.

    Args:
        config: The architecture.

    Source:
        Liu et al., Use What You Have: Video Retrieval Using Representations From Collaborative
        Experts (2019).

    Differs from:
        The released code averages the scores of a training video's captions before the loss, where
        it samples several captions.
    """

    name = "CE"

    @dataclass(frozen=True, kw_only=True)
    class Config(ExpertMatcher.Config):
        """Architecture of ``CE``.

        Attributes:
            word_pool: Pooling of words.
            netvlad_clusters: Number of NetVLAD clusters, by the name of an expert. Other experts
                are averaged over time.
        """

        word_pool: Literal["vlad", "first", "last", "max", "mean"] = "vlad"
        netvlad_clusters: dict[str, PositiveInt] = field(default_factory=dict)

        def __post_init__(self) -> None:
            super().__post_init__()
            require_field(
                set(self.netvlad_clusters) <= set(self.experts),
                self,
                "netvlad_clusters",
                f"names among {', '.join(self.experts)}",
            )

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = CollaborativeExpertEncoder(config)


class CollaborativeExpertEncoder(nn.Module):
    """Encoder of videos with one vector per expert, gated by one another.

    Args:
        config: The architecture.
    """

    def __init__(self, config: CE.Config):
        super().__init__()
        clusters = config.netvlad_clusters
        self.netvlads = nn.ModuleDict(
            {
                # Keys are numbers, because a name of an expert may have a dot, which a module name
                # may not.
                str(i): NetVLAD(dim, clusters[name])
                for i, (name, dim) in enumerate(config.experts.items())
                if name in clusters
            }
        )
        pooled_dims = [dim * clusters.get(name, 1) for name, dim in config.experts.items()]
        self.projections = nn.ModuleList(
            nn.Linear(dim, config.embedding_dim) for dim in pooled_dims
        )
        self.gating = CollaborativeGating(len(pooled_dims), config.embedding_dim)

    def forward(self, experts: Sequence[ExpertFeatures]) -> Tensor:
        """Encode videos.

        Args:
            experts: Features of each expert, in the order of the config.

        Returns:
            Unit vectors, shape ``[N, E, embedding_dim]``, 0 where an expert is missing.
        """
        pooled = [
            self.netvlads[str(i)](expert.features, expert.mask)
            if str(i) in self.netvlads
            else expert.pool(mean_pool)
            for i, expert in enumerate(experts)
        ]
        projected = [
            unit_rows(project(vectors))
            for project, vectors in zip(self.projections, pooled, strict=True)
        ]
        gated: Tensor = self.gating(
            torch.stack(projected, 1), torch.stack([expert.present for expert in experts], 1)
        )
        return gated
