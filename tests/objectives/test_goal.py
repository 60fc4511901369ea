"""GOAL: all fifteen combinations, their weights and their names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from visavis import Targets, parse
from visavis.core.errors import SpecError
from visavis.losses.objectives.goal import _prescribe as prescribe
from visavis.objectives import Goal

from ..matching import mentions
from ..sampling import for_each, pairwise
from .goal_cases import (
    ALL,
    RELATIONS,
    assert_close,
    every_goal,
    gradient,
    sides,
)


@every_goal
def test_goal_value_is_monitor_and_gradient_scales_with_loss(goal):
    left, right = sides(6)
    scores = left @ right.T
    hardest = scores - 9 * torch.eye(6)
    expected = hardest.amax(0).sum() + hardest.amax(1).sum() - 2 * scores.trace()
    assert_close(goal(scores, Targets.paired(6)), expected)
    leaf = scores.clone().requires_grad_()
    (scaled,) = torch.autograd.grad(1024 * goal(leaf, Targets.paired(6)), leaf)
    assert torch.equal(scaled, 1024 * gradient(goal, scores, Targets.paired(6)))


@every_goal
def test_goal_is_equivariant_to_transposition_and_order(goal):
    targets = RELATIONS["duplicates"]
    left, right = sides(*targets.shape)
    scores, rows, columns = left @ right.T, torch.randperm(4), torch.randperm(5)
    expected = gradient(goal, scores, targets)
    assert_close(gradient(goal, scores.T, targets.T).T, expected)
    assert_close(
        gradient(goal, scores[rows][:, columns], targets[rows].T[columns].T),
        expected[rows][:, columns],
    )


@every_goal
def test_goal_ignores_order_of_batch_positives(goal):
    left, right = sides(6)
    scores, targets = left @ right.T, Targets.paired(6)
    shuffled = replace(targets, positive_scores=scores.diagonal()[torch.randperm(6)])
    assert_close(gradient(goal, scores, shuffled), gradient(goal, scores, targets))
    rounded = replace(
        shuffled, positive_scores=shuffled.positive_scores * (1 + 2**-51)
    )  # rounding error of another order of additions
    assert_close(gradient(goal, scores, rounded), gradient(goal, scores, targets))


@for_each(goal=[goal for goal in ALL if goal.pair.endswith("_ms")])
def test_goal_row_blocks_match_full_gradient(goal):
    left, right = sides(6)
    scores, targets = goal.prepare(left @ right.T, Targets.paired(6))
    leaf = scores.clone().requires_grad_()
    whole = torch.autograd.grad(goal.one_way(leaf, targets).sum(), leaf)[0]
    for rows in (slice(0, 2), slice(2, 6)):
        leaf = scores[rows].clone().requires_grad_()
        assert_close(
            torch.autograd.grad(goal.one_way(leaf, targets[rows]).sum(), leaf)[0], whole[rows]
        )


EDGES = {
    "ties": torch.full((4, 4), 0.25),
    "perfect": 2 * torch.eye(4) - 1,
    "antipodal": 1 - 2 * torch.eye(4),
    "ones": torch.ones(4, 4),
    "minus ones": -torch.ones(4, 4),
    "one pair": torch.ones(1, 1),
    "one query": torch.tensor([[0.5, -1.0, 1.0]]),
    "nothing": torch.zeros(0, 3),
}


@pairwise(edge=EDGES, goal=ALL, dtype=[torch.float64, torch.bfloat16, torch.float16])
def test_goal_is_finite_for_extreme_scores(edge, goal, dtype):
    scores = EDGES[edge].to(dtype)
    by_ids = Targets(query_ids=range(len(scores)), candidate_ids=range(scores.shape[1]))
    for targets in (by_ids, Targets.from_pairs([], [], *scores.shape)):
        assert goal(scores, targets).isfinite()
        assert gradient(goal, scores, targets).isfinite().all()


@every_goal
def test_goal_memory_is_bounded_by_score_matrix(goal, largest):
    targets = Targets(query_ids=range(8), candidate_ids=torch.arange(8).repeat_interleave(5))
    left, right = sides(8, 40)
    with largest:
        gradient(goal, left @ right.T, targets)
    assert largest.numel == 8 * 40


@every_goal
def test_goal_pair_without_negative_is_zero_and_counted(goal):
    targets = Targets.paired(3, ignore=torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0]]))
    leaf = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    terms = goal.one_way(leaf, targets)
    assert len(terms) == 3
    assert terms[0] == 0
    assert terms[1] != 0
    assert not torch.autograd.grad(terms.sum(), leaf)[0][0].any()


# Weights


def pair_weights(
    pair: str, scores: list[list[float]], semantics: str = "reference", **fields
) -> list[tuple[float, float]]:
    """P+ and P- of each query, read from the prescribed gradient where T is 1."""
    leaf = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    goal = Goal(triplet="con", pair=pair, margin=3.0, semantics=semantics, **fields)
    (actual,) = torch.autograd.grad(goal.one_way(leaf, Targets.paired(len(scores))).sum(), leaf)
    return [(-row[i].item(), (row.sum() - row[i]).item()) for i, row in enumerate(actual)]


def test_goal_hinge_is_strict_at_margin():
    scores = torch.tensor([[0.75, 0.5], [0.5, 0.75]])
    for margin, count in ((0.25, 0), (0.250001, 2)):
        assert (
            gradient(Goal(triplet="con", pair="con", margin=margin), scores, Targets.paired(2))
            .diagonal()
            .abs()
            .sum()
            == 2 * count
        )


def test_goal_sets_include_scores_at_their_boundary():
    scores = [[0.5, 0.25, -0.25], [0.0, 0.75, 0.0], [0.0, 0.0, 0.25]]
    near = {"epsilon": 0.5, "semantics": "paper"}  # 0.75 <= 0.25 + 0.5 and -0.25 >= 0.25 - 0.5
    lead = ((0.5 - 0.75) + (0.5 - 0.25)) / 2
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(
        ((1 - lead) * 0.5, (1 + 0.5) * 0.25)
    )
    scores[1][1], scores[0][2] = 0.75 + 2**-20, -0.25 - 2**-20
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(((1 - 0.25) * 0.5, 0.25))
    scores[0][0], scores[1][1] = 0.75, 0.5  # the pair itself is at the boundary and left out
    lead = ((0.75 - 0.5) + (0.75 - 0.25)) / 2
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(((1 - lead) * 0.25, 0.25))


def test_goal_reference_ignores_zero_differences():
    scores = [
        [0.5, 0.5, 0.5, 0.25],
        [0.0, 0.5, 0.0, 0.0],
        [0.0, 0.0, 0.25, 0.0],
        [0.0, 0.0, 0.0, 0.5],
    ]
    assert pair_weights("lin_ms", scores, semantics="paper")[0] == pytest.approx(
        ((1 - 0.25 / 3) * 0.5, (1 + 0.25 / 2) * 0.5)
    )
    assert pair_weights("lin_ms", scores)[0] == pytest.approx(((1 - 0.25) * 0.5, (1 + 0.25) * 0.5))


def test_goal_sig_ms_matches_hand_computed_weights():
    scores = [[0.5, 0.25, 0.125], [0.0, 0.25, 0.0], [0.0, 0.0, 0.75]]
    m_p, m_n = (
        math.exp(2 * (0.5 - 0.25)),
        math.exp(-10 * (0.25 - 0.125)),
    )  # 0.75 is above 0.25 + 0.1, 0.125 not below 0.25 - 0.15
    expected = (1 / (m_p + math.exp(2 * (0.5 - 0.5))), 1 / (m_n + math.exp(-10 * (0.25 - 0.5))))
    assert pair_weights("sig_ms", scores, epsilon=0.15)[0] == pytest.approx(expected)


def test_goal_relative_negative_term_is_at_most_one():
    left, right = sides(40)
    scores = left @ right.T
    hardest = (scores - 9 * torch.eye(40)).amax(-1)
    pushed = torch.tensor(
        [push for _, push in pair_weights("sig_ms", scores.tolist())], dtype=torch.float64
    )
    m_n = 1 / pushed - (-10 * (hardest - 0.5)).exp()
    assert (m_n <= 1 + 1e-9).all()
    assert (m_n > 0.01).sum() > 10


def test_goal_lin_pulls_negative_scores_below_zero():
    assert pair_weights("lin", [[0.5, -0.25], [-0.5, 0.5]]) == [(0.5, -0.25), (0.5, -0.5)]


# Values


def test_goal_all_lists_each_combination_once():
    assert len(set(Goal.all())) == 15
    assert Goal() in Goal.all()
    assert {goal.tau for goal in Goal.all(tau=3)} == {3.0}
    assert all(parse(repr(goal)) == goal for goal in ALL)


def test_goal_needs_positive_scores_for_relative_weights_only():
    assert {goal.pair for goal in ALL if goal.needs_positive_scores} == {"lin_ms", "sig_ms"}
    left, right = sides(3)
    for goal in ALL:
        prepared = goal.prepare(left @ right.T, Targets.paired(3))[1]
        assert (prepared.positive_scores is not None) == goal.needs_positive_scores


@for_each(field=["tau", "alpha", "beta"])
def test_goal_rejects_slopes_of_zero(field):
    with pytest.raises(SpecError, match=mentions("Goal", field, "a number > 0, got 0")):
        Goal(**{field: 0})


def test_prescribe_changes_gradient_but_not_value():
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    value = prescribe(x / 3, 1e9 * x)
    assert torch.equal(value, x.detach() / 3)
    assert torch.autograd.grad(value.sum(), x)[0].tolist() == [1e9] * 3
