"""What is watched during training besides the loss: similarities and who still gets a gradient.

These are the curves of the Unified paper's figures 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from visavis.objectives import Objective
from visavis.targets import Targets
from visavis.types import Direction

GRADIENT_FLOOR = 1e-6
"""A query has a gradient if some |dL/ds| of its own direction's sum is above this."""


def similarities(scores: Tensor, targets: Targets) -> dict[str, Tensor]:
    """Scores of positives, and of each query's hardest negative in both directions, of one batch; flat tensors."""
    scores = scores.float()
    masked = scores.masked_fill(~targets.negative, float("-inf"))
    curves = {"positive": scores[targets.positive], "hardest_i2t": masked.amax(1), "hardest_t2i": masked.amax(0)}
    return {name: values[values > float("-inf")] for name, values in curves.items()}


def slopes(objective: Objective, scores: Tensor, targets: Targets) -> Iterator[tuple[Direction, Tensor, Targets]]:
    """Each direction of one batch: the derivative of the sum of its terms with respect to every score ``[Q, C]``, and its targets."""
    directions: tuple[tuple[Direction, Tensor, Targets], ...] = (("i2t", scores, targets), ("t2i", scores.T, targets.T))
    for way, block, facts in directions:
        with torch.enable_grad():
            leaf = block.detach().float().requires_grad_()
            (slope,) = torch.autograd.grad(objective.terms(*objective.prepare(leaf, facts)).sum(), leaf)
        yield way, slope, facts


def has_gradient(objective: Objective, scores: Tensor, targets: Targets) -> dict[str, Tensor]:
    """For each query with a negative, whether the objective gives it a gradient; both directions of one batch."""
    return {
        f"gradient_{way}": (slope.abs().amax(1) > GRADIENT_FLOOR)[facts.negative.any(1)].float()
        for way, slope, facts in slopes(objective, scores, targets)
    }


def summarize(batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Mean and standard deviation of everything watched; of ``loss`` and ``gradient_*`` the mean alone."""
    columns: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, values in batch.items():
            columns.setdefault(name, []).append(values.double().reshape(-1).cpu())
    summary = {}
    for name, parts in columns.items():
        values = torch.cat(parts)
        if name == "loss" or name.startswith("gradient"):
            summary[name] = values.mean().item() if len(values) else 0.0
        else:
            summary[f"{name}_mean"] = values.mean().item() if len(values) else 0.0
            summary[f"{name}_std"] = values.std(unbiased=False).item() if len(values) else 0.0
    return summary
