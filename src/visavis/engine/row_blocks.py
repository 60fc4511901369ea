"""Any objective by blocks of queries: a block's terms and their gradient are formed while its scores are at hand.

Memory is that of the items, their gradients and one block; never queries x candidates. ``each_direction`` adds up
what the terms of all blocks say; ``prescribed`` puts a value and gradients that are known already on the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visavis.engine.facts import learning, leaves, tensor_of, with_tensors, zeros
from visavis.engine.gathering import Processes
from visavis.engine.positives import positive_counts, positive_pairs
from visavis.engine.scoring import Gradients, Scores
from visavis.errors import VisavisError
from visavis.objectives.base import Objective
from visavis.targets import Targets

FEWEST_ROWS = 64  # fewer make a product slow


class Found(NamedTuple):
    """The value of both directions over all processes, and its gradients: by inputs of the scores, by facts that want one."""

    value: Tensor
    gradients: Gradients
    facts: list[tuple[Tensor, Tensor]]


class Direction(NamedTuple):
    """The sum of a direction's terms, their number, and what the sum says to facts that want a gradient."""

    total: Tensor
    number: int
    facts: list[tuple[Tensor, Tensor]]


def row_blocks(height: int, most: int, weights: Tensor | None = None) -> list[slice]:
    """Consecutive rows, at most so many at a time; ``weights``: what each row counts for, if not 1.

    >>> row_blocks(5, 2), row_blocks(3, 4, torch.tensor([3, 3, 1]))
    ([slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)], [slice(0, 1, None), slice(1, 3, None)])
    """
    if weights is None or weights.sum() <= most:
        return [slice(start, min(start + most, height)) for start in range(0, height, most)]
    starts, taken = [0], 0
    for row, weight in enumerate(weights.tolist()):
        if taken and taken + weight > most:
            starts.append(row)
            taken = 0
        taken += weight
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], height], strict=True)]


def each_direction(
    objective: Objective,
    scores: Scores,
    queries: tuple[slice, slice],
    targets: tuple[Targets, Targets],
    block_rows: int | None,
    processes: Processes,
    *,
    wanted: bool,
) -> Found:
    """One direction after the other: some images as queries, then some texts, each with targets of its own."""
    summed = objective.reduction == "sum"  # else the directions weigh differently, which only the end tells
    forth, back = scores.window(queries[0]), (scores if summed else scores.apart()).T.window(queries[1])
    directions = [
        _direction(objective, each, known, block_rows, processes, wanted=wanted) for each, known in zip((forth, back), targets, strict=True)
    ]
    counts = processes.sum(torch.tensor([each.number for each in directions], device=processes.device)).tolist()
    shares = [objective.share(count) for count in counts]
    value = processes.sum(torch.stack([each.total * share for each, share in zip(directions, shares, strict=True)]).sum())
    facts = [(fact, gradient * share) for each, share in zip(directions, shares, strict=True) for fact, gradient in each.facts]
    return Found(value, forth.gradients() if summed else forth.combined(back, shares), facts)


def _direction(
    objective: Objective, scores: Scores, targets: Targets, block_rows: int | None, processes: Processes, *, wanted: bool
) -> Direction:
    """The terms of all queries; with ``wanted``, their gradient is pushed into ``scores``."""
    height, width = scores.shape
    most = block_rows or max(FEWEST_ROWS, scores.at_once // max(width, 1))
    blocks = row_blocks(height, most)
    if objective.needs_positive_scores and targets.positive_scores is None:
        own = scores.of_pairs(*positive_pairs(targets, blocks), blocks)
        targets = replace(targets, positive_scores=processes.joined(own))
    if objective.wide:
        blocks = row_blocks(height, most, positive_counts(targets, blocks).clamp(min=1))
    names = list(learning(targets)) if wanted else []
    sums = zeros(targets, names)
    totals, count = [torch.zeros((), dtype=scores.dtype, device=targets.query_ids.device)], 0
    for rows in blocks:
        block = scores.block(rows)
        with torch.set_grad_enabled(wanted):
            leaf, known = block.scores.requires_grad_(wanted), targets[rows]
            facts = leaves(known, names)
            terms = objective.terms(*objective.prepare(leaf, with_tensors(known, facts)))
            total = terms.sum()
        totals.append(total.detach())
        count += len(terms)
        if total.requires_grad:
            to_scores, *to_facts = torch.autograd.grad(total, [leaf, *facts.values()], allow_unused=True)
            if to_scores is not None:
                block.push(to_scores)
            for name, gradient in zip(facts, to_facts, strict=True):
                if gradient is not None:
                    tensor_of(sums[rows], name).add_(gradient)
    facts_found = [(tensor_of(targets, name), tensor_of(sums, name)) for name in names]
    return Direction(torch.stack([each.to(totals[-1].dtype) for each in totals]).sum(), count, facts_found)


class _Prescribed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise VisavisError(
                "PairLoss has formed its gradient already and cannot be differentiated twice: "
                "call the objective itself on the score matrix, objective(scores, targets)."
            )
        return None, None, *(gradient * upstream[0] for gradient in ctx.gradients)


def prescribed(value: Tensor, gradients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The value on the graph, with these gradients by these inputs, whatever is done with it later."""
    wanted = [(given, gradient.reshape(given.shape).to(given.dtype)) for given, gradient in gradients if given.requires_grad]
    return _Prescribed.apply(value, [gradient for _, gradient in wanted], *(given for given, _ in wanted))
