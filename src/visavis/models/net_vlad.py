"""NetVLAD: any number of vectors as one, by their residuals to learned clusters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.models.layers import PresentBatchNorm


class NetVLAD(nn.Module):
    """The sums of residuals of vectors to learned centers, softly assigned; blind to the order of the vectors.

    Formula: ``V_k = unit(sum_l a_lk (x_l - c_k))`` with ``a_l. = softmax(BN(x_l W))``; all V_k in a row, at length 1 again.
    Shapes: items ``[N, L, D]``, mask ``[N, L]`` (None: all valid) -> ``[N, clusters D]``; 0 where nothing is valid.
    Source: Arandjelović et al. (2016); with batch norm, Miech et al., Learnable pooling with context gating (2017).
    Differs from: released codes, in which padding is assigned to clusters and enters the batch's statistics; here it does neither.
    """

    def __init__(self, width: int, clusters: int):
        super().__init__()
        self.assign = nn.Linear(width, clusters, bias=False)
        self.centers = nn.Parameter(torch.empty(clusters, width))
        self.norm = PresentBatchNorm(clusters)
        self.out_width = clusters * width
        nn.init.normal_(self.assign.weight, std=width**-0.5)
        nn.init.normal_(self.centers, std=width**-0.5)

    def forward(self, items: Tensor, mask: Tensor | None = None) -> Tensor:
        present = torch.ones(items.shape[:2], dtype=torch.bool, device=items.device) if mask is None else mask
        shares = self.norm(self.assign(items), present).softmax(-1) * present[..., None]
        sums = shares.transpose(1, 2) @ items.masked_fill(~present[..., None], 0.0)
        residuals = sums - shares.sum(1)[..., None] * self.centers
        return normalize(normalize(residuals, dim=-1).flatten(1), dim=-1)
