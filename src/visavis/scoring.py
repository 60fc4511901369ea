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

from visavis.measured_cost import FEW, cost_of, measure_cost
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
from visavis.types import Direction, Encoded

Score = Callable[[Any, Any], Tensor]
"""``score(visual, text) -> [V, T]``, as every matcher has it."""

LARGEST_ROWS = 256
"""Whole rows of scores at once; more gain no speed."""
HELD_BY_RERANKING = 64.0
"""Bytes of a pair while both stages are put in order: scores of both, flags and places, in float64."""
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


@dataclass(frozen=True)
class TwoStageScore(DeviceScore):
    """A score that is cheap for all, and a better one for the candidates of a query that come first by it.

    Called, it is the first stage; ``score_by_rows`` gives the order of both. first_stage: what ``score`` reads of items; of that, itself again. second_stage:
    ``second_stage(visual, text) -> [N]``, of item i with item i. top: a candidate is scored anew if at most so many of a query's
    candidates score as much as it does or more: all where there are no more, and one of many that are equal only if all of these are.
    """

    first_stage: Callable[[Any], Any]
    second_stage: Score
    top: int

    def __call__(self, visual: Items, text: Items) -> Tensor:
        return super().__call__(self.first_stage(visual), self.first_stage(text))

    @torch.inference_mode()
    def reranked(self, scores: Tensor, visual: Items, text: Items, way: Direction, memory_bytes: int) -> Tensor:
        """Scores ``[Q, C]`` of a direction's queries that order as both stages do, in float64.

        Those of the second stage, and below the lowest of these, in the order and at the distances of the first, all the rest.
        """
        inside = torch.ones_like(scores, dtype=torch.bool)
        if self.top < scores.shape[1]:
            inside = scores > scores.topk(self.top + 1, 1).values[:, -1:]
        query, candidate = inside.nonzero().unbind(1)
        pairs = (query, candidate) if way == "i2t" else (candidate, query)
        anew = self._pairs(visual, text, pairs, memory_bytes).double()
        scores = scores.double()
        lowest = torch.full_like(scores, math.inf).masked_scatter(inside, anew).amin(1, keepdim=True)
        highest = scores.masked_fill(inside, -math.inf).amax(1, keepdim=True)
        shift = torch.where(torch.isfinite(lowest - highest), lowest - highest - 1, 0.0)
        return (scores + shift).masked_scatter(inside, anew)

    def _pairs(self, visual: Items, text: Items, pairs: tuple[Tensor, Tensor], memory_bytes: int) -> Tensor:
        """The second stage of visual item i with text j for each pair (i, j): ``[P]``, so many at a time as the memory allows."""
        rows, columns = pairs
        if not len(rows):
            return torch.zeros(0)
        score = DeviceScore(self.second_stage, self.device)
        few = (largest(items, 2).to(self.device) for items in (visual, text))
        cost = measure_cost(_each_with_each(self.second_stage), *few, training=False).pair + item_bytes(visual) + item_bytes(text)
        at_once = block_shape(1, len(rows), BlockCost(cost), memory_bytes, largest=(1, LARGEST_TILE[0]))[1]
        return torch.cat([score(visual[rows[part]], text[columns[part]]) for part in spans(len(rows), at_once)])


def _each_with_each(score_pairs: Score) -> Score:
    """A score of pairs as one of all pairs, to be measured."""

    def score(visual: Items, text: Items) -> Tensor:
        rows, columns = torch.cartesian_prod(torch.arange(len(visual)), torch.arange(len(text))).unbind(1)
        return score_pairs(visual[rows], text[columns]).view(len(visual), len(text))

    return score


@torch.no_grad()
def score_by_blocks(score: Score, visual: Items, text: Items, memory: Memory = None) -> Tensor:
    """``score(visual, text)``, the whole matrix ``[V, T]``, without a gradient; of two stages the first.

    memory: of a block, beside the matrix itself. What fits is scored in one call. Raises VisavisError where not even one pair fits.
    """
    if isinstance(score, TwoStageScore):
        visual, text = score.first_stage(visual), score.first_stage(text)
    return score_in_blocks(score, visual, text, _shape(score, visual, text, _bytes_for(score, visual, memory)))


@torch.no_grad()
def score_by_rows(
    score: Score, visual: Items, text: Items, way: Direction, *, held: float, memory: Memory = None
) -> Iterator[tuple[slice, Tensor]]:
    """Some queries after the other with all candidates: which queries, and their scores ``[R, C]``.

    way: "i2t" where the visual items are the queries, "t2i" where the texts are. held: the bytes of a pair that the caller holds while it works
    on a block, the scores themselves included; these blocks take half of the memory, scoring them the other half. A ``TwoStageScore``
    orders them by both stages. Raises VisavisError where not even one pair fits.
    """
    stages = score if isinstance(score, TwoStageScore) else None
    first, other = (visual, text) if stages is None else (stages.first_stage(visual), stages.first_stage(text))
    asked, answering = (first, other) if way == "i2t" else (other, first)
    rows = rows_at_once(len(answering), held, memory)
    some = (first[:rows], other) if way == "i2t" else (first, other[:rows])
    available = _bytes_for(score, first, memory) // 2
    shape = _shape(score, *some, available)
    for queries in spans(len(asked), rows):
        these = (queries, slice(None)) if way == "i2t" else (slice(None), queries)
        block = score_in_blocks(score, first[these[0]], other[these[1]], shape)
        block = block if way == "i2t" else block.T
        yield queries, block if stages is None else stages.reranked(block, visual[these[0]], text[these[1]], way, available)


def score_in_order(score: Score, visual: Items, text: Items, way: Direction, memory: Memory = None) -> Tensor:
    """The scores of all queries of a direction with all candidates ``[Q, C]``, in the order of both stages where there are two."""
    if not isinstance(score, TwoStageScore):
        scores = score_by_blocks(score, visual, text, memory)
        return scores if way == "i2t" else scores.T
    return torch.cat([block for _, block in score_by_rows(score, visual, text, way, held=HELD_BY_RERANKING, memory=memory)])


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
    few = [largest(items, 2 * number) for items, number in zip((visual, text), FEW, strict=True)]
    if isinstance(score, DeviceScore):
        cost = cost_of(score.score, *(items.to(score.device) for items in few), training=False)
    else:
        cost = cost_of(score, *few, training=False)
    return BlockCost(cost.pair, cost.visual + item_bytes(visual), cost.text + item_bytes(text), cost.fixed)


def item_bytes(items: Items) -> int:
    """The bytes of one item, if they differ of the largest."""
    return sum(part[0].numel() * part.element_size() for part in _parts(largest(items, 1))) if len(items) else 0


def largest(items: Items, number: int) -> Items:
    """So many items, or all, that take as much memory as any."""
    return items[:number] if isinstance(items, Tensor) else items.largest(number)


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
    device = score.device if isinstance(score, DeviceScore) else next((part.device for part in _parts(items[:1])), torch.device("cpu"))
    return budget(memory, device)


def _parts(items: Items) -> list[Tensor]:
    return [items] if isinstance(items, Tensor) else items.tensors
