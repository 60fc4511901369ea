"""What tests of objectives share: scores, targets with every fact, gradients, and what equal means."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from visavis import Targets
from visavis.objectives import CATALOG

every_objective = pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)

RELATIONS = {
    "pairs": (range(6), range(6)),
    "captions": ([3, 1, 2], [1, 1, 2, 2, 3, 3, 3]),
    "duplicates": ([1, 1, 2, 3], [1, 2, 2, 3, 1]),
}
every_relation = pytest.mark.parametrize("relation", RELATIONS)


def cosines(height: int, width: int | None = None) -> torch.Tensor:
    rows, columns = (normalize(torch.randn(n, 5, dtype=torch.float64), dim=-1) for n in (height, width or height))
    return rows @ columns.T


def facts(height: int, width: int, **changes) -> dict[str, torch.Tensor]:
    """Everything that any objective may need."""
    made = {name: torch.rand(height, width, dtype=torch.float64) for name in ("relevance", "weight", "pair_margin")}
    made |= {name: torch.rand(n, dtype=torch.float64) for name, n in (("query_margin", height), ("candidate_margin", width))}
    made |= {f"{name}_offline_scores": torch.rand(n, 2, dtype=torch.float64) for name, n in (("query", height), ("candidate", width))}
    return made | changes


def targets_of(query_ids, candidate_ids, **changes) -> Targets:
    return Targets(query_ids=query_ids, candidate_ids=candidate_ids, **facts(len(query_ids), len(candidate_ids), **changes))


def gradient(objective, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    scores = scores.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(objective(scores, targets), scores)
    return found


def close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-11, "atol": 1e-11} | tolerance))
