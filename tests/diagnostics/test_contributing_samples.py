"""Counts of contributing samples: definitions by loops, laws, and errors of the released code."""

from __future__ import annotations

import math

import pytest
import torch
from tests.diagnostics.closed_forms import closed_weights

from visavis import Targets
from visavis.objectives import CATALOG, NTXent, SmoothAP, Triplet, TripletHN, Unified
from visavis.papers.diagnostics.contributing_samples import (
    contributing_by_epsilon,
    contributing_samples,
    count_contributing,
    effective_number,
    released_smooth_ap_counts,
    released_targets,
    released_triplet_counts,
    smooth_ap_counts,
)

SIZES = [1, 2, 3, 5, 24, 64]


def draw(height: int, width: int | None = None) -> torch.Tensor:
    return torch.rand(height, width or height, dtype=torch.float64) * 2 - 1


@pytest.mark.parametrize("size", SIZES)
def test_triplet_counts_equal_loops(size):
    scores = draw(size)
    expected = [
        sum(scores[i, i] - scores[i, j] < 0.3 for j in range(size) if j != i) for i in range(size)
    ]
    found = contributing_samples(Triplet(margin=0.3), scores, Targets.paired(size))
    assert found.count.tolist() == expected
    assert found.in_batch == sum(expected)
    assert found.idle == expected.count(0)
    hardest = contributing_samples(TripletHN(margin=0.3), scores, Targets.paired(size))
    assert hardest.count.tolist() == [min(number, 1) for number in expected]
    assert hardest.in_batch == size - found.idle
    assert hardest.per_moved == 1 or found.idle == size
    assert found.pull.tolist() == expected


@pytest.mark.parametrize("epsilon", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("size", SIZES)
def test_nt_xent_counts_equal_loops(size, epsilon):
    scores = draw(size)
    found = contributing_samples(NTXent(tau=0.25), scores, Targets.paired(size), epsilon=epsilon)
    for i, row in enumerate(scores.tolist()):
        partition = sum(math.exp(s / 0.25) for s in row)
        shares = [math.exp(s / 0.25) / partition for j, s in enumerate(row) if j != i]
        above = [share for share in shares if share > epsilon]
        assert found.count[i] == len(above)
        assert found.push[i].item() == pytest.approx(sum(above), rel=1e-10)
        assert found.push_below_epsilon[i].item() == pytest.approx(
            sum(shares) - sum(above), rel=1e-10, abs=1e-14
        )
        assert found.pull[i].item() == pytest.approx(
            1 - math.exp(row[i] / 0.25) / partition, rel=1e-10, abs=1e-14
        )


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_mean_count_times_moved_queries_is_batch_count(kind):
    """C^q (n - C^0) = C^B, as table 2 of the paper obeys, for every objective."""
    facts = {
        name: torch.rand(9, 9, dtype=torch.float64)
        for name in ("relevance", "weight", "pair_margin")
    }
    facts |= {
        f"{side}_offline_scores": torch.rand(9, 2, dtype=torch.float64)
        for side in ("query", "candidate")
    }
    found = contributing_samples(
        kind(), 0.5 + draw(9) / 10, Targets.paired(9, **facts), epsilon=1e-3
    )
    assert found.in_batch > 0
    assert found.per_moved * (9 - found.idle) == pytest.approx(found.in_batch)
    assert found.per_query * 9 == pytest.approx(found.in_batch)


def test_mean_count_is_nan_if_nothing_moves():
    found = contributing_samples(Triplet(), torch.eye(4), Targets.paired(4))
    assert (found.idle, found.in_batch, found.per_query) == (4, 0, 0)
    assert math.isnan(found.per_moved)


def test_hinge_at_its_corner_does_not_count():
    scores = torch.tensor(
        [[0.5, 0.25, 0.125], [0.5, 0.75, 0.5], [0.25, 0.0, 0.25]], dtype=torch.float64
    )
    pairs, expected = Targets.paired(3), [0.0, 0.0, 1.0]
    assert contributing_samples(Triplet(margin=0.25), scores, pairs).count.tolist() == expected
    assert (
        count_contributing(
            closed_weights(Triplet(margin=0.25), scores, pairs), pairs
        ).count.tolist()
        == expected
    )
    assert (
        count_contributing(
            closed_weights(TripletHN(margin=0.25), scores, pairs), pairs
        ).count.tolist()
        == expected
    )
    assert released_triplet_counts(scores, pairs, margin=0.25)["i2t"].tolist() == expected


def test_weight_equal_to_epsilon_does_not_count():
    """As in the released code: a hundred identical embeddings at epsilon 0.01 have 99 weights of
    0.01 each.
    """
    weights, pairs = torch.full((100, 100), 0.01, dtype=torch.float64), Targets.paired(100)
    found = count_contributing(weights, pairs, epsilon=0.01)
    assert (found.in_batch, found.push.sum(), found.push_below_epsilon.sum()) == (0, 0, 0)


def test_other_positives_do_not_count():
    targets = Targets(query_ids=[7, 8], candidate_ids=[7, 7, 8])
    found = contributing_samples(Triplet(margin=5.0), draw(2, 3), targets)
    assert found.count.tolist() == [1, 2]
    assert found.push.tolist() == [2, 2]  # image 7 pushes its one negative away from two captions
    assert found.pull.tolist() == [2, 2]


def test_weights_count_by_absolute_value():
    weights = torch.tensor([[-1.0, -0.5, 0.25], [0.001, -0.5, 0.0]])
    found = count_contributing(weights, Targets(query_ids=[0, 1], candidate_ids=[0, 2, 3]))
    assert found.count.tolist() == [2, 1]
    assert found.push.tolist() == [0.75, 0.5]
    assert found.pull.tolist() == [1, 0]


def smooth_ap_by_loops(
    scores: list[float], positives: list[int], tau: float, epsilon: float, with_slope: bool
) -> float:
    """Eq. 13 for one query."""

    def step(j: int, i: int) -> float:
        return 1 / (1 + math.exp(-(scores[j] - scores[i]) / tau))

    number = 0
    for i in positives:
        others = [step(j, i) for j in range(len(scores)) if j != i]
        rank = 1 + sum(others)
        number += sum(s * (1 - s) / (tau if with_slope else 1) / rank**2 > epsilon for s in others)
    return number / len(positives)


@pytest.mark.parametrize("with_slope", [False, True])
@pytest.mark.parametrize(("images", "captions"), [(1, 5), (2, 5), (6, 5), (7, 3), (4, 1)])
def test_smooth_ap_counts_equal_loops(images, captions, with_slope):
    ids = torch.arange(images)
    scores, targets = (
        draw(images, images * captions),
        Targets(query_ids=ids, candidate_ids=ids.repeat_interleave(captions)),
    )
    for block, facts in ((scores, targets), (scores.T, targets.T)):
        found = smooth_ap_counts(block, facts, tau=0.05, epsilon=0.02, with_slope=with_slope)
        expected = [
            smooth_ap_by_loops(row, own.nonzero()[:, 0].tolist(), 0.05, 0.02, with_slope)
            for row, own in zip(block.tolist(), facts.positive, strict=True)
        ]
        assert found.tolist() == pytest.approx(expected)
        assert images == 1 or sum(expected) > 0


def test_counts_of_extreme_scores_are_finite():
    scores = torch.tensor([[-1.0, 1.0, 1.0], [1.0, -1.0, 1.0]], dtype=torch.float64)
    found = smooth_ap_counts(scores, Targets(query_ids=[0, 1], candidate_ids=[0, 1, 2]), tau=1e-4)
    assert found.tolist() == [0, 0]


@pytest.mark.parametrize("images", [1, 4, 7, 26])
def test_released_smooth_ap_counts_equal_loops(images):
    """Text q is counted for images 5 q to 5 q + 4; no text from V / 5 on is."""
    scores = draw(images, 5 * images).T
    found = released_smooth_ap_counts(scores, tau=0.05, epsilon=0.02)
    for q, row in enumerate(scores.tolist()):
        rows = [r for r in range(5 * q, 5 * q + 5) if r < images]
        expected = sum(smooth_ap_by_loops(row, [r], 0.05, 0.02, with_slope=False) for r in rows)
        assert found[q] == expected
    assert (found[math.ceil(images / 5) :] == 0).all()


def test_released_smooth_ap_counts_have_no_slope():
    scores, targets = draw(20), released_targets(SmoothAP(), 4, 20)
    counts = {
        (semantics, with_slope): contributing_by_epsilon(
            SmoothAP(tau=0.05),
            scores[:4],
            targets,
            [0.02],
            semantics=semantics,
            with_slope=with_slope,
        )[0]
        for semantics in ("paper", "reference")
        for with_slope in (False, True)
    }
    for way in ("i2t", "t2i"):
        plain, printed = (counts["paper", slope][way].count for slope in (False, True))
        assert printed.sum() > plain.sum()
        released = [counts["reference", slope][way].count for slope in (False, True)]
        assert torch.equal(*released)


def test_released_triplet_counts_use_wrong_axis():
    scores, pairs = draw(16), Targets.paired(16)
    released, paper = (
        contributing_by_epsilon(Triplet(), scores, pairs, [0.01], semantics=semantics)[0]
        for semantics in ("reference", "paper")
    )
    assert released["i2t"].count.tolist() == paper["i2t"].count.tolist()
    by_image = [
        sum(0.2 + scores[i, j] - scores[j, j] > 0 for j in range(16) if i != j) for i in range(16)
    ]
    assert released["t2i"].count.tolist() == by_image
    assert released["t2i"].in_batch == paper["t2i"].in_batch
    assert (
        paper["t2i"].count.tolist()
        == contributing_samples(Triplet(), scores.T, pairs).count.tolist()
        != by_image
    )
    for objective in (TripletHN(), NTXent(), Unified()):  # right in the released code, or not there
        one, other = (
            contributing_by_epsilon(objective, scores, pairs, [0.01], semantics=semantics)[0]
            for semantics in ("paper", "reference")
        )
        assert all(torch.equal(one[way].count, other[way].count) for way in one)


def test_effective_number_of_equal_weights():
    weights = torch.tensor(
        [[0.0, 0.3, 0.0], [0.2, 0.2, 0.2], [0.0, 0.0, 0.0], [3e-30, 1e-30, 0.0]],
        dtype=torch.float64,
    )
    expected = [1.0, 3.0, 0.0, 16 / 10]  # (3 + 1)^2 / (9 + 1)
    for factor in (1.0, 1e-200, 1e200):
        assert effective_number(weights * factor).tolist() == pytest.approx(expected)
    assert effective_number(weights[:, :0]).tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_effective_number_is_between_one_and_all(kind):
    """Where all weights are equal, as those of Triplet, it is the count."""
    facts = {
        name: torch.rand(9, 9, dtype=torch.float64)
        for name in ("relevance", "weight", "pair_margin")
    }
    facts |= {
        f"{side}_offline_scores": torch.rand(9, 2, dtype=torch.float64)
        for side in ("query", "candidate")
    }
    found = contributing_samples(kind(), draw(9) / 5, Targets.paired(9, **facts), epsilon=0)
    moved = found.count > 0
    assert moved.any()
    assert (found.effective[moved] >= 1 - 1e-12).all()
    assert (found.effective[moved] <= found.count[moved] + 1e-9).all()
    if kind in (Triplet, TripletHN):
        torch.testing.assert_close(found.effective, found.count)
        assert found.effective_negatives == pytest.approx(found.per_moved)


def test_counts_decrease_with_epsilon():
    epsilons = [1e-3, 0.01, 0.1]
    found = contributing_by_epsilon(NTXent(tau=0.2), draw(24), Targets.paired(24), epsilons)
    counts = [at["t2i"].count for at in found]
    assert (counts[0] >= counts[1]).all()
    assert (counts[1] >= counts[2]).all()
    assert counts[0].sum() > counts[2].sum()
