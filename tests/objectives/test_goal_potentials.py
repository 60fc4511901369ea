"""GOAL: which combinations are the gradient of a loss, and which are not."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from visavis import Targets
from visavis.objectives import VLC, BinomialDeviance, Goal, TripletHN

from .goal_cases import (
    ALL,
    RELATIONS,
    assert_close,
    every_relation,
    gradient,
    sides,
)


def hard_nt_xent(scores: torch.Tensor, targets: Targets, tau: float) -> torch.Tensor:
    def one_way(scores, targets):
        positive = scores[targets.positive]
        hardest = scores.masked_fill(~targets.negative, -math.inf).amax(-1)[
            targets.positive.nonzero()[:, 0]
        ]
        return -(tau * torch.stack([positive, hardest], -1)).log_softmax(-1)[:, 0].sum()

    return one_way(scores, targets) + one_way(scores.T, targets.T)


@every_relation
def test_con_con_equals_gradient_of_hardest_triplet(relation):
    targets = RELATIONS[relation]
    left, right = sides(*targets.shape)
    for margin in (0.0, 0.2, 0.5):
        goal = Goal(triplet="con", pair="con", margin=margin)
        assert_close(
            gradient(goal, left @ right.T, targets),
            gradient(TripletHN(margin=margin), left @ right.T, targets),
        )


def test_con_con_reference_pulls_where_triplet_is_inactive():
    scores, targets = 2 * torch.eye(4, dtype=torch.float64) - 1, Targets.paired(4)
    assert not gradient(TripletHN(), scores, targets).any()
    assert not gradient(Goal(triplet="con", pair="con"), scores, targets).any()
    assert (
        gradient(Goal(triplet="con", pair="con", semantics="reference"), scores, targets).diagonal()
        == -2
    ).all()


@pytest.mark.parametrize("relation", ["pairs", "captions", "duplicates"])
def test_nca_con_times_tau_equals_gradient_of_hard_nt_xent(relation):
    targets = RELATIONS[relation]
    left, right = sides(*targets.shape)
    scores = left @ right.T
    for tau in (1.0, 10.0, 50.0):
        expected = gradient(partial(hard_nt_xent, tau=tau), scores, targets)
        assert_close(
            tau * gradient(Goal(triplet="nca", pair="con", tau=tau), scores, targets), expected
        )
    two = scores[:2, :2]
    assert_close(
        7 * gradient(Goal(triplet="nca", pair="con", tau=7.0), two, Targets.paired(2)),
        gradient(VLC(gamma=7.0), two, Targets.paired(2)),
    )


@every_relation
def test_con_sig_equals_binomial_deviance_for_active_hinges(relation):
    targets = RELATIONS[relation]
    left, right = sides(*targets.shape)
    scores = left @ right.T
    expected = gradient(BinomialDeviance(), scores, targets)
    assert_close(
        gradient(Goal(triplet="con", pair="sig", semantics="reference"), scores, targets), expected
    )
    assert_close(gradient(Goal(triplet="con", pair="sig", margin=3.0), scores, targets), expected)


def test_con_sig_is_zero_for_inactive_hinges():
    scores, targets = 2 * torch.eye(3, dtype=torch.float64) - 1, Targets.paired(3)
    assert not gradient(Goal(triplet="con", pair="sig"), scores, targets).any()
    assert gradient(BinomialDeviance(), scores, targets).any()


@pytest.mark.parametrize(("semantics", "shift"), [("paper", 0.0), ("reference", 0.5)])
@pytest.mark.parametrize("tau", [1.0, 10.0])
def test_cir_lin_has_potential(semantics, shift, tau):
    scores = torch.rand(100, 2, dtype=torch.float64) * 2 - 1
    leaf = scores.clone().requires_grad_()
    s_p, s_n = leaf.T
    potential = torch.logaddexp(
        tau * (s_n**2 - s_p * (2 - s_p) + shift), torch.zeros(100, dtype=torch.float64)
    ).sum() / (2 * tau)
    assert_close(
        field(Goal(triplet="cir", pair="lin", tau=tau, semantics=semantics), scores),
        torch.autograd.grad(potential, leaf)[0],
    )


def test_con_lin_has_potential_without_hinge():
    scores = torch.rand(100, 2, dtype=torch.float64) * 2 - 1
    assert_close(
        field(Goal(triplet="con", pair="lin", semantics="reference"), scores),
        torch.stack([scores[:, 0] - 1, scores[:, 1]], -1),
    )


def field(goal: Goal, points: torch.Tensor) -> torch.Tensor:
    """The prescribed gradient at N points (s_p, s_n), one query each: ``[N, 2]``."""
    leaf = points.clone().requires_grad_()
    targets = Targets(query_ids=[0] * len(points), candidate_ids=[0, 1])
    return torch.autograd.grad(goal.one_way(leaf, targets).sum(), leaf)[0]


def curl(goal: Goal, points: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    step_n, step_p = torch.tensor([[0.0, step], [step, 0.0]], dtype=torch.float64)
    pulled = (field(goal, points + step_n) - field(goal, points - step_n))[:, 0]
    pushed = (field(goal, points + step_p) - field(goal, points - step_p))[:, 1]
    return (pulled - pushed) / (2 * step)


INTEGRABLE = {("con", "con"), ("con", "lin"), ("con", "sig"), ("nca", "con"), ("cir", "lin")}


@pytest.mark.parametrize("goal", [goal for goal in ALL if not goal.pair.endswith("_ms")], ids=str)
def test_combinations_without_potential_have_nonzero_curl(goal):
    goal = replace(goal, margin=3.0, tau=3.0)  # every hinge is active
    largest = curl(goal, torch.rand(50, 2, dtype=torch.float64) * 1.8 - 0.9).abs().max()
    if (goal.triplet, goal.pair) in INTEGRABLE:
        assert largest < 1e-8
    else:
        assert largest > 0.05


@pytest.mark.parametrize("pair", ["con", "lin", "sig"])
def test_circulation_around_hinge_is_zero_for_con_con_only(pair):
    corners = torch.tensor(
        [[0.1, -0.5], [0.9, -0.5], [0.9, 0.5], [0.1, 0.5], [0.1, -0.5]], dtype=torch.float64
    )
    fraction = (torch.arange(20000, dtype=torch.float64)[:, None] + 0.5) / 20000
    circulation = sum(
        (
            (end - start)
            * field(Goal(triplet="con", pair=pair), start + fraction * (end - start)).mean(0)
        ).sum()
        for start, end in pairwise(corners)
    )
    assert abs(circulation) < 1e-3 if pair == "con" else abs(circulation) > 0.05
