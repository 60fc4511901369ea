"""What a walk ends with: a value whose gradients are known already, and how it is put on the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visavis.engine.scores import Gradients
from visavis.errors import VisavisError


class ValueAndGradients(NamedTuple):
    """The value of both directions over all processes, and its gradients: by inputs of the scores, by facts that need one, by the bias."""

    value: Tensor
    gradients: Gradients
    facts: list[tuple[Tensor, Tensor]]
    bias: Tensor | float = 0.0


def on_graph(value: Tensor, gradients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The value on the graph, with these gradients by these inputs, whatever is done with it later."""
    needed = [(given, gradient.reshape(given.shape).to(given.dtype)) for given, gradient in gradients if given.requires_grad]
    return _KnownGradients.apply(value, [gradient for _, gradient in needed], *(given for given, _ in needed))


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise VisavisError(
                "PairLoss has formed its gradient already and cannot be differentiated twice: "
                "call the objective itself on the score matrix, objective(scores, targets)."
            )
        return None, None, *(gradient * upstream[0] for gradient in ctx.gradients)
