"""Planner of a PairLoss: makes the inputs of its execution plans, from batches or from sizes, and
caches costs and budgets.
"""

from __future__ import annotations

from typing import Any

import torch

from visavis.core.blocking import BlockCost, Score, ScoreCost, block_cost_of
from visavis.core.encoded import Items, all_tensors
from visavis.core.errors import SpecError
from visavis.core.memory_budget import MemoryLimit, budget_bytes, parse_memory
from visavis.losses.objectives.base import Objective, validate_targets
from visavis.losses.pair_loss.encoded_items import float_tensors
from visavis.losses.pair_loss.plan import ExecutionPlan, PlanInputs, choose_plan
from visavis.losses.targets import Targets


class Planner:
    """Makes the plans of one loss. Score costs and memory budgets are cached, so that plans do not
    change between batches.

    Args:
        objective: The objective.
        score: Score function. None: cosines.
        block_rows: Maximum number of queries per block.
        memory: Memory setting.
        score_cost: Declared cost of the score function.
    """

    def __init__(
        self,
        objective: Objective,
        score: Score | None,
        block_rows: int | None,
        memory: MemoryLimit,
        score_cost: ScoreCost | None,
    ) -> None:
        parse_memory(memory)
        self.objective, self.score, self.block_rows, self.memory, self.score_cost = (
            objective,
            score,
            block_rows,
            memory,
            score_cost,
        )
        self.budgets: dict[torch.device, int] = {}
        self.cost_by_form: dict[tuple[Any, ...], BlockCost] = {}

    def plan_batch(
        self,
        images: Items,
        texts: Items,
        targets: tuple[Targets, Targets],
        *,
        has_extra_candidates: bool,
        world_size: int,
        training: bool,
    ) -> ExecutionPlan:
        """Make the plan of a batch.

        Args:
            images: Images of this rank.
            texts: Texts of this rank.
            targets: Targets of both directions.
            has_extra_candidates: Whether some candidates are never queries.
            world_size: Number of ranks.
            training: Whether the loss is in train mode.

        Returns:
            The plan.
        """
        needs_grad, device = torch.is_grad_enabled(), targets[0].query_ids.device
        num_candidates, num_items = (
            sum(each.shape[1] for each in targets),
            max(len(images) + len(texts), 1),
        )
        item_bytes = (_float_bytes(images) + _float_bytes(texts)) * num_candidates // num_items
        score_cost = None
        if self.score is not None:
            score_cost = self._measure_cost(
                self.score, images, texts, needs_grad=needs_grad, training=training
            )
        inputs = PlanInputs(
            self.objective,
            targets,
            item_bytes,
            device,
            self._memory_bytes(device, item_bytes),
            score_cost=score_cost,
            element_bytes=max(
                [
                    4,
                    *(
                        part.dtype.itemsize
                        for part in (*float_tensors(images), *float_tensors(texts))
                    ),
                ]
            ),
            has_extra_candidates=has_extra_candidates,
            world_size=world_size,
            block_rows=self.block_rows,
            needs_grad=needs_grad,
        )
        return choose_plan(inputs)

    def plan_sizes(
        self,
        num_items: tuple[int, int],
        embedding_dim: int,
        targets: Targets | None,
        images: Items | None,
        texts: Items | None,
        device: torch.device,
    ) -> ExecutionPlan:
        """Make the plan of a batch that does not exist yet.

        Args:
            num_items: Number of images and of texts.
            embedding_dim: Dimension of the embeddings, for cosines.
            targets: Targets of the image-to-text direction. None: captions spread evenly over
                images.
            images: A few images, to measure the cost of a score function.
            texts: A few texts.
            device: Device of the batch.

        Returns:
            The plan.

        Raises:
            SpecError: If the cost of the score function is unknown.
        """
        num_images, num_texts = num_items
        if targets is None:
            image_of = torch.arange(num_texts) * max(num_images, 1) // max(num_texts, 1)
            targets = Targets(query_ids=torch.arange(num_images), candidate_ids=image_of)
        validate_targets(targets, torch.Size(num_items))
        cost, item_bytes = None, 4 * embedding_dim * (num_images + num_texts)
        if self.score is not None and images is not None and texts is not None:
            cost = self._measure_cost(self.score, images, texts, needs_grad=True, training=True)
            item_bytes = sum(
                _float_bytes(items) * count // max(len(items), 1)
                for items, count in zip((images, texts), num_items, strict=True)
            )
        elif self.score is not None:
            if self.score_cost is None:
                raise SpecError(
                    "score_cost: expected the cost of the score function, got none. Set "
                    "PairLoss(score_cost=...), or pass images= and texts=."
                )
            cost = self.score_cost.to_block_cost(training=True)
        memory_bytes = self._memory_bytes(device, item_bytes)
        return choose_plan(
            PlanInputs(
                self.objective,
                (targets, targets.T),
                item_bytes,
                device,
                memory_bytes,
                cost,
                block_rows=self.block_rows,
            )
        )

    def _memory_bytes(self, device: torch.device, item_bytes: int) -> int:
        """Memory for gradients of items and for blocks."""
        if device not in self.budgets:
            self.budgets[device] = budget_bytes(self.memory, device)
        # Without a limit the budget is a share of the free memory for blocks only: what items and
        # gradients need is added.
        return self.budgets[device] + (4 * item_bytes if self.memory is None else 0)

    def _measure_cost(
        self, score: Score, images: Items, texts: Items, *, needs_grad: bool, training: bool
    ) -> BlockCost:
        """Cost of a block of the score function, declared or measured once for each shape of items."""
        form = tuple(
            (part.shape[1:], part.dtype, part.device)
            for items in (images, texts)
            for part in all_tensors(items)
        )
        key = (
            form,
            needs_grad,
            training,
            torch.is_autocast_enabled(all_tensors(images)[0].device.type),
        )
        if key not in self.cost_by_form:
            self.cost_by_form[key] = block_cost_of(
                score, images, texts, training=needs_grad, declared=self.score_cost
            )
        return self.cost_by_form[key]


def _float_bytes(items: Items) -> int:
    """Memory of the tensors that can have a gradient, at least in float32, in which gradients are
    summed.
    """
    return sum(part.numel() * max(part.dtype.itemsize, 4) for part in float_tensors(items))
