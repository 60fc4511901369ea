"""Facts of targets that lie on a graph (weights, margins, offline scores), as leaves of a block and as sums of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visavis.errors import VisavisError
from visavis.targets import FACTS, Factors, Targets

NAMES = tuple(fact.name for fact in FACTS)


def facts_needing_grad(targets: Targets) -> dict[str, Tensor]:
    """The tensors among the facts that need a gradient, by name. Raises VisavisError for a function that needs one."""
    tensors: dict[str, Tensor] = {}
    for name in NAMES:
        fact = getattr(targets, name)
        if isinstance(fact, Factors):
            tensors |= {f"{name}.query_vectors": fact.query_vectors, f"{name}.candidate_vectors": fact.candidate_vectors}
        elif isinstance(fact, Tensor):
            tensors[name] = fact
        elif fact is not None and len(targets.query_ids) and targets[:1].pairwise(name).requires_grad:
            raise VisavisError(f"the function given for {name} returns numbers with a gradient, which blocks cannot follow: give a tensor.")
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


def has_facts(targets: Targets) -> bool:
    """Whether anything but ids is known."""
    return targets.relation is not None or any(getattr(targets, name) is not None for name in NAMES)


def tensor_of(targets: Targets, name: str) -> Tensor:
    value: Any = targets
    for step in name.split("."):
        value = getattr(value, step)
    return value


def with_tensors(targets: Targets, new: dict[str, Tensor]) -> Targets:
    """The targets with some tensors replaced, each by its name."""
    for name, tensor in new.items():
        fact, _, part = name.partition(".")
        targets = replace(targets, **{fact: replace(getattr(targets, fact), **{part: tensor}) if part else tensor})
    return targets


def leaves(targets: Targets, names: list[str]) -> dict[str, Tensor]:
    """The named tensors, cut off their graph."""
    return {name: tensor_of(targets, name).detach().requires_grad_() for name in names}


def zeros(targets: Targets, names: list[str]) -> Targets:
    """Targets whose named tensors are sums of gradients, still 0; slices and ``T`` of it are views of the same memory."""
    return with_tensors(targets, {name: torch.zeros_like(tensor_of(targets, name)) for name in names})
