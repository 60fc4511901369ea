"""Loss and gradients of a PairLoss in blocks of queries: one direction after the other for any
objective, or both directions from one block.

A block is scored against all candidates, its loss terms are computed, and their gradient is
propagated to the embeddings before the next block is scored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from visavis.core.memory_budget import chunk_slices
from visavis.core.process_group import ProcessGroup
from visavis.losses.objective import Objective, PairwiseObjective
from visavis.losses.pair_loss.scores import InputGradients, Scores
from visavis.losses.pair_summaries import find_positive_pairs
from visavis.losses.targets import (
    Targets,
    annotations_needing_grad,
    get_annotation_tensor,
    replace_annotation_tensors,
    with_annotation_leaves,
)


class ValueAndGradients(NamedTuple):
    """Loss of both directions over all ranks, and its gradients on this rank.

    Attributes:
        value: The loss, a scalar.
        gradients: Gradients with respect to the inputs of the scores.
        annotation_grads: Pairs of an annotation tensor and its gradient.
        bias_grad: Gradient with respect to a bias of all scores.
    """

    value: Tensor
    gradients: InputGradients
    annotation_grads: list[tuple[Tensor, Tensor]]
    bias_grad: Tensor | float = 0.0


class DirectionLoss(NamedTuple):
    """Loss terms of one direction (image-to-text or text-to-image), summed over its queries.

    Attributes:
        total: Sum of the terms, a scalar.
        num_terms: Number of terms.
        annotation_grads: Pairs of an annotation tensor and its gradient.
        bias_grad: Gradient with respect to a bias that is added to all scores, a scalar.
    """

    total: Tensor
    num_terms: int
    annotation_grads: list[tuple[Tensor, Tensor]]
    bias_grad: Tensor


def run_row_blocks(
    objective: Objective,
    scores: Scores,
    queries: tuple[slice, slice],
    targets: tuple[Targets, Targets],
    block_rows: tuple[int, int],
    group: ProcessGroup,
    *,
    bias: Tensor | float | None = None,
    needs_grad: bool,
) -> ValueAndGradients:
    """Compute the loss of both directions in blocks of queries."""
    # With a sum reduction both directions have weight 1, so they can share one gradient buffer.
    # With a mean, the weights depend on the total number of terms, which is known only after both
    # passes: each direction needs its own buffer.
    shares_buffer = objective.reduction == "sum"
    image_to_text = scores.window(queries[0])
    text_to_image = (scores if shares_buffer else scores.fork()).T.window(queries[1])
    losses = [
        _direction_loss(
            objective, direction, direction_targets, max_rows, group, bias, needs_grad=needs_grad
        )
        for direction, direction_targets, max_rows in zip(
            (image_to_text, text_to_image), targets, block_rows, strict=True
        )
    ]
    # Number of terms of each direction over all ranks.
    counts = group.all_reduce_sum(
        torch.tensor([loss.num_terms for loss in losses], device=group.device)
    ).tolist()
    weights = [objective.term_weight(count) for count in counts]
    weighted = list(zip(losses, weights, strict=True))
    value = group.all_reduce_sum(
        torch.stack([loss.total * weight for loss, weight in weighted]).sum()
    )
    annotation_grads = [
        (tensor, gradient * weight)
        for loss, weight in weighted
        for tensor, gradient in loss.annotation_grads
    ]
    bias_grad = torch.stack([loss.bias_grad * weight for loss, weight in weighted]).sum()
    gradients = (
        image_to_text.gradients() if shares_buffer else image_to_text.merge(text_to_image, weights)
    )
    return ValueAndGradients(value, gradients, annotation_grads, bias_grad)


def run_shared_blocks(
    objective: PairwiseObjective,
    scores: Scores,
    targets: Targets,
    max_rows: int,
    group: ProcessGroup,
    *,
    bias: Tensor | float | None = None,
    needs_grad: bool,
) -> ValueAndGradients:
    """Compute the loss of both directions in blocks of queries of one of them."""
    # The number of terms and the queries that count follow from ids alone, so the weight of each
    # pair in both directions is known before it is scored.
    num_queries, num_candidates = scores.shape
    query, candidate = targets.positive_pairs([])  # [P]
    # Number of positives of each query [Q], and of each candidate [C], whose positives and other
    # queries are on all ranks.
    row_counts = query.bincount(minlength=num_queries)
    column_counts = group.all_reduce_sum(candidate.bincount(minlength=num_candidates))
    num_rows, num_row_terms = group.all_reduce_sum(
        torch.stack([query.new_tensor(num_queries), (row_counts > 0).sum()])
    ).tolist()
    # Weight of the loss of a pair as a term of its query [Q], and of its candidate [C].
    row_weights, column_weights = (
        objective.is_counted(counts, num_others - counts).to(scores.dtype)
        * objective.term_weight(num_terms)
        for counts, num_others, num_terms in (
            (row_counts, num_candidates, num_row_terms),
            (column_counts, num_rows, int((column_counts > 0).sum())),
        )
    )
    value = row_weights.new_zeros(())
    bias_grad = torch.zeros_like(value)
    for rows in chunk_slices(num_queries, max_rows):
        block = scores.block(rows, with_grad=needs_grad)
        block_targets = targets[rows]
        logits = (block.scores if bias is None else block.scores + bias).detach()
        logits.requires_grad_(needs_grad)
        with torch.set_grad_enabled(needs_grad):
            pairs = find_positive_pairs(logits, block_targets)
            losses = objective.pair_losses(pairs, block_targets)  # [R, C]
            # Not a product of vectors, which autocast would compute in half precision.
            total = (losses.sum(1) * row_weights[rows]).sum() + (
                losses.sum(0) * column_weights
            ).sum()
        value += total.detach()
        if needs_grad:
            (gradient,) = torch.autograd.grad(total, logits)
            block.accumulate_grad(gradient)
            bias_grad += gradient.sum()
            del gradient
        # Free the block before the next one is scored.
        del block, logits, pairs, losses, total
    return ValueAndGradients(group.all_reduce_sum(value), scores.gradients(), [], bias_grad)


def _split_rows_by_weight(num_rows: int, max_weight: int, weights: Tensor) -> list[slice]:
    """Split rows into consecutive blocks whose weights sum to at most a maximum, or that hold a
    single row.
    """
    if weights.sum() <= max_weight:
        return chunk_slices(num_rows, max_weight)
    starts = [0]
    total = 0
    for row, weight in enumerate(weights.tolist()):
        if total and total + weight > max_weight:
            starts.append(row)
            total = 0
        total += weight
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], num_rows], strict=True)]


def _direction_loss(
    objective: Objective,
    scores: Scores,
    targets: Targets,
    max_rows: int,
    group: ProcessGroup,
    bias: Tensor | float | None,
    *,
    needs_grad: bool,
) -> DirectionLoss:
    """Sum the terms of all queries of one direction, and accumulate their gradient in the scores."""
    num_queries = scores.shape[0]
    blocks = chunk_slices(num_queries, max_rows)
    if objective.needs_positive_scores and targets.positive_scores is None:
        local_scores = scores.score_pairs(*targets.positive_pairs(blocks), blocks)
        targets = replace(targets, positive_scores=group.all_gather_rows(local_scores))
    if objective.needs_pair_matrix:
        # A block of these objectives has one row per positive pair instead of one per query.
        blocks = _split_rows_by_weight(
            num_queries, max_rows, targets.positive_counts(blocks).clamp(min=1)
        )
    names = list(annotations_needing_grad(targets)) if needs_grad else []
    # Slices of these targets are views of the sums.
    annotation_sums = replace_annotation_tensors(
        targets, {name: torch.zeros_like(get_annotation_tensor(targets, name)) for name in names}
    )
    totals = [torch.zeros((), dtype=scores.dtype, device=targets.query_ids.device)]
    num_terms = 0
    bias_grad = torch.zeros_like(totals[0])
    for rows in blocks:
        block = scores.block(rows, with_grad=needs_grad)
        logits = block.scores if bias is None else block.scores + bias
        logits.requires_grad_(needs_grad)
        with torch.set_grad_enabled(needs_grad):
            block_targets, leaves = with_annotation_leaves(targets[rows], names)
            terms = objective.terms(*objective.prepare(logits, block_targets))
            total = terms.sum()
        totals.append(total.detach())
        num_terms += len(terms)
        del terms
        if total.requires_grad:
            score_grads, *annotation_grads = torch.autograd.grad(
                total, [logits, *leaves], allow_unused=True
            )
            del total, leaves, block_targets  # the graph
            if score_grads is not None:
                block.accumulate_grad(score_grads)
                if bias is not None:
                    bias_grad += score_grads.sum()
            for name, gradient in zip(names, annotation_grads, strict=True):
                if gradient is not None:
                    get_annotation_tensor(annotation_sums[rows], name).add_(gradient)
            del score_grads, annotation_grads
        # Free the block before the next one is scored.
        del block, logits
    annotation_pairs = [
        (get_annotation_tensor(targets, name), get_annotation_tensor(annotation_sums, name))
        for name in names
    ]
    return DirectionLoss(
        torch.stack([total.to(totals[-1].dtype) for total in totals]).sum(),
        num_terms,
        annotation_pairs,
        bias_grad,
    )
