"""SmoothAP: its limit average precision, comparison with loops, and its memory."""

from __future__ import annotations

import math

import pytest
import torch

from visavis import Targets
from visavis.evaluation.metrics import best_ranks, positive_ranks
from visavis.evaluation.metrics.ranking import average_precision
from visavis.objectives import SmoothAP

from ..sampling import for_each, pairwise

RELATIONS = {
    "pairs": Targets.paired(6),
    "captions": Targets(query_ids=[3, 1, 2], candidate_ids=[1, 1, 2, 2, 3, 3, 3]),
    "duplicates": Targets(query_ids=[1, 1, 2, 3], candidate_ids=[1, 2, 2, 3, 1]),
    "overlapping": Targets.from_pairs([0, 0, 1, 1, 2, 3], [0, 1, 1, 2, 0, 4], 4, 5),
    "without partners": Targets(query_ids=[1, 2, 3], candidate_ids=[2, 4, 4, 2]),
    "ignored": Targets(
        query_ids=[1, 2],
        candidate_ids=[1, 1, 2, 2, 3],
        ignore=torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 1, 0]]),
    ),
}


def scores_for(targets: Targets) -> torch.Tensor:
    return torch.rand(targets.shape, dtype=torch.float64) * 2 - 1


def gradient(objective, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
    scores = scores.detach().clone().requires_grad_()
    return torch.autograd.grad(objective(scores, targets), scores)[0]


def assert_close(ours, theirs, **tolerance) -> None:
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-11, "atol": 1e-12} | tolerance))


def step(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def loss_by_hand(
    row: list[float], positives: list[int], candidates: list[int], tau: float
) -> float:
    """One minus the average precision of a query."""
    precision = 0.0
    for i in positives:
        above = {j: step((row[j] - row[i]) / tau) for j in candidates if j != i}
        precision += (1 + sum(above[j] for j in positives if j != i)) / (1 + sum(above.values()))
    return 1 - precision / len(positives)


@pairwise(tau=[0.01, 0.1, 1.0], relation=RELATIONS)
def test_smooth_ap_terms_match_loops(relation, tau):
    targets = RELATIONS[relation]
    scores = scores_for(targets)
    for each, transposed in ((scores, targets), (scores.T, targets.T)):
        expected = []
        for row, positive, negative in zip(
            each.tolist(), transposed.positive.tolist(), transposed.negative.tolist(), strict=True
        ):
            positives = [j for j, is_one in enumerate(positive) if is_one]
            candidates = [j for j in range(len(row)) if positive[j] or negative[j]]
            expected += [loss_by_hand(row, positives, candidates, tau)] if positives else []
        assert_close(
            SmoothAP(tau=tau).one_way(each, transposed), torch.tensor(expected, dtype=torch.float64)
        )


@pytest.mark.parametrize("relation", ["pairs", "captions", "duplicates"])
def test_smooth_ap_converges_to_one_minus_average_precision(relation):
    targets = RELATIONS[relation]
    scores = scores_for(targets)
    exact = 1 - average_precision(positive_ranks(scores, targets))
    gaps = [
        (SmoothAP(tau=tau).one_way(scores, targets) - exact).abs().max()
        for tau in (0.1, 0.01, 1e-3, 1e-6)
    ]
    assert gaps[-1] < 1e-12 < gaps[0]


def test_smooth_ap_of_one_positive_is_one_minus_reciprocal_rank():
    targets = Targets.paired(9)
    scores = scores_for(targets)
    assert_close(
        SmoothAP(tau=1e-6).one_way(scores, targets),
        1 - 1 / best_ranks(scores, targets).double(),
        atol=1e-9,
    )


def test_smooth_ap_ties_cost_half_a_rank():
    for negatives in (1, 3):
        scores = torch.full((1, 1 + negatives), 0.25, dtype=torch.float64)
        targets = Targets(query_ids=[0], candidate_ids=range(1 + negatives))
        assert SmoothAP().one_way(scores, targets).item() == pytest.approx(
            1 - 1 / (1 + negatives / 2)
        )


@for_each(relation=RELATIONS)
def test_smooth_ap_value_is_mean_of_direction_means(relation):
    targets = RELATIONS[relation]
    scores = scores_for(targets)
    i2t, t2i = SmoothAP().one_way(scores, targets), SmoothAP().one_way(scores.T, targets.T)
    assert len(i2t) == targets.positive.any(1).sum()
    assert len(t2i) == targets.positive.any(0).sum()
    assert_close(SmoothAP()(scores, targets), (i2t.mean() + t2i.mean()) / 2)


def test_smooth_ap_is_zero_without_negatives():
    scores = torch.rand(1, 5, dtype=torch.float64, requires_grad=True)
    value = SmoothAP()(scores, Targets(query_ids=[0], candidate_ids=[0] * 5))
    assert value == 0
    value.backward()
    assert not scores.grad.any()


def test_smooth_ap_gradient_matches_formula_for_one_positive():
    targets, tau = Targets.paired(7), 0.2
    scores = scores_for(targets).requires_grad_()
    (actual,) = torch.autograd.grad(SmoothAP(tau=tau).one_way(scores, targets).sum(), scores)
    sigmoid = ((scores - scores.diagonal()[:, None]) / tau).sigmoid().detach()
    rank = 1 + (sigmoid * targets.negative).sum(1, keepdim=True)
    pushed = sigmoid * (1 - sigmoid) / tau / rank**2 * targets.negative
    assert_close(actual, pushed - pushed.sum(1).diag())


def test_smooth_ap_is_finite_for_large_exponents():
    targets = Targets(query_ids=[0, 1], candidate_ids=[0, 0, 1, 1])
    for scores in (
        torch.ones(2, 4),
        -torch.ones(2, 4),
        torch.tensor([[1.0, 1, -1, -1], [-1, -1, 1, 1]]),
        torch.tensor([[-1.0, 1, 1, -1]] * 2),
    ):
        for tau in (1e-2, 1e-3):
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                assert SmoothAP(tau=tau)(scores.to(dtype), targets).isfinite()
                assert gradient(SmoothAP(tau=tau), scores.to(dtype), targets).isfinite().all()
    perfect = torch.tensor([[1.0, 1, -1, -1], [-1, -1, 1, 1]], dtype=torch.float64)
    assert SmoothAP()(perfect, targets) < 1e-80
    assert SmoothAP()(-perfect, targets).item() == pytest.approx(
        (1 - 1.5 / 3.5) / 2 + (1 - 1 / 2) / 2
    )


def test_smooth_ap_memory_is_positives_by_candidates(largest):
    targets = Targets(query_ids=range(8), candidate_ids=torch.arange(8).repeat_interleave(5))
    with largest:
        gradient(SmoothAP(), scores_for(targets), targets)
    assert largest.numel == 40 * 40
