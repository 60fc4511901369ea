"""The learning rate and the parameter groups of a phase."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch.optim import Optimizer

from visavis.errors import RecipeError, nearest
from visavis.models.base import SCALE, Matcher
from visavis.training.settings import Phase, ScheduleSettings


def factor(schedule: ScheduleSettings, step: int, steps_per_epoch: int, epochs: int) -> float:
    """What the learning rate is multiplied by at a step of a phase (0 = its first): warm-up, then the schedule's kind.

    >>> [factor(ScheduleSettings(kind="step", milestones=(1,)), step, 2, 2) for step in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    >>> [factor(ScheduleSettings(kind="exponential", factor=0.5), step, 2, 3) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    total = steps_per_epoch * epochs
    warmup = round(schedule.warmup * total)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "step":
        return schedule.factor ** sum(step >= milestone * steps_per_epoch for milestone in schedule.milestones)
    if schedule.kind == "exponential":
        return schedule.factor ** (step // steps_per_epoch)
    if schedule.kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))
    return 1.0


def ramp(epochs: float, step: int, steps_per_epoch: int) -> float:
    """What the loss is multiplied by at a step of a phase (0 = its first), which rises from 0 to 1 over so many epochs.

    >>> [ramp(0.5, step, 8) for step in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, step / (epochs * steps_per_epoch)) if epochs else 1.0


def make_optimizer(matcher: Matcher, phase: Phase) -> Optimizer:
    """An optimizer over the trainable parts, one group a part, each with its own learning rate (``base_lr``); with a ``layer_decay``
    one group a layer of a part.

    Freezes the other parts. Raises RecipeError for a part that the model does not have.
    """
    by_part, settings = matcher.parameters_by_part(), phase.optimizer
    for part in (*phase.trainable, *settings.lr_multipliers):
        if part not in by_part:
            raise RecipeError(f"{part} is not a part of {type(matcher).__name__}: {nearest(part, by_part)}")
    groups = []
    for part, parameters in by_part.items():
        trainable = not phase.trainable or part in phase.trainable
        for _, parameter in parameters:
            parameter.requires_grad_(trainable)
        if trainable:
            lr, decay = settings.lr * settings.lr_multipliers.get(part, 1.0), 0.0 if part == SCALE else settings.weight_decay
            below = layers_below_top([name for name, _ in parameters]) if settings.layer_decay < 1 else [0] * len(parameters)
            for layers, members in groupby(zip(below, parameters, strict=True), key=lambda member: member[0]):
                own = [parameter for _, parameter in members]
                groups.append({"params": own, "base_lr": lr * settings.layer_decay**layers, "weight_decay": decay})
    kind = getattr(torch.optim, settings.name)
    optimizer: Optimizer = kind(groups, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    return optimizer


def layers_below_top(names: Sequence[str]) -> list[int]:
    """How many layers are above that of each parameter of a part, by their names in the order of the model.

    A layer is what stands in a numbered list; what comes before all lists, such as embeddings, is the lowest one, and what follows the
    last one, such as a projection, the top.

    >>> layers_below_top(["embeddings.weight", "layers.0.k.weight", "layers.0.k.bias", "layers.1.k.weight", "projection.weight"])
    [3, 2, 2, 1, 0]
    """
    layers = [match[0] if (match := re.match(r".*?\.\d+\.", name)) else "" for name in names]
    order = {layer: number for number, layer in enumerate(dict.fromkeys(filter(None, layers)), 1)}
    top = max((place for place, layer in enumerate(layers) if layer), default=-1) + 1
    heights = list(accumulate([order.get(layer, 0) for layer in layers[:top]], max)) + [len(order) + 1] * (len(layers) - top)
    return [max(heights, default=0) - height for height in heights]


def train_mode(matcher: Matcher) -> None:
    """Training mode, but parts that are frozen keep their batch statistics."""
    matcher.train()
    for child in matcher.children():
        parameters = list(child.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            child.eval()


def set_lr(optimizer: Optimizer, multiple: float) -> None:
    """Every group at its own learning rate times ``multiple``."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * multiple


def take_step(optimizer: Optimizer, clip_norm: float) -> None:
    """One step down the gathered gradient, its whole norm clipped first unless ``clip_norm`` is 0."""
    if clip_norm:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
