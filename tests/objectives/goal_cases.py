"""Shared parts of the GOAL tests: all combinations, relations, and weights computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from visavis import Targets
from visavis.objectives import Goal

from ..sampling import for_each

ALL = [goal for semantics in ("paper", "reference") for goal in Goal.all(semantics=semantics)]
every_goal = for_each(goal=ALL)
every_pair_of_weights = pytest.mark.parametrize(
    "goal", Goal.all(), ids=lambda goal: f"{goal.triplet}-{goal.pair}"
)

RELATIONS = {
    "pairs": Targets.paired(6),
    "two pairs": Targets.paired(2),
    "captions": Targets(query_ids=[3, 1, 2], candidate_ids=[1, 1, 2, 2, 3, 3, 3]),
    "duplicates": Targets(query_ids=[1, 1, 2, 3], candidate_ids=[1, 2, 2, 3, 1]),
    "overlapping": Targets.from_pairs([0, 0, 1, 1, 2], [0, 1, 1, 2, 0], 4, 5),
    "ignored": Targets.paired(
        5, ignore=torch.rand(5, 5, generator=torch.Generator().manual_seed(3)) > 0.7
    ),
}
every_relation = for_each(relation=RELATIONS)


def sides(num_queries: int, num_candidates: int | None = None) -> list[torch.Tensor]:
    return [
        normalize(torch.randn(n, 4, dtype=torch.float64), dim=-1)
        for n in (num_queries, num_candidates or num_queries)
    ]


def gradient(objective, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    scores = scores.detach().clone().requires_grad_()
    return torch.autograd.grad(objective(scores, targets), scores)[0]


def assert_close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-11, "atol": 1e-12} | tolerance))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def average(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def weights_by_hand(
    goal: Goal, s_p: float, s_n: float, positives: list[float], negatives: list[float], least: float
) -> list[float]:
    """T, P+ and P- of a positive and its hardest negative, given the other positives of the batch
    and other negatives of the query.
    """
    released = goal.semantics == "reference"
    triplet = {
        "con": 1.0 if released or goal.margin + s_n - s_p > 0 else 0.0,
        "nca": sigmoid(goal.tau * (s_n - s_p)),
        "cir": sigmoid(goal.tau * (s_n**2 - s_p * (2 - s_p) + (0.5 if released else 0.0))),
    }[goal.triplet]
    positives = [r for r in positives if r <= s_n + goal.epsilon]
    negatives = [r for r in negatives if r >= least - goal.epsilon]
    leads = [s_p - r for r in positives if not (released and r == s_p)]
    distances = [s_n - r for r in negatives if not (released and r == s_n)]
    m_p = average([math.exp(goal.alpha * (s_p - r)) for r in positives])
    m_n = average([math.exp(-goal.beta * (s_n - r)) for r in negatives])
    e_p, e_n = math.exp(goal.alpha * (s_p - goal.lam)), math.exp(-goal.beta * (s_n - goal.lam))
    pull, push = {
        "con": (1.0, 1.0),
        "lin": (1 - s_p, s_n),
        "sig": (1 / (1 + e_p), 1 / (1 + e_n)),
        "lin_ms": ((1 - average(leads)) * (1 - s_p), (1 + average(distances)) * s_n),
        "sig_ms": (1 / (m_p + e_p), 1 / (m_n + e_n)),
    }[goal.pair]
    return [triplet, pull, push]


def direction_by_hand(
    goal: Goal, scores: list[list[float]], positive, negative
) -> tuple[float, list[tuple[int, int, float]]]:
    """The monitor, and the contributions to the gradient as tuples of query, candidate and weight."""
    pairs = [(i, j) for i, row in enumerate(scores) for j in range(len(row)) if positive[i][j]]
    monitor, changes = 0.0, []
    for i, j in pairs:
        rivals = [k for k in range(len(scores[i])) if negative[i][k]]
        if not rivals:
            continue
        hardest = max(rivals, key=lambda k: scores[i][k])
        triplet, pull, push = weights_by_hand(
            goal,
            scores[i][j],
            scores[i][hardest],
            [scores[a][b] for a, b in pairs if (a, b) != (i, j)],
            [scores[i][k] for k in rivals if k != hardest],
            min(scores[a][b] for a, b in pairs),
        )
        monitor += scores[i][hardest] - scores[i][j]
        changes += [(i, hardest, triplet * push), (i, j, -triplet * pull)]
    return monitor, changes


def by_hand(
    goal: Goal, images: torch.Tensor, texts: torch.Tensor, scores: torch.Tensor, targets: Targets
):
    """The monitor and the gradients of both encoders: a score of weight w adds w times one
    embedding to the gradient of the other.
    """
    image_gradient, text_gradient = torch.zeros_like(images), torch.zeros_like(texts)
    annotations = (scores, targets.positive, targets.negative)
    i2t, changes = direction_by_hand(goal, *(annotation.tolist() for annotation in annotations))
    t2i, t2i_changes = direction_by_hand(
        goal, *(annotation.T.tolist() for annotation in annotations)
    )
    for i, j, weight in changes + [(i, j, weight) for j, i, weight in t2i_changes]:
        image_gradient[i] += weight * texts[j]
        text_gradient[j] += weight * images[i]
    return i2t + t2i, image_gradient, text_gradient
