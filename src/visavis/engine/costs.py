"""What an objective itself holds for a block of scores, measured on a few made-up ones; once for each objective.

>>> from visavis.objectives import TripletHN, Triplet
>>> cost = terms_cost(TripletHN(), Targets.paired(3), number_bytes=4)
>>> cost.of(128, 4096) / (128 * 4096) < 20          # bytes a score, with the graph and its way back
True
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from visavis.errors import MissingSupervision
from visavis.measured_cost import measure_blocks
from visavis.memory import BlockCost
from visavis.objectives.base import Objective
from visavis.targets import FACTS, Factors, Targets

FEW = 4, 16
"""Queries and candidates of the smallest block."""


def terms_cost(objective: Objective, targets: Targets, *, number_bytes: int) -> BlockCost:
    """The bytes of one direction's terms of a block, forth and back, beside the scores: rows are queries (pairs, of a ``wide`` one)."""
    return _measured(objective, _forms(targets), number_bytes, both=False)


def value_cost(objective: Objective, targets: Targets, *, number_bytes: int) -> BlockCost:
    """The bytes of the whole value by the graph of one matrix, forth and back, beside the scores."""
    return _measured(objective, _forms(targets), number_bytes, both=True)


Forms = tuple[tuple[str, str], ...]


def _forms(targets: Targets) -> Forms:
    """Which facts are known, and whether as factors or as numbers."""
    known = ((fact.name, getattr(targets, fact.name)) for fact in FACTS)
    return tuple((name, "factors" if isinstance(value, Factors) else "numbers") for name, value in known if value is not None)


@lru_cache(maxsize=256)
def _measured(objective: Objective, forms: Forms, number_bytes: int, *, both: bool) -> BlockCost:
    dtype = torch.float64 if number_bytes > 4 else torch.float32

    def prepare(height: int, width: int, forms: Forms = forms) -> Callable[[], Any]:
        random = torch.Generator().manual_seed(0)
        scores = torch.rand(height, width, generator=random, dtype=dtype).requires_grad_()
        facts: dict[str, Any] = {name: _made_up(name, form, height, width, random, dtype) for name, form in forms}
        targets = Targets(query_ids=torch.arange(height), candidate_ids=torch.arange(width), **facts)
        scores, targets = objective.prepare(scores, targets)

        def work() -> Any:
            value = objective(scores, targets) if both else objective.terms(scores, targets).sum()
            return value.requires_grad and torch.autograd.grad(value, scores, allow_unused=True)

        return work

    with torch.enable_grad():
        try:
            return measure_blocks(prepare, *FEW)
        except MissingSupervision:  # asked before there are any: as if all that it reads were there, as factors
            reads = {fact.name for fact in FACTS if fact.name in objective.reads or fact.other_side in objective.reads}
            full = (*forms, *((name, "factors") for name in sorted(reads - {name for name, _ in forms})))
            return measure_blocks(lambda height, width: prepare(height, width, full), *FEW)


def _made_up(name: str, form: str, height: int, width: int, random: torch.Generator, dtype: torch.dtype) -> Tensor | Factors:
    (fact,) = (fact for fact in FACTS if fact.name == name)
    if fact.shape != "pairwise":
        return torch.rand((height if fact.shape == "query" else width), *(2 for _ in fact.axes), generator=random, dtype=dtype)
    if form == "factors":
        return Factors(*(torch.rand(length, 2, generator=random, dtype=dtype) for length in (height, width)))
    return (
        torch.rand(height, width, generator=random, dtype=dtype) > 2
        if name == "ignore"
        else torch.rand(height, width, generator=random, dtype=dtype)
    )
