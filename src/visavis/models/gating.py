"""Gates: vectors that weaken or pass their own dimensions, by themselves or by what other experts hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.models.layers import PresentBatchNorm


class GatedEmbedding(nn.Module):
    """A gated embedding unit: a linear map whose result gates itself. ``[N, inputs] -> [N, width]``, rows at length 1.

    Formula: ``unit(y * sigmoid(BN(W2 y + b2)))`` with ``y = W1 x + b1``.
    Source: Miech et al., Learning a Text-Video Embedding from Incomplete and Heterogeneous Data (2018), section 3.1.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.linear, self.gate, self.norm = nn.Linear(inputs, width), nn.Linear(width, width), PresentBatchNorm(width)

    def forward(self, items: Tensor) -> Tensor:
        mapped = self.linear(items)
        return normalize(mapped * self.norm(self.gate(mapped)).sigmoid(), dim=-1)


class CollaborativeGating(nn.Module):
    """Each expert of a video gated by itself and by what it has to do with every other one that is there.

    Formula: ``unit(x_i * sigmoid(BN(h(mean_j g(x_i, x_j))) + BN(W_i x_i)))`` over the other experts j present; g and h have one hidden
    layer with ReLU, and are common to all experts. Without another expert the mean is 0.
    Shapes: experts ``[N, E, D]``, present ``[N, E]`` -> ``[N, E, D]``; 0 where an expert is missing.
    Source: Liu et al., Use What You Have: Video Retrieval Using Representations From Collaborative Experts (2019), section 3.2.
    Differs from: the paper, which sums over the others (the released code takes their mean, as here); and the released code, in which
    an expert meets those before it in the list as they are after their own gating.
    """

    def __init__(self, experts: int, width: int):
        super().__init__()
        self.own, self.other = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.relation = nn.Linear(width, width)
        self.attention = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.gate_norms = nn.ModuleList(PresentBatchNorm(width) for _ in range(experts))
        self.attention_norms = nn.ModuleList(PresentBatchNorm(width) for _ in range(experts))

    def forward(self, experts: Tensor, present: Tensor) -> Tensor:
        attention = self.attention(self._relations(experts, present))
        gated = [
            experts[:, i] * (attention_norm(attention[:, i], present[:, i]) + gate_norm(gate(experts[:, i]), present[:, i])).sigmoid()
            for i, (gate, gate_norm, attention_norm) in enumerate(zip(self.gates, self.gate_norms, self.attention_norms, strict=True))
        ]
        return normalize(torch.stack(gated, 1), dim=-1) * present[..., None]

    def _relations(self, experts: Tensor, present: Tensor) -> Tensor:
        """``mean_j g(x_i, x_j)`` ``[N, E, D]``: the map of the concatenation is the sum of two maps, the mean of maps the map of the mean."""
        itself = torch.eye(experts.shape[1], dtype=torch.bool, device=experts.device)
        others = (present[:, None, :] & ~itself)[..., None]
        hidden = ((self.own(experts)[:, :, None] + self.other(experts)[:, None]).relu() * others).sum(2)
        count = others.sum(2)
        return self.relation(hidden / count.clamp_min(1)) * (count > 0)
