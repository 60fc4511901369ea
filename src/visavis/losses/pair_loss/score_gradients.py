"""Gradients of a PairLoss at its scores and at its normalized vectors, computed in blocks of queries.

The backward pass of a training holds neither of them. Large batches have no score matrix, and the
gradient of normalized vectors is converted to that of the embeddings in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from visavis.core.blocking import Score
from visavis.core.process_group import ProcessGroup
from visavis.losses.logits import OptionalScalar
from visavis.losses.pair_loss.paths import CandidatePool
from visavis.losses.pair_loss.plan import ExecutionPlan
from visavis.losses.pair_loss.scores import (
    CosineScores,
    FunctionScores,
    InputGradients,
    ScoreBlock,
    Scores,
    cosine,
    reject_gradient,
)


class VectorGradients(NamedTuple):
    """Gradient of a loss with respect to the normalized vectors of one side.

    Attributes:
        normalized: The gradient, shape ``[N, D]``.
        tangent: Its component orthogonal to each vector, which normalization passes on.
    """

    normalized: Tensor
    tangent: Tensor


class ScoreGradients(NamedTuple):
    """Gradients of the loss of all ranks, for the queries and items of this rank.

    Attributes:
        query_norms: Norm of the gradient of each query's own terms with respect to its scores,
            before the reduction. Images ``[V]``, then texts ``[T]``.
        term_weights: Weight of these terms in the loss, for images and for texts as queries.
        vectors: Gradients of the normalized vectors of images and of texts. None for a score
            function.
    """

    query_norms: tuple[Tensor, Tensor]
    term_weights: tuple[float, float]
    vectors: tuple[VectorGradients, VectorGradients] | None


class ObservedScores(Scores):
    """Scores that keep the squared norm of the gradient of each query. Views share the sums.

    Attributes:
        query_squares: Squared norms of images, then of texts as queries of this rank.
        term_weights: Weight of a term of each direction, once both directions are complete.
    """

    query_squares: tuple[Tensor, Tensor]
    term_weights: list[float]
    observed_scale: float

    def observe(self, scale: float, num_queries: Sequence[int], device: torch.device) -> Self:
        """Prepare the sums, for scores with a scale and the queries of this rank."""
        images, texts = (
            torch.zeros(number, dtype=self.dtype, device=device) for number in num_queries
        )
        self.query_squares = images, texts
        self.term_weights = [1.0, 1.0]
        self.observed_scale = scale
        return self

    def _observed(self, block: ScoreBlock, rows: slice, *, passes_on: bool) -> ScoreBlock:
        squares = self.query_squares[self.is_transposed][rows]

        def accumulate(gradient: Tensor) -> None:
            squares.add_(gradient.square().sum(1))
            if passes_on:
                block.accumulate_grad(gradient)

        return block._replace(accumulate_grad=accumulate)

    def merge(self, other: Self, weights: Sequence[float]) -> InputGradients:
        """Add the weighted gradients, and keep the weights."""
        self.term_weights[:] = weights
        return super().merge(other, weights)

    def collect(
        self,
        gradients: InputGradients,
        pools: tuple[CandidatePool, CandidatePool],
        group: ProcessGroup,
    ) -> ScoreGradients:
        """Select the gradients of this rank, after all blocks."""
        # The gradient of a score before the scale has the scale as a factor.
        images, texts = (squares.sqrt() * self.observed_scale for squares in self.query_squares)
        weights = self.term_weights[0], self.term_weights[1]
        return ScoreGradients((images, texts), weights, self._vectors(gradients, pools, group))

    def _vectors(
        self,
        gradients: InputGradients,
        pools: tuple[CandidatePool, CandidatePool],
        group: ProcessGroup,
    ) -> tuple[VectorGradients, VectorGradients] | None:
        return None


class ObservedFunction(ObservedScores, FunctionScores):
    """Scores by a function, without gradients of the items.

    Attributes:
        matrix: Scores of all images with all texts, which both directions read. None: each block is
            scored when it is needed.
    """

    matrix: Tensor | None = None

    def score_block(self, rows: slice, columns: slice, *, with_grad: bool) -> ScoreBlock:
        """Score a block, or copy it from the matrix."""
        if self.matrix is None:
            return super().score_block(rows, columns, with_grad=with_grad)
        scores = (self.matrix.T if self.is_transposed else self.matrix)[rows, columns]
        return ScoreBlock(scores.clone(memory_format=torch.contiguous_format), reject_gradient)

    def block(
        self, rows: slice, columns: slice | None = None, *, with_grad: bool = True
    ) -> ScoreBlock:
        """Score some queries, whose gradient is observed."""
        return self._observed(super().block(rows, columns, with_grad=False), rows, passes_on=False)


class ObservedCosines(ObservedScores, CosineScores):
    """Cosines, with the gradient of normalized vectors instead of embeddings."""

    def block(
        self, rows: slice, columns: slice | None = None, *, with_grad: bool = True
    ) -> ScoreBlock:
        """Score some queries, whose gradient is observed and passed on to the vectors."""
        return self._observed(super().block(rows, columns, with_grad=True), rows, passes_on=True)

    def gradients(self) -> InputGradients:
        """Return the gradients of the normalized vectors."""
        images, texts = (side.gradient_buffer() for side in self.unit_vectors)
        return InputGradients([images], [texts], [])

    def _vectors(
        self,
        gradients: InputGradients,
        pools: tuple[CandidatePool, CandidatePool],
        group: ProcessGroup,
    ) -> tuple[VectorGradients, VectorGradients] | None:
        sides = list[VectorGradients]()
        for side, (total,), pool in zip(
            self.unit_vectors, (gradients.images, gradients.texts), pools, strict=True
        ):
            assert total is not None
            gradient = group.all_reduce_sum(total)[pool.query_rows]
            unit = side.unit_rows[pool.query_rows]
            radial = torch.linalg.vecdot(gradient, unit)[:, None] * unit
            sides.append(VectorGradients(gradient, gradient - radial))
        return sides[0], sides[1]


def observed_scores(
    score: Score,
    images: CandidatePool,
    texts: CandidatePool,
    scale: OptionalScalar,
    plan: ExecutionPlan,
) -> ObservedScores:
    """Make observed scores of the images and texts of all ranks."""
    inputs = images.items, texts.items, scale
    pools = images, texts
    scores: ObservedScores
    if score is cosine:
        scores = ObservedCosines(*inputs, ([True], [True]))
    else:
        images_need, texts_need = ([False] * len(pool.needs_grad) for pool in pools)
        scores = ObservedFunction(score, *inputs, (images_need, texts_need), plan.block_columns)
        num_items = (len(images.items), len(texts.items))
        image_limit = min(plan.block_rows[0], plan.block_columns[1])
        text_limit = min(plan.block_rows[1], plan.block_columns[0])
        # With several ranks, the matrix has more scores than both directions of one rank.
        is_one_rank = plan.num_queries == num_items
        if is_one_rank and image_limit >= num_items[0] and text_limit >= num_items[1]:
            # Score all images with all texts, once for both directions.
            image_rows, text_rows = (slice(0, number) for number in num_items)
            scores.matrix = scores.score_block(image_rows, text_rows, with_grad=False).scores
    num_queries = [pool.query_rows.stop - pool.query_rows.start for pool in pools]
    factor = 1.0 if scale is None else float(scale)
    return scores.observe(factor, num_queries, images.items.tensors[0].device)
