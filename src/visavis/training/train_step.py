"""Training step: loss of a phase, its forward and backward pass, the context of its supervision,
and the second network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from visavis.core.blocking import fork_random_numbers
from visavis.core.encoded import Encoded
from visavis.core.errors import RecipeError, RunError, log_debug, suggest_name
from visavis.core.memory_budget import MemoryLimit
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.core.progress import NoProgress, Progress
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader
from visavis.losses.logits import LearnedScale
from visavis.losses.objectives import Objective
from visavis.losses.pair_loss import PairLoss
from visavis.losses.pair_loss.batch_items import encode_in_chunks
from visavis.losses.targets import Targets
from visavis.models import Matcher
from visavis.models.batch_encoding import device_of
from visavis.models.device import autocast_context
from visavis.models.layers import Whitening
from visavis.training.encoder_blocks import encoder_blocks, prepare_encoders
from visavis.training.monitoring.gradient_norms import EncodedBatch, GradientNorms
from visavis.training.optimizer import (
    WeightAverage,
    full_tensor,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_lr,
    train_mode,
)
from visavis.training.recipes.learned_scale import learned_start_values, start_scale_and_bias
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.settings import Phase
from visavis.training.supervision import TrainingContext
from visavis.training.supervision.base import PairScores

INITIAL_LOSS_SCALE = 512.0
"""First factor of the loss in float16. With torch's 65,536, sums over a batch overflow in the first
steps, which are then skipped: 7 of 117 steps of VLC, and 7 points of RSUM
(``studies/precision.py``).
"""

ComputeTargets = Callable[[Encoded, Encoded, Batch], Targets]


def phase_loss(
    matcher: Matcher, phase: Phase, memory: MemoryLimit = None, group: ProcessGroup = ONE_PROCESS
) -> PairLoss:
    """Build the loss of a phase: its objective on the scores of a model. With several processes,
    the queries of each are compared with the candidates of all.
    """
    return _pair_loss(matcher, phase.objective, matcher.scale, memory, group)


def _pair_loss(
    matcher: Matcher,
    objective: Objective,
    scale: LearnedScale | None,
    memory: MemoryLimit,
    group: ProcessGroup,
) -> PairLoss:
    """``scale`` None: the scores are compared without a learned scale."""
    return PairLoss(
        objective,
        score=None if matcher.score_is_cosine else matcher.score,
        scale=scale,
        bias=None if objective.without_bias() is None else matcher.logit_bias,
        gather=group.world_size > 1,
        memory=memory,
        matryoshka_dims=matcher.matryoshka_dims,
    )


def added_loss(
    matcher: Matcher, phase: Phase, memory: MemoryLimit = None, group: ProcessGroup = ONE_PROCESS
) -> tuple[float, PairLoss] | None:
    """Build the loss that the supervision of a phase adds to its objective, with its factor."""
    added = phase.supervision.added_objective(phase.objective)
    if added is None:
        return None
    factor, objective = added
    return factor, _pair_loss(matcher, objective, None, memory, group)


def check_phase(matcher: Matcher, phase: Phase) -> None:
    """Check before the first step of a training that a later phase can train the model."""
    parts = matcher.parameters_by_part()
    objective = phase.objective
    for part in (*phase.trainable, *phase.optimizer.lr_multipliers, *phase.frozen_layers):
        if part not in parts:
            raise RecipeError(
                f"trainable, lr_multipliers, frozen_layers: {part} is not a part of {type(matcher).__name__}: "
                f"{suggest_name(part, parts)}"
            )
    make_optimizer(matcher, phase)
    if matcher.scale is not None and objective.without_scale() is None:
        raise RecipeError(
            "phases.objective: expected an objective without a fixed gamma or margin, because "
            f"{type(matcher).__name__} learns a scale, "
            f'got {objective!r}. Use NTXent, InfoNCE or Sigmoid, or set model.scale="fixed".'
        )
    learned_start_values(matcher, phase)


def _encode(encode: Callable[[Encoded], Encoded], items: Encoded, chunk_size: int) -> Encoded:
    """Encode the items of a batch, in chunks if it is larger than ``chunk_size``."""
    if not 0 < chunk_size < len(items):
        return encode(items)
    chunks = (items[start : start + chunk_size] for start in range(0, len(items), chunk_size))
    return encode_in_chunks(encode, chunks)  # type: ignore[return-value]


class BatchLoss(nn.Module):
    """Forward pass of a batch as one module, which ``DistributedDataParallel`` can wrap.

    Args:
        matcher: Model.
        loss: Loss of the phase.
        chunk_size: Items whose activations are in memory. The loss compares all items of the batch.
            0: all.
        added: Factor and loss that the supervision adds, or None.

    Attributes:
        gradient_norms: Receives the embeddings of the batches of the current optimizer step. None:
            its gradients are not recorded.
    """

    def __init__(
        self,
        matcher: Matcher,
        loss: PairLoss,
        chunk_size: int,
        added: tuple[float, PairLoss] | None = None,
    ):
        super().__init__()
        self.matcher = matcher
        self.loss = loss
        self.chunk_size = chunk_size
        self.added_factor = added[0] if added else 0.0
        self.added_loss = added[1] if added else None
        self.gradient_norms: GradientNorms | None = None

    def forward(self, batch: Batch, compute_targets: ComputeTargets) -> Tensor:
        """Compute the training loss of a batch, with the auxiliary loss of the model."""
        matcher = self.matcher
        norms = self.gradient_norms
        with norms.observe("visual") if norms else nullcontext():
            visual = _encode(matcher.encode_visual, batch.visual, self.chunk_size)
        with norms.observe("text") if norms else nullcontext():
            text = _encode(matcher.encode_text, batch.text, self.chunk_size)
        targets = compute_targets(visual, text, batch)
        items = matcher.first_stage_items(visual), matcher.first_stage_items(text)
        if norms:
            detached = [each.map(Tensor.detach) for each in items]
            norms.batch = EncodedBatch(detached[0], detached[1], targets)
        value = self.loss(*items, targets=targets)
        if self.added_loss is not None:
            value = value + self.added_factor * self.added_loss(*items, targets=targets)
        auxiliary = matcher.auxiliary_loss(visual, text, targets)
        return value if auxiliary is None else value + auxiliary


class TrainStep:
    """Training step of one network in one phase: forward and backward pass, gradient scaling,
    clipping and optimizer.

    Args:
        matcher: Network on its device.
        phase: Phase of the recipe.
        recipe: Recipe.
        group: Processes that train together. Their gradients are averaged.

    Attributes:
        matcher: The network, for evaluation. ``copy_weights`` gives it the trained weights.
        loss: Loss of the phase.
        optimizer: Optimizer of the phase.
        scaler: Scale of the gradients of float16. Without float16 it does nothing.
        average: Average of the trained weights. None without ``training.ema_decay``.
    """

    def __init__(
        self, matcher: Matcher, phase: Phase, recipe: Recipe, group: ProcessGroup = ONE_PROCESS
    ):
        self.matcher = matcher
        self.settings = recipe.training
        self.device = device_of(matcher)
        self.group = group
        log_debug(
            __name__,
            "training on %s, autocast %s, %d processes",
            self.device,
            self.settings.autocast,
            group.world_size,
        )
        self.is_sharded = self.settings.strategy == "fsdp" and group.world_size > 1
        self.trained_matcher = matcher
        self.loss = loss = phase_loss(matcher, phase, recipe.memory or None, group)
        self.optimizer = make_optimizer(matcher, phase)
        self.scaler = torch.GradScaler(
            self.device.type, INITIAL_LOSS_SCALE, enabled=self.settings.autocast == "float16"
        )
        if self.is_sharded:
            # A shard cannot encode alone, but validations need the whole network.
            self.trained_matcher = deepcopy(matcher)
            loss = phase_loss(self.trained_matcher, phase, recipe.memory or None, group)
        added = added_loss(self.trained_matcher, phase, recipe.memory or None, group)
        self.batch_loss = BatchLoss(self.trained_matcher, loss, self.settings.chunk_size, added)
        self.module: nn.Module = self.batch_loss
        if self.is_sharded:
            from torch.distributed.fsdp import fully_shard

            for part in (*encoder_blocks(self.trained_matcher), self.module):
                # A single number, such as a learned scale, cannot be sharded. Its gradients are
                # equal on all processes, because `PairLoss` sums them.
                scalars = {parameter for parameter in part.parameters() if parameter.dim() == 0}
                fully_shard(part, ignored_params=scalars)
            # Again, because sharding has replaced the parameters.
            self.optimizer = make_optimizer(self.trained_matcher, phase)
        elif group.world_size > 1:
            # A static graph may leave parameters unused, such as the pooling layer of a pretrained
            # encoder. It excludes ``no_sync``, so gradients are averaged after each accumulated
            # batch. That costs time and changes nothing, because the mean is linear.
            self.module = DistributedDataParallel(
                self.module, static_graph=True, gradient_as_bucket_view=True
            )
        decay = self.settings.ema_decay
        self.average = WeightAverage(self.trained_matcher, decay) if decay else None

    def backward(
        self, batch: Batch, compute_targets: ComputeTargets, loss_scale: float = 1.0
    ) -> float:
        """Compute the loss of a batch, and add its gradient to the gradients of previous batches."""
        train_mode(self.trained_matcher)  # an evaluation may have left another mode
        with autocast_context(self.device, self.settings.autocast):
            loss: Tensor = self.module(batch, compute_targets)
        self.scaler.scale(loss * loss_scale).backward()
        norms = self.batch_loss.gradient_norms
        # Only within its forward pass, a sharded network can compute a score of its own.
        can_score = self.trained_matcher.score_is_cosine or not self.is_sharded
        if norms is not None and can_score:
            # The next random numbers of the training must be the same as without a record.
            with fork_random_numbers(self.device):
                norms.add_batch(self.batch_loss.loss, loss_scale)
        return loss.item()

    def record_gradients(self) -> None:
        """Record the norms of the gradients of the batches until the next step of the optimizer."""
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        self.batch_loss.gradient_norms = GradientNorms(self.group, scale)

    def recorded_gradients(self) -> dict[str, float]:
        """Return the recorded norms after a step of the optimizer, and stop recording."""
        norms = self.batch_loss.gradient_norms
        self.batch_loss.gradient_norms = None
        return norms.summarize() if norms else {}

    def step(self, lr_factor: float) -> float:
        """Clip the gradient, step, clear the gradient, and move the average of the weights. float16
        skips a step whose gradient overflows, and scales the next ones less.
        """
        set_lr(self.optimizer, lr_factor)
        self.scaler.unscale_(self.optimizer)  # norms and clipping need the true gradients
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        context: AbstractContextManager[None] = nullcontext()
        if self.is_sharded:
            from torch.distributed.tensor.experimental import implicit_replication

            # A learned scale, which is not sharded, is used with sharded parameters.
            context = implicit_replication()
        with context:
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
            if (norms := self.batch_loss.gradient_norms) is not None:
                by_part = defaultdict[str, list[Tensor]](list)
                for group in self.optimizer.param_groups:
                    by_part[f"{group['part']}_parameters"] += [
                        p.grad for p in group["params"] if p.grad is not None
                    ]
                norms.parameters = {
                    name: full_tensor(get_total_norm(gradients)).item()
                    for name, gradients in by_part.items()
                    if gradients
                }
            if self.settings.clip_norm:
                clip_grads_with_norm_(parameters, self.settings.clip_norm, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return full_tensor(norm).item()

    def copy_weights(self) -> None:
        """Copy sharded weights into ``matcher``. All processes must call it. Without shards it does
        nothing.
        """
        if self.is_sharded:
            self.matcher.load_state_dict(
                {
                    name: full_tensor(part)
                    for name, part in self.trained_matcher.state_dict().items()
                }
            )

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give ``matcher`` the averaged weights within a block. All processes must enter it.
        Without an average it does nothing.
        """
        if self.average is None:
            yield
            return
        raw = {name: tensor.clone() for name, tensor in self.matcher.state_dict().items()}
        self.matcher.load_state_dict(self.average.full_tensors())
        try:
            yield
        finally:
            self.matcher.load_state_dict(raw)


@dataclass
class StepControl:
    """How the trainer uses its current batch.

    Attributes:
        loss_scale: Factor of the loss.
        is_optimizer_step: Whether the optimizer steps after this batch.
        lr_factor: Factor of all learning rates.
    """

    loss_scale: float = 1.0
    is_optimizer_step: bool = True
    lr_factor: float = 1.0


TeacherOpener = Callable[
    [str, Recipe, tuple[Dataset, Dataset], Progress, ProcessGroup], tuple[PairScores, PairScores]
]
"""Opens a teacher for a recipe. Returns its scores on the training and on the validation split."""


def training_context(
    recipe: Recipe,
    phase: Phase,
    matcher: Matcher,
    optimizer: Optimizer,
    train: Loader,
    validation: Loader,
    step_control: StepControl | None = None,
    group: ProcessGroup = ONE_PROCESS,
    progress: Progress | None = None,
    open_teacher: TeacherOpener | None = None,
) -> TrainingContext:
    """Build the context that a supervision receives at the start of a phase. ``step_control`` None:
    one optimizer step per batch. ``open_teacher`` None: teachers are refused.
    """

    def open_scores(teacher: str) -> tuple[PairScores, PairScores]:
        if open_teacher is None:
            raise RunError(
                f"teacher: expected a training that opens teachers, got {teacher} without an "
                "opener. Pass open_teacher, or train with visavis train."
            )
        splits = (train.data, validation.data)
        return open_teacher(teacher, recipe, splits, progress or NoProgress(), group)

    return TrainingContext(
        matcher=matcher,
        objective=phase.objective,
        optimizer=optimizer,
        make_peer=partial(
            PeerNetwork, matcher, phase, recipe, step_control or StepControl(), group
        ),
        train=train,
        validation=validation,
        seed=recipe.seed,
        device=next(matcher.parameters()).device,
        open_teacher=open_scores,
        memory=recipe.memory or None,
        group=group,
    )


class PeerNetwork:
    """Second network of co-teaching: same architecture as the first, other weights, trained by the
    same phase.

    Args:
        first: The first network.
        phase: Phase that trains both.
        recipe: Recipe of the run.
        step_control: Accumulation, loss scale and learning rates of the trainer.
        group: Processes that train together.
        seed: Seed of the initial weights.

    Attributes:
        matcher: The second network.
        train_step: Its training step.
    """

    def __init__(
        self,
        first: Matcher,
        phase: Phase,
        recipe: Recipe,
        step_control: StepControl,
        group: ProcessGroup,
        seed: int,
    ):
        torch.manual_seed(seed)
        self.matcher = type(first)(first.config).to(device_of(first))
        # Whitening is fitted to the data, not learned.
        for module, fitted_module in zip(self.matcher.modules(), first.modules(), strict=True):
            if isinstance(module, Whitening):
                module.load_state_dict(fitted_module.state_dict())
        start_scale_and_bias(self.matcher, phase)
        prepare_encoders(self.matcher, recipe.training, group)
        self.matcher.matryoshka_dims = first.matryoshka_dims
        self.train_step = TrainStep(self.matcher, phase, recipe, group)
        self.step_control = step_control

    def step(self, batch: Batch, compute_targets: ComputeTargets) -> None:
        """Backpropagate a batch, and step if the first network steps, at its current learning
        rates.
        """
        self.train_step.backward(batch, compute_targets, self.step_control.loss_scale)
        if self.step_control.is_optimizer_step:
            self.train_step.step(self.step_control.lr_factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and the states of optimizer and gradient scaler, by prefixed name."""
        weights = {
            f"weights.{name}": tensor.detach().cpu().clone()
            for name, tensor in self.matcher.state_dict().items()
        }
        optimizer = {
            f"optimizer.{name}": tensor
            for name, tensor in optimizer_tensors(self.train_step.optimizer).items()
        }
        scaler = {
            f"scaler.{name}": torch.tensor(value, dtype=torch.float64)
            for name, value in self.train_step.scaler.state_dict().items()
        }
        return weights | optimizer | scaler

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what ``state_dict`` returned."""

        def select(prefix: str) -> dict[str, Tensor]:
            return {
                name.removeprefix(prefix): tensor
                for name, tensor in state.items()
                if name.startswith(prefix)
            }

        self.matcher.load_state_dict(select("weights."))
        restore_optimizer(self.train_step.optimizer, select("optimizer."))
        restore_scaler(
            self.train_step.scaler,
            {name: tensor.item() for name, tensor in select("scaler.").items()},
        )


def restore_scaler(scaler: torch.GradScaler, state: dict[str, float]) -> None:
    """Load the state of a gradient scaler. It is empty without float16."""
    if state and scaler.is_enabled():
        integers = ("growth_interval", "_growth_tracker")
        scaler.load_state_dict(
            {name: int(value) if name in integers else value for name, value in state.items()}
        )
