"""What a loss knows for its plans: the cost of its score, and how much memory it may use."""

from __future__ import annotations

from typing import Any

import torch

from visavis.engine.items import Items, parts, tensors
from visavis.engine.plan import Plan, Sizes, choose
from visavis.engine.scores import Score
from visavis.errors import SpecError
from visavis.measured_cost import cost_of
from visavis.memory import BlockCost, Memory, ScoreCost, budget, parse_memory
from visavis.objectives.base import Objective
from visavis.targets import Targets


class Planner:
    """Plans of one loss. score: None for cosines. Costs of a score and budgets are remembered, so that plans stay the same."""

    def __init__(
        self, objective: Objective, score: Score | None, block_rows: int | None, memory: Memory, declared: ScoreCost | None
    ) -> None:
        self.objective, self.score, self.block_rows, self.declared = objective, score, block_rows, declared
        self.memory, self.is_set = memory, parse_memory(memory) is not None
        self.budgets: dict[torch.device, int] = {}
        self.costs: dict[tuple[Any, ...], BlockCost] = {}

    def of(self, images: Items, texts: Items, targets: tuple[Targets, Targets], *, extra: bool, processes: int, training: bool) -> Plan:
        """For these items, each direction with targets of its own; extra: some candidates are never queries."""
        needs_grad = torch.is_grad_enabled()
        candidates = targets[0].shape[1], targets[1].shape[1]
        every = _bytes_of(images) + _bytes_of(texts)
        sizes = Sizes(
            queries=(len(images), len(texts)),
            candidates=candidates,
            item_bytes=every * sum(candidates) // max(len(images) + len(texts), 1),
            number_bytes=max([4, *(part.dtype.itemsize for part in (*parts(images), *parts(texts)))]),
            extra=extra,
            processes=processes,
        )
        cost = None if self.score is None else self._cost(self.score, images, texts, needs_grad=needs_grad, training=training)
        return self._chosen(cost, targets, sizes, tensors(images)[0].device, needs_grad=needs_grad)

    def ahead(
        self, numbers: tuple[int, int], width: int, targets: Targets | None, images: Items | None, texts: Items | None, device: torch.device
    ) -> Plan:
        """For so many images and texts that are not there yet; images, texts: a few, by which the cost of a score is known."""
        num_images, num_texts = numbers
        if targets is None:
            image_of = torch.arange(num_texts) * max(num_images, 1) // max(num_texts, 1)
            targets = Targets(query_ids=torch.arange(num_images), candidate_ids=image_of)
        sizes, cost = Sizes.of_vectors(num_images, num_texts, width), None
        if self.score is not None and images is not None and texts is not None:
            cost = self._cost(self.score, images, texts, needs_grad=True, training=True)
            of_sides = (_bytes_of(items) * number // max(len(items), 1) for items, number in zip((images, texts), numbers, strict=True))
            sizes = Sizes(numbers, (num_texts, num_images), sum(of_sides))
        elif self.score is not None:
            if self.declared is None:
                raise SpecError("plan() does not know what this score costs: give PairLoss(score_cost=...), or a few images= and texts=.")
            cost = self.declared.block(training=True)
        return self._chosen(cost, (targets, targets.T), sizes, device, needs_grad=True)

    def _chosen(
        self, cost: BlockCost | None, targets: tuple[Targets, Targets], sizes: Sizes, device: torch.device, *, needs_grad: bool
    ) -> Plan:
        if device not in self.budgets:
            self.budgets[device] = budget(self.memory, device)
        memory_bytes = self.budgets[device] + (0 if self.is_set else 4 * sizes.item_bytes)  # a share is for blocks, whatever items take
        return choose(self.objective, cost, targets, sizes, device, memory_bytes, block_rows=self.block_rows, needs_grad=needs_grad)

    def _cost(self, score: Score, images: Items, texts: Items, *, needs_grad: bool, training: bool) -> BlockCost:
        """What a block of the score costs for items of this form; asked or measured once for each form."""
        form = tuple((part.shape[1:], part.dtype, part.device) for items in (images, texts) for part in tensors(items))
        key = form, needs_grad, training, torch.is_autocast_enabled(tensors(images)[0].device.type)
        if key not in self.costs:
            self.costs[key] = cost_of(score, images, texts, training=needs_grad, declared=self.declared)
        return self.costs[key]


def _bytes_of(items: Items) -> int:
    """Of the parts that can have a gradient, in float32 at least, which gradients are added up in."""
    return sum(part.numel() * max(part.dtype.itemsize, 4) for part in parts(items))
