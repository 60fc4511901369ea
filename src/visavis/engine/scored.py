"""Blocks of scores by any function of items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from visavis.engine.items import Items, as_leaves, parts, tensors
from visavis.engine.scoring import Block, Gradients, Scores, Wanted, learning_scale
from visavis.errors import ShapeError
from visavis.objectives.base import promoted

Score = Callable[[Any, Any], Tensor]


class Scored(Scores):
    """Scores by any function of images and texts, with whatever parameters it has; computed again for every use."""

    def __init__(self, score: Score, images: Items, texts: Items, scale: Tensor | float | None, wanted: Wanted):
        self.score, self.images, self.texts, self.scale = score, images, texts, scale
        self.parameters = [*learning_scale(scale), *parameters_of(score, images, texts)]
        self.sums = Gradients(
            [torch.zeros_like(each) if want else None for each, want in zip(parts(images), wanted[0], strict=True)],
            [torch.zeros_like(each) if want else None for each, want in zip(parts(texts), wanted[1], strict=True)],
            [torch.zeros_like(each) for each in self.parameters],
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

    def apart(self) -> Self:
        return self._changed(sums=Gradients(*([None if each is None else torch.zeros_like(each) for each in some] for some in self.sums)))

    def score_block(self, rows: slice, columns: slice) -> Block:
        own, other = (columns, rows) if self.turned else (rows, columns)
        wanted = any(total is not None for some in self.sums for total in some)
        with self._same_draws(own, other), torch.set_grad_enabled(wanted):
            images, texts = as_leaves(self.images, own), as_leaves(self.texts, other)
            scores = scores_of(self.score, images, texts)
            scores = scores if self.scale is None else scores * self.scale
            scores = promoted(scores.T if self.turned else scores)
            scores = scores if self.factor == 1 else scores * self.factor
        leaves_and_sums = [
            *((leaf, total[own]) for leaf, total in zip(parts(images), self.sums.images, strict=True) if total is not None),
            *((leaf, total[other]) for leaf, total in zip(parts(texts), self.sums.texts, strict=True) if total is not None),
            *zip(self.parameters, self.sums.parameters, strict=True),
        ]

        def push(gradient: Tensor) -> None:
            if scores.requires_grad:
                leaves = [leaf for leaf, _ in leaves_and_sums]
                found = torch.autograd.grad(scores, leaves, gradient, retain_graph=True, allow_unused=True)
                for (_, total), part in zip(leaves_and_sums, found, strict=True):
                    if total is not None and part is not None:
                        total += part

        return Block(scores.detach().clone(memory_format=torch.contiguous_format), push)

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


def parameters_of(score: Score, images: Items, texts: Items) -> list[Tensor]:
    """The leaves that a score reads beside its items, wherever it keeps them: those behind the score of one pair."""
    if not (torch.is_grad_enabled() and len(images) and len(texts)):
        return []
    seen, found, waiting = set(), [], [score(images[:1], texts[:1]).grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            waiting += [following for following, _ in node.next_functions]
    return found


def scores_of(score: Score, images: Items, texts: Items) -> Tensor:
    """``score(images, texts)``. Raises ShapeError unless that is images x texts."""
    scores = score(images, texts)
    if scores.shape != (len(images), len(texts)):
        raise ShapeError(f"score returned shape {list(scores.shape)} for {len(images)} images and {len(texts)} texts.")
    return scores
