"""Scores of a PairLoss in blocks off the graph: cosines, or any score function.

``accumulate_grad`` of a block takes dL/d(block) while its scores are in memory and adds the
gradients of the inputs. ``gradients`` returns the sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import reduce
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from visavis.core.blocking import (
    Score,
    checked_scores,
    detached_leaves,
    fork_random_numbers,
    graph_leaves,
    has_random_numbers,
)
from visavis.core.encoded import Encoded, Items, scaled_norms, unit_rows
from visavis.core.errors import ShapeError
from visavis.losses.logits import promote_half
from visavis.losses.objective import MAX_HALF_SCALE
from visavis.losses.pair_loss.batch_items import embedding_matrix

NeedsGrad = tuple[list[bool], list[bool]]
"""Which floating-point tensors of images, and which of texts, need a gradient."""


class ScoreBlock(NamedTuple):
    """A block of scores.

    Attributes:
        scores: Scores of shape ``[R, C]``, at least float32. They may be overwritten.
        accumulate_grad: Takes the gradient of the scores and adds the gradients of the inputs.
    """

    scores: Tensor
    accumulate_grad: Callable[[Tensor], None]


class InputGradients(NamedTuple):
    """Gradients of the inputs of scores. None where no gradient is needed.

    Attributes:
        images: Gradients of the floating-point tensors of the images.
        texts: Gradients of the floating-point tensors of the texts.
        parameters: Gradients of the parameters of the scores.
    """

    images: list[Tensor | None]
    texts: list[Tensor | None]
    parameters: list[Tensor | None]


class Scores(ABC):
    """Scores of queries against candidates in blocks of queries. Images are the queries unless
    transposed.

    ``T``, ``window`` and ``scaled_by`` return views that add to the same gradients. ``fork``
    returns a copy with its own gradients, and ``merge`` adds the weighted gradients of both.

    Attributes:
        dtype: Dtype of sums of scores.
        parameters: Tensors that the scores read next to the items.
        is_cheap: Whether a block costs only the memory of its scores, so that many blocks can be
            cached.
        factor: Factor of every score.
        is_transposed: Whether texts are the queries.
        query_window: Items of the query side that are queries. None: all.
    """

    dtype: torch.dtype
    parameters: list[Tensor]
    is_cheap: bool = False
    factor: float = 1.0
    is_transposed: bool = False
    query_window: slice | None = None

    @property
    @abstractmethod
    def num_items(self) -> tuple[int, int]:
        """Number of images and of texts."""

    @abstractmethod
    def gradients(self) -> InputGradients:
        """Return the accumulated gradients. Call it once, after all blocks."""

    @abstractmethod
    def fork(self) -> Self:
        """Make the same scores with their own gradients, still 0."""

    def merge(self, other: Self, weights: Sequence[float]) -> InputGradients:
        """Add the weighted gradients of these scores and of a fork, in place."""
        own = self.gradients()
        for totals, forked in zip(own, other.gradients(), strict=True):
            for total, gradient in zip(totals, forked, strict=True):
                if total is not None and gradient is not None:
                    total.mul_(weights[0]).add_(gradient, alpha=weights[1])
        return own

    @abstractmethod
    def score_block(self, rows: slice, columns: slice, *, with_grad: bool) -> ScoreBlock:
        """Score some items of the query side against some items of the candidate side. Without
        ``with_grad``, ``accumulate_grad`` of the block must not be called.
        """

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and of candidates."""
        images, texts = self.num_items
        num_queries, num_candidates = (texts, images) if self.is_transposed else (images, texts)
        if self.query_window is not None:
            num_queries = self.query_window.stop - self.query_window.start
        return num_queries, num_candidates

    @property
    def T(self) -> Self:
        """The scores with queries and candidates exchanged."""
        return self._changed(is_transposed=not self.is_transposed, query_window=None)

    def window(self, queries: slice) -> Self:
        """A view whose queries are some items of their side."""
        return self._changed(query_window=queries)

    def scaled_by(self, factor: float) -> Self:
        """A view with all scores multiplied by a factor."""
        return self._changed(factor=self.factor * factor)

    def block(
        self, rows: slice, columns: slice | None = None, *, with_grad: bool = True
    ) -> ScoreBlock:
        """Score some queries against all candidates, or against ``columns``."""
        rows = slice(rows.start + self.query_offset, rows.stop + self.query_offset)
        return self.score_block(
            rows, slice(0, self.shape[1]) if columns is None else columns, with_grad=with_grad
        )

    @property
    def query_offset(self) -> int:
        """Position of the first query among the items of its side."""
        return 0 if self.query_window is None else self.query_window.start

    def score_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        """Score single pairs ``[P]``, ascending by query, without gradient."""
        by_block = [
            self.block(rows, with_grad=False).scores.detach()[
                query[pairs] - rows.start, candidate[pairs]
            ]
            for rows, pairs in _pairs_by_block(query, blocks)
        ]
        return torch.cat(by_block) if by_block else query.new_zeros(0, dtype=self.dtype)

    def accumulate_pair_grads(
        self, query: Tensor, candidate: Tensor, pair_grads: Tensor, blocks: Sequence[slice]
    ) -> None:
        """Accumulate the gradient of single pairs ``[P]``. The gradient of all other pairs is 0."""
        for rows, pairs in _pairs_by_block(query, blocks):
            if len(pairs):
                block = self.block(rows)
                positions = (query[pairs] - rows.start, candidate[pairs])
                block.accumulate_grad(
                    torch.zeros_like(block.scores).index_put_(
                        positions, pair_grads[pairs], accumulate=True
                    )
                )
                # Free the block before the next one is scored.
                del block

    def _changed(self, **fields: Any) -> Self:
        changed = copy(self)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed


def trainable(scalar: Tensor | float | None) -> list[Tensor]:
    """List the scale or bias of scores if it needs a gradient."""
    return (
        [scalar]
        if isinstance(scalar, Tensor) and scalar.requires_grad and torch.is_grad_enabled()
        else []
    )


def _pairs_by_block(query: Tensor, blocks: Sequence[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Each block of queries with the indices of its pairs."""
    for rows in blocks:
        yield rows, ((query >= rows.start) & (query < rows.stop)).nonzero()[:, 0]


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
        """Return the gradient to add to, ``[N, D]``."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.unit_rows)
        return self.gradient

    def fork(self) -> UnitVectors:
        """Make a copy without gradient, which shares the vectors."""
        other = copy(self)
        other.gradient = None
        return other

    def input_gradient(self) -> Tensor | None:
        """Convert the gradient of normalized vectors to the gradient of embeddings, in place."""
        if not self.needs_grad:
            return None
        # The component orthogonal to the normalized vectors, divided by the norms.
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
    visual = embedding_matrix(images)
    textual = embedding_matrix(texts)
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
    visual = visual.to(dtype)
    textual = textual.to(dtype)
    # One node of the graph instead of five saves a third of the time for 64 pairs. Autocast, a
    # compiler and function transforms need the single operations.
    if not (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled(visual.device.type)
        or torch._C._are_functorch_transforms_active()
        or not (visual.requires_grad or textual.requires_grad)
    ):
        return _CosineMatrix.apply(visual, textual)
    return unit_rows(visual) @ unit_rows(textual).T


class _CosineMatrix(torch.autograd.Function):
    """Cosines whose gradient is that of normalized vectors, without its component along them."""

    @staticmethod
    def forward(ctx: Any, visual: Tensor, textual: Tensor) -> Tensor:
        sides = [scaled_norms(rows) for rows in (visual, textual)]
        visual_rows, textual_rows = (rows / norms for rows, norms, _ in sides)
        norms = [norms if factors is None else norms / factors for _, norms, factors in sides]
        ctx.save_for_backward(visual, textual, visual_rows, textual_rows, *norms)
        return visual_rows @ textual_rows.T

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        visual, textual, visual_rows, textual_rows, *norms = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For second derivatives: the same gradient with its own graph.
            cosines = unit_rows(visual) @ unit_rows(textual).T
            inputs = [side for side in (visual, textual) if side.requires_grad]
            graphs = iter(torch.autograd.grad(cosines, inputs, upstream[0], create_graph=True))
            return tuple(next(graphs) if needed else None for needed in ctx.needs_input_grad)
        gradients = upstream[0] @ textual_rows, upstream[0].T @ visual_rows
        return tuple(
            gradient.addcmul_(torch.linalg.vecdot(gradient, rows)[:, None], rows, value=-1).div_(
                norm
            )
            if needed
            else None
            for gradient, rows, norm, needed in zip(
                gradients, (visual_rows, textual_rows), norms, ctx.needs_input_grad, strict=True
            )
        )


class CosineScores(Scores):
    """Cosines with one product per block. Each gradient is propagated to the vectors while its
    block is in memory. Products run in the dtype of autocast where it is enabled, sums in float32 or
    better.

    Args:
        images: All images.
        texts: All texts.
        scale: Factor of the scores.
        needs_grad: Which tensors need a gradient.
    """

    is_cheap = True

    def __init__(
        self, images: Encoded, texts: Encoded, scale: Tensor | float | None, needs_grad: NeedsGrad
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
        self.buffer_by_dtype: dict[torch.dtype, Tensor] = {}

    def scaled_by(self, factor: float) -> Self:
        """Multiply all scores by a factor. Products that may not fit into float16 run in the dtype
        of sums.
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
        """Multiply by the scale and the factor of the scores."""
        return rows if self.total_factor == 1 else rows * self.total_factor

    @property
    def total_factor(self) -> float:
        """The scale times the factor of the scores."""
        return self.factor if self.scale is None else self.factor * self.scale

    def fork(self) -> Self:
        scale_gradient = (
            None if self.scale_gradient is None else torch.zeros_like(self.scale_gradient)
        )
        return self._changed(
            unit_vectors=[side.fork() for side in self.unit_vectors], scale_gradient=scale_gradient
        )

    def score_block(self, rows: slice, columns: slice, *, with_grad: bool) -> ScoreBlock:
        query_side, candidate_side = self._query_and_candidate_side()
        queries = query_side.matmul_rows[rows]
        candidates = candidate_side.matmul_rows[columns]
        scores = self._buffer(len(queries), len(candidates), queries.dtype)
        if scores.dtype == self.dtype:
            # With beta 0, the former content of the buffer is ignored, even NaN.
            torch.addmm(scores, queries, candidates.T, beta=0, alpha=self.total_factor, out=scores)
        else:
            # Under autocast the product has half precision, and its sums do not.
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
            weight = pair_grads[pairs, None]  # [P, 1]
            queries = query_side.unit_rows[i]
            candidates = candidate_side.unit_rows[j]
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
        queries = query_side.matmul_rows[rows]
        candidates = candidate_side.matmul_rows[columns]
        if queries.dtype != self.dtype:
            gradient = self._buffer(len(queries), len(candidates), queries.dtype).copy_(gradient)
        if self.scale_gradient is not None:
            # The gradient of the scale is the sum of gradient times cosine over all pairs.
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


class FunctionScores(Scores):
    """Scores by a function of images and texts.

    Args:
        score: The function, ``(images, texts) -> [V, T]``.
        images: All images.
        texts: All texts.
        scale: Factor of the scores.
        needs_grad: Which tensors need a gradient.
        block_columns: Maximum number of candidates that are scored at once, for each direction. A
            wider block is scored in pieces, and each piece again when its gradient is accumulated,
            so that one graph is in memory at a time.
    """

    def __init__(
        self,
        score: Score,
        images: Encoded,
        texts: Encoded,
        scale: Tensor | float | None,
        needs_grad: NeedsGrad,
        block_columns: tuple[int, int],
    ):
        self.score = score
        self.images = images
        self.texts = texts
        self.scale = scale
        self.block_columns = block_columns
        self.parameters = trainable(scale)
        # The leaves that the score reads next to its items: those in the graph of one pair.
        if torch.is_grad_enabled() and len(images) and len(texts):
            self.parameters += graph_leaves(checked_scores(score, images[:1], texts[:1]))
        image_sums, text_sums = (
            [
                torch.zeros_like(part) if needed else None
                for part, needed in zip(items.float_tensors, parts, strict=True)
            ]
            for items, parts in zip((images, texts), needs_grad, strict=True)
        )
        self.gradient_sums = InputGradients(
            image_sums, text_sums, [torch.zeros_like(parameter) for parameter in self.parameters]
        )
        self.rng_states: dict[tuple[bool, int, int], Any] = {}
        dtypes = (part.dtype for part in (*images.float_tensors, *texts.float_tensors))
        self.dtype = reduce(torch.promote_types, dtypes, torch.float32)

    @property
    def num_items(self) -> tuple[int, int]:
        """Number of images and of texts."""
        return len(self.images), len(self.texts)

    def gradients(self) -> InputGradients:
        """Return the accumulated gradients."""
        return self.gradient_sums

    def fork(self) -> Self:
        """Make the same scores with their own gradients."""
        zeros = (
            [None if total is None else torch.zeros_like(total) for total in totals]
            for totals in self.gradient_sums
        )
        return self._changed(gradient_sums=InputGradients(*zeros))

    def score_block(self, rows: slice, columns: slice, *, with_grad: bool) -> ScoreBlock:
        """Score a block, in pieces if it is too wide."""
        max_columns = self.block_columns[self.is_transposed]
        if columns.stop - columns.start > max_columns:
            starts = range(columns.start, columns.stop, max_columns)
            return self._score_in_pieces(
                rows, [slice(start, min(start + max_columns, columns.stop)) for start in starts]
            )
        image_rows, text_rows = (columns, rows) if self.is_transposed else (rows, columns)
        needs_grad = any(total is not None for totals in self.gradient_sums for total in totals)
        with self._same_random_numbers(image_rows, text_rows), torch.set_grad_enabled(needs_grad):
            images = detached_leaves(self.images[image_rows])
            texts = detached_leaves(self.texts[text_rows])
            scores = checked_scores(self.score, images, texts)
            scores = scores if self.scale is None else scores * self.scale
            scores = promote_half(scores.T if self.is_transposed else scores)
            scores = scores if self.factor == 1 else scores * self.factor
        values = scores.detach().clone(memory_format=torch.contiguous_format)
        if not with_grad:  # the graph is not kept either
            return ScoreBlock(values, reject_gradient)
        sides = (
            (images, image_rows, self.gradient_sums.images),
            (texts, text_rows, self.gradient_sums.texts),
        )
        leaves_and_sums = [
            (leaf, total[side_rows])
            for items, side_rows, totals in sides
            for leaf, total in zip(items.float_tensors, totals, strict=True)
            if total is not None
        ]
        leaves_and_sums += zip(self.parameters, self.gradient_sums.parameters, strict=True)  # type: ignore[arg-type]

        def accumulate(gradient: Tensor) -> None:
            if scores.requires_grad:
                leaves = [leaf for leaf, _ in leaves_and_sums]
                gradients = torch.autograd.grad(
                    scores, leaves, gradient, retain_graph=True, allow_unused=True
                )
                for (_, total), leaf_grad in zip(leaves_and_sums, gradients, strict=True):
                    if total is not None and leaf_grad is not None:
                        total += leaf_grad

        return ScoreBlock(values, accumulate)

    def _score_in_pieces(self, rows: slice, pieces: list[slice]) -> ScoreBlock:
        start = pieces[0].start

        def accumulate(gradient: Tensor) -> None:
            for piece in pieces:
                piece_grad = gradient[:, piece.start - start : piece.stop - start]
                if piece_grad.any():
                    self.score_block(rows, piece, with_grad=True).accumulate_grad(piece_grad)

        return ScoreBlock(
            torch.cat(
                [self.score_block(rows, piece, with_grad=False).scores for piece in pieces], 1
            ),
            accumulate,
        )

    @contextmanager
    def _same_random_numbers(self, images: slice, texts: slice) -> Iterator[None]:
        """Give a block that is scored again the random numbers of its first time, so that dropout
        drops the same units.
        """
        key = (self.is_transposed, images.start, texts.start)
        device = self.images.tensors[0].device
        # Not get_device_states of torch.utils.checkpoint, which fails on mps.
        generators = torch.get_device_module(device) if has_random_numbers(device) else None
        if key not in self.rng_states:
            own = generators.get_rng_state(device) if generators else None
            self.rng_states[key] = torch.get_rng_state(), own
            yield
            return
        state, own = self.rng_states[key]
        with fork_random_numbers(device):
            torch.set_rng_state(state)
            if generators:
                generators.set_rng_state(own, device)
            yield


def reject_gradient(_: Tensor) -> None:
    """Raise an error, as the ``accumulate_grad`` of a block that was scored without gradient."""
    raise AssertionError("a gradient was accumulated into a block that was scored without gradient")
