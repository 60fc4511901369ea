"""Both paths of a PairLoss: the graph of one matrix, or blocks off the graph whose gradients are
attached to the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from visavis.core.blocking import Score, checked_scores
from visavis.core.encoded import Encoded
from visavis.core.errors import (
    VisavisError,
)
from visavis.core.process_group import ProcessGroup
from visavis.losses.objective import (
    Objective,
    PairwiseObjective,
    SummaryObjective,
)
from visavis.losses.pair_loss.batch_comparison import BatchComparison, ExtraCandidates
from visavis.losses.pair_loss.batch_items import concatenate_items
from visavis.losses.pair_loss.blocks import (
    run_row_blocks,
    run_shared_blocks,
)
from visavis.losses.pair_loss.plan import ExecutionPlan
from visavis.losses.pair_loss.scores import (
    CosineScores,
    FunctionScores,
    Scores,
    cosine,
    trainable,
)
from visavis.losses.pair_loss.tiles import run_tiles
from visavis.losses.targets import (
    annotations_needing_grad,
)


def dense_loss(objective: Objective, score: Score, comparison: BatchComparison) -> Tensor:
    """Compute the loss on the graph of one score matrix, or of one per direction with extra
    candidates.
    """
    images = comparison.images
    texts = comparison.texts
    image_to_text, text_to_image = comparison.targets

    def logits(images: Encoded, texts: Encoded) -> Tensor:
        return comparison.scale_and_bias.apply(checked_scores(score, images, texts))

    if not comparison.has_extra_candidates:
        return objective(logits(images, texts), image_to_text)
    all_images, all_texts = (
        items if extra is None else concatenate_items(items, extra.local_items, extra.name)
        for items, extra in ((images, comparison.extra_images), (texts, comparison.extra_texts))
    )
    by_images = objective.prepare(logits(images, all_texts), image_to_text)
    by_texts = objective.prepare(logits(all_images, texts).T, text_to_image)
    return objective.reduce(objective.terms(*by_images), objective.terms(*by_texts))


def blockwise_loss(
    objective: Objective, score: Score, comparison: BatchComparison, plan: ExecutionPlan
) -> Tensor:
    """Compute value and gradients in one forward pass over blocks, and attach them to the graph."""
    group = comparison.group
    targets = comparison.targets
    scale, bias = comparison.scale_and_bias
    images = CandidatePool(comparison.images, comparison.extra_images, group)
    texts = CandidatePool(comparison.texts, comparison.extra_texts, group)
    queries = images.query_rows, texts.query_rows
    inputs = images.items, texts.items, scale, (images.needs_grad, texts.needs_grad)
    scores: Scores = (
        CosineScores(*inputs)
        if score is cosine
        else FunctionScores(score, *inputs, plan.block_columns)
    )
    biases = trainable(bias)
    annotations = [annotations_needing_grad(each) for each in targets]
    needs_grad = torch.is_grad_enabled() and (
        any(images.needs_grad + texts.needs_grad)
        or len(scores.parameters) + len(biases) > 0
        or any(annotations)
    )
    with torch.no_grad():
        if plan.tile_shape is not None:
            assert isinstance(objective, SummaryObjective)
            result = run_tiles(
                objective,
                scores.window(queries[0]),
                targets[0],
                plan.tile_shape,
                group,
                cache_bytes=plan.cached_bytes,
                needs_grad=needs_grad,
            )
        elif plan.shares_blocks:
            assert isinstance(objective, PairwiseObjective)
            result = run_shared_blocks(
                objective,
                scores.window(queries[0]),
                targets[0],
                plan.block_rows[0],
                group,
                bias=bias,
                needs_grad=needs_grad,
            )
        else:
            result = run_row_blocks(
                objective,
                scores,
                queries,
                targets,
                plan.block_rows,
                group,
                bias=bias,
                needs_grad=needs_grad,
            )
        if not needs_grad:
            return result.value
        # Each input tensor of this rank and its gradient. Gradients of items and annotations belong
        # to one rank and are multiplied by the number of ranks for the mean of
        # DistributedDataParallel. Gradients of parameters and the bias are equal on all ranks and
        # are summed.
        gradients = [
            *images.local_gradients(result.gradients.images, group),
            *texts.local_gradients(result.gradients.texts, group),
        ]
        gradients += [
            (tensor, group.all_reduce_sum(total))
            for tensor, total in zip(scores.parameters, result.gradients.parameters, strict=True)
            if total is not None
        ]
        gradients += [
            (tensor, group.scale_for_ddp_mean(total)) for tensor, total in result.annotation_grads
        ]
        gradients += [
            (tensor, group.all_reduce_sum(torch.as_tensor(result.bias_grad))) for tensor in biases
        ]
    needed = [
        (tensor, gradient.reshape(tensor.shape).to(tensor.dtype))
        for tensor, gradient in gradients
        if tensor.requires_grad
    ]
    return _KnownGradients.apply(
        result.value, [gradient for _, gradient in needed], *(tensor for tensor, _ in needed)
    )


class CandidatePool:
    """All candidates of one side, detached: the items of all ranks, then the extra candidates.

    Args:
        items: Items of this rank.
        extra_candidates: Extra candidates of this side, if any.
        group: Process group.
    """

    def __init__(
        self, items: Encoded, extra_candidates: ExtraCandidates | None, group: ProcessGroup
    ) -> None:
        self.local_tensors = items.float_tensors
        self.extra_candidates = extra_candidates
        all_items, self.query_rows = group.all_gather_items(items.map(Tensor.detach))
        self.num_batch_items = len(all_items)
        self.items = all_items
        parts = [self.local_tensors]
        if extra_candidates is not None:
            self.items = concatenate_items(
                all_items, extra_candidates.all_items, extra_candidates.name
            )
            parts.append(extra_candidates.local_items.float_tensors)
        self.needs_grad = [
            torch.is_grad_enabled() and group.any_rank(any(part.requires_grad for part in tensors))
            for tensors in zip(*parts, strict=True)
        ]

    def local_gradients(
        self, pool_gradients: Sequence[Tensor | None], group: ProcessGroup
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of a tensor of this rank and its gradient, scaled so that the mean over ranks is the
        gradient of the value.
        """
        extra = self.extra_candidates
        extra_tensors = (
            [None] * len(self.local_tensors) if extra is None else extra.local_items.float_tensors
        )
        # Not strict: cosine scores have a gradient of the embeddings only.
        for tensor, extra_tensor, total in zip(
            self.local_tensors, extra_tensors, pool_gradients, strict=False
        ):
            if total is None:
                continue
            # The gradient of the items of all ranks, due to the queries of all ranks.
            batch_grad = group.all_reduce_sum(total[: self.num_batch_items])[self.query_rows]
            yield tensor, group.scale_for_ddp_mean(_without_padding(batch_grad, tensor))
            if (
                extra is not None
                and extra_tensor is not None
                and group.any_rank(extra_tensor.requires_grad)
            ):
                extra_grad = group.all_reduce_sum(total[self.num_batch_items :])
                if extra.local_rows is None:  # a bank that all ranks share
                    yield extra_tensor, _without_padding(extra_grad, extra_tensor)
                else:
                    yield (
                        extra_tensor,
                        group.scale_for_ddp_mean(
                            _without_padding(extra_grad[extra.local_rows], extra_tensor)
                        ),
                    )


def _without_padding(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Drop the padding that was added to concatenate items of different lengths."""
    return gradient[:, : tensor.shape[1]] if tensor.dim() > 1 else gradient


class _KnownGradients(torch.autograd.Function):
    """A value with known gradients. The backward pass multiplies them by the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise VisavisError(
                "PairLoss cannot be differentiated twice, because its gradient is computed in the "
                "forward pass. "
                "Call the objective on the score matrix instead: objective(scores, targets)."
            )
        return None, None, *(gradient * upstream[0] for gradient in ctx.gradients)
