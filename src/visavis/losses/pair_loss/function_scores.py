"""Scores by an arbitrary function of items, which may have parameters. They are recomputed at each
use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from visavis.core.blocking import Score, checked_scores, detached_leaves, graph_leaves
from visavis.core.encoded import Items, all_tensors
from visavis.losses.objectives.base import promote_half
from visavis.losses.pair_loss.block_scores import (
    InputGradients,
    NeedsGrad,
    ScoreBlock,
    Scores,
    trainable,
)
from visavis.losses.pair_loss.encoded_items import float_tensors


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
        images: Items,
        texts: Items,
        scale: Tensor | float | None,
        needs_grad: NeedsGrad,
        block_columns: tuple[int, int],
    ):
        self.score, self.images, self.texts, self.scale, self.block_columns = (
            score,
            images,
            texts,
            scale,
            block_columns,
        )
        self.parameters = [*trainable(scale), *_score_parameters(score, images, texts)]
        image_sums, text_sums = (
            [
                torch.zeros_like(part) if needed else None
                for part, needed in zip(float_tensors(items), parts, strict=True)
            ]
            for items, parts in zip((images, texts), needs_grad, strict=True)
        )
        self.gradient_sums = InputGradients(
            image_sums, text_sums, [torch.zeros_like(parameter) for parameter in self.parameters]
        )
        self.rng_states: dict[tuple[bool, int, int], Any] = {}
        dtypes = (part.dtype for part in (*float_tensors(images), *float_tensors(texts)))
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
            images, texts = (
                detached_leaves(self.images[image_rows]),
                detached_leaves(self.texts[text_rows]),
            )
            scores = checked_scores(self.score, images, texts)
            scores = scores if self.scale is None else scores * self.scale
            scores = promote_half(scores.T if self.is_transposed else scores)
            scores = scores if self.factor == 1 else scores * self.factor
        values = scores.detach().clone(memory_format=torch.contiguous_format)
        if not with_grad:  # the graph is not kept either
            return ScoreBlock(values, _reject_gradient)
        sides = (
            (images, image_rows, self.gradient_sums.images),
            (texts, text_rows, self.gradient_sums.texts),
        )
        leaves_and_sums = [
            (leaf, total[side_rows])
            for items, side_rows, totals in sides
            for leaf, total in zip(float_tensors(items), totals, strict=True)
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
        if key not in self.rng_states:
            self.rng_states[key] = (
                torch.get_rng_state(),
                get_device_states(*all_tensors(self.images)),
            )
            yield
            return
        state, (devices, device_states) = self.rng_states[key]
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state)
            set_device_states(devices, device_states)
            yield


def _reject_gradient(_: Tensor) -> None:
    raise AssertionError("a gradient was accumulated into a block that was scored without gradient")


def _score_parameters(score: Score, images: Items, texts: Items) -> list[Tensor]:
    """The leaves that a score reads next to its items: those in the graph of the score of one pair."""
    if not (torch.is_grad_enabled() and len(images) and len(texts)):
        return []
    return graph_leaves(score(images[:1], texts[:1]))
