"""Objectives of one number per query: one block of scores serves both directions.

A first pass over blocks of images finishes the summary of each image and gathers that of each text. Then the terms,
and their gradient by summaries and positive scores, are a matter of pairs. The hardest negatives need no more: their
gradient touches one pair a query. A log-sum-exp spreads over all pairs, in a second pass over the same blocks.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from visavis.engine.exponentials import Exponentials
from visavis.engine.facts import learning, leaves, tensor_of, with_tensors
from visavis.engine.gathering import Processes
from visavis.engine.row_blocks import Found
from visavis.engine.scoring import Scores
from visavis.engine.tiles import Tiles
from visavis.objectives.base import Objective
from visavis.objectives.pairs import NEVER
from visavis.objectives.summary import Hardest, LogSumExp, SummaryObjective
from visavis.targets import Targets


def is_summary(objective: Objective, targets: Targets) -> TypeGuard[SummaryObjective]:
    """Whether one number for each query is all that the objective needs with such targets."""
    return isinstance(objective, SummaryObjective) and objective.takes_scores_as_they_are(targets)


def both_directions(
    objective: SummaryObjective, scores: Scores, targets: Targets, block_rows: int | None, processes: Processes, *, wanted: bool
) -> Found:
    """Both directions of the objective; with ``wanted``, their gradient is pushed into ``scores``."""
    if isinstance(objective.summary, LogSumExp):
        return _log_sum_exp(objective, objective.summary.scale, Tiles(scores, targets, block_rows), processes, wanted=wanted)
    assert isinstance(objective.summary, Hardest)
    return _hardest(objective, Tiles(scores, targets, block_rows), processes, wanted=wanted)


class _Meeting(NamedTuple):
    """The value, and its gradient by the summaries of rows and of columns, by positive scores and by facts."""

    value: Tensor
    rows: Tensor
    columns: Tensor
    positive: Tensor
    facts: list[tuple[Tensor, Tensor]]


def _meet(
    objective: SummaryObjective, tiles: Tiles, positive: Tensor, rows: Tensor, columns: Tensor, processes: Processes, *, wanted: bool
) -> _Meeting:
    """Every positive pair meets the summaries of its row and of its column."""
    names = list(learning(tiles.targets)) if wanted else []
    with torch.set_grad_enabled(wanted):
        inputs = [each.requires_grad_(wanted) for each in (rows, columns, positive)]
        facts = leaves(tiles.targets, names)
        targets = with_tensors(tiles.targets, facts)
        forth = objective.pair_terms(rows[tiles.query], positive, tiles.query, targets)
        back = objective.pair_terms(columns[tiles.candidate], positive, tiles.candidate, targets.T)
        share = objective.share(int(processes.sum(torch.tensor(len(tiles.query), device=positive.device))))
        value = torch.stack([forth.sum() * share, back.sum() * share]).sum()
    leaf = [*inputs, *facts.values()]
    gradients = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True) if value.requires_grad else leaf
    given = [tensor_of(tiles.targets, name) for name in names]
    return _Meeting(
        processes.sum(value.detach()), gradients[0], processes.sum(gradients[1]), gradients[2], list(zip(given, gradients[3:], strict=True))
    )


def _log_sum_exp(objective: SummaryObjective, scale: float, tiles: Tiles, processes: Processes, *, wanted: bool) -> Found:
    scores, exponentials = tiles.scores.times(scale), Exponentials()
    positive, in_rows, in_columns = (tiles.new(length) for length in (len(tiles.query), *scores.shape))
    for tile in tiles(scores, keep=wanted):
        positive[tile.pairs] = tile.positive / scale
        for sums, here, further in zip((in_rows, in_columns), (tile.rows, tile.columns), exponentials.log_sums(tile.scores), strict=True):
            sums[here] = torch.logaddexp(sums[here], further)
    in_columns = processes.stack(in_columns).logsumexp(0)
    meeting = _meet(objective, tiles, positive, in_rows, in_columns, processes, wanted=wanted)
    if wanted:
        in_rows, in_columns = (sums.detach().masked_fill(sums == NEVER, -NEVER) for sums in (in_rows, in_columns))
        for tile in tiles(scores):
            sums = in_rows[tile.rows], in_columns[tile.columns]
            weights = exponentials.weights(tile.scores, *sums, meeting.rows[tile.rows], meeting.columns[tile.columns])
            weights[tile.place] = meeting.positive[tile.pairs] / scale
            tile.block.push(weights)
    return Found(meeting.value, scores.gradients, meeting.facts)


def _hardest(objective: SummaryObjective, tiles: Tiles, processes: Processes, *, wanted: bool) -> Found:
    scores = tiles.scores
    positive, in_rows, in_columns = (tiles.new(length) for length in (len(tiles.query), *scores.shape))
    row_at, column_at = (tiles.query.new_zeros(length) for length in scores.shape)
    for tile in tiles(scores):
        positive[tile.pairs] = tile.positive
        _keep_best(in_rows, row_at, tile.rows, tile.columns.start, tile.scores)
        _keep_best(in_columns, column_at, tile.columns, tile.rows.start, tile.scores.T)
    in_columns, owner = processes.stack(in_columns).max(0)
    meeting = _meet(objective, tiles, positive, in_rows, in_columns, processes, wanted=wanted)
    if wanted:
        rows, columns = (torch.arange(length, device=owner.device) for length in scores.shape)
        query, candidate = torch.cat([rows, column_at, tiles.query]), torch.cat([row_at, columns, tiles.candidate])
        to_columns = meeting.columns.where(owner == processes.rank, 0.0)
        gradient = torch.cat([meeting.rows, to_columns, meeting.positive])
        pushed = gradient.nonzero()[:, 0]
        scores.push_pairs(query[pushed], candidate[pushed], gradient[pushed], tiles.blocks)
    return Found(meeting.value, scores.gradients, meeting.facts)


def _keep_best(best: Tensor, at: Tensor, rows: slice, first: int, scores: Tensor) -> None:
    """Take over what is better in a tile than all before; a maximum is cheap, its place only looked for where it is."""
    most = torch.maximum(best[rows], scores.amax(1))
    better = (most != best[rows]).nonzero()[:, 0]
    at[rows.start + better] = scores[better].argmax(1) + first
    best[rows] = most
