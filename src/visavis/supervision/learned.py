"""Pair weights from a small network that is itself taught by validation batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from visavis.data.loader import Batch, seed_of
from visavis.models.base import Matcher, evaluating
from visavis.scoring import score_by_blocks
from visavis.spec import check_fields, require
from visavis.supervision.base import PairSupervision, Supervision, TrainingContext
from visavis.targets import Targets
from visavis.types import Encoded

SHORTEST = 1e-12


@dataclass(kw_only=True, eq=False)
class LearnedWeights(Supervision):
    """A weight for every pair that belongs together, as ``Unified`` reads it (eq. 24), learned by a step ahead.

    A network with one hidden layer sees the score of a pair, and how far it lies above the hardest negative of its image and of its
    text; it gives a weight, 1 for all at the start and always 1 in the mean of a batch. Negatives have weight 1. Every ``every``
    batches: one virtual step of the matcher down the weighted loss, at ``virtual_lr``; the unweighted loss of a validation
    batch after it; one step of the network down that, of length ``lr`` however small the slope.
    Negatives keep their weight because eq. 24 multiplies scores: other weights on the two sides of a hinge pull all scores
    below 0, and less is learned.
    The step ahead holds the graph of a whole batch of scores, and that of its gradient: a costly score needs small batches.
    Validation pairs thus teach the weights, so that a model's validation RSUM flatters it: only the test split judges.
    Source: the idea of Meta-SPN (Wei et al., 2021), whose sizes and code are not published: a re-creation, not a reproduction.
    """

    hidden: int = 32
    lr: float = 0.05
    virtual_lr: float = 1e-2
    every: int = 4

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden", "lr", "virtual_lr", "every"):
            require(getattr(self, name) > 0, self, name, "a number above 0")

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        self._context, self._pairs = context, PairSupervision()
        torch.manual_seed(seed_of(context.seed, 0, self.hidden))
        self._network = WeightNetwork(self.hidden).to(context.device)
        if state:
            self._network.load_state_dict(state)

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        targets = self._pairs.targets(visual, text, batch)
        with torch.no_grad():
            scores = score_by_blocks(self._context.matcher.score, visual, text, self._context.memory).float()
            return replace(targets, weight=self._network(scores, targets.to(scores.device).positive))

    def observe(self, batch: Batch, loss: float) -> None:
        if batch.number % self.every:
            return
        matcher, validation = self._context.matcher, self._context.validation
        number = batch.number // self.every % validation.batches_in(batch.epoch)
        held_out = next(iter(validation.epoch(batch.epoch, start=number, training=False))).to(self._context.device)
        parameters = {name: part.detach().requires_grad_() for name, part in matcher.named_parameters() if part.requires_grad}
        with evaluating(matcher), _differentiable_twice():
            ahead = self._value(batch, parameters, weighted=True)
            slopes = torch.autograd.grad(ahead, list(parameters.values()), create_graph=True, materialize_grads=True)
            moved = {name: part - self.virtual_lr * slope for (name, part), slope in zip(parameters.items(), slopes, strict=True)}
            learned = list(self._network.parameters())
            down = torch.autograd.grad(self._value(held_out, moved, weighted=False), learned, materialize_grads=True)
        length = torch.cat([slope.flatten() for slope in down]).norm()
        with torch.no_grad():
            for part, slope in zip(learned, down, strict=True):
                part.sub_(slope * self.lr / length.clamp(min=SHORTEST))

    def state_dict(self) -> dict[str, Tensor]:
        return {name: part.detach().cpu().clone() for name, part in self._network.state_dict().items()}

    def _value(self, batch: Batch, parameters: Mapping[str, Tensor], *, weighted: bool) -> Tensor:
        """The mean loss of a batch under other parameters of the matcher."""
        visual, text, scores = functional_call(
            _Whole(self._context.matcher), {f"matcher.{name}": part for name, part in parameters.items()}, (batch.visual, batch.text)
        )
        targets = self._pairs.targets(visual, text, batch)
        if weighted:
            targets = replace(targets, weight=self._network(scores.detach(), targets.positive))
        return self._context.objective(scores, targets) / len(scores)


class WeightNetwork(nn.Module):
    """Scores ``[V, T]`` and who belongs to whom ``[V, T]`` to weights ``[V, T]``: 1 in the mean over positives, 1 for negatives."""

    def __init__(self, hidden: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        nn.init.zeros_(self.layers[2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.layers[2].bias)  # type: ignore[arg-type]

    def forward(self, scores: Tensor, positive: Tensor) -> Tensor:
        others = scores.masked_fill(positive, -1.0)
        seen = torch.stack([scores, scores - others.amax(1, keepdim=True), scores - others.amax(0, keepdim=True)], -1)
        trust = torch.sigmoid(self.layers(seen)).squeeze(-1) * positive
        return torch.where(positive, trust * positive.sum() / trust.sum(), 1.0)


@contextmanager
def _differentiable_twice() -> Iterator[None]:
    """Attention and recurrent layers by code whose gradient has a gradient, which the fastest one has not."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        yield


class _Whole(nn.Module):
    """A matcher as one function of a batch, as functional_call wants it."""

    def __init__(self, matcher: Matcher):
        super().__init__()
        self.matcher = matcher

    def forward(self, visual: Encoded, text: Encoded) -> tuple[Encoded, Encoded, Tensor]:
        images, texts = self.matcher.encode_visual(visual), self.matcher.encode_text(text)
        return images, texts, self.matcher.score(images, texts)
