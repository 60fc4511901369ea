"""Maps of vectors that several matchers are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm


def head(inputs: int, outputs: int, *, depth: int, hidden: int, dropout: float, input_dropout: float) -> nn.Sequential:
    """The layers of one tower on one vector an item: ``depth`` hidden ones, and a linear map."""
    layers: list[nn.Module] = [nn.Dropout(input_dropout)] if input_dropout else []
    for _ in range(depth):
        layers += [nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout)]
        inputs = hidden
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def linear(inputs: int, outputs: int, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """A linear map as the VSE family starts it: uniform by Glorot's bound, bias 0."""
    layer = kind(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def keep_statistics(module: nn.Module) -> None:
    """Batch norms go on with the statistics that they came with, also in training."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()


class ResidualMap(nn.Module):
    """``Linear(x) + MLP(x)`` on every region or word, the MLP with one hidden layer of half the width, batch norm and ReLU.

    Shapes: ``[N, L, inputs] -> [N, L, outputs]``. Source: Chen et al. (2021), section 4, for features of frozen encoders.
    """

    def __init__(self, inputs: int, outputs: int, dropout: float):
        super().__init__()
        self.linear = linear(inputs, outputs)
        hidden = max(1, outputs // 2)
        self.mlp = nn.Sequential(
            nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, outputs)
        )

    def forward(self, items: Tensor) -> Tensor:
        flat = items.flatten(0, 1)
        return (self.linear(flat) + self.mlp(flat)).unflatten(0, items.shape[:2])


class PresentBatchNorm(nn.BatchNorm1d):
    """Batch norm over the vectors that are there: ``[..., D]``, present ``[...]`` (None: all).

    In training the mean and variance are those of the present vectors; of fewer than two, those learned so far.
    """

    def forward(self, items: Tensor, present: Tensor | None = None) -> Tensor:
        rows = items.flatten(0, -2) if present is None else items[present]
        if not self.training or len(rows) < 2:
            return batch_norm(items.flatten(0, -2), self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps).view_as(
                items
            )
        normed = super().forward(rows)
        return (
            normed.view_as(items)
            if present is None
            else torch.zeros_like(items, dtype=normed.dtype).masked_scatter(present[..., None], normed)
        )
