"""Pair weights: closed forms, blocks, and laws of objectives."""

from __future__ import annotations

import pytest
import torch
from tests.diagnostics.closed_forms import closed_weights

from visavis import Targets
from visavis.core.errors import ShapeError, SpecError
from visavis.objectives import VLC, NTXent, Objective, Triplet, TripletHN, Unified
from visavis.papers.diagnostics import pair_weights

PRINTED = [
    Triplet(),
    TripletHN(),
    NTXent(),
    NTXent(tau=0.02),
    NTXent(denominator="negatives"),
    Unified(),
    Unified(gamma=1),
    VLC(gamma=7),
]
printed = pytest.mark.parametrize("objective", PRINTED, ids=repr)
RELATIONS = {
    "pairs": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "one pair": ([0], [0]),
    "captions of images": ([7, -8, 9], [7, 7, -8, 7, 9, 9]),
    "an image twice": ([7, 7, 8], [7, 8, 7, 8, 8]),
    "all belong together": ([1, 1], [1, 1, 1]),
    "nothing belongs together": ([1, 2], [3, 4, 5]),
}


def draw(targets: Targets) -> torch.Tensor:
    return torch.rand(targets.shape, dtype=torch.float64) * 2 - 1


@printed
@pytest.mark.parametrize("relation", RELATIONS)
def test_pair_weights_equal_closed_forms(objective, relation):
    targets = Targets(query_ids=RELATIONS[relation][0], candidate_ids=RELATIONS[relation][1])
    scores = draw(targets)
    torch.testing.assert_close(
        closed_weights(objective, scores, targets),
        pair_weights(objective, scores, targets),
        rtol=1e-10,
        atol=1e-13,
    )


@printed
def test_pair_weights_of_ignored_pairs_are_zero(objective):
    ignore = torch.tensor([[False, True, False], [False, False, False], [True, False, False]])
    targets = Targets.paired(3, ignore=ignore)
    scores = draw(targets)
    weights = closed_weights(objective, scores, targets)
    torch.testing.assert_close(
        weights, pair_weights(objective, scores, targets), rtol=1e-10, atol=1e-13
    )
    assert (weights[ignore] == 0).all()


@pytest.mark.parametrize(
    "objective", [Triplet(), TripletHN(), NTXent(), VLC(), Unified()], ids=repr
)
def test_pair_weights_of_difference_objectives_sum_to_zero(objective):
    targets = Targets(query_ids=[7, -8, 9], candidate_ids=[7, 7, -8, 7, 9, 9])
    rows = pair_weights(objective, draw(targets), targets).sum(1)
    torch.testing.assert_close(rows, torch.zeros_like(rows), atol=1e-12, rtol=0)


def test_pair_weights_have_unit_of_paper():
    """No 1 / tau, no 1 / B, whatever the reduction: the share of a candidate in the softmax."""
    scores, pairs = draw(Targets.paired(5)), Targets.paired(5)
    share = (scores / 0.1).softmax(1)
    for reduction in ("sum", "mean", "half_mean"):
        weights = pair_weights(NTXent(tau=0.1, reduction=reduction), scores, pairs)
        torch.testing.assert_close(weights, share - torch.eye(5), rtol=1e-12, atol=1e-14)
    vlc = VLC(gamma=10)
    torch.testing.assert_close(
        pair_weights(vlc, scores, pairs),
        pair_weights(NTXent(tau=0.1), scores, pairs),
        rtol=1e-12,
        atol=1e-14,
    )
    leaf = scores.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(vlc.one_way(leaf, pairs).sum(), leaf)
    torch.testing.assert_close(pair_weights(vlc, scores, pairs) * vlc.gradient_scale, slopes)


class OfOthers(Objective):
    """An objective that reads the scores of all positives, as GOAL does."""

    needs_positive_scores = True

    def one_way(self, scores: torch.Tensor, targets: Targets) -> torch.Tensor:
        return scores[targets.positive] * targets.positive_scores.sum()


def test_pair_weights_use_all_positive_scores():
    scores = torch.randn(5, 5, dtype=torch.float64)
    torch.testing.assert_close(
        pair_weights(OfOthers(), scores, Targets.paired(5)),
        torch.eye(5, dtype=torch.float64) * scores.diagonal().sum(),
    )


def test_pair_weights_do_not_change_scores():
    scores = torch.rand(3, 3, requires_grad=True)
    with torch.no_grad():
        weights = pair_weights(Unified(), scores, Targets.paired(3))
    assert scores.grad is None
    assert not weights.requires_grad
    assert (
        pair_weights(Unified(), scores.detach().bfloat16(), Targets.paired(3)).dtype
        == torch.float32
    )


def test_pair_weights_reject_invalid_arguments():
    with pytest.raises(ShapeError, match="targets: expected the shape of the scores"):
        pair_weights(Unified(), torch.rand(2, 3), Targets.paired(2))
    with pytest.raises(SpecError, match=r"expected one of Triplet, .* Use pair_weights"):
        closed_weights(OfOthers(), torch.rand(2, 2), Targets.paired(2))
