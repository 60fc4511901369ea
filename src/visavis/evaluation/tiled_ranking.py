"""Ranks of all images and texts in both directions, from tiles of the score matrix, which is never
held as a whole.

`count_before` counts the candidates before each positive, here tile by tile and in `positive_ranks`
on one block. `ranks_from_counts` turns the counts into ranks. Two details make them exact here:

- Positive scores come from the same product. A product of another shape, or an elementwise sum,
  rounds differently, so that an item could outrank itself. The tiles that hold positive pairs are
  therefore scored first, by the same calls as in the main pass (a small part of all tiles, because
  items are sorted by id, and the first ones are kept for the main pass).
- Equal items have equal scores. The same vector in two rows of one product can give two results,
  because the last rows and columns of a matrix use other code. Items that are bit-identical are
  therefore scored once, and their score counts for each of them: a duplicate image is a tie, and a
  collapsed model is all ties.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from visavis.core.blocking import Score, checked_scores
from visavis.core.encoded import Direction, Encoded
from visavis.core.errors import DataError
from visavis.core.memory_budget import MemoryLimit, chunk_slices
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.evaluation.metrics.ranking import (
    Ties,
    count_before,
    pad_by_query,
    positive_ranks,
    raise_on_invalid_row,
    ranks_from_counts,
)
from visavis.losses.scoring import (
    DirectedScore,
    TwoStageScore,
    score_query_rows,
    select_items,
    tile_shape,
)
from visavis.losses.targets import Targets

MAX_TILE_ROWS = 256
"""Images that are scored at once. Larger tiles leave the processor's cache while they are counted."""
MAX_KEPT_BYTES = 2**25
"""Memory of tiles that are kept from the first pass."""
BYTES_PER_SUM = 2**20
"""Bytes that are summed at once."""
FIRST_BYTES = 64
"""Bytes of each item that are summed first."""
COUNTING_BYTES_PER_PAIR = 16.0
"""Memory per pair while a tile is counted: its scores or those of the previous tile, and flags, at
most in float64.
"""
RANKING_BYTES_PER_PAIR = 48.0
"""Memory per pair of `positive_ranks`: scores, masked scores and flags in float64, and the positive
and negative masks.
"""


@dataclass(frozen=True)
class _Side:
    """The distinct items of one side, sorted by id and split into tiles.

    Attributes:
        encoded: All items.
        items: Position of each distinct item among the encoded ones, shape ``[U]``.
        index: Distinct item of each item, shape ``[N]``.
        copies: Number of items that are equal to each distinct item, shape ``[U]``.
        cuts: Bounds of the tiles among the distinct items, from 0 to U.
    """

    encoded: Encoded
    items: Tensor
    index: Tensor
    copies: Tensor
    cuts: list[int]

    def tile(self, number: int) -> Encoded:
        return select_items(self.encoded, self.items[self.cuts[number] : self.cuts[number + 1]])

    def tile_of(self, item: Tensor) -> Tensor:
        return torch.bucketize(self.index[item], torch.tensor(self.cuts[1:]), right=True)


@dataclass(frozen=True, eq=False)
class RankedQueries:
    """Ranks and scores of the queries of one side.

    Attributes:
        queries: Positions of the queries among the given items, shape ``[Q]``: all that have a
            positive, ascending.
        positive_ranks: Ranks of the positives, shape ``[Q, M]``. See
            `visavis.evaluation.metrics.positive_ranks`.
        top_candidates: The candidate with the highest score, shape ``[Q]``.
        positive_scores: Scores of the positives, best first, shape ``[Q, M]``, padded with -inf.
        hardest_negative_scores: Score of the hardest negative, shape ``[Q]``, -inf without
            negatives.
    """

    queries: Tensor
    positive_ranks: Tensor
    top_candidates: Tensor
    positive_scores: Tensor
    hardest_negative_scores: Tensor


@torch.no_grad()
def rank_by_tiles(
    visual: Encoded,
    text: Encoded,
    score: Score,
    image_ids: Tensor,
    text_ids: Tensor,
    *,
    targets: Targets | None = None,
    ties: Ties = "pessimistic",
    memory: MemoryLimit = None,
    max_tile: tuple[int, int] | None = None,
    group: ProcessGroup = ONE_PROCESS,
) -> tuple[RankedQueries, RankedQueries]:
    """Rank all texts for each image and all images for each text. An item without a positive is only
    a candidate.
    """
    if targets is None:
        targets = Targets(query_ids=image_ids, candidate_ids=text_ids)
    # The image and the text of all positive pairs, [P].
    if targets.relation is None:
        image, text_of_pair = targets.positive_pairs([])
    else:
        image, text_of_pair = targets.relation.unique(dim=0).T
    if isinstance(score, TwoStageScore | DirectedScore):
        # These order the candidates of each direction differently.
        images = image.unique()
        texts = text_of_pair.unique()
        by_images = rank_by_rows(
            select_items(visual, images),
            text,
            score,
            targets[images],
            "i2t",
            ties=ties,
            memory=memory,
        )
        by_texts = rank_by_rows(
            visual,
            select_items(text, texts),
            score,
            targets.T[texts],
            "t2i",
            ties=ties,
            memory=memory,
        )
        return replace(by_images, queries=images), replace(by_texts, queries=texts)
    if max_tile is None:
        rows, columns = tile_shape(
            score, visual, text, caller_bytes_per_pair=COUNTING_BYTES_PER_PAIR, memory=memory
        )
        max_tile = min(rows, MAX_TILE_ROWS), columns
    # Free memory differs between processes, but they must cut the same tiles.
    max_rows, max_columns = group.all_gather_stack(torch.tensor(max_tile)).amin(0).tolist()
    images = _split_side(visual, image_ids, max_rows)
    texts = _split_side(text, text_ids, max_columns)
    tiles = _ScoreTiles(images, texts, score, image, text_of_pair)
    # [P], in the order of the tiles. Only they are scored twice.
    scores = torch.cat([tile.positive_scores for tile in tiles.score(only_with_positives=True)])
    pairs = _PositivePairs(tiles.pair_image, tiles.pair_text, scores)
    image_counter = _RankCounter(pairs, images, texts, ties)
    text_counter = _RankCounter(
        _PositivePairs(pairs.candidate, pairs.query, scores), texts, images, ties
    )
    for tile in tiles.score(group):
        image_counter.add(tile)
        text_counter.add(tile.T)
    image_counter.merge(group)
    text_counter.merge(group)
    return image_counter.result(), text_counter.result()


@torch.no_grad()
def rank_by_rows(
    visual: Encoded,
    text: Encoded,
    score: Score,
    targets: Targets,
    direction: Direction,
    *,
    ties: Ties = "pessimistic",
    memory: MemoryLimit = None,
) -> RankedQueries:
    """Rank the candidates of one direction by blocks of queries, with positives of any relation."""
    # One entry for each block of queries.
    ranks = []
    positive_scores = []
    top_candidates = []
    hardest = []
    for rows, block in iter_score_rows(visual, text, score, direction, memory=memory):
        block_targets = targets[rows]
        positive = block_targets.positive
        ranks.append(positive_ranks(block, block_targets, ties=ties))
        positive_scores.append(pad_by_query(block[positive], positive.nonzero()[:, 0], len(block)))
        top_candidates.append(block.argmax(1))
        # -inf for a query without a negative
        hardest.append(block.masked_fill(~block_targets.negative, -torch.inf).amax(1))
    return RankedQueries(
        torch.arange(len(targets.query_ids)),
        stack_rows(ranks, torch.inf),
        torch.cat(top_candidates),
        stack_rows(positive_scores, -torch.inf),
        torch.cat(hardest),
    )


def stack_rows(blocks: list[Tensor], padding: float) -> Tensor:
    """Concatenate blocks of rows ``[Q, L]`` whose lengths L differ."""
    width = max(block.shape[1] for block in blocks)
    return torch.cat([pad(block, (0, width - block.shape[1]), value=padding) for block in blocks])


@torch.no_grad()
def iter_score_rows(
    visual: Encoded,
    text: Encoded,
    score: Score,
    direction: Direction,
    *,
    memory: MemoryLimit = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Score blocks of queries against all candidates, ``[R, C]``. Equal candidates have equal scores."""
    (kind, queries), (_, candidates) = (("image", visual), ("text", text))[
        :: 1 if direction == "i2t" else -1
    ]
    # Equal candidates are scored once, in one tile.
    side = _split_side(candidates, torch.arange(len(candidates)), len(candidates))
    distinct = select_items(candidates, side.items)
    both = (visual, distinct) if direction == "i2t" else (distinct, text)
    for rows, block in score_query_rows(
        score, *both, direction, caller_bytes_per_pair=RANKING_BYTES_PER_PAIR, memory=memory
    ):
        message = (
            f"scores of {kind} {{}}: expected numbers, got NaN. Check the model and its features."
        )
        raise_on_invalid_row(block.isnan(), message, range(len(queries))[rows])
        # Back to all candidates: [R, distinct] to [R, C].
        yield rows, block.cpu()[:, side.index]


class _PositivePairs(NamedTuple):
    """Positive pairs sorted by tile: queries, candidates and scores, ``[P]`` each."""

    query: Tensor
    candidate: Tensor
    scores: Tensor


class _RankCounter:
    """Counts, tile by tile, the other candidates before each positive of each query of one side.

    It also tracks the hardest negative of each query.
    """

    def __init__(self, pairs: _PositivePairs, queries: _Side, candidates: _Side, ties: Ties):
        self.pairs = pairs
        self.queries = queries
        self.candidates = candidates
        num_queries = len(queries.index)
        positive_scores = pad_by_query(pairs.scores, pairs.query, num_queries)  # [Q, M]
        self.positive_scores = positive_scores
        self.ties = ties
        # [Q, M], halves for mean ties
        self.num_before = positive_scores.new_zeros(positive_scores.shape, dtype=torch.float64)
        # The hardest negative of each query, [Q], and its number among the distinct candidates.
        self.hardest = positive_scores.new_full((num_queries,), -torch.inf)
        self.hardest_candidate = torch.zeros(num_queries, dtype=torch.long)
        # Queries sorted by their distinct item, so that those of a tile are consecutive.
        self.order = torch.argsort(queries.index, stable=True)
        self.position = torch.argsort(self.order)
        self.cuts = torch.searchsorted(
            queries.index[self.order], torch.tensor(queries.cuts)
        ).tolist()

    def add(self, tile: _ScoredTile) -> None:
        """Count the scores of a tile, whose rows are the queries."""
        block = tile.scores
        query_tile, candidate_tile = tile.position
        pair_query = self.pairs.query[tile.pairs]
        pair_candidate = self.candidates.index[self.pairs.candidate[tile.pairs]]
        queries = self.order[self.cuts[query_tile] : self.cuts[query_tile + 1]]
        first_candidate, stop = self.candidates.cuts[candidate_tile : candidate_tile + 2]
        # Number of candidates behind each column: a duplicate counts as often as it occurs.
        copies = self.candidates.copies[first_candidate:stop]
        has_copies = bool(copies.amax() > 1)
        # Rows and columns of the positive pairs.
        pairs = torch.stack(
            [self.position[pair_query] - self.cuts[query_tile], pair_candidate - first_candidate]
        )
        if has_copies:
            pairs, count = pairs.unique(dim=1, return_counts=True)
            # Of equal candidates that are not all positives, one is a negative.
            pairs = pairs[:, count == copies[pairs[1]]]
        pairs = pairs.to(block.device)
        rows = self.queries.index[queries] - self.queries.cuts[query_tile]
        positive_scores = self.positive_scores[queries].to(block.device)  # [Q, M] of the tile
        # Equal queries share a row of the block, so there may be more queries than rows.
        for part in chunk_slices(len(queries), len(block)):
            is_block = len(queries) == len(block)
            scores = block if is_block else block[rows[part]]
            buffer = tile.buffer if is_block else torch.empty_like(scores)
            num_before = count_before(
                scores,
                positive_scores[part],
                self.ties,
                copies=copies.to(scores) if has_copies else None,
                buffer=buffer,
            )
            self.num_before[queries[part]] += num_before.cpu().double()
            row, column = pairs[:, (pairs[0] >= part.start) & (pairs[0] < part.stop)]
            negatives = buffer.copy_(scores)
            negatives[row - part.start, column] = -torch.inf
            self._update_hardest(queries[part], negatives, first_candidate)

    def _update_hardest(self, queries: Tensor, negatives: Tensor, first_candidate: int) -> None:
        """Track the hardest negatives. ``negatives`` is overwritten."""
        highest = negatives.amax(1)
        hardest = highest.cpu()
        # Strictly, so that of equal scores the first tile keeps its candidate.
        is_harder = hardest > self.hardest[queries]
        self.hardest[queries[is_harder]] = hardest[is_harder]
        # Only a negative that is not below all positives can be a top candidate.
        is_top = is_harder & (hardest >= self.positive_scores[queries, 0])
        if is_top.any():
            # The first of equal maxima, several times faster than ``negatives.max(1)``.
            numbers = torch.arange(negatives.shape[1], 0, -1).to(negatives)
            last = negatives.eq_(highest[:, None]).mul_(numbers).amax(1)
            column = negatives.shape[1] - last.cpu().long()
            self.hardest_candidate[queries[is_top]] = first_candidate + column[is_top]

    def merge(self, group: ProcessGroup) -> None:
        """Add the counts of the tiles of all processes."""
        # each pair was counted by one process
        self.num_before = group.all_reduce_sum(self.num_before)
        # Of equal scores the first process has the earlier tile.
        self.hardest, owner = group.all_gather_stack(self.hardest).max(0)
        candidates = group.all_gather_stack(self.hardest_candidate)
        self.hardest_candidate = candidates.gather(0, owner[None])[0]

    def result(self) -> RankedQueries:
        """Ranks of the queries."""
        num_positives = torch.bincount(self.pairs.query, minlength=len(self.hardest))
        ranks = ranks_from_counts(self.num_before, self.positive_scores, num_positives, self.ties)
        # The distinct candidate with the highest score, [Q], of equal ones the first: the first of
        # the best positives, or the hardest negative.
        query, candidate, scores = self.pairs
        best = self.positive_scores[:, 0]
        is_best = scores == best[query]
        first = torch.full_like(self.hardest_candidate, len(self.candidates.items))
        first.scatter_reduce_(0, query[is_best], self.candidates.index[candidate[is_best]], "amin")
        is_positive = (best > self.hardest) | (
            (best == self.hardest) & (first < self.hardest_candidate)
        )
        top = torch.where(is_positive, first, self.hardest_candidate)
        top_candidates = self.candidates.items[top]
        queries = num_positives.nonzero()[:, 0]
        columns = ranks, top_candidates, self.positive_scores, self.hardest
        return RankedQueries(queries, *(values[queries] for values in columns))


@dataclass(frozen=True, eq=False)
class _ScoredTile:
    """A tile of scores, memory like them, its row and column in the grid of tiles, its positive
    pairs among all, and their rows and columns in the tile.
    """

    scores: Tensor
    buffer: Tensor
    position: tuple[int, int]
    pairs: slice
    pair_rows: Tensor
    pair_columns: Tensor

    @property
    def T(self) -> _ScoredTile:
        """The same tile with the roles of queries and candidates exchanged."""
        return _ScoredTile(
            self.scores.T,
            self.buffer.T,
            self.position[::-1],
            self.pairs,
            self.pair_columns,
            self.pair_rows,
        )

    @property
    def positive_scores(self) -> Tensor:
        return self.scores[self.pair_rows, self.pair_columns].cpu()


class _ScoreTiles:
    """The tiles of the score matrix, and the positive pairs sorted by tile: ``pair_image [P]``,
    ``pair_text [P]``.
    """

    def __init__(self, images: _Side, texts: _Side, score: Score, image: Tensor, text: Tensor):
        self.images = images
        self.texts = texts
        self.score_function = score
        self.num_rows = len(images.cuts) - 1
        self.num_columns = len(texts.cuts) - 1
        tile, order = (images.tile_of(image) * self.num_columns + texts.tile_of(text)).sort(
            stable=True
        )
        self.pair_image = image[order]
        self.pair_text = text[order]
        self.buffer: Tensor | None = None
        self.kept_tiles: dict[int, Tensor] = {}
        self.bytes_to_keep = MAX_KEPT_BYTES
        # Pairs of tile t are pair_bounds[t] to pair_bounds[t + 1].
        self.pair_bounds = torch.searchsorted(
            tile, torch.arange(self.num_rows * self.num_columns + 1)
        ).tolist()

    def score(
        self, group: ProcessGroup = ONE_PROCESS, *, only_with_positives: bool = False
    ) -> Iterator[_ScoredTile]:
        """Score the tiles of this process, or only those with positive pairs, whose other scores
        are not checked.
        """
        images = self.images
        texts = self.texts
        for row_tile in (
            torch.arange(self.num_rows).tensor_split(group.world_size)[group.rank].tolist()
        ):
            visual = images.tile(row_tile)
            for column_tile in range(self.num_columns):
                tile = row_tile * self.num_columns + column_tile
                pairs = slice(*self.pair_bounds[tile : tile + 2])
                if only_with_positives and pairs.start == pairs.stop:
                    continue
                block = self.kept_tiles.pop(tile, None)
                if block is None:
                    block = checked_scores(self.score_function, visual, texts.tile(column_tile))
                    # Half precision would tie in other places than float32.
                    block = block if block.dtype == torch.float64 else block.float()
                    if only_with_positives and block.nbytes <= self.bytes_to_keep:
                        self.kept_tiles[tile] = block
                        self.bytes_to_keep -= block.nbytes
                # Without a NaN in the sum there is none among the scores, so that they need not be
                # inspected one by one.
                if not only_with_positives and block.sum().isnan():
                    # A sum of infinite scores can be NaN, too.
                    for row, column in block.isnan().nonzero()[:1].tolist():
                        image = int(images.items[images.cuts[row_tile] + row])
                        item = int(texts.items[texts.cuts[column_tile] + column])
                        raise DataError(
                            f"score of image {image} and text {item}: expected a number, got NaN. "
                            "Check the model and its features."
                        )
                # The same memory for all tiles. Fresh memory for each of them would cost as much time
                # as the count.
                buffer = self.buffer
                if buffer is None or (buffer.shape, buffer.dtype) != (block.shape, block.dtype):
                    self.buffer = buffer = torch.empty_like(block)
                rows = images.index[self.pair_image[pairs]] - images.cuts[row_tile]
                columns = texts.index[self.pair_text[pairs]] - texts.cuts[column_tile]
                yield _ScoredTile(block, buffer, (row_tile, column_tile), pairs, rows, columns)


def _split_side(encoded: Encoded, ids: Tensor, max_items: int) -> _Side:
    """Sort the items of a side by id, keep one of those with equal content, and split them into
    tiles of about equal size.
    """
    # Sorted by id, so that most tiles hold no positive pair.
    order = torch.argsort(ids, stable=True)
    originals = _first_copies(encoded, order)
    items = order[originals[order] == order]
    number = torch.empty_like(order)
    number[items] = torch.arange(len(items))
    index = number[originals]
    num_tiles = math.ceil(len(items) / max_items)
    cuts = [len(items) * tile // num_tiles for tile in range(num_tiles + 1)]
    return _Side(encoded, items, index, torch.bincount(index), cuts)


def _first_copies(encoded: Encoded, order: Tensor) -> Tensor:
    """For each item the first one in an order that is bit-identical, except for zero padding,
    ``[N]``.
    """
    candidates = torch.arange(len(encoded))
    # A sum of the first bytes with pseudorandom weights, 8 bytes at once, is unequal for most
    # different items, and a sum of all bytes for almost all of the others.
    for max_bytes in (FIRST_BYTES, None):
        sums = _content_sums(encoded, candidates, max_bytes)
        _, group, sizes = sums.unique(return_inverse=True, return_counts=True)
        candidates = candidates[sizes[group] > 1]
        if not len(candidates):
            break
    originals = torch.arange(len(encoded))
    # Only items with equal sums are compared by all their bytes.
    candidates = order[torch.isin(order, candidates)]
    first_by_content: dict[tuple[bytes, ...], int] = {}
    for item in candidates.tolist():
        parts = encoded[item : item + 1].tensors
        content = tuple(_row_bytes(part).numpy().tobytes().rstrip(b"\0") for part in parts)
        originals[item] = first_by_content.setdefault(content, item)
    return originals


def _content_sums(encoded: Encoded, selected: Tensor, max_bytes: int | None) -> Tensor:
    """Weighted sums of the bytes of the selected items, in ascending order, modulo 2^64. Padding is 0
    and adds nothing.
    """
    sums = torch.zeros(len(encoded), dtype=torch.long)
    is_selected = torch.zeros(len(encoded), dtype=torch.bool)
    is_selected[selected] = True
    for items, block in encoded.iter_blocks():
        rows = is_selected[items].nonzero()[:, 0]
        for seed, part in enumerate(block.tensors):
            values = part.reshape(len(part), -1)
            if max_bytes is not None:
                values = values[:, : max_bytes // part.element_size()]
            num_bytes = values.shape[1] * values.element_size()
            random = np.random.default_rng(seed)
            weights = torch.from_numpy(
                random.integers(-(2**63), 2**63 - 1, math.ceil(num_bytes / 8), dtype=np.int64)
            )
            for part_rows in chunk_slices(len(rows), max(1, BYTES_PER_SUM // max(1, num_bytes))):
                chunk = rows[part_rows]
                content = _row_bytes(values[chunk])
                words = pad(content, (0, -content.shape[1] % 8)).view(torch.long)
                sums[items[chunk]] += (words * weights).sum(1)
    return sums[selected]


def _row_bytes(part: Tensor) -> Tensor:
    """The bytes of each row, ``[N, bytes]``. numpy has no bfloat16."""
    return part.cpu().contiguous().reshape(len(part), -1).view(torch.uint8)
