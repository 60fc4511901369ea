"""Cosines few enough to be kept: one product for both directions, one for each gradient, blocks that stay in cache between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from visavis.engine.items import Items
from visavis.engine.scores.base import Block, Gradients, NeedsGrad
from visavis.engine.scores.units import CosineScores


class KeptCosines(CosineScores):
    """The whole matrix, and a matrix of gradients that is multiplied out at the end."""

    def __init__(self, images: Items, texts: Items, scale: Tensor | float | None, needs_grad: NeedsGrad):
        super().__init__(images, texts, scale, needs_grad)
        visual, textual = (side.factors for side in self.units)
        self.matrix = torch.mm(self.scaled(visual), textual.T).to(self.dtype)
        self.total = torch.zeros_like(self.matrix)

    def gradients(self) -> Gradients:
        visual, textual = self.units
        total = self.total.to(visual.factors.dtype)
        if visual.needs_grad or self.scale_gradient is not None:
            visual.gradient = torch.mm(total, textual.factors).to(self.dtype)
            if self.scale_gradient is not None:
                self.scale_gradient += torch.linalg.vecdot(visual.gradient, visual.rows).sum()
            visual.gradient = self.scaled(visual.gradient)
        if textual.needs_grad:
            textual.gradient = torch.mm(total.T, self.scaled(visual.factors)).to(self.dtype)
        return self.of_given()

    def fork(self) -> Self:
        return self._changed(total=torch.zeros_like(self.total))

    def merge(self, other: Self, shares: Sequence[float]) -> Gradients:
        self.total.mul_(shares[0]).add_(other.total, alpha=shares[1])
        return self.gradients()

    def score_block(self, rows: slice, columns: slice, *, pushed: bool) -> Block:
        total = (self.total.T if self.turned else self.total)[rows, columns]

        def push(gradient: Tensor) -> None:
            total.add_(gradient)

        return Block((self.matrix.T if self.turned else self.matrix)[rows, columns].contiguous(), push)

    def of_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        return (self.matrix.T if self.turned else self.matrix)[query + self.start, candidate]
