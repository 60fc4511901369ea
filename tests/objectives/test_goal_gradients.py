"""GOAL: every combination compared with hand-computed gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from visavis import Targets

from .goal_cases import (
    RELATIONS,
    assert_close,
    by_hand,
    direction_by_hand,
    every_goal,
    gradient,
    sides,
)


@every_goal
def test_goal_gradients_match_hand_computed_gradients(goal):
    for relation, targets in RELATIONS.items():
        images, texts = (side.requires_grad_() for side in sides(*targets.shape))
        scores = images @ texts.T
        value = goal(scores, targets)
        actual = torch.autograd.grad(value, (images, texts))
        monitor, *expected = by_hand(
            goal, images.detach(), texts.detach(), scores.detach(), targets
        )
        assert value.item() == pytest.approx(monitor, rel=1e-12, abs=1e-12)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_close(ours, theirs)
        assert any(theirs.any() for theirs in expected), relation


@every_goal
def test_goal_gradients_match_for_other_parameters(goal):
    targets = RELATIONS["captions"]
    images, texts = sides(*targets.shape)
    scores = images @ texts.T
    for fields in (
        {"alpha": 20, "beta": 40},
        {"epsilon": 0},
        {"epsilon": -0.3},
        {"epsilon": 2},
        {"lam": -0.2, "tau": 1, "margin": 0.4},
    ):
        other = replace(goal, **fields)
        _, expected, _ = by_hand(other, images, texts, scores, targets)
        assert_close(gradient(other, scores, targets) @ texts, expected, rtol=1e-9)


@every_goal
def test_goal_gradients_match_for_equal_scores(goal):
    """Other positives of equal score are treated like all other positives. Only the pair itself is
    left out.
    """
    scores = torch.tensor(
        [[0.5, 0.25, 0.125], [0.375, 0.5, 0.25], [0.25, 0.125, 0.75]], dtype=torch.float64
    )
    scores = torch.cat([scores, scores[:, 1:2]], 1)
    targets = Targets(query_ids=[0, 1, 2], candidate_ids=[0, 1, 2, 3])
    for each, transposed in ((scores, targets), (scores.T, targets.T)):
        monitor, changes = direction_by_hand(
            goal,
            *(
                annotation.tolist()
                for annotation in (each, transposed.positive, transposed.negative)
            ),
        )
        expected = torch.zeros_like(each)
        for i, j, weight in changes:
            expected[i, j] += weight
        leaf = each.clone().requires_grad_()
        terms = goal.one_way(leaf, transposed)
        assert terms.sum().item() == pytest.approx(monitor)
        actual = torch.autograd.grad(terms.sum(), leaf)[0]
        assert_close(actual.sum(-1), expected.sum(-1))  # any of the hardest negatives in a tie
        assert_close(actual[transposed.positive], expected[transposed.positive])
