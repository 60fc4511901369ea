"""Identities between objectives of the triplet family, and the effect of weights and margins."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from visavis import Targets
from visavis.core.errors import MissingSupervision
from visavis.objectives import (
    NCR,
    RSP,
    SSP,
    VLC,
    InfoNCE,
    MaxMargin,
    NTXent,
    Triplet,
    TripletHN,
    TripletTopK,
    Unified,
)

from ..matching import mentions
from ..sampling import for_each, pairwise
from .cases import assert_close, cosines, gradient

WITH_MARGINS = (Triplet, TripletHN, TripletTopK, Unified, MaxMargin, SSP, RSP)


every_gamma = for_each(gamma=[0.5, 10.0, 50.0, 1000.0])


@every_gamma
def test_unified_without_margin_equals_vlc_and_clip_loss(gamma):
    scores, pairs, labels = cosines(8), Targets.paired(8), torch.arange(8)
    clip = (cross_entropy(gamma * scores, labels) + cross_entropy(gamma * scores.T, labels)) / 2
    assert_close(VLC(gamma=gamma)(scores, pairs), 2 * 8 * clip, rtol=1e-10)
    assert_close(
        gamma * Unified(margin=0, gamma=gamma)(scores, pairs), VLC(gamma=gamma)(scores, pairs)
    )
    assert_close(
        NTXent(tau=1 / gamma)(scores, pairs), VLC(gamma=gamma, reduction="half_mean")(scores, pairs)
    )
    assert_close(
        gamma * gradient(Unified(margin=0, gamma=gamma), scores, pairs),
        gradient(VLC(gamma=gamma), scores, pairs),
    )


@every_gamma
def test_info_nce_equals_clip_loss_for_pairs(gamma):
    scores, pairs, labels = cosines(8), Targets.paired(8), torch.arange(8)
    i2t, t2i = cross_entropy(gamma * scores, labels), cross_entropy(gamma * scores.T, labels)
    assert_close(InfoNCE(tau=1 / gamma)(scores, pairs), (i2t + t2i) / 2, rtol=1e-10)
    assert_close(
        InfoNCE(tau=1 / gamma, reduction="mean")(scores, pairs), i2t + t2i, rtol=1e-10
    )  # MMT
    assert_close(
        gradient(InfoNCE(tau=1 / gamma), scores, pairs),
        gradient(NTXent(tau=1 / gamma), scores, pairs),
        rtol=1e-9,
    )


def test_info_nce_shares_target_among_equal_ids():
    ids = torch.tensor([4, 7, 4, 9, 7, 4])
    scores, targets = cosines(6), Targets(query_ids=ids, candidate_ids=ids)
    shared = (ids[:, None] == ids).double()
    shared /= shared.sum(1, keepdim=True)
    i2t, t2i = cross_entropy(scores / 0.1, shared), cross_entropy(scores.T / 0.1, shared)
    assert_close(InfoNCE(tau=0.1)(scores, targets), (i2t + t2i) / 2)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_unified_converges_to_triplet_hn_from_above(size):
    scores, pairs = cosines(size), Targets.paired(size)
    hardest = TripletHN(margin=0.2)(scores, pairs)
    for gamma in (1.0, 10.0, 60.0, 1e3, 1e6):
        above = Unified(margin=0.2, gamma=gamma)(scores, pairs) - hardest
        assert -1e-12 <= above <= 2 * size / gamma * math.log(size) + 1e-12
    assert_close(
        gradient(Unified(gamma=1e6), scores, pairs), gradient(TripletHN(), scores, pairs), atol=1e-6
    )
    collapsed = torch.full(
        (size, size), 0.3, dtype=torch.float64
    )  # the bound is reached if all scores are equal
    above = Unified(margin=0, gamma=5.0)(collapsed, pairs) - TripletHN(margin=0)(collapsed, pairs)
    assert above.item() == pytest.approx(2 * size / 5 * math.log(size))


def test_triplet_is_at_least_triplet_hn():
    for size in (2, 3, 9):
        scores, pairs = cosines(size), Targets.paired(size)
        assert Triplet()(scores, pairs) >= TripletHN()(scores, pairs)
    scores, one_negative = cosines(2), Targets.paired(2)
    assert_close(Triplet()(scores, one_negative), TripletHN()(scores, one_negative))
    assert_close(
        gradient(Triplet(), scores, one_negative), gradient(TripletHN(), scores, one_negative)
    )


def test_triplet_top_k_ranges_from_triplet_hn_to_triplet():
    scores, targets = (
        cosines(3, 7),
        Targets(query_ids=[3, 1, 2], candidate_ids=[1, 1, 2, 2, 3, 3, 3]),
    )
    for k, same in ((1, TripletHN()), (6, Triplet()), (1000, Triplet())):
        assert_close(TripletTopK(k=k)(scores, targets), same(scores, targets))
        assert_close(gradient(TripletTopK(k=k), scores, targets), gradient(same, scores, targets))
    values = [TripletTopK(k=k)(scores, targets) for k in range(1, 7)]
    assert values == sorted(values)


def test_weight_of_one_changes_nothing():
    scores, ids = cosines(6), {"query_ids": torch.arange(6), "candidate_ids": torch.arange(6)}
    ones = torch.ones(6, 6, dtype=torch.float64)
    assert_close(Unified()(scores, Targets(**ids, weight=ones)), Unified()(scores, Targets(**ids)))
    assert_close(
        gradient(Unified(), scores, Targets(**ids, weight=ones)),
        gradient(Unified(), scores, Targets(**ids)),
    )


def test_weight_has_gradient():
    scores, weight = cosines(4), torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda weight: Unified(gamma=5)(scores, Targets.paired(4, weight=weight)), weight
    )


@for_each(kind=WITH_MARGINS)
def test_given_margins_replace_objective_margin(kind):
    scores, margins = cosines(6), torch.full((6,), 0.3, dtype=torch.float64)
    given_margins = Targets.paired(6, query_margin=margins, candidate_margin=margins)
    assert_close(
        kind(margin=0.9)(scores, given_margins), kind(margin=0.3)(scores, Targets.paired(6))
    )


def test_unified_pair_margins_match_anchor_margins():
    """Equal margins of the negatives of an anchor are the margin of the anchor, in one direction."""
    scores, margins = cosines(6), torch.rand(6, dtype=torch.float64)
    of_anchors = Targets.paired(6, query_margin=margins, candidate_margin=margins)
    of_pairs = Targets.paired(6, pair_margin=margins[:, None].expand(6, 6))
    assert_close(
        Unified(gamma=5).one_way(scores, of_pairs), Unified(gamma=5).one_way(scores, of_anchors)
    )
    both = Targets.paired(
        6, query_margin=margins, candidate_margin=margins, pair_margin=torch.rand(6, 6)
    )
    assert_close(Unified(gamma=5)(scores, both), Unified(gamma=5)(scores, of_anchors))


def test_unified_with_pair_margins_approaches_ncr():
    scores, margins = cosines(6), torch.rand(6, 6, dtype=torch.float64)
    targets = Targets.paired(6, pair_margin=margins)
    difference = Unified(gamma=1e4)(scores, targets) - NCR()(scores, targets)
    assert 0 <= difference.item() <= 2 * 6 * math.log(6) / 1e4


@pairwise(side=["query_margin", "candidate_margin"], kind=WITH_MARGINS)
def test_margins_for_one_side_only_are_rejected(kind, side):
    with pytest.raises(
        MissingSupervision, match=mentions(kind.__name__, "one side only", "query_margin")
    ):
        kind()(cosines(3), Targets.paired(3, **{side: torch.rand(3)}))
