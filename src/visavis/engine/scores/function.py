"""Scores by any function of items, with whatever parameters it has; computed again for every use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from visavis.engine.items import Items, as_leaves, parts, tensors
from visavis.engine.scores.base import Block, Gradients, NeedsGrad, Scores, learnable_scale
from visavis.measured_cost import leaves_behind
from visavis.memory import scores_of
from visavis.objectives.base import promoted

Score = Callable[[Any, Any], Tensor]


class FunctionScores(Scores):
    """Scores by a function of images and texts.

    columns: how many candidates are scored at once, for images as queries and for texts as queries. A block that is wider comes in
    pieces: scored one after the other, and each again when its gradient is pushed, so that one graph lives at a time.
    """

    def __init__(
        self, score: Score, images: Items, texts: Items, scale: Tensor | float | None, needs_grad: NeedsGrad, columns: tuple[int, int]
    ):
        self.score, self.images, self.texts, self.scale, self.columns = score, images, texts, scale, columns
        self.parameters = [*learnable_scale(scale), *parameters_of(score, images, texts)]
        self.sums = Gradients(
            [torch.zeros_like(part) if needed else None for part, needed in zip(parts(images), needs_grad[0], strict=True)],
            [torch.zeros_like(part) if needed else None for part, needed in zip(parts(texts), needs_grad[1], strict=True)],
            [torch.zeros_like(parameter) for parameter in self.parameters],
        )
        self.draws: dict[tuple[bool, int, int], Any] = {}
        self.dtype = torch.float32
        for part in (*parts(images), *parts(texts)):
            self.dtype = torch.promote_types(self.dtype, part.dtype)

    @property
    def sides(self) -> tuple[int, int]:
        return len(self.images), len(self.texts)

    def gradients(self) -> Gradients:
        return self.sums

    def fork(self) -> Self:
        zeros = ([None if total is None else torch.zeros_like(total) for total in totals] for totals in self.sums)
        return self._changed(sums=Gradients(*zeros))

    def score_block(self, rows: slice, columns: slice, *, pushed: bool) -> Block:
        most = self.columns[self.turned]
        if columns.stop - columns.start > most:
            starts = range(columns.start, columns.stop, most)
            return self._in_pieces(rows, [slice(start, min(start + most, columns.stop)) for start in starts])
        own, other = (columns, rows) if self.turned else (rows, columns)
        needs_grad = any(total is not None for totals in self.sums for total in totals)
        with self._same_draws(own, other), torch.set_grad_enabled(needs_grad):
            images, texts = as_leaves(self.images, own), as_leaves(self.texts, other)
            scores = scores_of(self.score, images, texts)
            scores = scores if self.scale is None else scores * self.scale
            scores = promoted(scores.T if self.turned else scores)
            scores = scores if self.factor == 1 else scores * self.factor
        numbers = scores.detach().clone(memory_format=torch.contiguous_format)
        if not pushed:  # nor is the graph kept
            return Block(numbers, _refuse)
        leaves_and_sums = [
            *((leaf, total[own]) for leaf, total in zip(parts(images), self.sums.images, strict=True) if total is not None),
            *((leaf, total[other]) for leaf, total in zip(parts(texts), self.sums.texts, strict=True) if total is not None),
            *zip(self.parameters, self.sums.parameters, strict=True),
        ]

        def push(gradient: Tensor) -> None:
            if scores.requires_grad:
                leaves = [leaf for leaf, _ in leaves_and_sums]
                gradients = torch.autograd.grad(scores, leaves, gradient, retain_graph=True, allow_unused=True)
                for (_, total), of_leaf in zip(leaves_and_sums, gradients, strict=True):
                    if total is not None and of_leaf is not None:
                        total += of_leaf

        return Block(numbers, push)

    def _in_pieces(self, rows: slice, pieces: list[slice]) -> Block:
        start = pieces[0].start

        def push(gradient: Tensor) -> None:
            for piece in pieces:
                of_piece = gradient[:, piece.start - start : piece.stop - start]
                if of_piece.any():
                    self.score_block(rows, piece, pushed=True).push(of_piece)

        return Block(torch.cat([self.score_block(rows, piece, pushed=False).scores for piece in pieces], 1), push)

    @contextmanager
    def _same_draws(self, images: slice, texts: slice) -> Iterator[None]:
        """A block that is scored again meets the random numbers of the first time: dropout drops the same."""
        key = (self.turned, images.start, texts.start)
        if key not in self.draws:
            self.draws[key] = torch.get_rng_state(), get_device_states(*tensors(self.images))
            yield
            return
        state, (devices, device_states) = self.draws[key]
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state)
            set_device_states(devices, device_states)
            yield


def _refuse(_: Tensor) -> None:
    raise AssertionError("a gradient was pushed into a block that was scored without one")


def parameters_of(score: Score, images: Items, texts: Items) -> list[Tensor]:
    """The leaves that a score reads beside its items, wherever it keeps them: those behind the score of one pair."""
    if not (torch.is_grad_enabled() and len(images) and len(texts)):
        return []
    return leaves_behind(score(images[:1], texts[:1]))
