"""Blocks of scores, and the gradient that flows back through them; here for cosines.

Any kind scores some queries against all candidates, off the graph. The block's ``push`` takes dL/d(block) while
everything is at hand and adds what it means for the inputs; ``gradients`` gives the sums, input by input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from visavis.engine.items import Items, vectors
from visavis.errors import ShapeError

Wanted = tuple[list[bool], list[bool]]  # which parts of images and of texts want a gradient
SHORTEST = 1e-12  # the length that normalize divides by at least
ROWS_AT_ONCE = 1024


class Block(NamedTuple):
    """Scores ``[R, C]``, float32 at least, free to be written over; ``push`` takes their gradient."""

    scores: Tensor
    push: Callable[[Tensor], None]


class Gradients(NamedTuple):
    """By the floating-point parts of images and of texts, and by parameters; None where none was wanted."""

    images: list[Tensor | None]
    texts: list[Tensor | None]
    parameters: list[Tensor | None]


class Scores(ABC):
    """Scores of queries against candidates, scaled, in blocks of queries.

    dtype: of sums. parameters: what the scores read beside items. light: a block is no more than its numbers. at_once: scores of a
    block. ``T`` exchanges the roles, ``window`` lets only some items be queries, ``times`` multiplies: all add to the same
    gradients. ``apart`` begins its own, ``combined`` weighs and adds the two.
    """

    dtype: torch.dtype
    parameters: list[Tensor]
    light: bool = False
    at_once: int = 2**21
    factor: float = 1.0
    turned: bool = False
    queries: slice | None = None

    @property
    @abstractmethod
    def sides(self) -> tuple[int, int]:
        """How many images and how many texts."""

    @abstractmethod
    def gradients(self) -> Gradients:
        """What was pushed; asked for once, when all is."""

    @abstractmethod
    def apart(self) -> Self: ...

    def combined(self, other: Self, shares: Sequence[float]) -> Gradients:
        """Gradients here, and apart from them, each times its share."""
        return Gradients(
            *(
                [None if a is None or b is None else a.mul_(shares[0]).add_(b, alpha=shares[1]) for a, b in zip(*both, strict=True)]
                for both in zip(self.gradients(), other.gradients(), strict=True)
            )
        )

    @abstractmethod
    def score_block(self, rows: slice, columns: slice) -> Block:
        """Scores of some items against some of the other side."""

    @property
    def shape(self) -> tuple[int, int]:
        images, texts = self.sides
        height, width = (texts, images) if self.turned else (images, texts)
        return (height if self.queries is None else self.queries.stop - self.queries.start), width

    @property
    def T(self) -> Self:
        return self._changed(turned=not self.turned, queries=None)

    def window(self, queries: slice) -> Self:
        return self._changed(queries=queries)

    def times(self, factor: float) -> Self:
        return self._changed(factor=self.factor * factor)

    def block(self, rows: slice, columns: slice | None = None) -> Block:
        """Scores of some queries against all candidates, or some."""
        rows = slice(rows.start + self.start, rows.stop + self.start)
        return self.score_block(rows, slice(0, self.shape[1]) if columns is None else columns)

    @property
    def start(self) -> int:
        """Where the queries begin among the items of their side."""
        return 0 if self.queries is None else self.queries.start

    def of_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        """Scores of single pairs ``[P]``, ordered by query, without a gradient."""
        found = [self.block(rows).scores.detach()[query[here] - rows.start, candidate[here]] for rows, here in _by_block(query, blocks)]
        return torch.cat(found) if found else query.new_zeros(0, dtype=self.dtype)

    def push_pairs(self, query: Tensor, candidate: Tensor, gradient: Tensor, blocks: Sequence[slice]) -> None:
        """The gradient of single pairs, those of all others being 0."""
        for rows, here in _by_block(query, blocks):
            if len(here):
                block = self.block(rows)
                place = (query[here] - rows.start, candidate[here])
                block.push(torch.zeros_like(block.scores).index_put_(place, gradient[here], accumulate=True))

    def _changed(self, **fields: Any) -> Self:
        changed = copy(self)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed


class _Units:
    """The vectors of one side at length 1, and their gradient: None while there is none, or none is wanted."""

    def __init__(self, given: Tensor, dtype: torch.dtype, product: torch.dtype, *, wanted: bool):
        given = given.detach().to(dtype)
        self.wanted = wanted
        self.length = given.norm(dim=-1, keepdim=True).clamp_min(SHORTEST)
        self.rows = given / self.length
        self.factors = self.rows.to(product)
        self.gradient: Tensor | None = None

    def total(self) -> Tensor:
        """The gradient, to add to."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.rows)
        return self.gradient

    def apart(self) -> _Units:
        other = copy(self)
        other.gradient = None
        return other

    def gradient_of_given(self) -> Tensor | None:
        """The part of the gradient across the unit rows, over their length; in place."""
        if not self.wanted:
            return None
        for gradient, rows, length in zip(*(each.split(ROWS_AT_ONCE) for each in (self.total(), self.rows, self.length)), strict=True):
            gradient.sub_(torch.linalg.vecdot(gradient, rows)[:, None] * rows).div_(length)
        return self.gradient


class Cosines(Scores):
    """Cosines of vectors. Products run in the precision of autocast where it is on, sums in float32 at least."""

    light = True

    def __init__(self, images: Items, texts: Items, scale: Tensor | float | None, wanted: Wanted):
        visual, textual = vectors(images), vectors(texts)
        if visual.shape[1] != textual.shape[1]:
            raise ShapeError(f"images are {visual.shape[1]} wide and texts {textual.shape[1]}: a cosine needs equal widths.")
        self.dtype = torch.promote_types(torch.promote_types(visual.dtype, textual.dtype), torch.float32)
        device = visual.device.type
        mixed = torch.is_autocast_enabled(device) and self.dtype == torch.float32
        product = torch.get_autocast_dtype(device) if mixed else self.dtype
        self.units = [_Units(side, self.dtype, product, wanted=want[0]) for side, want in zip((visual, textual), wanted, strict=True)]
        self.parameters = learning_scale(scale)
        self.scale = None if scale is None else float(scale.detach() if isinstance(scale, Tensor) else scale)
        self.scale_gradient = torch.zeros((), dtype=self.dtype, device=visual.device) if self.parameters else None
        self.room: dict[torch.dtype, Tensor] = {}

    @property
    def sides(self) -> tuple[int, int]:
        return len(self.units[0].rows), len(self.units[1].rows)

    def gradients(self) -> Gradients:
        visual, textual = (side.gradient_of_given() for side in self.units)
        return Gradients([visual], [textual], [self.scale_gradient] if self.parameters else [])

    def apart(self) -> Self:
        scale_gradient = None if self.scale_gradient is None else torch.zeros_like(self.scale_gradient)
        return self._changed(units=[side.apart() for side in self.units], scale_gradient=scale_gradient)

    def score_block(self, rows: slice, columns: slice) -> Block:
        asking, answering = self._asking_and_answering()
        queries, candidates = self._scaled(asking.factors[rows]), answering.factors[columns]
        scores = self._empty(len(queries), len(candidates), queries.dtype)
        torch.mm(queries, candidates.T, out=scores)
        if scores.dtype != self.dtype:
            scores = self._empty(len(queries), len(candidates), self.dtype).copy_(scores)
        return Block(scores, lambda gradient: self._multiply_out(rows, columns, gradient))

    def of_pairs(self, query: Tensor, candidate: Tensor, blocks: Sequence[slice]) -> Tensor:
        asking, answering = self._asking_and_answering()
        found = torch.empty(len(query), dtype=self.dtype, device=asking.rows.device)
        for here, i, j in self._pairs_at_once(query, candidate):
            found[here] = torch.linalg.vecdot(self._scaled(asking.factors[i]), answering.factors[j]).to(self.dtype)
        return found

    def push_pairs(self, query: Tensor, candidate: Tensor, gradient: Tensor, blocks: Sequence[slice]) -> None:
        asking, answering = self._asking_and_answering()
        for here, i, j in self._pairs_at_once(query, candidate):
            weight, queries, candidates = gradient[here, None], asking.rows[i], answering.rows[j]
            if self.scale_gradient is not None:
                self.scale_gradient += (weight * queries * candidates).sum() * self.factor
            if asking.wanted:
                asking.total().index_add_(0, i, candidates.mul_(self._scaled(weight)))
            if answering.wanted:
                answering.total().index_add_(0, j, queries.mul_(self._scaled(weight)))

    def _asking_and_answering(self) -> tuple[_Units, _Units]:
        images, texts = self.units
        return (texts, images) if self.turned else (images, texts)

    def _scaled(self, queries: Tensor) -> Tensor:
        factor = self.factor if self.scale is None else self.factor * self.scale
        return queries if factor == 1 else queries * factor

    def _multiply_out(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        asking, answering = self._asking_and_answering()
        gradient = gradient.to(asking.factors.dtype)
        if asking.wanted or self.scale_gradient is not None:
            pulled = torch.mm(gradient, answering.factors[columns]).to(self.dtype)
            if self.scale_gradient is not None:
                self.scale_gradient += torch.linalg.vecdot(pulled, asking.rows[rows]).sum() * self.factor
            if asking.wanted:
                asking.total()[rows] += self._scaled(pulled)
        if answering.wanted:
            queries = self._scaled(asking.factors[rows])
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


def learning_scale(scale: Tensor | float | None) -> list[Tensor]:
    return [scale] if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled() else []


def _by_block(query: Tensor, blocks: Sequence[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Each block of rows with the places in ``query`` that lie in it."""
    for rows in blocks:
        yield rows, ((query >= rows.start) & (query < rows.stop)).nonzero()[:, 0]
