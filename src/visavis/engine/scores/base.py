"""What a walk over scores asks for: blocks of them, off the graph, and a way back for their gradient.

A block's ``push`` takes dL/d(block) while its scores are at hand and adds what it means for the inputs; ``gradients`` gives the sums,
input by input. Any score, of a product or of a function, has this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

NeedsGrad = tuple[list[bool], list[bool]]
"""Which floating-point parts of images, and which of texts, need a gradient."""


class Block(NamedTuple):
    """Scores ``[R, C]``, float32 at least, free to be written over; ``push`` takes their gradient."""

    scores: Tensor
    push: Callable[[Tensor], None]


class Gradients(NamedTuple):
    """By the floating-point parts of images and of texts, and by parameters; None where none was needed."""

    images: list[Tensor | None]
    texts: list[Tensor | None]
    parameters: list[Tensor | None]


class Scores(ABC):
    """Scores of queries against candidates, scaled, in blocks of queries.

    dtype: of sums. parameters: what the scores read beside the items. light: a block costs no more than its numbers, so that many may
    be kept. factor: what every score is multiplied by. turned: texts are the queries. queries: which items of their side are
    queries; None: all. ``T``, ``window`` and ``times`` are views that add to the same gradients; ``fork`` begins gradients of its own,
    ``merge`` weighs and adds the two.
    """

    dtype: torch.dtype
    parameters: list[Tensor]
    light: bool = False
    factor: float = 1.0
    turned: bool = False
    queries: slice | None = None

    @property
    @abstractmethod
    def sides(self) -> tuple[int, int]:
        """How many images and how many texts."""

    @abstractmethod
    def gradients(self) -> Gradients:
        """The sums of what was pushed; asked for once, when all is."""

    @abstractmethod
    def fork(self) -> Self:
        """The same scores with gradients of their own, still 0."""

    def merge(self, other: Self, shares: Sequence[float]) -> Gradients:
        """The gradients here and those of a fork, each times its share, added."""
        return Gradients(
            *(
                [None if a is None or b is None else a.mul_(shares[0]).add_(b, alpha=shares[1]) for a, b in zip(*both, strict=True)]
                for both in zip(self.gradients(), other.gradients(), strict=True)
            )
        )

    @abstractmethod
    def score_block(self, rows: slice, columns: slice, *, pushed: bool) -> Block:
        """Scores of some items of the queries' side against some of the other. pushed: whether a gradient will be; else none may be."""

    @property
    def shape(self) -> tuple[int, int]:
        images, texts = self.sides
        height, width = (texts, images) if self.turned else (images, texts)
        return (height if self.queries is None else self.queries.stop - self.queries.start), width

    @property
    def T(self) -> Self:
        """Queries and candidates exchanged."""
        return self._changed(turned=not self.turned, queries=None)

    def window(self, queries: slice) -> Self:
        """Only some items of their side as queries."""
        return self._changed(queries=queries)

    def times(self, factor: float) -> Self:
        return self._changed(factor=self.factor * factor)

    def block(self, rows: slice, columns: slice | None = None, *, pushed: bool = True) -> Block:
        """Scores of some queries against all candidates, or some."""
        rows = slice(rows.start + self.start, rows.stop + self.start)
        return self.score_block(rows, slice(0, self.shape[1]) if columns is None else columns, pushed=pushed)

    @property
    def start(self) -> int:
        """Where the queries begin among the items of their side."""
        return 0 if self.queries is None else self.queries.start

    def of_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        """Scores of single pairs ``[P]``, ordered by query, without a gradient."""
        by_block = [
            self.block(rows, pushed=False).scores.detach()[query[here] - rows.start, candidate[here]]
            for rows, here in _by_block(query, blocks)
        ]
        return torch.cat(by_block) if by_block else query.new_zeros(0, dtype=self.dtype)

    def push_pairs(self, query: Tensor, candidate: Tensor, gradient: Tensor, blocks: Sequence[slice]) -> None:
        """The gradient of single pairs, those of all others being 0."""
        for rows, here in _by_block(query, blocks):
            if len(here):
                block = self.block(rows)
                place = (query[here] - rows.start, candidate[here])
                block.push(torch.zeros_like(block.scores).index_put_(place, gradient[here], accumulate=True))
                del block  # before the next one is made

    def _changed(self, **fields: Any) -> Self:
        changed = copy(self)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed


def learnable_scale(scale: Tensor | float | None) -> list[Tensor]:
    """The scale, where it is a parameter that a gradient is needed of."""
    return [scale] if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled() else []


def _by_block(query: Tensor, blocks: Sequence[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Each block of rows with the places in ``query`` that lie in it."""
    for rows in blocks:
        yield rows, ((query >= rows.start) & (query < rows.stop)).nonzero()[:, 0]
