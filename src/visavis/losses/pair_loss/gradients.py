"""Gradients of a PairLoss: annotations that need a gradient, and a value with gradients that are
already computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visavis.core.errors import VisavisError
from visavis.losses.pair_loss.block_scores import InputGradients
from visavis.losses.targets import ANNOTATIONS, Factors, Targets

ANNOTATION_NAMES = tuple(annotation.name for annotation in ANNOTATIONS)


def annotations_needing_grad(targets: Targets) -> dict[str, Tensor]:
    """Find the annotation tensors that need a gradient.

    Args:
        targets: The targets.

    Returns:
        Tensors by name, such as "weight" or "weight.query_vectors" for factors.

    Raises:
        VisavisError: If a function returns values that need a gradient.
    """
    tensors: dict[str, Tensor] = {}
    for name in ANNOTATION_NAMES:
        value = getattr(targets, name)
        if isinstance(value, Factors):
            tensors |= {
                f"{name}.query_vectors": value.query_vectors,
                f"{name}.candidate_vectors": value.candidate_vectors,
            }
        elif isinstance(value, Tensor):
            tensors[name] = value
        elif (
            value is not None
            and len(targets.query_ids)
            and targets[:1].pairwise(name).requires_grad
        ):
            raise VisavisError(
                f"{name}: expected a function without gradient, got values with a gradient. Pass a "
                "tensor instead."
            )
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


def has_annotations(targets: Targets) -> bool:
    """Return whether the targets hold more than ids.

    Args:
        targets: The targets.

    Returns:
        Whether there is a relation or an annotation.
    """
    return targets.relation is not None or any(
        getattr(targets, name) is not None for name in ANNOTATION_NAMES
    )


def get_annotation_tensor(targets: Targets, name: str) -> Tensor:
    """Return an annotation tensor by its name.

    Args:
        targets: The targets.
        name: A name as in `annotations_needing_grad`.

    Returns:
        The tensor.
    """
    value: Any = targets
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value


def replace_annotation_tensors(targets: Targets, new: dict[str, Tensor]) -> Targets:
    """Replace annotation tensors.

    Args:
        targets: The targets.
        new: Tensors by name.

    Returns:
        The targets with the new tensors.
    """
    for name, tensor in new.items():
        field, _, part = name.partition(".")
        targets = replace(
            targets,
            **{field: replace(getattr(targets, field), **{part: tensor}) if part else tensor},
        )
    return targets


def with_annotation_leaves(targets: Targets, names: list[str]) -> tuple[Targets, list[Tensor]]:
    """Detach annotation tensors and make them leaves of a new graph.

    Args:
        targets: The targets.
        names: Names of the tensors.

    Returns:
        The targets with the leaves, and the leaves.
    """
    leaves = {
        name: get_annotation_tensor(targets, name).detach().requires_grad_() for name in names
    }
    return replace_annotation_tensors(targets, leaves), list(leaves.values())


class ValueAndGradients(NamedTuple):
    """Loss of both directions over all ranks, and its gradients on this rank.

    Attributes:
        value: The loss, a scalar.
        gradients: Gradients with respect to the inputs of the scores.
        annotation_grads: Pairs of an annotation tensor and its gradient.
        bias_grad: Gradient with respect to a bias of all scores.
    """

    value: Tensor
    gradients: InputGradients
    annotation_grads: list[tuple[Tensor, Tensor]]
    bias_grad: Tensor | float = 0.0


def attach_gradients(value: Tensor, gradients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attach a value with known gradients to the graph.

    Args:
        value: A scalar.
        gradients: Pairs of an input and the gradient of the value with respect to it.

    Returns:
        The value. Its backward pass multiplies the known gradients by the upstream gradient.
    """
    needed = [
        (tensor, gradient.reshape(tensor.shape).to(tensor.dtype))
        for tensor, gradient in gradients
        if tensor.requires_grad
    ]
    return _KnownGradients.apply(
        value, [gradient for _, gradient in needed], *(tensor for tensor, _ in needed)
    )


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise VisavisError(
                "PairLoss cannot be differentiated twice, because its gradient is computed in the "
                "forward pass. "
                "Call the objective on the score matrix instead: objective(scores, targets)."
            )
        return None, None, *(gradient * upstream[0] for gradient in ctx.gradients)
