"""Optimizers: parameter groups and learning rates of a phase, and optimizer states as named
tensors.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam
from torch.optim.swa_utils import get_ema_multi_avg_fn

from visavis.core.errors import RecipeError, RunError, suggest_name
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
        self.k = k
        self.alpha = alpha

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each parameter that has a gradient, and move the slow copies that are due."""
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
    """Return the state of an optimizer, by ``<parameter>.<state name>``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{parameter}.{name}": full_tensor(torch.as_tensor(value))
        for index, parameter in enumerate(_named_parameters(optimizer))
        for name, value in state.get(index, {}).items()
        if value is not None
    }


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the shards of a tensor. All processes must call it."""
    # The method of DTensor, whose import takes half a second.
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor as another one, if that one is sharded."""
    sharded: Any = like
    if not hasattr(sharded, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), sharded.device_mesh, sharded.placements)


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load an optimizer state that ``optimizer_tensors`` returned."""
    parameters = _named_parameters(optimizer)
    indices = {parameter: index for index, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, name = key.rsplit(".", 1)
        # The state may come from an optimizer of other parts of the model or of another class: each
        # parameter receives what its optimizer uses.
        if parameter in indices and name in STATE_NAMES[type(optimizer)]:
            # A fused step reads parameter and state in memory order, so the state needs the memory
            # layout of the parameter.
            like = parameters[parameter]
            state.setdefault(indices[parameter], {})[name] = (
                value if name == "step" else torch.empty_like(like).copy_(shard_like(value, like))
            )
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def check_optimizer_state(
    optimizer: Optimizer, tensors: dict[str, Tensor], steps: int, source: str
) -> None:
    """Check that tensors are a state of an optimizer after a number of steps."""
    names = STATE_NAMES[type(optimizer)]
    parameters = _named_parameters(optimizer)
    kind = type(optimizer).__name__
    expected = {
        f"{parameter}.{name}": parameters[parameter] for parameter in parameters for name in names
    }
    # A parameter that no gradient has reached has no state. Any other one has all of it.
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


_POSITIONS = re.compile(
    r"pos(ition(al)?)?_?embed|embed_?pos|relative_(position|attention)_bias"
    r"|(^|[._])(cls|class|dist|distillation|mask|reg|register)_(token|embed)"
)
NO_DECAY_RULES: dict[str, Callable[[str, Tensor], bool]] = {
    "biases_and_norms": lambda name, parameter: parameter.dim() < 2 or name.endswith("bias"),
    "positions": lambda name, _: _POSITIONS.search(name) is not None,
}
"""Rules of ``OptimizerSettings.no_decay``: parameters without weight decay in open_clip and timm
(fewer than two dimensions, and ``no_weight_decay`` of their models).
"""


def has_weight_decay(name: str, parameter: Tensor, no_decay: Sequence[str]) -> bool:
    """Determine whether a parameter has weight decay.

    Args:
        name: Name of the parameter.
        parameter: The parameter.
        no_decay: Rules and patterns, see ``OptimizerSettings``.

    Returns:
        Whether no entry matches.

    Example:
        >>> [has_weight_decay(name, torch.zeros(2, 2), ["positions"]) for name in ("text.pos_embed", "text.fc.weight")]
        [False, True]
    """
    return not any(
        NO_DECAY_RULES[entry](name, parameter)
        if entry in NO_DECAY_RULES
        else fnmatchcase(name, entry)
        for entry in no_decay
    )


def make_optimizer(matcher: Matcher, phase: Phase) -> Optimizer:
    """Build the optimizer of a phase, and freeze the parts and layers that the phase does not
    train.
    """
    settings = phase.optimizer
    groups = list[dict[str, Any]]()
    by_part = matcher.parameters_by_part()
    names = [name for each in by_part.values() for name, _ in each]
    for entry in settings.no_decay:
        if entry not in NO_DECAY_RULES and not any(fnmatchcase(name, entry) for name in names):
            similar = suggest_name(entry.strip("*"), (*NO_DECAY_RULES, *names))
            raise RecipeError(
                f"optimizer.no_decay: expected {' or '.join(map(repr, NO_DECAY_RULES))}, or a "
                f"pattern of parameter names such as '*.bias', got {entry!r}, which matches none: "
                f"{similar}"
            )
    for part, parameters in by_part.items():
        heights, num_layers = layer_heights([name for name, _ in parameters])
        num_frozen = phase.frozen_layers.get(part, 0)
        if num_frozen > num_layers:
            raise RecipeError(
                f"frozen_layers: expected at most {num_layers} layers of {part}, as many as "
                f"{matcher.name} has, got {num_frozen}. "
                + (
                    "Lower it."
                    if num_layers
                    else "Remove it, or freeze the whole part with trainable."
                )
            )
        is_trainable = not phase.trainable or part in phase.trainable
        # One group for the part, or for each of its layers if `layer_decay` is below 1, with and
        # without weight decay. Each group has its own learning rate, `base_lr`.
        members: dict[tuple[int, float], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for (name, parameter), height in zip(parameters, heights, strict=True):
            parameter.requires_grad_(is_trainable and (height > num_frozen or not num_frozen))
            if parameter.requires_grad:
                depth = max(heights) - height if settings.layer_decay < 1 else 0
                decays = part != SCALE_PART and has_weight_decay(name, parameter, settings.no_decay)
                weight_decay = settings.weight_decay if decays else 0.0
                members[depth, weight_decay].append((name, parameter))
        lr = settings.lr * settings.lr_multipliers.get(part, 1.0)
        for (depth, weight_decay), params in members.items():
            base_lr = lr * settings.layer_decay**depth
            groups.append(
                {"params": params, "part": part, "base_lr": base_lr, "weight_decay": weight_decay}
            )
    if not groups:
        raise RecipeError(
            f"trainable, frozen_layers: expected weights of {matcher.name} to train, got none. "
            "Freeze less."
        )
    kind = Ranger if settings.name == "Ranger" else getattr(torch.optim, settings.name)
    given = {name: value for name in ("betas", "eps") if (value := getattr(settings, name))}
    if kind is not Ranger:
        given["fused"] = True
    optimizer: Optimizer = kind(groups, lr=settings.lr, weight_decay=settings.weight_decay, **given)
    return optimizer


def layer_heights(names: Sequence[str]) -> tuple[list[int], int]:
    """Compute the layer of each parameter of a part, from the lowest one.

    A layer is an entry of a numbered list. Parameters before all lists, such as embeddings, are
    layer 0. Parameters after the last list, such as a projection, are above the top layer.

    Args:
        names: Parameter names in the order of the model.

    Returns:
        The number of each parameter's layer, from 1, and the number of layers.

    Example:
        >>> layer_heights(["embeddings.weight", "layers.0.k.weight", "layers.0.k.bias", "layers.1.k.weight", "projection.weight"])
        ([0, 1, 1, 2, 3], 2)
    """
    layers = [match[0] if (match := re.match(r".*?\.\d+\.", name)) else "" for name in names]
    order = {layer: number for number, layer in enumerate(dict.fromkeys(filter(None, layers)), 1)}
    end = max((position for position, layer in enumerate(layers) if layer), default=-1) + 1
    heights = list(accumulate([order.get(layer, 0) for layer in layers[:end]], max)) + [
        len(order) + 1
    ] * (len(layers) - end)
    return heights, len(order)


def train_mode(module: nn.Module) -> None:
    """Set training mode. Frozen parts and layers stay in evaluation mode, so that their batch
    statistics do not change and their dropout is off.
    """
    module.train()
    _stop_frozen(module)


def _stop_frozen(module: nn.Module) -> None:
    """Set the modules without a trainable parameter to evaluation mode."""
    trainable = {parameter.requires_grad for parameter in module.parameters()}
    if trainable == {False}:
        module.eval()
    elif len(trainable) == 2:
        for child in module.children():
            _stop_frozen(child)


class WeightAverage:
    """Exponential moving average of the weights and buffers of a model. Integers, such as the
    number of batches of a batch norm, are copied.

    Args:
        model: Model in training, whose weights may be sharded.
        decay: Decay after the warmup. Update t uses ``min(decay, t / (t + 9))``.

    Attributes:
        tensors: The averaged weights by name, sharded as in the model.
        updates: Number of updates so far.

    Source:
        ``torch.optim.swa_utils.get_ema_multi_avg_fn``. The warmup is as in TensorFlow's
        ExponentialMovingAverage with ``num_updates``. ``AveragedModel`` copies a module, which a
        sharded one does not allow.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model = model
        self.decay = decay
        self.updates = 0
        self.tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def update(self) -> None:
        """Move the average towards the current weights."""
        self.updates += 1
        current = {name: _local(tensor) for name, tensor in self.model.state_dict().items()}
        average = {name: _local(tensor) for name, tensor in self.tensors.items()}
        floats = [name for name, tensor in average.items() if tensor.is_floating_point()]
        step = get_ema_multi_avg_fn(min(self.decay, self.updates / (self.updates + 9)))
        step([average[name] for name in floats], [current[name] for name in floats], None)
        for name in average.keys() - set(floats):
            average[name].copy_(current[name])

    def full_tensors(self) -> dict[str, Tensor]:
        """Gather the averaged weights. All processes must call it."""
        return {name: full_tensor(tensor) for name, tensor in self.tensors.items()}

    def restore(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Continue an earlier average."""
        self.updates = updates
        for name, tensor in self.tensors.items():
            tensor.copy_(shard_like(tensors[name], tensor))


def _local(tensor: Any) -> Tensor:
    """The part of a tensor on this process."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set the learning rate of each group to its base rate times a factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def _named_parameters(optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters by name, in the order in which the optimizer numbers them."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
