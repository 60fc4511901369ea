"""What a supervision is given of the training that it is part of, a second network among it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from visavis import objectives
from visavis.data.loader import Loader
from visavis.models import Matcher
from visavis.models.device import autocast
from visavis.supervision import TrainingContext
from visavis.training.loss import phase_loss
from visavis.training.optimizer_state import optimizer_tensors, restore_optimizer
from visavis.training.recipe import Recipe
from visavis.training.schedule import make_optimizer, take_step, train_mode
from visavis.training.settings import Phase


@dataclass
class Pace:
    """How the training takes its present batch. share: what the loss is multiplied by; steps: whether the optimizer steps after it."""

    share: float = 1.0
    steps: bool = True


def training_context(
    recipe: Recipe, phase: Phase, matcher: Matcher, optimizer: Optimizer, train: Loader, validation: Loader, pace: Pace | None = None
) -> TrainingContext:
    """The context of a phase. pace: as the trainer of the first network sets it, batch by batch; None: a step a batch."""
    return TrainingContext(
        matcher=matcher,
        objective=objectives.parse(phase.objective),
        optimizer=optimizer,
        peer_network=partial(PeerNetwork, matcher, optimizer, phase, recipe, pace or Pace()),
        train=train,
        validation=validation,
        seed=recipe.seed,
        device=next(matcher.parameters()).device,
        memory=recipe.memory or None,
    )


class PeerNetwork:
    """A network of the same architecture as the first, with weights of its own, trained as the phase trains the first."""

    def __init__(self, first: Matcher, beside: Optimizer, phase: Phase, recipe: Recipe, pace: Pace, seed: int):
        self.device = next(first.parameters()).device
        torch.manual_seed(seed)
        self.matcher = type(first)(first.config).to(self.device)
        self.matcher.widths = first.widths
        self.loss = phase_loss(self.matcher, phase, recipe.memory or None)
        self.optimizer, self.beside, self.training, self.pace = make_optimizer(self.matcher, phase), beside, recipe.training, pace

    def learn(self, value: Callable[[], Tensor]) -> None:
        """The gradient of a batch, and one step down where the first network takes one, at the rates that it has now."""
        train_mode(self.matcher)
        with autocast(self.device, self.training.autocast):
            loss = value()
        (loss * self.pace.share).backward()
        if not self.pace.steps:
            return
        for group, first in zip(self.optimizer.param_groups, self.beside.param_groups, strict=True):
            group["lr"] = first["lr"]
        take_step(self.optimizer, self.training.clip_norm)

    def state_dict(self) -> dict[str, Tensor]:
        weights = {f"weights.{name}": tensor.detach().cpu().clone() for name, tensor in self.matcher.state_dict().items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(self.optimizer).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        def of(kind: str) -> dict[str, Tensor]:
            return {name.removeprefix(f"{kind}."): tensor for name, tensor in state.items() if name.startswith(f"{kind}.")}

        self.matcher.load_state_dict(of("weights"))
        restore_optimizer(self.optimizer, of("optimizer"))
