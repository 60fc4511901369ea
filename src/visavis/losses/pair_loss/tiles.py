"""Loss and gradients of a PairLoss in tiles, for objectives that need one number per query.

A tile is a block of some queries and some candidates that serves both directions. The first pass
computes the summary of each row and each column. The terms of the positive pairs then determine the
gradient of the summaries and of the positive scores. A hardest negative needs no more, because its
gradient is that of one pair per query. A log-sum-exp spreads its gradient over all pairs, which
takes a second pass.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from visavis.core.memory_budget import chunk_slices
from visavis.core.process_group import ProcessGroup
from visavis.losses.objective import SummaryObjective
from visavis.losses.pair_loss.blocks import ValueAndGradients
from visavis.losses.pair_loss.scores import ScoreBlock, Scores
from visavis.losses.pair_summaries import NEG_INF, NegativeLogSumExp
from visavis.losses.targets import (
    Targets,
    annotations_needing_grad,
    get_annotation_tensor,
    with_annotation_leaves,
)


class Tile(NamedTuple):
    """A tile of scores, -inf where a pair is not negative, and the positive pairs in it.

    Attributes:
        rows: Queries.
        columns: Candidates.
        pairs: The positive pairs of the tile among all positive pairs.
        pair_positions: Row and column of each of them in the tile.
        positive_scores: Their scores.
        block: The scores and the accumulation of their gradient.
    """

    rows: slice
    columns: slice
    pairs: slice
    pair_positions: tuple[Tensor, Tensor]
    positive_scores: Tensor
    block: ScoreBlock

    @property
    def scores(self) -> Tensor:
        """Scores of the tile, shape ``[R, C]``."""
        return self.block.scores

    def view_of(self, memory: Tensor) -> Tensor:
        """View the start of a one-dimensional tensor in the shape of the tile."""
        return memory[: self.scores.numel()].view(self.scores.shape)


class Tiles:
    """All tiles of a score matrix.

    Args:
        scores: Scores of the queries of this rank against all candidates.
        targets: Targets of the image-to-text direction.
        tile_shape: Rows and columns of a tile.

    Attributes:
        row_blocks: Queries of each row of tiles.
        positions: Row and column of each tile among the tiles.
        query: Query of each positive pair, in the order of the tiles.
        candidate: Candidate of each positive pair.
    """

    def __init__(self, scores: Scores, targets: Targets, tile_shape: tuple[int, int]):
        self.scores = scores
        self.targets = targets
        height, width = tile_shape
        self.row_blocks = chunk_slices(scores.shape[0], height)
        self.column_blocks = chunk_slices(scores.shape[1], width)
        self.positions = list(product(range(len(self.row_blocks)), range(len(self.column_blocks))))
        query, candidate = targets.positive_pairs(self.row_blocks)  # [P]
        tile_numbers, order = (
            query // height * max(len(self.column_blocks), 1) + candidate // width
        ).sort(stable=True)
        self.query = query[order]
        self.candidate = candidate[order]
        # The pairs of tile t are pair_bounds[t] to pair_bounds[t + 1].
        self.pair_bounds = torch.searchsorted(
            tile_numbers, torch.arange(len(self.positions) + 1, device=tile_numbers.device)
        ).tolist()
        self.negative: tuple[slice, Tensor] | None = None

    def score(self, row: int, column: int, *, with_grad: bool) -> Tile:
        """Score a tile. The next one overwrites its scores."""
        rows = self.row_blocks[row]
        columns = self.column_blocks[column]
        number = row * len(self.column_blocks) + column
        pairs = slice(*self.pair_bounds[number : number + 2])
        block = self.scores.block(rows, columns, with_grad=with_grad)
        positions = (self.query[pairs] - rows.start, self.candidate[pairs] - columns.start)
        positive = block.scores[positions]
        if self.targets.is_defined_by_ids:
            block.scores[positions] = NEG_INF
        else:
            # Computed once for all tiles of these rows.
            if self.negative is None or self.negative[0] != rows:
                self.negative = rows, self.targets[rows].negative
            block.scores.masked_fill_(~self.negative[1][:, columns], NEG_INF)
        return Tile(rows, columns, pairs, positions, positive, block)

    @property
    def max_tile_scores(self) -> int:
        """Number of scores of the largest tile."""
        return math.prod(
            max((block.stop - block.start for block in blocks), default=0)
            for blocks in (self.row_blocks, self.column_blocks)
        )

    def new_tensor(self, *length: int, value: float = NEG_INF) -> Tensor:
        """Make a tensor with the dtype of the scores."""
        return torch.full(length, value, dtype=self.scores.dtype, device=self.query.device)


class TileExponentials:
    """Exponentials of a tile, for its rows and its columns at once.

    One shift serves the whole tile if all of its sums can be computed with it, which is tested. A
    sum close to the smallest number may have lost terms. The tile then keeps its scores, and its
    sums and gradients are computed with a shift for each row and column. So no temperature and no
    spread of scores underflows, and a usual tile costs one exponential per score.

    Args:
        scores: Scores of shape ``[R, C]``.
        memory: Tensor of this shape for the exponentials.
        totals: Log-sum-exp of each row and of each column over all tiles, if they are known.
            ``memory`` may then be ``scores``.

    Attributes:
        values: $e^(s_ij - shift)$, or the scores if no shift serves all of them.
        shift: The shift. None: no shift serves all scores.
        log_sums: Log-sum-exp of rows ``[R]`` and of columns ``[C]``, -inf where all scores are
            -inf. Missing if the totals were known.
    """

    log_sums: tuple[Tensor, Tensor]

    def __init__(self, scores: Tensor, memory: Tensor, totals: tuple[Tensor, Tensor] | None = None):
        shift = scores.amax()
        shift = torch.where(shift == -math.inf, 0.0, shift)
        # The smallest sum of this many terms in which no lost term matters. Terms are lost below
        # the smallest number.
        limits = torch.finfo(scores.dtype)
        smallest = limits.tiny / limits.eps * scores.numel()
        self.shift: Tensor | None = shift
        if totals is not None and (
            shift - torch.minimum(*(total.min() for total in totals))
        ) >= -math.log(smallest):
            self.shift = None
            self.values = memory.copy_(scores)
            return
        self.values = torch.sub(scores, shift, out=memory).exp_()
        if totals is not None:
            return
        rows = self.values.sum(1)
        columns = self.values.sum(0)
        if torch.minimum(rows.min(), columns.min()) < smallest:
            self.shift = None
            self.values = memory.copy_(scores)
            self.log_sums = scores.logsumexp(1), scores.logsumexp(0)
        else:
            self.log_sums = rows.log_().add_(shift), columns.log_().add_(shift)

    def gradient(
        self, totals: tuple[Tensor, Tensor], total_grads: tuple[Tensor, Tensor], memory: Tensor
    ) -> Tensor:
        """Compute $row_grads_i e^(s_ij - rows_i) + column_grads_j e^(s_ij - columns_j)$. Overwrites
        the exponentials and ``memory``, both ``[R, C]``. A total without negatives is +inf.
        """
        rows, columns = totals
        row_grads, column_grads = total_grads
        if self.shift is not None:
            per_row = row_grads * (self.shift - rows).exp_()
            per_column = column_grads * (self.shift - columns).exp_()
            return self.values.mul_(torch.add(per_column, per_row[:, None], out=memory))
        by_columns = torch.sub(self.values, columns, out=memory).exp_().mul_(column_grads)
        return self.values.sub_(rows[:, None]).exp_().mul_(row_grads[:, None]).add_(by_columns)


def run_tiles(
    objective: SummaryObjective,
    scores: Scores,
    targets: Targets,
    tile_shape: tuple[int, int],
    group: ProcessGroup,
    *,
    cache_bytes: int,
    needs_grad: bool,
) -> ValueAndGradients:
    """Compute the loss of both directions tile by tile."""
    summary = objective.summary(targets)
    if isinstance(summary, NegativeLogSumExp):
        tiles = Tiles(scores.scaled_by(summary.scale), targets, tile_shape)
        loss = _SummaryLoss(objective, tiles, group, needs_grad=needs_grad)
        _log_sum_exp_loss(loss, summary.scale, cache_bytes if scores.is_cheap else 0)
    else:
        loss = _SummaryLoss(
            objective, Tiles(scores, targets, tile_shape), group, needs_grad=needs_grad
        )
        _hardest_loss(loss)
    return ValueAndGradients(
        group.all_reduce_sum(loss.value), loss.tiles.scores.gradients(), loss.annotation_grads
    )


class _SummaryLoss:
    """Loss of the positive pairs given the summaries of their rows and columns, and the gradient of
    both.
    """

    def __init__(
        self, objective: SummaryObjective, tiles: Tiles, group: ProcessGroup, *, needs_grad: bool
    ):
        self.objective = objective
        self.tiles = tiles
        self.group = group
        self.needs_grad = needs_grad
        self.term_weight = objective.term_weight(
            int(group.all_reduce_sum(torch.tensor(len(tiles.query), device=tiles.query.device)))
        )
        self.names = list(annotations_needing_grad(tiles.targets)) if needs_grad else []
        annotations = [get_annotation_tensor(tiles.targets, name) for name in self.names]
        self.annotation_grads = [(tensor, torch.zeros_like(tensor)) for tensor in annotations]
        self.value = tiles.new_tensor(value=0.0)
        # Scores of the positive pairs [P], and summaries of the rows [Q] and columns [C], with the
        # gradient of each.
        self.positive = tiles.new_tensor(len(tiles.query))
        self.positive_grads = tiles.new_tensor(len(tiles.query), value=0.0)
        self.rows, self.columns = (tiles.new_tensor(length) for length in tiles.scores.shape)
        self.row_grads, self.column_grads = (
            tiles.new_tensor(length, value=0.0) for length in tiles.scores.shape
        )

    def add_terms(self) -> None:
        """Add the terms of all pairs in both directions, whose summaries are complete."""
        for summaries, summary_grads, query, is_transposed in (
            (self.rows, self.row_grads, self.tiles.query, False),
            (self.columns, self.column_grads, self.tiles.candidate, True),
        ):
            with torch.set_grad_enabled(self.needs_grad):
                summary = summaries.detach().requires_grad_(self.needs_grad)
                positive = self.positive.detach().requires_grad_(self.needs_grad)
                targets, annotations = with_annotation_leaves(self.tiles.targets, self.names)
                terms = self.objective.pair_terms(
                    summary[query], positive, query, targets.T if is_transposed else targets
                )
                value = terms.sum() * self.term_weight
            # Not in place: the dtype of the annotations may be wider than that of the scores.
            self.value = self.value + value.detach()
            if value.requires_grad:
                summary_grad, positive_grad, *grads = torch.autograd.grad(
                    value,
                    [summary, positive, *annotations],
                    allow_unused=True,
                    materialize_grads=True,
                )
                summary_grads += summary_grad
                self.positive_grads += positive_grad
                for (_, total), gradient in zip(self.annotation_grads, grads, strict=True):
                    total += gradient


def _log_sum_exp_loss(loss: _SummaryLoss, scale: float, cache_bytes: int) -> None:
    """Compute a loss that summarizes the negatives of each row and of each column by a log-sum-exp."""
    # The tiles hold scaled scores, so positive scores are divided by `scale`.
    tiles = loss.tiles
    group = loss.group
    memory = tiles.new_tensor(tiles.max_tile_scores)  # scratch memory for one tile
    num_cached = min(cache_bytes // memory.element_size(), math.prod(tiles.scores.shape))
    free = memory.new_empty(num_cached if loss.needs_grad else 0)
    cached = dict[tuple[int, int], tuple[Tile, TileExponentials]]()

    # First pass: the exponentials of each tile [R, C] are added to the log-sum-exp of its rows and
    # of its columns.
    for position in tiles.positions:
        tile = tiles.score(*position, with_grad=tiles.scores.is_cheap)
        loss.positive[tile.pairs] = tile.positive_scores / scale
        is_cached = len(free) >= tile.scores.numel()
        exponentials = TileExponentials(tile.scores, tile.view_of(free if is_cached else memory))
        if is_cached:
            free = free[tile.scores.numel() :]
            cached[position] = tile, exponentials
        for running, items, sums in zip(
            (loss.rows, loss.columns),
            (tile.rows, tile.columns),
            exponentials.log_sums,
            strict=True,
        ):
            running[items] = torch.logaddexp(running[items], sums)
        # Free the tile before the next one is scored.
        del tile, exponentials
    # The negatives of a column are on all ranks.
    loss.columns = group.all_gather_stack(loss.columns).logsumexp(0)

    # The terms give the gradient of each log-sum-exp.
    loss.add_terms()
    loss.column_grads = group.all_reduce_sum(loss.column_grads)

    # Second pass: the gradient of a score is its softmax weight in its row times the gradient of
    # the row, plus the same for its column. Positive scores have the gradient of their terms
    # instead. The exponentials come from the cache, or the tile is scored again.
    for position in tiles.positions if loss.needs_grad else ():
        stored = cached.pop(position, None)
        tile = tiles.score(*position, with_grad=True) if stored is None else stored[0]
        totals = _inf_if_empty(loss.rows[tile.rows]), _inf_if_empty(loss.columns[tile.columns])
        exponentials = (
            TileExponentials(tile.scores, tile.scores, totals) if stored is None else stored[1]
        )
        gradient = exponentials.gradient(
            totals,
            (loss.row_grads[tile.rows], loss.column_grads[tile.columns]),
            tile.view_of(memory),
        )
        gradient[tile.pair_positions] = loss.positive_grads[tile.pairs] / scale
        tile.block.accumulate_grad(gradient)
        # Free the tile before the next one is scored.
        del tile, stored, exponentials, gradient


def _inf_if_empty(sums: Tensor) -> Tensor:
    """+inf for an empty log-sum-exp, so that its exponentials are 0."""
    return sums.masked_fill(sums == NEG_INF, -NEG_INF)


def _hardest_loss(loss: _SummaryLoss) -> None:
    """Compute a loss that reads only the hardest negative of each row and of each column."""
    tiles = loss.tiles
    group = loss.group
    # One pass finds these maxima and their positions.
    row_argmax, column_argmax = (tiles.query.new_zeros(length) for length in tiles.scores.shape)
    for position in tiles.positions:
        tile = tiles.score(*position, with_grad=False)
        loss.positive[tile.pairs] = tile.positive_scores
        _update_max(loss.rows, row_argmax, tile.rows, tile.columns.start, tile.scores)
        _update_max(loss.columns, column_argmax, tile.columns, tile.rows.start, tile.scores.T)
        del tile  # before the next one is scored
    # The maximum of a column is that over all ranks. Only the rank that scored it, its owner, adds
    # its gradient.
    loss.columns, owner = group.all_gather_stack(loss.columns).max(0)
    loss.add_terms()
    if loss.needs_grad:
        # Only positive pairs and hardest pairs have a gradient, so no tile is scored again.
        all_rows, all_columns = (
            torch.arange(length, device=owner.device) for length in tiles.scores.shape
        )
        # The hardest pair of each row [Q] and of each column [C], then the positive pairs [P].
        query = torch.cat([all_rows, column_argmax, tiles.query])
        candidate = torch.cat([row_argmax, all_columns, tiles.candidate])
        column_grads = group.all_reduce_sum(loss.column_grads).where(owner == group.rank, 0.0)
        gradient = torch.cat([loss.row_grads, column_grads, loss.positive_grads])
        nonzero = gradient.nonzero()[:, 0]
        tiles.scores.accumulate_pair_grads(
            query[nonzero], candidate[nonzero], gradient[nonzero], tiles.row_blocks
        )


def _update_max(best: Tensor, argmax: Tensor, rows: slice, first: int, scores: Tensor) -> None:
    """Take over larger scores of a tile. A maximum is cheap, so its position is computed only for
    rows that improve.
    """
    highest = torch.maximum(best[rows], scores.amax(1))
    better = (highest != best[rows]).nonzero()[:, 0]
    argmax[rows.start + better] = scores[better].argmax(1) + first
    best[rows] = highest
