"""Objectives of one number per query: one block of scores serves both directions.

A first pass over blocks of images finishes the summary of each image and gathers that of each text. Then the terms,
and their gradient by summaries and positive scores, are a matter of pairs. The hardest negatives need no more: their
gradient touches one pair a query. A log-sum-exp spreads over all pairs, in a second pass over the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from visavis.engine.exponentials import Exponentials
from visavis.engine.facts import learning, leaves, tensor_of, with_tensors
from visavis.engine.gathering import Processes
from visavis.engine.positives import by_ids_alone, positive_pairs
from visavis.engine.row_blocks import Found, row_blocks
from visavis.engine.scoring import Block, Scores
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
        return _log_sum_exp(objective, objective.summary.scale, _Negatives(scores, targets, block_rows), processes, wanted=wanted)
    assert isinstance(objective.summary, Hardest)
    return _hardest(objective, _Negatives(scores, targets, block_rows), processes, wanted=wanted)


class _Part(NamedTuple):
    """Some rows of scores, -inf where a pair is no negative; ``place``: in the block, where its positive pairs stood."""

    rows: slice
    pairs: slice
    place: tuple[Tensor, Tensor]
    positive: Tensor
    block: Block


class _Negatives:
    """The scores of negatives by blocks of rows, and all positive pairs, ordered by row."""

    def __init__(self, scores: Scores, targets: Targets, block_rows: int | None):
        self.scores, self.targets = scores, targets
        self.blocks = row_blocks(scores.shape, block_rows)
        self.query, self.candidate = positive_pairs(targets, self.blocks)
        starts = torch.tensor([rows.start for rows in self.blocks], dtype=torch.long, device=self.query.device)
        self.first_pairs = [*torch.searchsorted(self.query, starts).tolist(), len(self.query)]

    def parts(self, scores: Scores) -> Iterator[_Part]:
        for number, rows in enumerate(self.blocks):
            pairs = slice(self.first_pairs[number], self.first_pairs[number + 1])
            block, place = scores.block(rows), (self.query[pairs] - rows.start, self.candidate[pairs])
            positive = block.scores[place]
            if by_ids_alone(self.targets):
                block.scores[place] = NEVER
            else:
                block.scores.masked_fill_(~self.targets[rows].negative, NEVER)
            yield _Part(rows, pairs, place, positive, block)

    def new(self, length: int, value: float = NEVER) -> Tensor:
        return torch.full((length,), value, dtype=self.scores.dtype, device=self.query.device)


class _Meeting(NamedTuple):
    """The value, and its gradient by the summaries of rows and of columns, by positive scores and by facts."""

    value: Tensor
    rows: Tensor
    columns: Tensor
    positive: Tensor
    facts: list[tuple[Tensor, Tensor]]


def _meet(
    objective: SummaryObjective, found: _Negatives, positive: Tensor, rows: Tensor, columns: Tensor, processes: Processes, *, wanted: bool
) -> _Meeting:
    """Every positive pair meets the summaries of its row and of its column."""
    names = list(learning(found.targets)) if wanted else []
    with torch.set_grad_enabled(wanted):
        inputs = [each.requires_grad_(wanted) for each in (rows, columns, positive)]
        facts = leaves(found.targets, names)
        targets = with_tensors(found.targets, facts)
        forth = objective.pair_terms(rows[found.query], positive, found.query, targets)
        back = objective.pair_terms(columns[found.candidate], positive, found.candidate, targets.T)
        share = objective.share(int(processes.sum(torch.tensor(len(found.query), device=positive.device))))
        value = torch.stack([forth.sum() * share, back.sum() * share]).sum()
    leaf = [*inputs, *facts.values()]
    gradients = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True) if value.requires_grad else leaf
    given = [tensor_of(found.targets, name) for name in names]
    return _Meeting(
        processes.sum(value.detach()), gradients[0], processes.sum(gradients[1]), gradients[2], list(zip(given, gradients[3:], strict=True))
    )


def _log_sum_exp(objective: SummaryObjective, scale: float, found: _Negatives, processes: Processes, *, wanted: bool) -> Found:
    scores = found.scores.times(scale)
    height, width = scores.shape
    positive, in_rows, in_columns = found.new(len(found.query)), found.new(height), found.new(width)
    exponentials = Exponentials()
    for part in found.parts(scores):
        positive[part.pairs] = part.positive / scale
        in_rows[part.rows], of_block = exponentials.log_sums(part.block.scores)
        in_columns = torch.logaddexp(in_columns, of_block)
    in_columns = processes.stack(in_columns).logsumexp(0)
    meeting = _meet(objective, found, positive, in_rows, in_columns, processes, wanted=wanted)
    if wanted:
        in_rows, in_columns = in_rows.detach(), in_columns.detach()
        for part in found.parts(scores):
            weights = exponentials.weights(
                part.block.scores, in_rows[part.rows], in_columns, meeting.rows[part.rows], meeting.columns
            )
            weights[part.place] = meeting.positive[part.pairs] / scale
            part.block.push(weights)
    return Found(meeting.value, found.scores.gradients, meeting.facts)


def _hardest(objective: SummaryObjective, found: _Negatives, processes: Processes, *, wanted: bool) -> Found:
    height, width = found.scores.shape
    positive, in_rows, in_columns = found.new(len(found.query)), found.new(height), found.new(width)
    row_at, column_at = found.query.new_zeros(height), found.query.new_zeros(width)
    for part in found.parts(found.scores):
        positive[part.pairs] = part.positive
        scores = part.block.scores
        if width:
            in_rows[part.rows], row_at[part.rows] = scores.max(1)
        better = (scores.amax(0) > in_columns).nonzero()[:, 0]
        best, at = scores.T[better].max(1)  # side by side: a maximum with its place is slow across rows
        in_columns[better], column_at[better] = best, at + part.rows.start
    everyones = processes.stack(in_columns)
    in_columns, owner = everyones.max(0)
    meeting = _meet(objective, found, positive, in_rows, in_columns, processes, wanted=wanted)
    if wanted:
        own = torch.arange(height, device=row_at.device), torch.arange(width, device=row_at.device)
        to_columns = meeting.columns.where(owner == processes.rank, 0.0)
        query = torch.cat([own[0], column_at, found.query])
        candidate = torch.cat([row_at, own[1], found.candidate])
        gradient = torch.cat([meeting.rows, to_columns, meeting.positive])
        open_ones = gradient.nonzero()[:, 0]
        found.scores.push_pairs(query[open_ones], candidate[open_ones], gradient[open_ones], found.blocks)
    return Found(meeting.value, found.scores.gradients, meeting.facts)
