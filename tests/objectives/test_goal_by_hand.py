"""GOAL: every combination against gradients written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from visavis import Targets

from .goal_cases import (
    RELATIONS,
    by_hand,
    close,
    every_goal,
    every_relation,
    gradient,
    one_way_by_hand,
    sides,
)


@every_goal
@every_relation
def test_gradients_of_both_towers_are_those_written_out_by_hand(goal, relation):
    targets = RELATIONS[relation]
    images, texts = (side.requires_grad_() for side in sides(*targets.shape))
    scores = images @ texts.T
    value = goal(scores, targets)
    found = torch.autograd.grad(value, (images, texts))
    monitor, *expected = by_hand(goal, images.detach(), texts.detach(), scores.detach(), targets)
    assert value.item() == pytest.approx(monitor, rel=1e-12, abs=1e-12)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    assert any(theirs.any() for theirs in expected)


@every_goal
def test_other_parameters_by_hand(goal):
    targets = RELATIONS["captions"]
    images, texts = sides(*targets.shape)
    scores = images @ texts.T
    for fields in ({"alpha": 20, "beta": 40}, {"epsilon": 0}, {"epsilon": -0.3}, {"epsilon": 2}, {"lam": -0.2, "tau": 1, "margin": 0.4}):
        other = replace(goal, **fields)
        _, expected, _ = by_hand(other, images, texts, scores, targets)
        close(gradient(other, scores, targets) @ texts, expected, rtol=1e-9)


@every_goal
def test_equal_scores_by_hand(goal):
    """Other positives that score as the own one does are read, or not counted, as others are: the own one alone is left out."""
    scores = torch.tensor([[0.5, 0.25, 0.125], [0.375, 0.5, 0.25], [0.25, 0.125, 0.75]], dtype=torch.float64)
    scores = torch.cat([scores, scores[:, 1:2]], 1)
    targets = Targets(query_ids=[0, 1, 2], candidate_ids=[0, 1, 2, 3])
    for each, turned in ((scores, targets), (scores.T, targets.T)):
        monitor, changes = one_way_by_hand(goal, *(fact.tolist() for fact in (each, turned.positive, turned.negative)))
        expected = torch.zeros_like(each)
        for i, j, weight in changes:
            expected[i, j] += weight
        leaf = each.clone().requires_grad_()
        terms = goal.one_way(leaf, turned)
        assert terms.sum().item() == pytest.approx(monitor)
        found = torch.autograd.grad(terms.sum(), leaf)[0]
        close(found.sum(-1), expected.sum(-1))  # ties among the hardest: whichever of them
        close(found[turned.positive], expected[turned.positive])
