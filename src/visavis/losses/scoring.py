"""Scores of many items without a gradient, in blocks that fit one memory setting.

The size of every block follows from the cost of its score (declared or measured) and from one
memory setting. Three access patterns exist: the whole matrix (``score_matrix``), queries with all
candidates (``score_query_rows``), and tiles (``tile_shape``).

Example:
    >>> visual, text = torch.rand(50, 4), torch.rand(70, 4)
    >>> score_matrix(lambda visual, text: visual @ text.T, visual, text, memory="1KiB").shape
    torch.Size([50, 70])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visavis.core.blocking import (
    MAX_BLOCK_BYTES,
    MAX_TILE_SHAPE,
    PROBE_SHAPE,
    BlockCost,
    Score,
    block_cost_of,
    block_shape,
    measure_score_cost,
    score_in_blocks,
)
from visavis.core.encoded import (
    Direction,
    Encoded,
    Items,
    as_encoded,
    on_float64_device,
    to_float64,
)
from visavis.core.memory_budget import MemoryLimit, budget_bytes, chunk_slices

MAX_QUERY_ROWS = 256
"""Number of queries that are scored at once. More are not faster."""
RERANK_BYTES_PER_PAIR = 64.0
"""Bytes per pair while two stages are merged: scores of both stages, flags and indices, in float64.
"""


@dataclass(frozen=True)
class DeviceScore:
    """Score that is computed on a device for items on the CPU. Blocks of items move to the device,
    scores move back.

    Attributes:
        score: The score function.
        device: Device of the computation.
    """

    score: Score
    device: torch.device

    @torch.inference_mode()
    def __call__(self, visual: Items, text: Items) -> Tensor:
        return self.score(visual.to(self.device), text.to(self.device)).cpu()


class DirectedScore:
    """Base class of a score that depends on the direction and on all candidates of a ranking. A
    call returns the part that does not.
    """

    def __call__(self, visual: Encoded, text: Encoded) -> Tensor:
        """Compute scores that do not depend on them.

        Args:
            visual: Visual items.
            text: Texts.

        Returns:
            Scores, shape ``[V, T]``.
        """
        raise NotImplementedError

    def query_rows(
        self,
        visual: Encoded,
        text: Encoded,
        direction: Direction,
        *,
        caller_bytes_per_pair: float,
        memory: MemoryLimit,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the scores of a direction, see ``score_query_rows``.

        Args:
            visual: Visual items.
            text: Texts.
            direction: Which side holds the queries.
            caller_bytes_per_pair: Bytes per pair that the caller holds.
            memory: Memory of a block.

        Yields:
            The queries of a block, and their scores, shape ``[R, C]``.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TwoStageScore(DeviceScore):
    """A cheap score of all pairs, and a better score of the first candidates of each query.

    A call computes the first stage. ``score_query_rows`` returns scores that rank by both stages.

    Attributes:
        first_stage_items: Returns the part of items that the first stage reads. Its own result does
            not change.
        second_stage_scores: ``second_stage_scores(visual, text) -> [N]``, the score of item i with
            item i.
        rerank_top_k: A candidate is re-ranked if at most this many candidates of its query have an
            equal or higher score. Of a group of equal candidates, all are re-ranked or none.
    """

    first_stage_items: Callable[[Any], Any]
    second_stage_scores: Score
    rerank_top_k: int

    def __call__(self, visual: Items, text: Items) -> Tensor:
        return super().__call__(self.first_stage_items(visual), self.first_stage_items(text))

    @torch.inference_mode()
    def rerank_scores(
        self,
        scores: Tensor,
        visual: Encoded,
        text: Encoded,
        direction: Direction,
        memory_bytes: int,
    ) -> Tensor:
        """Merge the scores ``[Q, C]`` of the first stage with the second stage, in float64. The
        result ranks as the two stages do.
        """
        scores = on_float64_device(scores)
        reranked = torch.ones_like(scores, dtype=torch.bool)
        if self.rerank_top_k < scores.shape[1]:
            reranked = scores > scores.topk(self.rerank_top_k + 1, 1).values[:, -1:]
        query, candidate = reranked.nonzero().unbind(1)
        pairs = (query, candidate) if direction == "i2t" else (candidate, query)
        second_stage = to_float64(self._score_pairs(visual, text, pairs, memory_bytes))
        scores = scores.double()
        # Re-ranked candidates keep their second-stage score. All others are shifted below the
        # lowest of these and keep the order and the distances of the first stage.
        lowest_reranked = (
            torch.full_like(scores, math.inf)
            .masked_scatter(reranked, second_stage)
            .amin(1, keepdim=True)
        )
        highest_other = scores.masked_fill(reranked, -math.inf).amax(1, keepdim=True)
        gap = lowest_reranked - highest_other
        shift = torch.where(torch.isfinite(gap), gap - 1, 0.0)
        return (scores + shift).masked_scatter(reranked, second_stage)

    def _score_pairs(
        self, visual: Encoded, text: Encoded, pairs: tuple[Tensor, Tensor], memory_bytes: int
    ) -> Tensor:
        """Return the second-stage score of visual item i with text j for each pair (i, j), ``[P]``."""
        rows, columns = pairs
        if not len(rows):
            return torch.zeros(0)
        score = DeviceScore(self.second_stage_scores, self.device)

        # The cost is measured with a score of all pairs.
        def score_all(visual: Encoded, text: Encoded) -> Tensor:
            grid = torch.cartesian_prod(torch.arange(len(visual)), torch.arange(len(text)))
            i, j = grid.unbind(1)
            return self.second_stage_scores(visual[i], text[j]).view(len(visual), len(text))

        samples = (items.largest_items(2).to(self.device) for items in (visual, text))
        measured = measure_score_cost(score_all, *samples, training=False)
        cost = measured.pair_bytes + item_bytes(visual) + item_bytes(text)
        chunk_size = block_shape(
            1, len(rows), BlockCost(cost), memory_bytes, max_shape=(1, MAX_TILE_SHAPE[0])
        )[1]
        return torch.cat(
            [
                score(visual[rows[part]], text[columns[part]])
                for part in chunk_slices(len(rows), chunk_size)
            ]
        )


@torch.no_grad()
def score_matrix(score: Score, visual: Items, text: Items, memory: MemoryLimit = None) -> Tensor:
    """Compute the whole score matrix ``[V, T]`` without a gradient. Of a two-stage score, this is
    the first stage.
    """
    sides: tuple[Encoded, Encoded] = (as_encoded(visual), as_encoded(text))
    if isinstance(score, TwoStageScore):
        sides = score.first_stage_items(sides[0]), score.first_stage_items(sides[1])
    memory_bytes = _block_budget(score, sides[0], memory)
    return score_in_blocks(score, *sides, _block_shape(score, *sides, memory_bytes))


@torch.no_grad()
def score_query_rows(
    score: Score,
    visual: Items,
    text: Items,
    direction: Direction,
    *,
    caller_bytes_per_pair: float,
    memory: MemoryLimit = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of queries with their scores ``[R, C]`` against all candidates. A
    ``TwoStageScore`` ranks by both stages.
    """
    visual = as_encoded(visual)
    text = as_encoded(text)
    if isinstance(score, DirectedScore):
        yield from score.query_rows(
            visual, text, direction, caller_bytes_per_pair=caller_bytes_per_pair, memory=memory
        )
        return
    stages = score if isinstance(score, TwoStageScore) else None
    first_visual = visual
    first_text = text
    if stages is not None:
        first_visual = stages.first_stage_items(visual)
        first_text = stages.first_stage_items(text)
    # Half of the memory is for the caller, who holds `caller_bytes_per_pair` with the scores. The
    # computation of scores takes the other half.
    queries, candidates = (
        (first_visual, first_text) if direction == "i2t" else (first_text, first_visual)
    )
    rows = max_query_rows(len(candidates), caller_bytes_per_pair, memory)
    first_block = (
        (first_visual[:rows], first_text)
        if direction == "i2t"
        else (first_visual, first_text[:rows])
    )
    memory_bytes = _block_budget(score, first_visual, memory) // 2
    shape = _block_shape(score, *first_block, memory_bytes)
    for chunk in chunk_slices(len(queries), rows):
        images, texts = (chunk, slice(None)) if direction == "i2t" else (slice(None), chunk)
        block = score_in_blocks(score, first_visual[images], first_text[texts], shape)
        block = block if direction == "i2t" else block.T
        yield (
            chunk,
            block
            if stages is None
            else stages.rerank_scores(block, visual[images], text[texts], direction, memory_bytes),
        )


def score_direction(
    score: Score, visual: Items, text: Items, direction: Direction, memory: MemoryLimit = None
) -> Tensor:
    """Compute the scores ``[Q, C]`` of all queries of a direction with all candidates. A
    ``TwoStageScore`` ranks by both stages.
    """
    if not isinstance(score, TwoStageScore | DirectedScore):
        scores = score_matrix(score, visual, text, memory)
        return scores if direction == "i2t" else scores.T
    blocks = score_query_rows(
        score, visual, text, direction, caller_bytes_per_pair=RERANK_BYTES_PER_PAIR, memory=memory
    )
    return torch.cat([block for _, block in blocks])


def max_query_rows(
    num_candidates: int, caller_bytes_per_pair: float, memory: MemoryLimit = None
) -> int:
    """Return the number of queries that fit into half of the memory."""
    return max(
        1,
        min(
            MAX_QUERY_ROWS,
            int(budget_bytes(memory, "cpu") // 2 // max(caller_bytes_per_pair * num_candidates, 1)),
        ),
    )


def tile_shape(
    score: Score,
    visual: Items,
    text: Items,
    *,
    caller_bytes_per_pair: float,
    memory: MemoryLimit = None,
) -> tuple[int, int]:
    """Choose the size of tiles of the score matrix: visual items and texts."""
    visual = as_encoded(visual)
    text = as_encoded(text)
    memory_bytes = _block_budget(score, visual, memory)
    return _block_shape(
        score,
        visual,
        text,
        memory_bytes,
        caller_bytes_per_pair=caller_bytes_per_pair,
        max_shape=MAX_TILE_SHAPE,
    )


def inference_block_cost(score: Score, visual: Encoded, text: Encoded) -> BlockCost:
    """Return the cost of a block without a gradient: the cost of the score, and one copy of its
    items.
    """
    if not (len(visual) and len(text)):
        return BlockCost(0.0)
    samples = [
        items.largest_items(2 * number)
        for items, number in zip((visual, text), PROBE_SHAPE, strict=True)
    ]
    if isinstance(score, DeviceScore):
        cost = block_cost_of(
            score.score, *(items.to(score.device) for items in samples), training=False
        )
    else:
        cost = block_cost_of(score, *samples, training=False)
    return cost + BlockCost(0.0, item_bytes(visual), item_bytes(text))


def item_bytes(items: Encoded) -> int:
    """Return the size of the largest item in bytes."""
    if not len(items):
        return 0
    largest = items.largest_items(1).tensors
    return sum(part[0].numel() * part.element_size() for part in largest)


def select_items(items: Encoded, rows: Tensor | slice) -> Encoded:
    """Select items. Consecutive positions give a view, others a copy."""
    return items[as_slice(rows)]


def as_slice(positions: Tensor | slice) -> Tensor | slice:
    """Convert consecutive positions to a slice, which selects a view."""
    if isinstance(positions, slice):
        return positions
    first = int(positions[0]) if len(positions) else 0
    consecutive = bool((positions == torch.arange(first, first + len(positions))).all())
    return slice(first, first + len(positions)) if consecutive else positions


def _block_shape(
    score: Score,
    visual: Encoded,
    text: Encoded,
    memory_bytes: int,
    *,
    caller_bytes_per_pair: float = 0.0,
    max_shape: tuple[int | None, int | None] = (None, None),
) -> tuple[int, int]:
    """Choose the shape of blocks that fit into memory and do not exceed ``MAX_BLOCK_BYTES``."""
    cost = inference_block_cost(score, visual, text) + BlockCost(caller_bytes_per_pair)
    size = (len(visual), len(text))
    max_shape = block_shape(
        *size,
        BlockCost(cost.pair_bytes),
        max(MAX_BLOCK_BYTES, math.ceil(cost.pair_bytes)),
        max_shape=max_shape,
    )
    return block_shape(*size, cost, memory_bytes, max_shape=max_shape)


def _block_budget(score: Score, items: Encoded, memory: MemoryLimit) -> int:
    if isinstance(score, DeviceScore):
        return budget_bytes(memory, score.device)
    device = next((tensor.device for tensor in items[:1].tensors), torch.device("cpu"))
    return budget_bytes(memory, device)
