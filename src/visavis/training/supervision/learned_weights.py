"""Supervision by pair weights from a small network that learns from validation batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from visavis.core.encoded import Encoded
from visavis.core.fields import require_field, validate_fields
from visavis.data.loader import Batch, derive_seed
from visavis.losses.scoring import score_matrix
from visavis.losses.targets import Targets
from visavis.models.base import Matcher
from visavis.models.batch_encoding import evaluation_mode
from visavis.training.supervision.base import PairSupervision, Supervision, TrainingContext

MIN_GRADIENT_NORM = 1e-12
"""Lower bound of the norm by which the gradient of the weight network is divided."""


@dataclass(kw_only=True)
class LearnedWeights(Supervision):
    """A weight for every positive pair, as ``Unified`` uses it (eq. 24), learned from the
    validation loss after a virtual step.

    A network with one hidden layer receives the score of a pair, and its distance to the hardest
    negative of its image and of its text. It returns a weight, which is 1 for all pairs at the
    start and always 1 on average over a batch. Negatives have weight 1. Every ``every`` batches:

    1. Take one virtual step of the model along the gradient of the weighted loss, with
       ``virtual_lr``.
    2. Compute the unweighted loss of a validation batch after this step.
    3. Take one step of the network along the gradient of that loss, of length ``lr`` for any
       gradient norm.

    Negatives keep their weight because eq. 24 multiplies scores. Different weights on the two sides
    of a hinge pull all scores below 0, and the model learns less. The virtual step holds the graph
    of the scores of a batch and of their gradient, so a costly score needs small batches. The
    validation pairs train the weights, so the validation RSUM is too high. Compare models on the
    test split.

    Attributes:
        hidden_dim: Number of hidden units of the network.
        lr: Length of a step of the network.
        virtual_lr: Learning rate of the virtual step.
        every: Number of batches between updates of the network.

    Source:
        The idea of Meta-SPN (Wei et al., 2021), whose sizes and code are not published. This is not
        a reproduction.
    """

    one_process_only: ClassVar[str] = (
        "its virtual step needs second derivatives of the loss of the whole batch"
    )
    # How positives are defined, for the report of a training.
    by: ClassVar[str] = "ids"

    hidden_dim: int = 32
    lr: float = 0.05
    virtual_lr: float = 1e-2
    every: int = 4

    def __post_init__(self) -> None:
        validate_fields(self)
        for name in ("hidden_dim", "lr", "virtual_lr", "every"):
            require_field(getattr(self, name) > 0, self, name, "a number above 0")

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        """Create or restore the weight network. See `Supervision.begin_phase`."""
        self._context = context
        self._pairs = PairSupervision()
        torch.manual_seed(derive_seed(context.seed, 0, self.hidden_dim))
        self._network = WeightNetwork(self.hidden_dim).to(context.device)
        if state:
            self._network.load_state_dict(state)

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build targets with the current weights. See `Supervision.targets`."""
        targets = self._pairs.targets(visual, text, batch)
        with torch.no_grad():
            scores = score_matrix(
                self._context.matcher.score, visual, text, self._context.memory
            ).float()
            return replace(
                targets, weight=self._network(scores, targets.to(scores.device).positive)
            )

    def observe(self, batch: Batch, loss: float) -> None:
        """Update the weight network after every ``every`` batches. See `Supervision.observe`."""
        if batch.index % self.every:
            return
        matcher = self._context.matcher
        validation = self._context.validation
        batch_number = batch.index // self.every % validation.num_batches
        validation_batch = next(
            validation.epoch(
                batch.epoch,
                start=batch_number,
                stop=batch_number + 1,
                training=False,
                device=self._context.device,
            )
        )
        trained = {
            name: parameter
            for name, parameter in matcher.named_parameters()
            if parameter.requires_grad
        }
        parameters = {
            name: parameter.detach().requires_grad_() for name, parameter in trained.items()
        }
        # The fastest attention and recurrent layers have no second derivatives.
        with (
            evaluation_mode(matcher),
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.cudnn.flags(enabled=False),
        ):
            weighted_loss = self._loss(batch, parameters, weighted=True)
            gradients = torch.autograd.grad(
                weighted_loss, list(parameters.values()), create_graph=True, materialize_grads=True
            )
            virtual_parameters = {
                name: parameter - self.virtual_lr * gradient
                for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
            }
            validation_loss = self._loss(validation_batch, virtual_parameters, weighted=False)
            network_parameters = list(self._network.parameters())
            network_gradients = torch.autograd.grad(
                validation_loss, network_parameters, materialize_grads=True
            )
        norm = torch.cat([gradient.flatten() for gradient in network_gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(network_parameters, network_gradients, strict=True):
                parameter.sub_(gradient * self.lr / norm.clamp(min=MIN_GRADIENT_NORM))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of the network."""
        return {
            name: tensor.detach().cpu().clone()
            for name, tensor in self._network.state_dict().items()
        }

    def _loss(self, batch: Batch, parameters: Mapping[str, Tensor], *, weighted: bool) -> Tensor:
        """The mean loss of a batch with other parameters of the model."""
        visual, text, scores = functional_call(
            _MatcherModule(self._context.matcher),
            {f"matcher.{name}": parameter for name, parameter in parameters.items()},
            (batch.visual, batch.text),
        )
        targets = self._pairs.targets(visual, text, batch)
        if weighted:
            targets = replace(targets, weight=self._network(scores.detach(), targets.positive))
        return self._context.objective(scores, targets) / len(scores)


class WeightNetwork(nn.Module):
    """Network that maps scores to pair weights.

    Args:
        hidden_dim: Number of hidden units.
    """

    def __init__(self, hidden_dim: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, hidden_dim), nn.Tanh(), nn.Linear(hidden_dim, 1))
        nn.init.zeros_(self.layers[2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.layers[2].bias)  # type: ignore[arg-type]

    def forward(self, scores: Tensor, positive: Tensor) -> Tensor:
        """Compute the weights of all pairs, [V, T]: on average 1 over positives, 1 for negatives."""
        others = scores.masked_fill(positive, -1.0)
        features = torch.stack(
            [scores, scores - others.amax(1, keepdim=True), scores - others.amax(0, keepdim=True)],
            -1,
        )
        weights = torch.sigmoid(self.layers(features)).squeeze(-1) * positive
        return torch.where(positive, weights * positive.sum() / weights.sum(), 1.0)


class _MatcherModule(nn.Module):
    """A model as one function of a batch, for ``functional_call``."""

    def __init__(self, matcher: Matcher):
        super().__init__()
        self.matcher = matcher

    def forward(self, visual: Encoded, text: Encoded) -> tuple[Encoded, Encoded, Tensor]:
        images = self.matcher.encode_visual(visual)
        texts = self.matcher.encode_text(text)
        return images, texts, self.matcher.score(images, texts)
