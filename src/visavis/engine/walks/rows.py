"""One direction after the other, for any objective: a block's terms and their gradient are formed while its scores are at hand.

Memory is that of the items, their gradients and one block; never queries x candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from visavis.engine.facts import facts_needing_grad, leaves, tensor_of, with_tensors, zeros
from visavis.engine.positives import positive_counts, positive_pairs
from visavis.engine.processes import Processes
from visavis.engine.scores import Scores
from visavis.engine.walks.outcome import ValueAndGradients
from visavis.memory import spans
from visavis.objectives.base import Objective
from visavis.targets import Targets


class Direction(NamedTuple):
    """The sum of a direction's terms, their number, and what the sum says to facts that need a gradient, and to a bias of all scores."""

    total: Tensor
    number: int
    facts: list[tuple[Tensor, Tensor]]
    bias: Tensor


def walk_rows(
    objective: Objective,
    scores: Scores,
    queries: tuple[slice, slice],
    targets: tuple[Targets, Targets],
    rows: tuple[int, int],
    processes: Processes,
    *,
    bias: Tensor | float | None = None,
    needs_grad: bool,
) -> ValueAndGradients:
    """Some images as queries, then some texts, each with targets of its own; at most so many ``rows`` in a block of each direction.

    bias: added to all scores.
    """
    summed = objective.reduction == "sum"  # else the directions weigh differently, which only the end tells
    forth, back = scores.window(queries[0]), (scores if summed else scores.fork()).T.window(queries[1])
    directions = [
        _direction(objective, of_one_way, known, most, processes, bias, needs_grad=needs_grad)
        for of_one_way, known, most in zip((forth, back), targets, rows, strict=True)
    ]
    counts = processes.sum(torch.tensor([direction.number for direction in directions], device=processes.device)).tolist()
    shares = [objective.share(count) for count in counts]
    value = processes.sum(torch.stack([direction.total * share for direction, share in zip(directions, shares, strict=True)]).sum())
    facts = [(fact, gradient * share) for direction, share in zip(directions, shares, strict=True) for fact, gradient in direction.facts]
    to_bias = torch.stack([direction.bias * share for direction, share in zip(directions, shares, strict=True)]).sum()
    return ValueAndGradients(value, forth.gradients() if summed else forth.merge(back, shares), facts, to_bias)


def balanced_rows(height: int, most: int, weights: Tensor | None = None) -> list[slice]:
    """Consecutive rows that count for at most so much together; ``weights``: what each row counts for, if not 1.

    >>> balanced_rows(5, 2), balanced_rows(3, 4, torch.tensor([3, 3, 1]))
    ([slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)], [slice(0, 1, None), slice(1, 3, None)])
    """
    if weights is None or weights.sum() <= most:
        return spans(height, most)
    starts, taken = [0], 0
    for row, weight in enumerate(weights.tolist()):
        if taken and taken + weight > most:
            starts.append(row)
            taken = 0
        taken += weight
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], height], strict=True)]


def _direction(
    objective: Objective,
    scores: Scores,
    targets: Targets,
    most: int,
    processes: Processes,
    bias: Tensor | float | None,
    *,
    needs_grad: bool,
) -> Direction:
    """The terms of all queries; with ``needs_grad``, their gradient is pushed into ``scores``."""
    height = scores.shape[0]
    blocks = spans(height, most)
    if objective.needs_positive_scores and targets.positive_scores is None:
        own = scores.of_pairs(*positive_pairs(targets, blocks), blocks)
        targets = replace(targets, positive_scores=processes.joined(own))
    if objective.wide:
        blocks = balanced_rows(height, most, positive_counts(targets, blocks).clamp(min=1))
    names = list(facts_needing_grad(targets)) if needs_grad else []
    sums = zeros(targets, names)
    totals, count = [torch.zeros((), dtype=scores.dtype, device=targets.query_ids.device)], 0
    to_bias = torch.zeros_like(totals[0])
    for rows in blocks:
        block = scores.block(rows, pushed=needs_grad)
        leaf = (block.scores if bias is None else block.scores + bias).requires_grad_(needs_grad)
        with torch.set_grad_enabled(needs_grad):
            known = targets[rows]
            facts = leaves(known, names)
            terms = objective.terms(*objective.prepare(leaf, with_tensors(known, facts)))
            total = terms.sum()
        totals.append(total.detach())
        count += len(terms)
        if total.requires_grad:
            to_scores, *to_facts = torch.autograd.grad(total, [leaf, *facts.values()], allow_unused=True)
            if to_scores is not None:
                block.push(to_scores)
                if bias is not None:
                    to_bias += to_scores.sum()
            for name, gradient in zip(facts, to_facts, strict=True):
                if gradient is not None:
                    tensor_of(sums[rows], name).add_(gradient)
            del to_scores, to_facts
        del block, leaf, terms, total  # before the next block is made
    to_given = [(tensor_of(targets, name), tensor_of(sums, name)) for name in names]
    return Direction(torch.stack([total.to(totals[-1].dtype) for total in totals]).sum(), count, to_given, to_bias)
