"""MaxMargin: the hinges that its mean includes."""

from __future__ import annotations

import pytest
import torch

from visavis import Targets
from visavis.objectives import MaxMargin, Triplet


@pytest.mark.parametrize("size", [1, 2, 5, 24])
def test_max_margin_is_mean_of_hinges_for_pairs(size):
    scores = 2 * torch.rand(size, size, dtype=torch.float64) - 1
    hinges, own_hinges = [], []
    for i in range(size):
        for j in range(size):
            hinges_of_pair = own_hinges if i == j else hinges
            hinges_of_pair += [
                max(0.0, 0.3 - scores[i, i].item() + s.item()) for s in (scores[i, j], scores[j, i])
            ]
    assert len(hinges) == 2 * size * (size - 1)
    expected = sum(hinges) / max(len(hinges), 1)
    assert MaxMargin(margin=0.3)(scores, Targets.paired(size)).item() == pytest.approx(expected)
    expected = (sum(hinges) + sum(own_hinges)) / (2 * size**2)
    assert MaxMargin(margin=0.3, fix_norm=False)(
        scores, Targets.paired(size)
    ).item() == pytest.approx(expected)


def test_max_margin_without_fix_norm_counts_own_hinge():
    scores = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    assert MaxMargin(margin=0.25)(scores, Targets.paired(1)) == 0
    value = MaxMargin(margin=0.25, fix_norm=False)(scores, Targets.paired(1))
    assert value == 0.25
    assert torch.autograd.grad(value, scores)[0] == 0
    assert MaxMargin(margin=-0.25, fix_norm=False)(scores.detach(), Targets.paired(1)) == 0


def test_max_margin_has_hinges_of_triplet():
    targets = Targets(
        query_ids=[1, 2, 3], candidate_ids=[1, 1, 2, 2, 3, 3]
    )  # every query has the same number of negatives
    scores = torch.rand(3, 6, dtype=torch.float64)
    terms = MaxMargin(margin=0.2).one_way(scores, targets)
    torch.testing.assert_close(terms, Triplet(margin=0.2).one_way(scores, targets) / 4)
