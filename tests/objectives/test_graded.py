"""Laws of GradedVLC: its limit VLC, its gradient, its loop, and when the order costs nothing."""

from __future__ import annotations

import math

import pytest
import torch

from visavis import Targets
from visavis.errors import MissingSupervision
from visavis.objectives import VLC, GradedVLC

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
IDS = [0, 1, 1, 2], [1, 0, 2, 1, 5]  # two captions for each query of 1


def case(**facts):
    scores = 2 * torch.rand(4, 5, dtype=torch.float64) - 1
    relevance = facts.pop("relevance", torch.rand(4, 5, dtype=torch.float64))
    return scores, Targets(query_ids=IDS[0], candidate_ids=IDS[1], relevance=relevance, **facts)


def test_without_beta_it_is_vlc():
    scores, targets = case()
    for reduction in ("sum", "mean"):
        ours, theirs = GradedVLC(beta=0.0, gamma=30, reduction=reduction), VLC(gamma=30, reduction=reduction)
        torch.testing.assert_close(ours(scores, targets), theirs(scores, targets), **CLOSE)


def test_the_order_is_a_divergence_over_the_negatives():
    scores, targets = case(ignore=torch.tensor([[0, 0, 0, 0, 1]] + 3 * [[0] * 5]))
    objective = GradedVLC(tau=0.3, graded_gamma=7.0)
    for i in range(4):
        negatives = targets.negative[i].nonzero()[:, 0].tolist()
        p = [math.exp(targets.relevance[i, j] / 0.3) for j in negatives]
        q = [math.exp(7 * scores[i, j]) for j in negatives]
        expected = sum(a / sum(p) * math.log(a / sum(p) / (b / sum(q))) for a, b in zip(p, q, strict=True))
        assert objective.divergence(scores, targets)[i].item() == pytest.approx(expected, rel=1e-11)


def test_each_query_with_a_pair_has_its_order_once():
    scores, targets = case()
    objective = GradedVLC()
    more = objective.one_way(scores, targets).sum() - VLC(gamma=objective.gamma).one_way(scores, targets).sum()
    torch.testing.assert_close(more, objective.beta * objective.divergence(scores, targets).sum(), **CLOSE)


def test_the_gradient_is_what_it_says():
    scores, targets = case()
    scores.requires_grad_()
    objective = GradedVLC(beta=2.0, tau=0.2, graded_gamma=5.0)
    (ours,) = torch.autograd.grad(objective.one_way(scores, targets).sum(), scores)
    (pairs,) = torch.autograd.grad(VLC(gamma=objective.gamma).one_way(scores, targets).sum(), scores)
    negative = targets.negative
    wanted, given = (x.masked_fill(~negative, -math.inf).softmax(-1) for x in (targets.pairwise("relevance") / 0.2, 5.0 * scores.detach()))
    torch.testing.assert_close(ours, pairs + 2.0 * 5.0 * (given - wanted), **CLOSE)


def test_scores_that_follow_the_degrees_cost_nothing():
    scores = 2 * torch.rand(4, 5, dtype=torch.float64) - 1
    objective = GradedVLC(tau=0.1, graded_gamma=20.0)
    _, targets = case(relevance=20.0 * 0.1 * scores + torch.rand(4, 1, dtype=torch.float64))
    torch.testing.assert_close(objective.divergence(scores, targets), torch.zeros(4, dtype=torch.float64), **CLOSE)
    _, others = case()
    assert (objective.divergence(scores, others) > 0).all()


def test_a_query_without_negatives_has_no_order():
    scores = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    targets = Targets(query_ids=[1, 1], candidate_ids=[1, 1], relevance=torch.rand(2, 2))
    value = GradedVLC()(scores, targets)
    assert value.item() == 0
    assert torch.autograd.grad(value, scores)[0].abs().sum() == 0


def test_without_degrees_it_names_who_brings_them():
    with pytest.raises(MissingSupervision, match=r"GradedVLC needs relevance for every pair.*GradedSupervision"):
        GradedVLC()(torch.rand(2, 2), Targets.paired(2))
