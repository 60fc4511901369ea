"""The learning rate and the parameter groups of a phase."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from visavis.errors import RecipeError, nearest
from visavis.models.base import Matcher
from visavis.training.settings import Phase, ScheduleSettings


def factor(schedule: ScheduleSettings, step: int, steps_per_epoch: int, epochs: int) -> float:
    """What the learning rate is multiplied by at a step of a phase (0 = its first): warm-up, then the schedule's kind.

    >>> [factor(ScheduleSettings(kind="step", milestones=(1,)), step, 2, 2) for step in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """
    total = steps_per_epoch * epochs
    warmup = round(schedule.warmup * total)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "step":
        return schedule.factor ** sum(step >= milestone * steps_per_epoch for milestone in schedule.milestones)
    if schedule.kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))
    return 1.0


def make_optimizer(matcher: Matcher, phase: Phase) -> Optimizer:
    """An optimizer over the trainable parts, one group a part, each with its own learning rate (``base_lr``).

    Freezes the other parts. Raises RecipeError for a part that the model does not have.
    """
    by_part = matcher.parameters_by_part()
    for part in (*phase.trainable, *phase.optimizer.lr_multipliers):
        if part not in by_part:
            raise RecipeError(f"{part} is not a part of {type(matcher).__name__}: {nearest(part, by_part)}")
    groups = []
    for part, parameters in by_part.items():
        trainable = not phase.trainable or part in phase.trainable
        for _, parameter in parameters:
            parameter.requires_grad_(trainable)
        if trainable:
            groups.append({"params": parameters, "base_lr": phase.optimizer.lr * phase.optimizer.lr_multipliers.get(part, 1.0)})
    kind = getattr(torch.optim, phase.optimizer.name)
    optimizer: Optimizer = kind(groups, lr=phase.optimizer.lr, weight_decay=phase.optimizer.weight_decay, fused=True)
    return optimizer


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
