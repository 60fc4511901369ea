"""GradedVLC: its limit VLC, its gradient, and its divergence."""

from __future__ import annotations

import math

import pytest
import torch

from visavis import Targets
from visavis.core.errors import MissingSupervision
from visavis.losses.pair_summaries import find_positive_pairs
from visavis.objectives import VLC, GradedVLC

from ..matching import mentions

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
IDS = [0, 1, 1, 2], [1, 0, 2, 1, 5]  # two positives for each query of id 1


def case(**annotations):
    scores = 2 * torch.rand(4, 5, dtype=torch.float64) - 1
    relevance = annotations.pop("relevance", torch.rand(4, 5, dtype=torch.float64))
    return scores, Targets(
        query_ids=IDS[0], candidate_ids=IDS[1], relevance=relevance, **annotations
    )


def test_graded_vlc_without_beta_equals_vlc():
    scores, targets = case()
    for reduction in ("sum", "mean"):
        ours, theirs = (
            GradedVLC(beta=0.0, gamma=30, reduction=reduction),
            VLC(gamma=30, reduction=reduction),
        )
        torch.testing.assert_close(ours(scores, targets), theirs(scores, targets), **CLOSE)


def test_graded_vlc_divergence_is_over_negatives():
    scores, targets = case(ignore=torch.tensor([[0, 0, 0, 0, 1]] + 3 * [[0] * 5]))
    objective = GradedVLC(tau=0.3, graded_gamma=7.0)
    for i in range(4):
        negatives = targets.negative[i].nonzero()[:, 0].tolist()
        p = [math.exp(targets.relevance[i, j] / 0.3) for j in negatives]
        q = [math.exp(7 * scores[i, j]) for j in negatives]
        expected = sum(
            a / sum(p) * math.log(a / sum(p) / (b / sum(q))) for a, b in zip(p, q, strict=True)
        )
        assert objective._divergence(find_positive_pairs(scores, targets), targets)[
            i
        ].item() == pytest.approx(expected, rel=1e-11)


def test_graded_vlc_adds_one_divergence_per_query():
    scores, targets = case()
    objective = GradedVLC()
    more = (
        objective.one_way(scores, targets).sum()
        - VLC(gamma=objective.gamma).one_way(scores, targets).sum()
    )
    torch.testing.assert_close(
        more,
        objective.beta * objective._divergence(find_positive_pairs(scores, targets), targets).sum(),
        **CLOSE,
    )


def test_graded_vlc_gradient_matches_formula():
    scores, targets = case()
    scores.requires_grad_()
    objective = GradedVLC(beta=2.0, tau=0.2, graded_gamma=5.0)
    (ours,) = torch.autograd.grad(objective.one_way(scores, targets).sum(), scores)
    (pairs,) = torch.autograd.grad(
        VLC(gamma=objective.gamma).one_way(scores, targets).sum(), scores
    )
    negative = targets.negative
    expected, predicted = (
        x.masked_fill(~negative, -math.inf).softmax(-1)
        for x in (targets.pairwise("relevance") / 0.2, 5.0 * scores.detach())
    )
    torch.testing.assert_close(ours, pairs + 2.0 * 5.0 * (predicted - expected), **CLOSE)


def test_graded_vlc_divergence_is_zero_for_matching_scores():
    scores = 2 * torch.rand(4, 5, dtype=torch.float64) - 1
    objective = GradedVLC(tau=0.1, graded_gamma=20.0)
    _, targets = case(relevance=20.0 * 0.1 * scores + torch.rand(4, 1, dtype=torch.float64))
    torch.testing.assert_close(
        objective._divergence(find_positive_pairs(scores, targets), targets),
        torch.zeros(4, dtype=torch.float64),
        **CLOSE,
    )
    _, others = case()
    assert (objective._divergence(find_positive_pairs(scores, others), others) > 0).all()


def test_graded_vlc_is_zero_for_query_without_negatives():
    scores = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    targets = Targets(query_ids=[1, 1], candidate_ids=[1, 1], relevance=torch.rand(2, 2))
    value = GradedVLC()(scores, targets)
    assert value.item() == 0
    assert torch.autograd.grad(value, scores)[0].abs().sum() == 0


def test_graded_vlc_without_relevance_names_supervision():
    with pytest.raises(
        MissingSupervision, match=mentions("GradedVLC", "relevance", "GradedSupervision")
    ):
        GradedVLC()(torch.rand(2, 2), Targets.paired(2))
