"""Shared parts of the objective tests: scores, targets with every annotation, gradients and
assertions.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from visavis import Targets
from visavis.objectives import CATALOG

from ..sampling import for_each

every_objective = for_each(kind=CATALOG)

RELATIONS = {
    "pairs": (range(6), range(6)),
    "captions": ([3, 1, 2], [1, 1, 2, 2, 3, 3, 3]),
    "duplicates": ([1, 1, 2, 3], [1, 2, 2, 3, 1]),
}


def cosines(num_queries: int, num_candidates: int | None = None) -> torch.Tensor:
    rows, columns = (
        normalize(torch.randn(n, 5, dtype=torch.float64), dim=-1)
        for n in (num_queries, num_candidates or num_queries)
    )
    return rows @ columns.T


def annotations(num_queries: int, num_candidates: int, **changes) -> dict[str, torch.Tensor]:
    """Every annotation that some objective uses."""
    values = {
        name: torch.rand(num_queries, num_candidates, dtype=torch.float64)
        for name in ("relevance", "weight", "pair_margin")
    }
    values |= {
        name: torch.rand(n, dtype=torch.float64)
        for name, n in (("query_margin", num_queries), ("candidate_margin", num_candidates))
    }
    values |= {
        f"{name}_offline_scores": torch.rand(n, 2, dtype=torch.float64)
        for name, n in (("query", num_queries), ("candidate", num_candidates))
    }
    return values | changes


def targets_of(query_ids, candidate_ids, **changes) -> Targets:
    return Targets(
        query_ids=query_ids,
        candidate_ids=candidate_ids,
        **annotations(len(query_ids), len(candidate_ids), **changes),
    )


def gradient(objective, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    scores = scores.detach().clone().requires_grad_()
    (actual,) = torch.autograd.grad(objective(scores, targets), scores)
    return actual


def assert_close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-11, "atol": 1e-11} | tolerance))
