"""Loss of a phase and of each of its batches, the context of its supervision, and the second network of co-teaching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from visavis import objectives
from visavis.data.loader import Batch, Loader
from visavis.errors import RecipeError
from visavis.memory_budget import MemoryLimit
from visavis.models import Matcher
from visavis.models.device import bfloat16_autocast
from visavis.models.layers import Whitening
from visavis.pair_loss import PairLoss
from visavis.recipes.recipe import Recipe
from visavis.recipes.settings import Phase
from visavis.supervision import TrainingContext
from visavis.targets import Targets
from visavis.training.optimizer import make_optimizer, optimizer_step, optimizer_tensors, restore_optimizer, train_mode
from visavis.types import Encoded


def phase_loss(matcher: Matcher, phase: Phase, memory: MemoryLimit = None) -> PairLoss:
    """Build the loss of a phase: its objective on the scores of a model.

    Args:
        matcher: Model, whose learned scale and Matryoshka dimensions the loss uses.
        phase: Phase of a recipe.
        memory: Memory limit of score blocks.

    Returns:
        The loss.

    Raises:
        RecipeError: If the objective has a fixed gamma or margin and the model learns a scale.
    """
    objective = objectives.parse(phase.objective)
    if matcher.scale is not None and objective.without_scale() is None:
        raise RecipeError(
            f"phases.objective: expected an objective without a fixed gamma or margin, because {type(matcher).__name__} learns a scale, "
            f'got {objective!r}. Use NTXent, InfoNCE or Sigmoid, or set model.scale="fixed".'
        )
    score = None if matcher.score_is_cosine else matcher.score
    return PairLoss(objective, score=score, scale=matcher.scale, memory=memory, matryoshka_dims=matcher.matryoshka_dims)


def compute_loss(matcher: Matcher, loss: PairLoss, compute_targets: Callable[[Encoded, Encoded, Batch], Targets], batch: Batch) -> Tensor:
    """Compute the training loss of one batch.

    Args:
        matcher: Model in training mode.
        loss: Loss of the phase.
        compute_targets: Builds the targets of the encoded batch, such as ``Supervision.targets``.
        batch: Batch on the device of the model.

    Returns:
        The loss, a scalar, with the auxiliary loss of the model if it has one.
    """
    visual, text = matcher.encode_visual(batch.visual), matcher.encode_text(batch.text)
    targets = compute_targets(visual, text, batch)
    value = loss(matcher.first_stage_items(visual), matcher.first_stage_items(text), targets=targets)
    auxiliary = matcher.auxiliary_loss(visual, text, targets)
    return value if auxiliary is None else value + auxiliary


@dataclass
class StepControl:
    """How the trainer uses its current batch.

    Attributes:
        loss_scale: Factor of the loss.
        is_optimizer_step: Whether the optimizer steps after this batch.
    """

    loss_scale: float = 1.0
    is_optimizer_step: bool = True


def training_context(
    recipe: Recipe,
    phase: Phase,
    matcher: Matcher,
    optimizer: Optimizer,
    train: Loader,
    validation: Loader,
    step_control: StepControl | None = None,
) -> TrainingContext:
    """Build the context that a supervision receives at the start of a phase.

    Args:
        recipe: Recipe of the training.
        phase: Current phase.
        matcher: Model.
        optimizer: Optimizer of the model in this phase.
        train: Batches of the training split.
        validation: Batches of the validation split.
        step_control: Control that the trainer sets for each batch. None: one optimizer step per batch.

    Returns:
        The context.
    """
    return TrainingContext(
        matcher=matcher,
        objective=objectives.parse(phase.objective),
        optimizer=optimizer,
        make_peer=partial(PeerNetwork, matcher, optimizer, phase, recipe, step_control or StepControl()),
        train=train,
        validation=validation,
        seed=recipe.seed,
        device=next(matcher.parameters()).device,
        memory=recipe.memory or None,
    )


class PeerNetwork:
    """Second network of co-teaching: same architecture as the first, other weights, trained by the same phase.

    Args:
        first: The first network.
        main_optimizer: Optimizer of the first network, whose learning rates are followed.
        phase: Phase that trains both.
        recipe: Recipe of the run.
        step_control: Accumulation and loss scale of the trainer.
        seed: Seed of the initial weights.

    Attributes:
        matcher: The second network.
        loss: Loss of the phase for this network.
        optimizer: Its own optimizer.
    """

    def __init__(self, first: Matcher, main_optimizer: Optimizer, phase: Phase, recipe: Recipe, step_control: StepControl, seed: int):
        self.device = next(first.parameters()).device
        torch.manual_seed(seed)
        self.matcher = type(first)(first.config).to(self.device)
        for own, source in zip(self.matcher.modules(), first.modules(), strict=True):
            if isinstance(own, Whitening):
                own.load_state_dict(source.state_dict())
        self.matcher.matryoshka_dims = first.matryoshka_dims
        self.loss = phase_loss(self.matcher, phase, recipe.memory or None)
        self.optimizer = make_optimizer(self.matcher, phase)
        self.main_optimizer, self.training, self.step_control = main_optimizer, recipe.training, step_control

    def train_step(self, batch: Batch, compute_targets: Callable[[Encoded, Encoded, Batch], Targets]) -> None:
        """Backpropagate a batch, and step if the first network steps, at its current learning rates.

        Args:
            batch: Batch on the device of the networks.
            compute_targets: Builds the targets of this network.
        """
        train_mode(self.matcher)
        with bfloat16_autocast(self.device, self.training.autocast):
            loss = compute_loss(self.matcher, self.loss, compute_targets, batch)
        (loss * self.step_control.loss_scale).backward()
        if not self.step_control.is_optimizer_step:
            return
        for group, first in zip(self.optimizer.param_groups, self.main_optimizer.param_groups, strict=True):
            group["lr"] = first["lr"]
        optimizer_step(self.optimizer, self.training.clip_norm)

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and optimizer state.

        Returns:
            Tensors by ``weights.<name>`` and ``optimizer.<name>``.
        """
        weights = {f"weights.{name}": tensor.detach().cpu().clone() for name, tensor in self.matcher.state_dict().items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(self.optimizer).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what ``state_dict`` returned.

        Args:
            state: Tensors by name.
        """

        def select(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}

        self.matcher.load_state_dict(select("weights."))
        restore_optimizer(self.optimizer, select("optimizer."))
