"""What the objectives of the family become at their limits, and what weights and margins are to them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from visavis import Targets
from visavis.errors import MissingSupervision
from visavis.objectives import RSP, SSP, VLC, InfoNCE, MaxMargin, NTXent, Triplet, TripletHN, TripletTopK, Unified

from .cases import close, cosines, gradient

every_with_margins = pytest.mark.parametrize(
    "kind", [Triplet, TripletHN, TripletTopK, Unified, MaxMargin, SSP, RSP], ids=lambda kind: kind.__name__
)


widths = pytest.mark.parametrize("gamma", [0.5, 10.0, 50.0, 1000.0])


@widths
def test_unified_without_margin_is_vlc_is_the_loss_of_clip(gamma):
    scores, pairs, labels = cosines(8), Targets.paired(8), torch.arange(8)
    clip = (cross_entropy(gamma * scores, labels) + cross_entropy(gamma * scores.T, labels)) / 2
    close(VLC(gamma=gamma)(scores, pairs), 2 * 8 * clip, rtol=1e-10)
    close(gamma * Unified(margin=0, gamma=gamma)(scores, pairs), VLC(gamma=gamma)(scores, pairs))
    close(NTXent(tau=1 / gamma)(scores, pairs), VLC(gamma=gamma, reduction="half_mean")(scores, pairs))
    close(gamma * gradient(Unified(margin=0, gamma=gamma), scores, pairs), gradient(VLC(gamma=gamma), scores, pairs))


@widths
def test_info_nce_of_pairs_is_the_loss_of_clip(gamma):
    scores, pairs, labels = cosines(8), Targets.paired(8), torch.arange(8)
    forth, back = cross_entropy(gamma * scores, labels), cross_entropy(gamma * scores.T, labels)
    close(InfoNCE(tau=1 / gamma)(scores, pairs), (forth + back) / 2, rtol=1e-10)
    close(InfoNCE(tau=1 / gamma, reduction="mean")(scores, pairs), forth + back, rtol=1e-10)  # MMT
    close(gradient(InfoNCE(tau=1 / gamma), scores, pairs), gradient(NTXent(tau=1 / gamma), scores, pairs), rtol=1e-9)


def test_info_nce_shares_its_target_among_equal_ids():
    ids = torch.tensor([4, 7, 4, 9, 7, 4])
    scores, targets = cosines(6), Targets(query_ids=ids, candidate_ids=ids)
    shared = (ids[:, None] == ids).double()
    shared /= shared.sum(1, keepdim=True)
    forth, back = cross_entropy(scores / 0.1, shared), cross_entropy(scores.T / 0.1, shared)
    close(InfoNCE(tau=0.1)(scores, targets), (forth + back) / 2)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_unified_tends_to_the_hardest_negative_from_above(size):
    scores, pairs = cosines(size), Targets.paired(size)
    hardest = TripletHN(margin=0.2)(scores, pairs)
    for gamma in (1.0, 10.0, 60.0, 1e3, 1e6):
        above = Unified(margin=0.2, gamma=gamma)(scores, pairs) - hardest
        assert -1e-12 <= above <= 2 * size / gamma * math.log(size) + 1e-12
    close(gradient(Unified(gamma=1e6), scores, pairs), gradient(TripletHN(), scores, pairs), atol=1e-6)
    collapsed = torch.full((size, size), 0.3, dtype=torch.float64)  # the bound is reached where everything ties
    above = Unified(margin=0, gamma=5.0)(collapsed, pairs) - TripletHN(margin=0)(collapsed, pairs)
    assert above.item() == pytest.approx(2 * size / 5 * math.log(size))


def test_all_negatives_weigh_at_least_as_much_as_the_hardest():
    for size in (2, 3, 9):
        scores, pairs = cosines(size), Targets.paired(size)
        assert Triplet()(scores, pairs) >= TripletHN()(scores, pairs)
    scores, one_negative = cosines(2), Targets.paired(2)
    close(Triplet()(scores, one_negative), TripletHN()(scores, one_negative))
    close(gradient(Triplet(), scores, one_negative), gradient(TripletHN(), scores, one_negative))


def test_the_k_hardest_lead_from_the_hardest_to_all():
    scores, targets = cosines(3, 7), Targets(query_ids=[3, 1, 2], candidate_ids=[1, 1, 2, 2, 3, 3, 3])
    for k, same in ((1, TripletHN()), (6, Triplet()), (1000, Triplet())):
        close(TripletTopK(k=k)(scores, targets), same(scores, targets))
        close(gradient(TripletTopK(k=k), scores, targets), gradient(same, scores, targets))
    values = [TripletTopK(k=k)(scores, targets) for k in range(1, 7)]
    assert values == sorted(values)


def test_a_weight_of_one_changes_nothing():
    scores, ids = cosines(6), {"query_ids": torch.arange(6), "candidate_ids": torch.arange(6)}
    ones = torch.ones(6, 6, dtype=torch.float64)
    close(Unified()(scores, Targets(**ids, weight=ones)), Unified()(scores, Targets(**ids)))
    close(gradient(Unified(), scores, Targets(**ids, weight=ones)), gradient(Unified(), scores, Targets(**ids)))


def test_weights_have_a_gradient_of_their_own():
    scores, weight = cosines(4), torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda weight: Unified(gamma=5)(scores, Targets.paired(4, weight=weight)), weight)


@every_with_margins
def test_given_margins_replace_the_objectives_own(kind):
    scores, margins = cosines(6), torch.full((6,), 0.3, dtype=torch.float64)
    given_margins = Targets.paired(6, query_margin=margins, candidate_margin=margins)
    close(kind(margin=0.9)(scores, given_margins), kind(margin=0.3)(scores, Targets.paired(6)))


@every_with_margins
@pytest.mark.parametrize("side", ["query_margin", "candidate_margin"])
def test_margins_of_one_side_only_are_no_reason_to_fall_back(kind, side):
    with pytest.raises(
        MissingSupervision, match=rf"^{kind.__name__} got margins for one side only: give query_margin and candidate_margin"
    ):
        kind()(cosines(3), Targets.paired(3, **{side: torch.rand(3)}))
