"""Laws of GOAL: all fifteen combinations, their weights, and how they are named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from visavis import Targets, parse
from visavis.errors import SpecError
from visavis.objectives import Goal
from visavis.objectives.goal import prescribe

from .goal_cases import (
    ALL,
    RELATIONS,
    close,
    every_goal,
    gradient,
    sides,
)


@every_goal
def test_the_value_is_the_monitor_and_the_scale_of_a_loss_is_kept(goal):
    left, right = sides(6)
    scores = left @ right.T
    hardest = scores - 9 * torch.eye(6)
    expected = hardest.amax(0).sum() + hardest.amax(1).sum() - 2 * scores.trace()
    close(goal(scores, Targets.paired(6)), expected)
    leaf = scores.clone().requires_grad_()
    (scaled,) = torch.autograd.grad(1024 * goal(leaf, Targets.paired(6)), leaf)
    assert torch.equal(scaled, 1024 * gradient(goal, scores, Targets.paired(6)))


@every_goal
def test_turned_and_shuffled_batches(goal):
    targets = RELATIONS["duplicates"]
    left, right = sides(*targets.shape)
    scores, rows, columns = left @ right.T, torch.randperm(4), torch.randperm(5)
    expected = gradient(goal, scores, targets)
    close(gradient(goal, scores.T, targets.T).T, expected)
    close(gradient(goal, scores[rows][:, columns], targets[rows].T[columns].T), expected[rows][:, columns])


@every_goal
def test_the_positives_of_the_batch_have_no_order(goal):
    left, right = sides(6)
    scores, targets = left @ right.T, Targets.paired(6)
    shuffled = replace(targets, positive_scores=scores.diagonal()[torch.randperm(6)])
    close(gradient(goal, scores, shuffled), gradient(goal, scores, targets))
    rounded = replace(shuffled, positive_scores=shuffled.positive_scores * (1 + 2**-51))  # as another order of additions leaves them
    close(gradient(goal, scores, rounded), gradient(goal, scores, targets))


@pytest.mark.parametrize("goal", [goal for goal in ALL if goal.pair.endswith("_ms")], ids=str)
def test_rows_may_come_in_blocks_once_the_positives_are_known(goal):
    left, right = sides(6)
    scores, targets = goal.prepare(left @ right.T, Targets.paired(6))
    leaf = scores.clone().requires_grad_()
    whole = torch.autograd.grad(goal.one_way(leaf, targets).sum(), leaf)[0]
    for rows in (slice(0, 2), slice(2, 6)):
        leaf = scores[rows].clone().requires_grad_()
        close(torch.autograd.grad(goal.one_way(leaf, targets[rows]).sum(), leaf)[0], whole[rows])


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


@every_goal
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_edges_are_finite(goal, dtype):
    for edge in EDGES.values():
        scores = edge.to(dtype)
        by_ids = Targets(query_ids=range(len(scores)), candidate_ids=range(scores.shape[1]))
        for targets in (by_ids, Targets.from_pairs([], [], *scores.shape)):
            assert goal(scores, targets).isfinite()
            assert gradient(goal, scores, targets).isfinite().all()


@every_goal
def test_no_table_of_pairs_by_positives_is_made(goal, largest):
    targets = Targets(query_ids=range(8), candidate_ids=torch.arange(8).repeat_interleave(5))
    left, right = sides(8, 40)
    with largest:
        gradient(goal, left @ right.T, targets)
    assert largest.numel == 8 * 40


@every_goal
def test_a_pair_without_a_negative_counts_and_rests(goal):
    targets = Targets.paired(3, ignore=torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0]]))
    leaf = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    terms = goal.one_way(leaf, targets)
    assert len(terms) == 3
    assert terms[0] == 0
    assert terms[1] != 0
    assert not torch.autograd.grad(terms.sum(), leaf)[0][0].any()


# weights


def pair_weights(pair: str, scores: list[list[float]], semantics: str = "reference", **fields) -> list[tuple[float, float]]:
    """P+ and P- of each query, read from the prescribed gradient where T is 1."""
    leaf = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    goal = Goal(triplet="con", pair=pair, margin=3.0, semantics=semantics, **fields)
    (found,) = torch.autograd.grad(goal.one_way(leaf, Targets.paired(len(scores))).sum(), leaf)
    return [(-row[i].item(), (row.sum() - row[i]).item()) for i, row in enumerate(found)]


def test_the_hinge_is_strict_and_its_corner_closed():
    scores = torch.tensor([[0.75, 0.5], [0.5, 0.75]])
    for margin, count in ((0.25, 0), (0.250001, 2)):
        assert gradient(Goal(triplet="con", pair="con", margin=margin), scores, Targets.paired(2)).diagonal().abs().sum() == 2 * count


def test_what_stands_at_the_edge_of_a_set_is_in_it():
    scores = [[0.5, 0.25, -0.25], [0.0, 0.75, 0.0], [0.0, 0.0, 0.25]]
    near = {"epsilon": 0.5, "semantics": "paper"}  # 0.75 <= 0.25 + 0.5 and -0.25 >= 0.25 - 0.5
    lead = ((0.5 - 0.75) + (0.5 - 0.25)) / 2
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(((1 - lead) * 0.5, (1 + 0.5) * 0.25))
    scores[1][1], scores[0][2] = 0.75 + 2**-20, -0.25 - 2**-20
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(((1 - 0.25) * 0.5, 0.25))
    scores[0][0], scores[1][1] = 0.75, 0.5  # the pair itself stands at the edge, and is left out
    lead = ((0.75 - 0.5) + (0.75 - 0.25)) / 2
    assert pair_weights("lin_ms", scores, **near)[0] == pytest.approx(((1 - lead) * 0.25, 0.25))


def test_the_released_code_does_not_count_differences_of_zero():
    scores = [[0.5, 0.5, 0.5, 0.25], [0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.25, 0.0], [0.0, 0.0, 0.0, 0.5]]
    assert pair_weights("lin_ms", scores, semantics="paper")[0] == pytest.approx(((1 - 0.25 / 3) * 0.5, (1 + 0.25 / 2) * 0.5))
    assert pair_weights("lin_ms", scores)[0] == pytest.approx(((1 - 0.25) * 0.5, (1 + 0.25) * 0.5))


def test_sig_ms_by_hand():
    scores = [[0.5, 0.25, 0.125], [0.0, 0.25, 0.0], [0.0, 0.0, 0.75]]
    m_p, m_n = math.exp(2 * (0.5 - 0.25)), math.exp(-10 * (0.25 - 0.125))  # 0.75 is above 0.25 + 0.1, 0.125 not below 0.25 - 0.15
    expected = (1 / (m_p + math.exp(2 * (0.5 - 0.5))), 1 / (m_n + math.exp(-10 * (0.25 - 0.5))))
    assert pair_weights("sig_ms", scores, epsilon=0.15)[0] == pytest.approx(expected)


def test_under_hard_mining_the_relative_term_of_negatives_is_at_most_one():
    left, right = sides(40)
    scores = left @ right.T
    hardest = (scores - 9 * torch.eye(40)).amax(-1)
    pushed = torch.tensor([push for _, push in pair_weights("sig_ms", scores.tolist())], dtype=torch.float64)
    m_n = 1 / pushed - (-10 * (hardest - 0.5)).exp()
    assert (m_n <= 1 + 1e-9).all()
    assert (m_n > 0.01).sum() > 10


def test_a_negative_below_zero_is_pulled_by_lin():
    assert pair_weights("lin", [[0.5, -0.25], [-0.5, 0.5]]) == [(0.5, -0.25), (0.5, -0.5)]


# as values


def test_all_combinations_are_listed_once():
    assert len(set(Goal.all())) == 15
    assert Goal() in Goal.all()
    assert {goal.tau for goal in Goal.all(tau=3)} == {3.0}
    assert all(parse(repr(goal)) == goal for goal in ALL)


def test_only_relative_weights_need_the_positives_of_the_batch():
    assert {goal.pair for goal in ALL if goal.needs_positive_scores} == {"lin_ms", "sig_ms"}
    left, right = sides(3)
    for goal in ALL:
        prepared = goal.prepare(left @ right.T, Targets.paired(3))[1]
        assert (prepared.positive_scores is not None) == goal.needs_positive_scores


@pytest.mark.parametrize("field", ["tau", "alpha", "beta"])
def test_slopes_are_above_zero(field):
    with pytest.raises(SpecError, match=rf"^Goal: {field} is 0\.0, expected a number above 0\.$"):
        Goal(**{field: 0})


def test_a_prescribed_gradient_leaves_the_value_alone():
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    value = prescribe(x / 3, 1e9 * x)
    assert torch.equal(value, x.detach() / 3)
    assert torch.autograd.grad(value.sum(), x)[0].tolist() == [1e9] * 3
