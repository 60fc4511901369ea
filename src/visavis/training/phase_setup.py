"""Loss of a phase, its forward pass over one or more processes, the context of its supervision, and the second network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from visavis import objectives
from visavis.data.loader import Batch, Loader
from visavis.errors import RecipeError
from visavis.memory_budget import MemoryLimit
from visavis.models import Matcher
from visavis.models.device import bfloat16_autocast
from visavis.models.layers import Whitening
from visavis.pair_loss import PairLoss
from visavis.process_group import ONE_PROCESS, ProcessGroup
from visavis.recipes.recipe import Recipe
from visavis.recipes.settings import Phase
from visavis.supervision import TrainingContext
from visavis.targets import Targets
from visavis.training.batch_norm import synchronize_batch_norm
from visavis.training.optimizer import make_optimizer, optimizer_step, optimizer_tensors, restore_optimizer, train_mode
from visavis.types import Encoded

ComputeTargets = Callable[[Encoded, Encoded, Batch], Targets]


def phase_loss(matcher: Matcher, phase: Phase, memory: MemoryLimit = None, group: ProcessGroup = ONE_PROCESS) -> PairLoss:
    """Build the loss of a phase: its objective on the scores of a model.

    Args:
        matcher: Model, whose learned scale and Matryoshka dimensions the loss uses.
        phase: Phase of a recipe.
        memory: Memory limit of score blocks.
        group: Processes that train together. Queries of one process are compared with the candidates of all.

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
    gather = group.world_size > 1
    return PairLoss(objective, score=score, scale=matcher.scale, gather=gather, memory=memory, matryoshka_dims=matcher.matryoshka_dims)


def compute_loss(matcher: Matcher, loss: PairLoss, compute_targets: ComputeTargets, batch: Batch) -> Tensor:
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


class BatchLoss(nn.Module):
    """Forward pass of a batch as one module, which ``DistributedDataParallel`` can wrap.

    Args:
        matcher: Model.
        loss: Loss of the phase.
    """

    def __init__(self, matcher: Matcher, loss: PairLoss):
        super().__init__()
        self.matcher, self.loss = matcher, loss

    def forward(self, batch: Batch, compute_targets: ComputeTargets) -> Tensor:
        """Compute the training loss of a batch. See ``compute_loss``.

        Args:
            batch: Batch on the device of the model.
            compute_targets: Builds the targets of the encoded batch.

        Returns:
            The loss.
        """
        return compute_loss(self.matcher, self.loss, compute_targets, batch)


def distribute(module: BatchLoss, group: ProcessGroup) -> nn.Module:
    """Average the gradients of a module over processes after each backward pass.

    Args:
        module: Forward pass of a batch.
        group: Processes that train together.

    Returns:
        The module itself for one process, else ``DistributedDataParallel`` around it.
    """
    if group.world_size == 1:
        return module
    # A static graph may leave parameters unused, such as the pooling layer of a pretrained encoder. It excludes ``no_sync``, so gradients
    # are averaged after each accumulated batch. That costs time and changes nothing, because the mean is linear.
    return DistributedDataParallel(module, static_graph=True, gradient_as_bucket_view=True)


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
    group: ProcessGroup = ONE_PROCESS,
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
        group: Processes that train together.

    Returns:
        The context.
    """
    return TrainingContext(
        matcher=matcher,
        objective=objectives.parse(phase.objective),
        optimizer=optimizer,
        make_peer=partial(PeerNetwork, matcher, optimizer, phase, recipe, step_control or StepControl(), group),
        train=train,
        validation=validation,
        seed=recipe.seed,
        device=next(matcher.parameters()).device,
        memory=recipe.memory or None,
        group=group,
    )


class PeerNetwork:
    """Second network of co-teaching: same architecture as the first, other weights, trained by the same phase.

    Args:
        first: The first network.
        main_optimizer: Optimizer of the first network, whose learning rates are followed.
        phase: Phase that trains both.
        recipe: Recipe of the run.
        step_control: Accumulation and loss scale of the trainer.
        group: Processes that train together.
        seed: Seed of the initial weights.

    Attributes:
        matcher: The second network.
        loss: Loss of the phase for this network.
        optimizer: Its own optimizer.
    """

    def __init__(
        self,
        first: Matcher,
        main_optimizer: Optimizer,
        phase: Phase,
        recipe: Recipe,
        step_control: StepControl,
        group: ProcessGroup,
        seed: int,
    ):
        self.device = next(first.parameters()).device
        torch.manual_seed(seed)
        self.matcher = type(first)(first.config).to(self.device)
        for own, source in zip(self.matcher.modules(), first.modules(), strict=True):
            if isinstance(own, Whitening):
                own.load_state_dict(source.state_dict())
        synchronize_batch_norm(self.matcher, group)
        self.matcher.matryoshka_dims = first.matryoshka_dims
        self.loss = phase_loss(self.matcher, phase, recipe.memory or None, group)
        self.optimizer = make_optimizer(self.matcher, phase)
        self.batch_loss = distribute(BatchLoss(self.matcher, self.loss), group)
        self.main_optimizer, self.training, self.step_control = main_optimizer, recipe.training, step_control

    def train_step(self, batch: Batch, compute_targets: ComputeTargets) -> None:
        """Backpropagate a batch, and step if the first network steps, at its current learning rates.

        Args:
            batch: Batch on the device of the networks.
            compute_targets: Builds the targets of this network.
        """
        train_mode(self.matcher)
        with bfloat16_autocast(self.device, self.training.autocast):
            loss = self.batch_loss(batch, compute_targets)
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
