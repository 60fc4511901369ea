"""Polynomial losses RSP and SSP: their limits, and the condition of SSP."""

from __future__ import annotations

import math

import pytest
import torch

from visavis import Targets, parse
from visavis.objectives import RSP, SSP, Triplet, TripletHN, Unified

PAIRS = ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
CAPTIONS = ([7, 8, 7, 9], [8, 7, 7, 9, 8, 3])
every_relation = pytest.mark.parametrize("relation", [PAIRS, CAPTIONS], ids=["pairs", "captions"])


def case(relation) -> tuple[torch.Tensor, Targets]:
    targets = Targets(query_ids=relation[0], candidate_ids=relation[1])
    return 2 * torch.rand(targets.shape, dtype=torch.float64) - 1, targets


def gradient(objective, scores, targets):
    scores = scores.clone().requires_grad_()
    return torch.autograd.grad(objective(scores, targets), scores)[0]


def assert_close(ours, theirs, **tolerance):
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-11, "atol": 1e-11} | tolerance))


@every_relation
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RSP(), TripletHN()),
        (RSP(gamma=9), Unified(gamma=9)),
        (RSP(coefficients=(0.05, 1)), TripletHN(margin=0.25)),
    ],
    ids=str,
)
def test_rsp_linear_polynomial_equals_triplet_family(relation, ours, theirs):
    scores, targets = case(relation)
    assert_close(ours(scores, targets), theirs(scores, targets))
    assert_close(gradient(ours, scores, targets), gradient(theirs, scores, targets))


@every_relation
@pytest.mark.parametrize("coefficients", [(0.0, 2.0), (0.1, 1.0, 0.2), (0.0, 1.0, 0.0, 0.5)])
def test_rsp_soft_form_converges_to_hinge_if_increasing(relation, coefficients):
    scores, targets = case(relation)
    hinge = RSP(coefficients=coefficients)(scores, targets)
    for gamma in (10.0, 1e3, 1e6):
        above = RSP(coefficients=coefficients, gamma=gamma)(scores, targets) - hinge
        assert (
            -1e-12
            <= above
            <= 2 * int(targets.positive.sum()) * math.log(max(targets.shape)) / gamma
        )


def test_rsp_soft_form_differs_from_hinge_if_not_monotonic():
    scores, targets = (
        torch.tensor([[0.5, 0.25, -0.5]], dtype=torch.float64),
        Targets(query_ids=[0], candidate_ids=[0, 1, 2]),
    )
    hinge, soft = (
        RSP(coefficients=(0, 0, 1), gamma=gamma).one_way(scores, targets).item()
        for gamma in (None, 1e6)
    )
    assert hinge == pytest.approx(0.2 + 0.25**2)  # the square at the hardest negative
    assert soft == pytest.approx(0.2 + 1.0**2)  # the largest square, at the easiest


def test_rsp_without_coefficients_is_margin():
    scores, targets = case(PAIRS)
    assert RSP(coefficients=())(scores, targets).item() == pytest.approx(2 * 5 * 0.2)
    assert not gradient(RSP(coefficients=()), scores, targets).any()


def test_rsp_repr_round_trips_tuples_and_none():
    objective = RSP(coefficients=[0, 1, 0.5], gamma=None)
    assert objective.coefficients == (0.0, 1.0, 0.5)
    assert parse(repr(objective)) == objective
    assert parse(repr(RSP(gamma=3))) == RSP(gamma=3.0)


def term(positive: float, negative: float, **fields) -> float:
    """The one term of SSP for a positive and its only negative."""
    scores = torch.tensor([[positive, negative]], dtype=torch.float64)
    return SSP(**fields).one_way(scores, Targets(query_ids=[0], candidate_ids=[0, 1])).item()


def test_ssp_evaluates_condition_in_published_order():
    assert 0.5 + 0.2 <= 0.7
    assert 0.7 - 0.5 < 0.2  # another order of operations would give another result
    assert term(0.7, 0.5) == 0
    assert 0.1 + 0.2 > 0.3
    assert term(0.3, 0.1) > 0


def test_ssp_is_discontinuous_at_condition():
    assert term(0.75, 0.5, margin=0.25) == 0
    value = 0.5 - 0.7 * 0.75 + 0.2 * 0.75**2 + 0.03 - 0.4 * 0.5 + 0.9 * 0.25
    assert term(0.75, math.nextafter(0.5, 1), margin=0.25) == pytest.approx(value)


def test_ssp_skips_saturated_positives():
    assert term(1 - 1e-5, 0.9) == 0
    assert term(1.0, 1.0) == 0
    assert term(math.nextafter(1 - 1e-5, 0), 0.9) > 0
    scores = torch.tensor([[1.0, 0.9], [0.9, 0.7]], dtype=torch.float64)
    assert gradient(SSP(), scores, Targets.paired(2))[0, 0] == 0


def test_ssp_gradient_is_slope_of_parabolas():
    scores = torch.tensor([[0.4, 0.5, 0.25]], dtype=torch.float64, requires_grad=True)
    targets = Targets(query_ids=[0], candidate_ids=[0, 1, 2])
    (actual,) = torch.autograd.grad(SSP().one_way(scores, targets).sum(), scores)
    assert_close(
        actual, torch.tensor([[-0.7 + 0.4 * 0.4, -0.4 + 1.8 * 0.5, 0.0]], dtype=torch.float64)
    )


def test_ssp_pulls_low_negatives_and_ignores_middle_ones():
    slopes = []
    for negative in (0.0, 0.2, 0.3489, 0.5):
        scores = torch.tensor([[0.1, negative]], dtype=torch.float64, requires_grad=True)
        term = SSP().one_way(scores, Targets(query_ids=[0], candidate_ids=[0, 1])).sum()
        slopes.append(torch.autograd.grad(term, scores)[0][0, 1].item())
    assert slopes == [-0.4, 0, 0, pytest.approx(0.5)]


@every_relation
def test_ssp_is_sum_of_both_parabolas_if_all_pairs_active(relation):
    scores, targets = case(relation)
    both = SSP(margin=3, reduction="sum")(0.4 * scores, targets)  # every pair is active
    negative_part = SSP(margin=3, positive=(), reduction="sum")(0.4 * scores, targets)
    positive_part = SSP(margin=3, negative=(), reduction="sum")(0.4 * scores, targets)
    assert_close(both, negative_part + positive_part)
    assert positive_part > 0


def test_rsp_is_at_most_triplet():
    scores, targets = case(CAPTIONS)
    assert RSP()(scores, targets) <= Triplet()(scores, targets)
