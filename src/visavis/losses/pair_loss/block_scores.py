"""Interface of block-wise scores: blocks off the graph, and accumulation of their gradients into
the inputs.

``accumulate_grad`` of a block takes dL/d(block) while its scores are in memory and adds the
gradients of the inputs. ``gradients`` returns the sums. Cosines and arbitrary score functions share
this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

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
        """Return the accumulated gradients. Call it once, after all blocks.

        Returns:
            The sums.
        """

    @abstractmethod
    def fork(self) -> Self:
        """Make the same scores with their own gradients, still 0.

        Returns:
            The copy.
        """

    def merge(self, other: Self, weights: Sequence[float]) -> InputGradients:
        """Add the weighted gradients of these scores and of a fork.

        Args:
            other: The fork.
            weights: Weight of these scores and of the fork.

        Returns:
            The sums.
        """

        def add_weighted(
            totals: list[Tensor | None], others: list[Tensor | None]
        ) -> list[Tensor | None]:
            pairs = zip(totals, others, strict=True)
            return [
                None if a is None or b is None else a.mul_(weights[0]).add_(b, alpha=weights[1])
                for a, b in pairs
            ]

        return InputGradients(*map(add_weighted, self.gradients(), other.gradients()))

    @abstractmethod
    def score_block(self, rows: slice, columns: slice, *, with_grad: bool) -> ScoreBlock:
        """Score some items of the query side against some items of the candidate side.

        Args:
            rows: Items of the query side.
            columns: Items of the candidate side.
            with_grad: Whether ``accumulate_grad`` of the block will be called. It must not be
                called otherwise.

        Returns:
            The block.
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
        """Restrict the queries to some items of their side.

        Args:
            queries: The items.

        Returns:
            A view.
        """
        return self._changed(query_window=queries)

    def scaled_by(self, factor: float) -> Self:
        """Multiply all scores by a factor.

        Args:
            factor: The factor.

        Returns:
            A view.
        """
        return self._changed(factor=self.factor * factor)

    def block(
        self, rows: slice, columns: slice | None = None, *, with_grad: bool = True
    ) -> ScoreBlock:
        """Score some queries against all or some candidates.

        Args:
            rows: Queries.
            columns: Candidates. None: all.
            with_grad: Whether ``accumulate_grad`` of the block will be called.

        Returns:
            The block.
        """
        rows = slice(rows.start + self.query_offset, rows.stop + self.query_offset)
        return self.score_block(
            rows, slice(0, self.shape[1]) if columns is None else columns, with_grad=with_grad
        )

    @property
    def query_offset(self) -> int:
        """Position of the first query among the items of its side."""
        return 0 if self.query_window is None else self.query_window.start

    def score_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        """Score single pairs, without gradient.

        Args:
            query: Query of each pair, shape ``[P]``, ascending.
            candidate: Candidate of each pair, shape ``[P]``.
            blocks: Slices of queries that are scored at once.

        Returns:
            Scores of shape ``[P]``.
        """
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
        """Accumulate the gradient of single pairs. The gradient of all other pairs is 0.

        Args:
            query: Query of each pair, shape ``[P]``.
            candidate: Candidate of each pair, shape ``[P]``.
            pair_grads: Gradient of the score of each pair, shape ``[P]``.
            blocks: Slices of queries that are scored at once.
        """
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
    """Return the scale or bias of scores if it needs a gradient.

    Args:
        scalar: Scale or bias of the scores.

    Returns:
        The tensor in a list, or an empty list.
    """
    return (
        [scalar]
        if isinstance(scalar, Tensor) and scalar.requires_grad and torch.is_grad_enabled()
        else []
    )


def _pairs_by_block(query: Tensor, blocks: Sequence[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Each block of queries with the indices of its pairs."""
    for rows in blocks:
        yield rows, ((query >= rows.start) & (query < rows.stop)).nonzero()[:, 0]
