"""CE: collaborative experts, each with a vector of its own that the others gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.models.experts import Expert, ExpertMatcher
from visavis.models.gating import CollaborativeGating
from visavis.models.net_vlad import NetVLAD
from visavis.models.pooling import mean_pool
from visavis.spec import Count, require


class CE(ExpertMatcher):
    """CE: collaborative experts; features averaged over time, or by NetVLAD, and gated by what the other experts hold.

    Videos: each expert is the mean of its features, or NetVLAD with as many clusters as ``clusters`` gives it by name, then a linear
    map to length 1, then ``CollaborativeGating``. Blind to the order of frames. Texts and score: as every mixture of experts.
    Source: Liu et al., Use What You Have: Video Retrieval Using Representations From Collaborative Experts (2019).
    Differs from: the released code, which averages the scores of a training video's captions before the loss, where it draws several.
    """

    name = "CE"

    @dataclass(frozen=True, kw_only=True)
    class Config(ExpertMatcher.Config):
        word_pool: Literal["vlad", "first", "last", "max", "mean"] = "vlad"
        clusters: dict[str, Count] = field(default_factory=dict)

        def __post_init__(self) -> None:
            super().__post_init__()
            require(set(self.clusters) <= set(self.experts), self, "clusters", f"names among {', '.join(self.experts)}")

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = CollaborativeExperts(config)


class CollaborativeExperts(nn.Module):
    """The experts of videos, one vector each, gated by one another: ``[N, E, width]``."""

    def __init__(self, config: CE.Config):
        super().__init__()
        self.clusters = nn.ModuleDict(
            {
                str(i): NetVLAD(width, config.clusters[name])
                for i, (name, width) in enumerate(config.experts.items())
                if name in config.clusters
            }
        )
        widths = [width * config.clusters.get(name, 1) for name, width in config.experts.items()]
        self.projections = nn.ModuleList(nn.Linear(width, config.width) for width in widths)
        self.gating = CollaborativeGating(len(widths), config.width)

    def forward(self, experts: Sequence[Expert]) -> Tensor:
        projected = [normalize(project(self._pooled(i, experts[i])), dim=-1) for i, project in enumerate(self.projections)]
        gated: Tensor = self.gating(torch.stack(projected, 1), torch.stack([expert.present for expert in experts], 1))
        return gated

    def _pooled(self, i: int, expert: Expert) -> Tensor:
        if (clusters := str(i)) in self.clusters:
            return self.clusters[clusters](expert.features, expert.mask)
        return expert.pool(mean_pool)
