"""Cosines that are computed again for every use: memory is that of the vectors and one block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis.engine.items import Items, vectors
from visavis.engine.scores.base import Block, Gradients, NeedsGrad
from visavis.engine.scores.units import ROWS_AT_ONCE, CosineScores, Units
from visavis.errors import ShapeError


def cosine(images: Items, texts: Items) -> Tensor:
    """Cosine of every image with every text: ``[V, D], [T, D] -> [V, T]``; lengths are taken in float32 at least."""
    visual, textual = vectors(images), vectors(texts)
    if visual.shape[1] != textual.shape[1]:
        raise ShapeError(f"images are {visual.shape[1]} wide and texts {textual.shape[1]}: a cosine needs equal widths.")
    dtype = torch.promote_types(torch.promote_types(visual.dtype, textual.dtype), torch.float32)
    return normalize(visual.to(dtype), dim=-1) @ normalize(textual.to(dtype), dim=-1).T


class CosineBlocks(CosineScores):
    """Cosines, a product for each block; every gradient is multiplied out while its block is at hand."""

    def __init__(self, images: Items, texts: Items, scale: Tensor | float | None, needs_grad: NeedsGrad):
        super().__init__(images, texts, scale, needs_grad)
        self.room: dict[torch.dtype, Tensor] = {}

    def gradients(self) -> Gradients:
        return self.of_given()

    def fork(self) -> Self:
        scale_gradient = None if self.scale_gradient is None else torch.zeros_like(self.scale_gradient)
        return self._changed(units=[side.fork() for side in self.units], scale_gradient=scale_gradient)

    def score_block(self, rows: slice, columns: slice, *, pushed: bool) -> Block:
        asking, answering = self._asking_and_answering()
        queries, candidates = self.scaled(asking.factors[rows]), answering.factors[columns]
        scores = self._empty(len(queries), len(candidates), queries.dtype)
        torch.mm(queries, candidates.T, out=scores)
        if scores.dtype != self.dtype:
            scores = self._empty(len(queries), len(candidates), self.dtype).copy_(scores)
        return Block(scores, lambda gradient: self._multiply_out(rows, columns, gradient))

    def of_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        asking, answering = self._asking_and_answering()
        scores = torch.empty(len(query), dtype=self.dtype, device=asking.rows.device)
        for here, i, j in self._pairs_at_once(query, candidate):
            scores[here] = torch.linalg.vecdot(self.scaled(asking.factors[i]), answering.factors[j]).to(self.dtype)
        return scores

    def push_pairs(self, query: Tensor, candidate: Tensor, gradient: Tensor, blocks: Sequence[slice]) -> None:
        asking, answering = self._asking_and_answering()
        for here, i, j in self._pairs_at_once(query, candidate):
            weight, queries, candidates = gradient[here, None], asking.rows[i], answering.rows[j]
            if self.scale_gradient is not None:
                self.scale_gradient += (weight * queries * candidates).sum() * self.factor
            if asking.needs_grad:
                asking.total().index_add_(0, i, candidates.mul_(self.scaled(weight)))
            if answering.needs_grad:
                answering.total().index_add_(0, j, queries.mul_(self.scaled(weight)))

    def _asking_and_answering(self) -> tuple[Units, Units]:
        images, texts = self.units
        return (texts, images) if self.turned else (images, texts)

    def _multiply_out(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        asking, answering = self._asking_and_answering()
        gradient = gradient.to(asking.factors.dtype)
        if asking.needs_grad or self.scale_gradient is not None:
            pulled = torch.mm(gradient, answering.factors[columns]).to(self.dtype)
            if self.scale_gradient is not None:
                self.scale_gradient += torch.linalg.vecdot(pulled, asking.rows[rows]).sum() * self.factor
            if asking.needs_grad:
                asking.total()[rows] += self.scaled(pulled)
        if answering.needs_grad:
            queries = self.scaled(asking.factors[rows])
            if queries.dtype == self.dtype:
                answering.total()[columns].addmm_(gradient.T, queries)
            else:
                answering.total()[columns] += torch.mm(gradient.T, queries)

    def _pairs_at_once(self, query: Tensor, candidate: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, len(query), ROWS_AT_ONCE):
            here = slice(start, start + ROWS_AT_ONCE)
            yield here, query[here] + self.start, candidate[here]

    def _empty(self, height: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory that every block uses again: fresh pages cost as much as a product."""
        if dtype not in self.room or self.room[dtype].numel() < height * width:
            self.room[dtype] = self.units[0].rows.new_empty(height * width, dtype=dtype)
        return self.room[dtype].detach()[: height * width].view(height, width)
