"""Memory of the loss terms of an objective, measured once per objective on small random blocks.

>>> from visavis.losses.objectives import TripletHN
>>> cost = measure_objective_cost(TripletHN(), Targets.paired(3), element_bytes=4, both_directions=False)
>>> cost.total_bytes(128, 4096) / (128 * 4096) < 20          # bytes per score, with the graph and the backward pass
True
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from visavis.core.blocking import BlockCost, measure_block_cost
from visavis.core.errors import MissingSupervision
from visavis.losses.objectives.base import Objective
from visavis.losses.targets import ANNOTATIONS, Annotation, Factors, Targets

SMALLEST_BLOCK_SHAPE = 4, 16
"""Queries and candidates of the smallest measured block."""
AnnotationForms = tuple[tuple[str, str], ...]
"""Names of the given annotations, each with "factors" or "numbers"."""


def measure_objective_cost(
    objective: Objective, targets: Targets, *, element_bytes: int, both_directions: bool
) -> BlockCost:
    """Measure the memory of the loss terms of one matrix of scores, forward and backward, without
    the scores.

    Args:
        objective: The objective.
        targets: Targets with the annotations to measure with.
        element_bytes: Bytes of a score.
        both_directions: Whether to measure the whole loss. False: the terms of one direction.

    Returns:
        The cost of a block. Rows are queries, or positive pairs for an objective that needs the
        pair matrix.
    """
    return _measure(
        objective, _annotation_forms(targets), element_bytes, both_directions=both_directions
    )


def _annotation_forms(targets: Targets) -> AnnotationForms:
    values = ((annotation.name, getattr(targets, annotation.name)) for annotation in ANNOTATIONS)
    return tuple(
        (name, "factors" if isinstance(value, Factors) else "numbers")
        for name, value in values
        if value is not None
    )


@lru_cache(maxsize=256)
def _measure(
    objective: Objective, forms: AnnotationForms, element_bytes: int, *, both_directions: bool
) -> BlockCost:
    dtype = torch.float64 if element_bytes > 4 else torch.float32

    def prepare(height: int, width: int, forms: AnnotationForms = forms) -> Callable[[], Any]:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(height, width, generator=generator, dtype=dtype).requires_grad_()
        by_name = {annotation.name: annotation for annotation in ANNOTATIONS}
        annotations: dict[str, Any] = {
            name: _random_annotation(by_name[name], form, (height, width), generator, dtype)
            for name, form in forms
        }
        targets = Targets(
            query_ids=torch.arange(height), candidate_ids=torch.arange(width), **annotations
        )
        scores, targets = objective.prepare(scores, targets)

        def run() -> Any:
            value = (
                objective(scores, targets)
                if both_directions
                else objective.terms(scores, targets).sum()
            )
            return value.requires_grad and torch.autograd.grad(value, scores, allow_unused=True)

        return run

    with torch.enable_grad():
        try:
            return measure_block_cost(prepare, *SMALLEST_BLOCK_SHAPE)
        except MissingSupervision:
            # A plan may be made before the annotations exist. Measure as if all that the objective
            # reads were given as factors.
            used = {
                annotation.name
                for annotation in ANNOTATIONS
                if {annotation.name, annotation.transposed_field} & set(objective.used_annotations)
            }
            all_forms = (
                *forms,
                *((name, "factors") for name in sorted(used - {name for name, _ in forms})),
            )
            return measure_block_cost(
                lambda height, width: prepare(height, width, all_forms), *SMALLEST_BLOCK_SHAPE
            )


def _random_annotation(
    annotation: Annotation,
    form: str,
    shape: tuple[int, int],
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tensor | Factors:
    height, width = shape
    if annotation.shape != "pairwise":
        length = height if annotation.shape == "query" else width
        return torch.rand(length, *(2 for _ in annotation.axes), generator=generator, dtype=dtype)
    if form == "factors":
        return Factors(
            *(torch.rand(length, 2, generator=generator, dtype=dtype) for length in shape)
        )
    values = torch.rand(height, width, generator=generator, dtype=dtype)
    return values > 2 if annotation.name == "ignore" else values
