"""Objectives of one number per query: one tile of scores serves both directions.

A first time through the tiles gives the summary of each row and each column. The terms of pairs then tell what summaries
and positive scores weigh. The hardest negatives need no more: their gradient touches one pair a query. A log-sum-exp
spreads over all pairs, a second time through the tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visavis.engine.facts import facts_needing_grad, leaves, tensor_of, with_tensors
from visavis.engine.processes import Processes
from visavis.engine.scores import Scores
from visavis.engine.walks.exponentials import Exponentials
from visavis.engine.walks.outcome import ValueAndGradients
from visavis.engine.walks.tiles import Tiles
from visavis.objectives.base import SummaryObjective
from visavis.objectives.pairs import NEVER
from visavis.objectives.summary import LogSumExp
from visavis.targets import Targets


def walk_shared_blocks(
    objective: SummaryObjective,
    scores: Scores,
    targets: Targets,
    tile: tuple[int, int],
    processes: Processes,
    *,
    kept_bytes: int,
    needs_grad: bool,
) -> ValueAndGradients:
    """Both directions of the objective, tile by tile; with ``needs_grad``, their gradient is pushed into ``scores``.

    kept_bytes: of tiles that are kept for the second time, where all pairs have a gradient.
    """
    summary = objective.summary(targets)
    if isinstance(summary, LogSumExp):
        scaled, in_steps = scores.times(summary.scale), processes.number == 1
        tiles = Tiles(scaled, targets, tile, in_steps=in_steps, kept_bytes=kept_bytes if needs_grad else 0)
        return _log_sum_exp(objective, summary.scale, tiles, processes, needs_grad=needs_grad)
    return _hardest(objective, Tiles(scores, targets, tile, in_steps=False, kept_bytes=0), processes, needs_grad=needs_grad)


class _Meeting:
    """Positive pairs as they meet the summaries of their rows and columns: the value, and what everything weighs in it."""

    def __init__(self, objective: SummaryObjective, tiles: Tiles, processes: Processes, *, needs_grad: bool):
        self.objective, self.tiles, self.processes, self.needs_grad = objective, tiles, processes, needs_grad
        self.share = objective.share(int(processes.sum(torch.tensor(len(tiles.query), device=tiles.query.device))))
        self.names = list(facts_needing_grad(tiles.targets)) if needs_grad else []
        self.facts = [(fact, torch.zeros_like(fact)) for fact in (tensor_of(tiles.targets, name) for name in self.names)]
        self.value = tiles.new(value=0.0)
        self.positive, self.to_positive = tiles.new(len(tiles.query)), tiles.new(len(tiles.query), value=0.0)
        self.rows, self.columns = (tiles.new(length) for length in tiles.scores.shape)
        self.to_rows, self.to_columns = (tiles.new(length, value=0.0) for length in tiles.scores.shape)

    def meet(self, rows: slice, columns: slice) -> None:
        """The pairs of some rows, and those of some columns, whose summaries are complete."""
        for summaries, weights, own, here, turned in (
            (self.rows, self.to_rows, self.tiles.query, rows, False),
            (self.columns, self.to_columns, self.tiles.candidate, columns, True),
        ):
            pairs = ((own >= here.start) & (own < here.stop)).nonzero()[:, 0]
            with torch.set_grad_enabled(self.needs_grad):
                inputs = [summaries[here].requires_grad_(self.needs_grad), self.positive[pairs].requires_grad_(self.needs_grad)]
                facts = leaves(self.tiles.targets, self.names)
                targets = with_tensors(self.tiles.targets, facts)
                query = own[pairs]
                terms = self.objective.pair_terms(inputs[0][query - here.start], inputs[1], query, targets.T if turned else targets)
                value = terms.sum() * self.share
            self.value = self.value + value.detach()  # of the dtype of its facts, where that is larger
            if value.requires_grad:
                to_inputs = torch.autograd.grad(value, [*inputs, *facts.values()], allow_unused=True, materialize_grads=True)
                weights[here] = to_inputs[0]
                self.to_positive[pairs] += to_inputs[1]
                for (_, total), gradient in zip(self.facts, to_inputs[2:], strict=True):
                    total += gradient

    def outcome(self) -> ValueAndGradients:
        return ValueAndGradients(self.processes.sum(self.value), self.tiles.scores.gradients(), self.facts)


def _log_sum_exp(objective: SummaryObjective, scale: float, tiles: Tiles, processes: Processes, *, needs_grad: bool) -> ValueAndGradients:
    met, exponentials = _Meeting(objective, tiles, processes, needs_grad=needs_grad), Exponentials()
    for step in range(tiles.number):
        for tile in tiles.first_time(step):
            met.positive[tile.pairs] = tile.positive / scale
            sums = exponentials.log_sums(tile.scores)
            for totals, here, further in zip((met.rows, met.columns), (tile.rows, tile.columns), sums, strict=True):
                totals[here] = torch.logaddexp(totals[here], further)
        complete = tiles.completed(step)
        met.columns[complete[1]] = processes.stack(met.columns[complete[1]]).logsumexp(0)
        met.meet(*complete)
        met.to_columns[complete[1]] = processes.sum(met.to_columns[complete[1]])
        for tile in tiles.second_time(step) if needs_grad else ():
            sums = _or_never(met.rows[tile.rows]), _or_never(met.columns[tile.columns])
            weights = exponentials.weights(tile.scores, *sums, met.to_rows[tile.rows], met.to_columns[tile.columns])
            weights[tile.place] = met.to_positive[tile.pairs] / scale
            tile.block.push(weights)
            del tile, weights  # before the next one is made
    return met.outcome()


def _or_never(sums: Tensor) -> Tensor:
    """A sum of nothing weighs nothing: nothing is left of any score beside +inf."""
    return sums.masked_fill(sums == NEVER, -NEVER)


def _hardest(objective: SummaryObjective, tiles: Tiles, processes: Processes, *, needs_grad: bool) -> ValueAndGradients:
    met = _Meeting(objective, tiles, processes, needs_grad=needs_grad)
    row_at, column_at = (tiles.query.new_zeros(length) for length in tiles.scores.shape)
    for tile in tiles.first_time(0):
        met.positive[tile.pairs] = tile.positive
        _keep_best(met.rows, row_at, tile.rows, tile.columns.start, tile.scores)
        _keep_best(met.columns, column_at, tile.columns, tile.rows.start, tile.scores.T)
    met.columns, owner = processes.stack(met.columns).max(0)
    met.meet(*tiles.completed(0))
    if needs_grad:
        own_rows, own_columns = (torch.arange(length, device=owner.device) for length in tiles.scores.shape)
        query, candidate = torch.cat([own_rows, column_at, tiles.query]), torch.cat([row_at, own_columns, tiles.candidate])
        to_columns = processes.sum(met.to_columns).where(owner == processes.rank, 0.0)
        gradient = torch.cat([met.to_rows, to_columns, met.to_positive])
        pushed = gradient.nonzero()[:, 0]
        tiles.scores.push_pairs(query[pushed], candidate[pushed], gradient[pushed], tiles.blocks)
    return met.outcome()


def _keep_best(best: Tensor, at: Tensor, rows: slice, first: int, scores: Tensor) -> None:
    """Take over what is better in a tile than all before; a maximum is cheap, its place only looked for where it is."""
    most = torch.maximum(best[rows], scores.amax(1))
    better = (most != best[rows]).nonzero()[:, 0]
    at[rows.start + better] = scores[better].argmax(1) + first
    best[rows] = most
