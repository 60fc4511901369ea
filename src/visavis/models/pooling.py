"""From regions or words to one vector: mean, max, last, and the generalised pooling operator."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

LEFT_OUT = -1e4


def max_pool(items: Tensor, mask: Tensor | None) -> Tensor:
    """The largest value of each dimension over the valid positions: ``[N, L, D] -> [N, D]``."""
    return items.max(1).values if mask is None else items.masked_fill(~mask[..., None], float("-inf")).max(1).values


def mean_pool(items: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the valid positions: ``[N, L, D] -> [N, D]``."""
    if mask is None:
        return items.mean(1)
    weight = mask[..., None].to(items.dtype)
    return (items * weight).sum(1) / weight.sum(1)


class GeneralizedPooling(nn.Module):
    """Generalised pooling operator: a learned mixture of each dimension's values, from largest to smallest.

    Formula: ``v_d = sum_k w_k sort(x_.d)_k`` with w = softmax(f(positions 1..L) / temperature) over the L valid values;
    f is a bidirectional GRU over sinusoidal positions, its directions averaged, and one linear map. w depends on L alone.
    Shapes: items ``[N, L, D]``, mask ``[N, L]`` -> ``[N, D]``.
    Source: Chen et al., Learning the Best Pooling Strategy for Visual Semantic Embedding (2021), section 3.
    Special cases: w = (1, 0, ...) is max pooling, w = 1/L mean pooling.
    """

    def __init__(self, position_width: int = 32, hidden_width: int = 32, temperature: float = 0.1):
        super().__init__()
        self.position_width, self.temperature = position_width, temperature
        self.gru = nn.GRU(position_width, hidden_width, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(hidden_width, 1, bias=False)

    def forward(self, items: Tensor, mask: Tensor | None = None) -> Tensor:
        by_value = items.transpose(1, 2).contiguous()
        if mask is None:
            lengths = torch.tensor([items.shape[1]], device=items.device)
            kind = torch.zeros(len(items), dtype=torch.long, device=items.device)
        else:
            lengths, kind = mask.sum(1).unique(return_inverse=True)
            by_value = by_value.masked_fill(~mask[:, None, :], LEFT_OUT)
        weights = self.weights(lengths, items.shape[1])[kind].to(items.dtype)
        return torch.einsum("ndl,nl->nd", ascending(by_value), weights.flip(-1))

    def shares(self, items: Tensor, mask: Tensor | None = None) -> Tensor:
        """What each position gives to what is pooled ``[N, L, D]``; their sum over L is that."""
        valid = torch.ones(items.shape[:2], dtype=torch.bool, device=items.device) if mask is None else mask
        places = items.masked_fill(~valid[..., None], LEFT_OUT).argsort(dim=1, descending=True, stable=True).argsort(1)
        weights = self.weights(valid.sum(1), items.shape[1]).to(items.dtype)
        return weights[..., None].expand_as(items).gather(1, places) * items

    def weights(self, lengths: Tensor, longest: int) -> Tensor:
        """The weights for sets of the given sizes ``[K]``: ``[K, longest]``, rows sum to 1, 0 beyond a set's size."""
        positions = sinusoids(longest, self.position_width, lengths.device).to(self.linear.weight.dtype).expand(len(lengths), -1, -1)
        packed = nn.utils.rnn.pack_padded_sequence(positions, lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=longest)
        forth, back = hidden.chunk(2, -1)
        logits = self.linear((forth + back) / 2).squeeze(-1)
        valid = torch.arange(longest, device=lengths.device) < lengths[:, None]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (logits / self.temperature).masked_fill(~valid, float("-inf")).softmax(-1)


def ascending(values: Tensor) -> Tensor:
    """Every row of the last axis from smallest to largest; on a CPU by numpy, which sorts short rows many times faster."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    given = values.detach() if values.dtype.itemsize >= 4 else values.detach().float()
    if not values.requires_grad:
        return torch.from_numpy(np.sort(given.numpy(), -1)).to(values.dtype)
    return values.gather(-1, torch.from_numpy(np.argsort(given.numpy(), -1)))


def sinusoids(length: int, width: int, device: torch.device | None = None) -> Tensor:
    """Sinusoidal positions ``[length, width]``: sine in even, cosine in odd dimensions."""
    position = torch.arange(length, device=device, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, device=device, dtype=torch.float32) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width, device=device)
    table[:, 0::2], table[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
    return table
