"""Scores of many items without a gradient, by blocks that keep within one memory setting.

Whoever needs scores asks here, so that the blocks of every score follow from what it costs (declared by who scores, or measured)
and from one setting: the whole matrix (``score_by_blocks``), some queries at a time with all their candidates
(``score_by_rows``), or tiles for a walk of one's own (``tile_shape``).

>>> visual, text = torch.rand(50, 4), torch.rand(70, 4)
>>> score_by_blocks(lambda visual, text: visual @ text.T, visual, text, memory="1KiB").shape
torch.Size([50, 70])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from visavis.memory import (
    LARGEST_BLOCK,
    LARGEST_TILE,
    BlockCost,
    Items,
    Memory,
    ScoreCost,
    block_shape,
    budget,
    declared_cost,
    score_in_blocks,
    spans,
)
from visavis.probe import FEW, cost_of
from visavis.types import Direction, Encoded

Score = Callable[[Any, Any], Tensor]
"""``score(visual, text) -> [V, T]``, as every matcher has it."""

LARGEST_ROWS = 256
"""Whole rows of scores at once; more gain no speed."""
SomeItems = TypeVar("SomeItems", Tensor, Encoded)


@dataclass(frozen=True)
class DeviceScore:
    """A score that is computed on a device, of items that are kept on the CPU: blocks of them go there, scores come back."""

    score: Score
    device: torch.device

    @torch.inference_mode()
    def __call__(self, visual: Items, text: Items) -> Tensor:
        return self.score(visual.to(self.device), text.to(self.device)).cpu()

    def score_cost(self, visual: Items, text: Items) -> ScoreCost | None:
        return declared_cost(self.score, visual, text)


@torch.no_grad()
def score_by_blocks(score: Score, visual: Items, text: Items, memory: Memory = None) -> Tensor:
    """``score(visual, text)``, the whole matrix ``[V, T]``, without a gradient.

    memory: of a block, beside the matrix itself. What fits is scored in one call. Raises VisavisError where not even one pair fits.
    """
    return score_in_blocks(score, visual, text, _shape(score, visual, text, _bytes_for(score, visual, memory)))


@torch.no_grad()
def score_by_rows(
    score: Score, visual: Items, text: Items, way: Direction, *, held: float, memory: Memory = None
) -> Iterator[tuple[slice, Tensor]]:
    """Some queries after the other with all candidates: which queries, and their scores ``[R, C]``.

    way: "i2t" where the visual items are the queries, "t2i" where the texts are. held: the bytes of a pair that the caller holds while it works
    on a block, the scores themselves included; these blocks take half of the memory, scoring them the other half. Raises
    VisavisError where not even one pair fits.
    """
    asked, answering = (visual, text) if way == "i2t" else (text, visual)
    rows = rows_at_once(len(answering), held, memory)
    some = (visual[:rows], text) if way == "i2t" else (visual, text[:rows])
    shape = _shape(score, *some, _bytes_for(score, visual, memory) // 2)
    for queries in spans(len(asked), rows):
        if way == "i2t":
            yield queries, score_in_blocks(score, visual[queries], text, shape)
        else:
            yield queries, score_in_blocks(score, visual, text[queries], shape).T


def rows_at_once(candidates: int, held: float, memory: Memory = None) -> int:
    """How many queries are worked on at once, if each holds so many bytes for each candidate: in half of the memory, at least one."""
    return max(1, min(LARGEST_ROWS, int(budget(memory, "cpu") // 2 // max(held * candidates, 1))))


def tile_shape(score: Score, visual: Items, text: Items, *, held: float, memory: Memory = None) -> tuple[int, int]:
    """How many visual items and texts a tile of the score matrix has at most. held: bytes of a pair beside its score.

    Raises VisavisError where not even one pair fits.
    """
    return _shape(score, visual, text, _bytes_for(score, visual, memory), held=held, largest=LARGEST_TILE)


def block_cost(score: Score, visual: Items, text: Items) -> BlockCost:
    """What a block holds while it is scored without a gradient: the cost of the score, and its items once more (a copy, or moved)."""
    if not (len(visual) and len(text)):
        return BlockCost(0.0)
    if isinstance(score, DeviceScore):
        few = (items[: 2 * number].to(score.device) for items, number in zip((visual, text), FEW, strict=True))
        cost = cost_of(score.score, *few, training=False)
    else:
        cost = cost_of(score, visual, text, training=False)
    return BlockCost(cost.pair, cost.visual + item_bytes(visual), cost.text + item_bytes(text), cost.fixed)


def item_bytes(items: Items) -> int:
    """The bytes of one item."""
    return sum(part[0].numel() * part.element_size() for part in _parts(items)) if len(items) else 0


def pick(items: SomeItems, rows: Tensor | slice) -> SomeItems:
    """The items at these positions: a view where they follow each other, else a copy."""
    if isinstance(rows, slice):
        return items[rows]
    first = int(rows[0]) if len(rows) else 0
    together = bool((rows == torch.arange(first, first + len(rows))).all())
    return items[first : first + len(rows)] if together else items[rows]


def _shape(
    score: Score,
    visual: Items,
    text: Items,
    memory_bytes: int,
    *,
    held: float = 0.0,
    largest: tuple[int | None, int | None] = (None, None),
) -> tuple[int, int]:
    """The shape of the blocks of a matrix within so many bytes."""
    cost, size = block_cost(score, visual, text).plus(held), (len(visual), len(text))
    largest = block_shape(*size, BlockCost(cost.pair), max(LARGEST_BLOCK, math.ceil(cost.pair)), largest=largest)
    return block_shape(*size, cost, memory_bytes, largest=largest)


def _bytes_for(score: Score, items: Items, memory: Memory) -> int:
    device = score.device if isinstance(score, DeviceScore) else next((part.device for part in _parts(items)), torch.device("cpu"))
    return budget(memory, device)


def _parts(items: Items) -> list[Tensor]:
    return (
        [items]
        if isinstance(items, Tensor)
        else [part for part in tree_leaves((items.vectors, items.mask, items.weights)) if part is not None]
    )
