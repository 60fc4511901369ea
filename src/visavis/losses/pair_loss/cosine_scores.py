"""Cosine scores, recomputed block by block or cached as one matrix.

Recomputed cosines need the memory of the embeddings and one block. Cached cosines need one product
for both directions and one for each gradient, and the blocks in between stay in the processor's
cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from visavis.core.encoded import Items, scaled_norms, unit_rows
from visavis.core.errors import ShapeError
from visavis.losses.objectives.base import MAX_HALF_SCALE
from visavis.losses.pair_loss.block_scores import (
    InputGradients,
    NeedsGrad,
    ScoreBlock,
    Scores,
    trainable,
)
from visavis.losses.pair_loss.encoded_items import embedding_matrix

ROWS_PER_CHUNK = 1024
"""Vectors of which a temporary copy is made at once."""


class UnitVectors:
    """The embeddings of one side, normalized, and the gradient of the normalized vectors.

    Args:
        embeddings: Embeddings of shape ``[N, D]``.
        dtype: Dtype of the normalized vectors and of sums.
        matmul_dtype: Dtype of products, the one of autocast where it is enabled.
        needs_grad: Whether the embeddings need a gradient.
    """

    def __init__(
        self, embeddings: Tensor, dtype: torch.dtype, matmul_dtype: torch.dtype, *, needs_grad: bool
    ):
        self.needs_grad = needs_grad
        rows, self.norm, self.factors = scaled_norms(embeddings.detach().to(dtype))
        self.unit_rows = rows / self.norm
        self.matmul_rows = self.unit_rows.to(matmul_dtype)
        self.gradient: Tensor | None = None

    def gradient_buffer(self) -> Tensor:
        """Return the gradient to add to.

        Returns:
            Gradient of the normalized vectors, shape ``[N, D]``.
        """
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.unit_rows)
        return self.gradient

    def fork(self) -> UnitVectors:
        """Make a copy without gradient.

        Returns:
            The copy, which shares the vectors.
        """
        other = copy(self)
        other.gradient = None
        return other

    def input_gradient(self) -> Tensor | None:
        """Convert the gradient of the normalized vectors to that of the embeddings, in place.

        Returns:
            The component orthogonal to the normalized vectors, divided by the norms. None if no
            gradient is needed.
        """
        if not self.needs_grad:
            return None
        for gradient, rows, norm in zip(
            *(
                part.split(ROWS_PER_CHUNK)
                for part in (self.gradient_buffer(), self.unit_rows, self.norm)
            ),
            strict=True,
        ):
            gradient.sub_(torch.linalg.vecdot(gradient, rows)[:, None] * rows).div_(norm)
        return (
            self.gradient_buffer()
            if self.factors is None
            else self.gradient_buffer().mul_(self.factors)
        )


def _embedding_pair(images: Items, texts: Items) -> tuple[Tensor, Tensor, torch.dtype]:
    """The embeddings of both sides, and the dtype of their cosines, at least float32."""
    visual, textual = embedding_matrix(images), embedding_matrix(texts)
    if visual.shape[1] != textual.shape[1]:
        raise ShapeError(
            f"cosine scores: expected embeddings of one dimension, got {visual.shape[1]} for "
            f"images and {textual.shape[1]} for texts."
        )
    return (
        visual,
        textual,
        torch.promote_types(torch.promote_types(visual.dtype, textual.dtype), torch.float32),
    )


def cosine(images: Items, texts: Items) -> Tensor:
    """Compute the cosine of every image with every text. Norms are computed in float32 or better.

    Args:
        images: Embeddings of shape ``[V, D]``.
        texts: Embeddings of shape ``[T, D]``.

    Returns:
        Cosines of shape ``[V, T]``.

    Raises:
        ShapeError: If an item is not one vector, or the dimensions differ.
    """
    visual, textual, dtype = _embedding_pair(images, texts)
    return unit_rows(visual.to(dtype)) @ unit_rows(textual.to(dtype)).T


class CosineScores(Scores):
    """Base class of cosine scores. Products run in the dtype of autocast where it is enabled, sums
    in float32 or better.

    Args:
        images: All images.
        texts: All texts.
        scale: Factor of the scores.
        needs_grad: Which tensors need a gradient.
    """

    is_cheap = True

    def __init__(
        self, images: Items, texts: Items, scale: Tensor | float | None, needs_grad: NeedsGrad
    ):
        visual, textual, self.dtype = _embedding_pair(images, texts)
        device = visual.device.type
        mixed = torch.is_autocast_enabled(device) and self.dtype == torch.float32
        matmul_dtype = torch.get_autocast_dtype(device) if mixed else self.dtype
        self.unit_vectors = [
            UnitVectors(side, self.dtype, matmul_dtype, needs_grad=parts[0])
            for side, parts in zip((visual, textual), needs_grad, strict=True)
        ]
        self.parameters = trainable(scale)
        self.scale = (
            None if scale is None else float(scale.detach() if isinstance(scale, Tensor) else scale)
        )
        self.scale_gradient = (
            torch.zeros((), dtype=self.dtype, device=visual.device) if self.parameters else None
        )

    def scaled_by(self, factor: float) -> Self:
        """Multiply all scores by a factor. Products that may not fit into float16 run in the dtype
        of sums.

        Args:
            factor: The factor.

        Returns:
            A view.
        """
        scaled = super().scaled_by(factor)
        if factor > MAX_HALF_SCALE:
            for side in self.unit_vectors:
                side.matmul_rows = side.unit_rows
        return scaled

    @property
    def num_items(self) -> tuple[int, int]:
        """Number of images and of texts."""
        return len(self.unit_vectors[0].unit_rows), len(self.unit_vectors[1].unit_rows)

    def gradients(self) -> InputGradients:
        """Convert gradients of normalized vectors to gradients of the embeddings."""
        visual, textual = (side.input_gradient() for side in self.unit_vectors)
        return InputGradients([visual], [textual], [self.scale_gradient] if self.parameters else [])

    def apply_scale(self, rows: Tensor) -> Tensor:
        """Multiply by the scale and the factor of the scores.

        Args:
            rows: Any tensor.

        Returns:
            The scaled tensor, or the tensor itself for a factor of 1.
        """
        return rows if self.total_factor == 1 else rows * self.total_factor

    @property
    def total_factor(self) -> float:
        """The scale times the factor of the scores."""
        return self.factor if self.scale is None else self.factor * self.scale


class RecomputedCosines(CosineScores):
    """Cosines with one product per block. Each gradient is propagated to the vectors while its
    block is in memory.

    Args:
        images: All images.
        texts: All texts.
        scale: Factor of the scores.
        needs_grad: Which tensors need a gradient.
    """

    def __init__(
        self, images: Items, texts: Items, scale: Tensor | float | None, needs_grad: NeedsGrad
    ):
        super().__init__(images, texts, scale, needs_grad)
        self.buffer_by_dtype: dict[torch.dtype, Tensor] = {}

    def fork(self) -> Self:
        scale_gradient = (
            None if self.scale_gradient is None else torch.zeros_like(self.scale_gradient)
        )
        return self._changed(
            unit_vectors=[side.fork() for side in self.unit_vectors], scale_gradient=scale_gradient
        )

    def score_block(self, rows: slice, columns: slice, *, with_grad: bool) -> ScoreBlock:
        query_side, candidate_side = self._query_and_candidate_side()
        queries, candidates = query_side.matmul_rows[rows], candidate_side.matmul_rows[columns]
        scores = self._buffer(len(queries), len(candidates), queries.dtype)
        if scores.dtype == self.dtype:
            torch.addmm(scores, queries, candidates.T, beta=0, alpha=self.total_factor, out=scores)
        else:
            torch.mm(self.apply_scale(queries), candidates.T, out=scores)
            scores = self._buffer(len(queries), len(candidates), self.dtype).copy_(scores)
        return ScoreBlock(scores, lambda gradient: self._accumulate(rows, columns, gradient))

    def score_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        query_side, candidate_side = self._query_and_candidate_side()
        scores = torch.empty(len(query), dtype=self.dtype, device=query_side.unit_rows.device)
        for pairs, i, j in self._chunk_pairs(query, candidate):
            scores[pairs] = torch.linalg.vecdot(
                self.apply_scale(query_side.matmul_rows[i]), candidate_side.matmul_rows[j]
            ).to(self.dtype)
        return scores

    def accumulate_pair_grads(
        self, query: Tensor, candidate: Tensor, pair_grads: Tensor, blocks: Sequence[slice]
    ) -> None:
        query_side, candidate_side = self._query_and_candidate_side()
        for pairs, i, j in self._chunk_pairs(query, candidate):
            weight, queries, candidates = (
                pair_grads[pairs, None],
                query_side.unit_rows[i],
                candidate_side.unit_rows[j],
            )
            if self.scale_gradient is not None:
                self.scale_gradient += (weight * queries * candidates).sum() * self.factor
            if query_side.needs_grad:
                query_side.gradient_buffer().index_add_(
                    0, i, candidates.mul_(self.apply_scale(weight))
                )
            if candidate_side.needs_grad:
                candidate_side.gradient_buffer().index_add_(
                    0, j, queries.mul_(self.apply_scale(weight))
                )

    def _query_and_candidate_side(self) -> tuple[UnitVectors, UnitVectors]:
        images, texts = self.unit_vectors
        return (texts, images) if self.is_transposed else (images, texts)

    def _accumulate(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        query_side, candidate_side = self._query_and_candidate_side()
        queries, candidates = query_side.matmul_rows[rows], candidate_side.matmul_rows[columns]
        is_exact = queries.dtype == self.dtype
        if not is_exact:
            gradient = self._buffer(len(queries), len(candidates), queries.dtype).copy_(gradient)
        if self.scale_gradient is not None:
            query_grad = torch.mm(gradient, candidates).to(self.dtype)
            self.scale_gradient += (
                torch.linalg.vecdot(query_grad, query_side.unit_rows[rows]).sum() * self.factor
            )
            if query_side.needs_grad:
                query_side.gradient_buffer()[rows].add_(query_grad, alpha=self.total_factor)
        elif query_side.needs_grad:
            self._add_product(query_side.gradient_buffer()[rows], gradient, candidates)
        if candidate_side.needs_grad:
            self._add_product(candidate_side.gradient_buffer()[columns], gradient.T, queries)

    def _add_product(self, total: Tensor, gradient: Tensor, vectors: Tensor) -> None:
        """Add the product of the gradient of scores with vectors, times the factor of the scores."""
        if vectors.dtype == total.dtype:
            total.addmm_(gradient, vectors, alpha=self.total_factor)
        else:
            total.add_(torch.mm(gradient, vectors), alpha=self.total_factor)

    def _chunk_pairs(
        self, query: Tensor, candidate: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, len(query), ROWS_PER_CHUNK):
            pairs = slice(start, start + ROWS_PER_CHUNK)
            yield pairs, query[pairs] + self.query_offset, candidate[pairs]

    def _buffer(self, height: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory that all blocks share. Fresh memory pages would cost as much time as a product."""
        if (
            dtype not in self.buffer_by_dtype
            or self.buffer_by_dtype[dtype].numel() < height * width
        ):
            self.buffer_by_dtype[dtype] = self.unit_vectors[0].unit_rows.new_empty(
                height * width, dtype=dtype
            )
        return self.buffer_by_dtype[dtype].detach()[: height * width].view(height, width)


class CachedCosines(CosineScores):
    """Cosines as one cached matrix, with a matrix of gradients that is propagated to the vectors at
    the end.

    Args:
        images: All images.
        texts: All texts.
        scale: Factor of the scores.
        needs_grad: Which tensors need a gradient.
    """

    def __init__(
        self, images: Items, texts: Items, scale: Tensor | float | None, needs_grad: NeedsGrad
    ):
        super().__init__(images, texts, scale, needs_grad)
        visual, textual = (side.matmul_rows for side in self.unit_vectors)
        self.matrix = torch.mm(self.apply_scale(visual), textual.T).to(self.dtype)
        has_gradient = self.parameters or any(map(any, needs_grad))
        self.score_grads = torch.zeros_like(self.matrix if has_gradient else self.matrix[:0])

    def gradients(self) -> InputGradients:
        visual, textual = self.unit_vectors
        total = self.score_grads.to(visual.matmul_rows.dtype)
        if visual.needs_grad or self.scale_gradient is not None:
            visual.gradient = torch.mm(total, textual.matmul_rows).to(self.dtype)
            if self.scale_gradient is not None:
                self.scale_gradient += torch.linalg.vecdot(visual.gradient, visual.unit_rows).sum()
            visual.gradient = self.apply_scale(visual.gradient)
        if textual.needs_grad:
            textual.gradient = torch.mm(total.T, self.apply_scale(visual.matmul_rows)).to(
                self.dtype
            )
        return super().gradients()

    def fork(self) -> Self:
        return self._changed(score_grads=torch.zeros_like(self.score_grads))

    def merge(self, other: Self, weights: Sequence[float]) -> InputGradients:
        self.score_grads.mul_(weights[0]).add_(other.score_grads, alpha=weights[1])
        return self.gradients()

    def score_block(self, rows: slice, columns: slice, *, with_grad: bool) -> ScoreBlock:
        total = (self.score_grads.T if self.is_transposed else self.score_grads)[rows, columns]

        def accumulate(gradient: Tensor) -> None:
            total.add_(gradient)

        return ScoreBlock(
            (self.matrix.T if self.is_transposed else self.matrix)[rows, columns].contiguous(),
            accumulate,
        )

    def score_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        return (self.matrix.T if self.is_transposed else self.matrix)[
            query + self.query_offset, candidate
        ]
