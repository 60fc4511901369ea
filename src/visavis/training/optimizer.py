"""Optimizers: parameter groups and learning rates of a phase, and optimizer states as named
tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam

from visavis.core.errors import RunError
from visavis.models.base import SCALE_PART, Matcher
from visavis.training.recipes.settings import Phase, ScheduleSettings


class Ranger(RAdam):
    """RAdam with Lookahead: every k steps each parameter moves back to a slow copy that follows it.

    Args:
        params: Parameters or groups, as for ``torch.optim``.
        lr: Learning rate.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        k: Steps between two moves of the slow copy.
        alpha: Share of the way to the parameter that the slow copy moves.
        betas: Decay rates of the mean gradient and of its square.
        eps: Added to the root of the mean square.

    Formula:
        Every k steps $slow <- slow + alpha (parameter - slow)$, then $parameter <- slow$. The slow copy
        starts as the initial parameter.

    Special cases:
        ``k=1, alpha=1`` is RAdam.

    Source:
        Zhang et al., Lookahead Optimizer: k steps forward, 1 step back (2019), and Liu et al., On
        the Variance of the Adaptive Learning Rate and Beyond (2020). Defaults of the Ranger in the
        released code of CE.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        k: int = 6,
        alpha: float = 0.5,
        betas: tuple[float, float] = (0.95, 0.999),
        eps: float = 1e-5,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=True)
        self.k, self.alpha = k, alpha

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each parameter that has a gradient, and move the slow copies that are due.

        Args:
            closure: Computes the loss again.

        Returns:
            The loss of the closure.
        """
        parameters = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # RAdam fills only an empty state, so the slow copies are stored after its first step.
        initial = {
            parameter: parameter.clone() for parameter in parameters if not self.state[parameter]
        }
        loss = super().step(closure)
        for parameter in parameters:
            state = self.state[parameter]
            slow = state.setdefault("slow", initial.get(parameter))
            if state["step"] % self.k == 0:
                parameter.copy_(slow.lerp_(parameter, self.alpha))
        return loss


# What each optimizer stores for a parameter that it has updated. "step" is a scalar, the others
# have the shape of the parameter.
STATE_NAMES: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq", "step"),
    AdamW: ("exp_avg", "exp_avg_sq", "step"),
    Ranger: ("exp_avg", "exp_avg_sq", "slow", "step"),
    SGD: (),
}


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimizer.

    Args:
        optimizer: Optimizer with named parameters.

    Returns:
        Tensors by ``<parameter>.<state name>``.
    """
    state = optimizer.state_dict()["state"]
    return {
        f"{parameter}.{name}": full_tensor(torch.as_tensor(value))
        for index, parameter in enumerate(_named_parameters(optimizer))
        for name, value in state.get(index, {}).items()
        if value is not None
    }


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the shards of a tensor. All processes must call it.

    Args:
        tensor: A tensor, sharded or not.

    Returns:
        The whole tensor.
    """
    # The method of DTensor, whose import takes half a second.
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load an optimizer state that ``optimizer_tensors`` returned.

    The state may come from an optimizer of other parts of the model or of another class: each
    parameter receives what its optimizer uses.

    Args:
        optimizer: Optimizer that receives the state.
        tensors: State by ``<parameter>.<state name>``.
    """
    parameters = _named_parameters(optimizer)
    indices = {parameter: index for index, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, name = key.rsplit(".", 1)
        if parameter in indices and name in STATE_NAMES[type(optimizer)]:
            # A fused step reads parameter and state in memory order, so the state needs the memory
            # layout of the parameter.
            like: Any = parameters[parameter]
            if name != "step" and hasattr(like, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
            state.setdefault(indices[parameter], {})[name] = (
                value if name == "step" else torch.empty_like(like).copy_(value)
            )
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def check_optimizer_state(
    optimizer: Optimizer, tensors: dict[str, Tensor], steps: int, source: str
) -> None:
    """Check that tensors are a state of an optimizer after a number of steps.

    A parameter that no gradient has reached has no state.

    Args:
        optimizer: Optimizer to compare with.
        tensors: State by ``<parameter>.<state name>``.
        steps: Steps of the optimizer so far.
        source: File of the state, for messages.

    Raises:
        RunError: If a tensor is unknown, missing or of another shape.
    """
    names, parameters, kind = (
        STATE_NAMES[type(optimizer)],
        _named_parameters(optimizer),
        type(optimizer).__name__,
    )
    expected = {
        f"{parameter}.{name}": parameters[parameter] for parameter in parameters for name in names
    }
    for key in sorted(
        tensors.keys() | {f"{key.rsplit('.', 1)[0]}.{name}" for key in tensors for name in names}
    ):
        if key not in expected or key not in tensors:
            raise RunError(
                f"{source}: expected the state of {kind}, but {key} is "
                f"{'unknown' if key in tensors else 'missing'}."
            )
        shape = [] if key.endswith(".step") else list(expected[key].shape)
        if list(tensors[key].shape) != shape:
            raise RunError(
                f"{source}: {key}: expected shape {shape}, got {list(tensors[key].shape)}."
            )
    if steps and expected and not tensors:
        raise RunError(
            f"{source}: expected the state of {kind} after {steps:,} steps, got an empty file."
        )


def lr_factor(schedule: ScheduleSettings, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Compute the factor of the learning rate at a step of a phase.

    Args:
        schedule: Schedule of the phase.
        step: Step of the phase, from 0.
        steps_per_epoch: Steps of one epoch.
        epochs: Epochs of the phase.

    Returns:
        The factor, from 0 to 1.

    Example:
        >>> [lr_factor(ScheduleSettings(kind="step", milestones=(1,)), step, 2, 2) for step in range(4)]
        [1.0, 1.0, 0.1, 0.1]
        >>> [lr_factor(ScheduleSettings(kind="exponential", factor=0.5), step, 2, 3) for step in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    total = steps_per_epoch * epochs
    warmup = round(schedule.warmup * total)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "step":
        return schedule.factor ** sum(
            step >= milestone * steps_per_epoch for milestone in schedule.milestones
        )
    if schedule.kind == "exponential":
        return schedule.factor ** (step // steps_per_epoch)
    if schedule.kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))
    return 1.0


def loss_warmup_factor(epochs: float, step: int, steps_per_epoch: int) -> float:
    """Compute the factor of the loss, which rises linearly from 0 to 1.

    Args:
        epochs: Epochs until the factor is 1. 0: no warmup.
        step: Step of the phase, from 0.
        steps_per_epoch: Steps of one epoch.

    Returns:
        The factor, from 0 to 1.

    Example:
        >>> [loss_warmup_factor(0.5, step, 8) for step in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, step / (epochs * steps_per_epoch)) if epochs else 1.0


def make_optimizer(matcher: Matcher, phase: Phase) -> Optimizer:
    """Build the optimizer of a phase, and freeze the parts that the phase does not train.

    There is one parameter group for each part of the model, or for each layer of a part if
    ``layer_decay`` is below 1. Each group has its own learning rate, ``base_lr``.

    Args:
        matcher: Model.
        phase: Phase of a recipe.

    Returns:
        The optimizer.
    """
    by_part, settings, groups = matcher.parameters_by_part(), phase.optimizer, []
    for part, parameters in by_part.items():
        trainable = not phase.trainable or part in phase.trainable
        for _, parameter in parameters:
            parameter.requires_grad_(trainable)
        if not trainable:
            continue
        lr = settings.lr * settings.lr_multipliers.get(part, 1.0)
        weight_decay = 0.0 if part == SCALE_PART else settings.weight_decay
        depths = (
            layers_below_top([name for name, _ in parameters])
            if settings.layer_decay < 1
            else [0] * len(parameters)
        )
        for depth, members in groupby(
            zip(depths, parameters, strict=True), key=lambda member: member[0]
        ):
            params = [parameter for _, parameter in members]
            base_lr = lr * settings.layer_decay**depth
            groups.append(
                {"params": params, "part": part, "base_lr": base_lr, "weight_decay": weight_decay}
            )
    if settings.name == "Ranger":
        return Ranger(groups, settings.lr, settings.weight_decay)
    optimizer: Optimizer = getattr(torch.optim, settings.name)(
        groups, lr=settings.lr, weight_decay=settings.weight_decay, fused=True
    )
    return optimizer


def layers_below_top(names: Sequence[str]) -> list[int]:
    """Compute the depth of each parameter of a part below its top layer.

    A layer is an entry of a numbered list. Parameters before all lists, such as embeddings, form
    the lowest layer. Parameters after the last list, such as a projection, belong to the top.

    Args:
        names: Parameter names in the order of the model.

    Returns:
        The number of layers above each parameter.

    Example:
        >>> layers_below_top(["embeddings.weight", "layers.0.k.weight", "layers.0.k.bias", "layers.1.k.weight", "projection.weight"])
        [3, 2, 2, 1, 0]
    """
    layers = [match[0] if (match := re.match(r".*?\.\d+\.", name)) else "" for name in names]
    order = {layer: number for number, layer in enumerate(dict.fromkeys(filter(None, layers)), 1)}
    end = max((position for position, layer in enumerate(layers) if layer), default=-1) + 1
    heights = list(accumulate([order.get(layer, 0) for layer in layers[:end]], max)) + [
        len(order) + 1
    ] * (len(layers) - end)
    return [max(heights, default=0) - height for height in heights]


def train_mode(matcher: Matcher) -> None:
    """Set training mode. Frozen parts stay in evaluation mode, so that their batch statistics do
    not change.

    Args:
        matcher: Model.
    """
    matcher.train()
    for child in matcher.children():
        parameters = list(child.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            child.eval()


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set the learning rate of each group to its base rate times a factor.

    Args:
        optimizer: Optimizer of ``make_optimizer``.
        factor: Factor of all learning rates.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def _named_parameters(optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters by name, in the order in which the optimizer numbers them."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
