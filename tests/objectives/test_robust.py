"""Losses for wrong pairs: the formulas of their authors by loops, their limits and their gradients
at wrong pairs.
"""

from __future__ import annotations

import math

import pytest
import torch

from visavis import Targets
from visavis.core.errors import SpecError
from visavis.objectives import CRCL, RCL, RINCE, NTXent

from ..matching import mentions
from .cases import assert_close, cosines, gradient

FORMS = ("log", "tan", "abs", "exp", "gce")


def probabilities(scores: list[list[float]], tau: float) -> list[list[float]]:
    """Softmax of each row, with the 1e-10 of both released codes."""
    rows = [[math.exp(s / tau) for s in row] for row in scores]
    return [[x / (sum(row) + 1e-10) for x in row] for row in rows]


def both_directions(scores: torch.Tensor, tau: float) -> list[list[list[float]]]:
    return [probabilities(side.tolist(), tau) for side in (scores, scores.T)]


def released_rcl(scores: torch.Tensor, tau: float, form: str, q: float) -> float:
    """The sums of the released code over all negatives."""
    functions = {
        "log": lambda x: -math.log(1 - x + 1e-10),
        "tan": math.tan,
        "abs": lambda x: x,
        "exp": lambda x: math.exp(-(1 - x)),
        "gce": lambda x: (1 - (1 - x + 1e-10) ** q) / q,
    }
    n = len(scores)
    return sum(
        functions[form](rows[i][j]) / n
        for rows in both_directions(scores, tau)
        for i in range(n)
        for j in range(n)
        if i != j
    )


def released_crcl(scores: torch.Tensor, tau: float, labels: list[float]) -> float:
    n = len(scores)
    value = 0.0
    for rows in both_directions(scores, tau):
        for i, row in enumerate(rows):
            tangents = [math.tan(x) for x in row]
            complement = (sum(tangents) - tangents[i]) / sum(tangents) ** (1 - labels[i])
            value += (5 * complement - labels[i] * math.log(row[i])) / n
    return value


def released_rince(scores: torch.Tensor, tau: float, q: float, lam: float) -> float:
    n = len(scores)
    value = 0.0
    for side in (scores.tolist(), scores.T.tolist()):
        for i, row in enumerate(side):
            positive = math.exp(row[i] / tau)
            negatives = sum(math.exp(s / tau) for j, s in enumerate(row) if j != i)
            value += -(positive**q) / q + (lam * (positive + negatives)) ** q / q
    return value / (2 * n)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tau", [0.2, 0.5])
def test_rcl_equals_released_formula(form, tau):
    scores = cosines(7)
    ours = RCL(tau=tau, form=form, q=0.3)(scores, Targets.paired(7)).item()
    # Ours subtracts the constant of "exp".
    constant = 2 * 6 * math.exp(-1) if form == "exp" else 0.0
    expected = released_rcl(scores, tau, form, 0.3)
    assert ours + constant == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_crcl_equals_released_formula():
    scores, labels = cosines(7), torch.rand(7, dtype=torch.float64)
    targets = Targets.paired(7, relevance=labels.diag())
    ours = CRCL(tau=0.2)(scores, targets).item()
    assert ours == pytest.approx(released_crcl(scores, 0.2, labels.tolist()), rel=1e-8)


def test_rince_equals_released_formula():
    scores = cosines(7)
    ours = RINCE(tau=0.2, q=0.4, lam=0.02)(scores, Targets.paired(7)).item()
    assert ours == pytest.approx(released_rince(scores, 0.2, 0.4, 0.02), rel=1e-10)


@pytest.mark.parametrize("form", ["log", "gce"])
def test_rcl_is_exact_where_a_negative_is_almost_certain(form):
    """1 - p is 4e-18 here, and 0 if p is rounded."""
    scores = torch.tensor([[0.0, 0.8, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    term = RCL(tau=0.02, form=form).one_way(scores, Targets.paired(3))[0].item()
    rest = 2 / (2 + math.exp(40))
    other = 1 / (2 + math.exp(40))
    if form == "log":
        assert term == pytest.approx(-math.log(rest) + other, rel=1e-12)
    else:
        assert term == pytest.approx((1 - rest**0.5) / 0.5 + other, rel=1e-12)


def test_rcl_gce_lies_between_log_and_abs():
    scores, targets = cosines(6), Targets.paired(6)
    assert_close(RCL(form="gce", q=1.0)(scores, targets), RCL(form="abs")(scores, targets))
    log = RCL(form="log")(scores, targets)
    assert_close(RCL(form="gce", q=1e-9)(scores, targets), log, rtol=1e-6)


def test_rcl_of_one_negative_is_nt_xent():
    scores, targets = cosines(2), Targets.paired(2)
    ours = RCL(tau=0.2)(scores, targets)
    assert_close(ours, NTXent(tau=0.2, reduction="mean")(scores, targets))


def test_crcl_with_labels_of_one_adds_nt_xent_and_rcl():
    scores, targets = cosines(6), Targets.paired(6)
    softmax = NTXent(tau=0.1, reduction="mean")(scores, targets)
    complement = RCL(tau=0.1, form="tan")(scores, targets)
    assert_close(CRCL(tau=0.1, lam=3.0)(scores, targets), softmax + 3 * complement)


def test_rince_approaches_nt_xent_for_small_q():
    scores, targets = cosines(6), Targets.paired(6)
    ours = RINCE(q=1e-7, lam=0.5)(scores, targets)
    assert_close(ours, NTXent(tau=0.1)(scores, targets) + math.log(0.5), rtol=1e-5)


def test_rince_with_q_of_one_is_symmetric():
    """The gradient of a score depends on no other score."""
    scores, targets = cosines(5), Targets.paired(5)
    objective = RINCE(tau=0.5, q=1.0, lam=0.3, reduction="sum")
    slopes = (scores / 0.5).exp() / 0.5
    expected = 2 * slopes * (0.3 - torch.eye(5, dtype=torch.float64))
    assert_close(gradient(objective, scores, targets), expected)


@pytest.mark.parametrize("objective", [RCL(form="abs"), CRCL(estimate=True)], ids=str)
def test_wrong_pair_is_pulled_less_than_by_nt_xent(objective):
    """A pair whose score is far below its negatives, as wrong pairs are after some training."""
    scores = torch.eye(5, dtype=torch.float64) * 0.6
    scores[0, 0] = -0.2
    targets = Targets.paired(5)
    pull, reference = (
        gradient(each, scores, targets)[0, 0].abs().item() * (each.tau or 1)
        for each in (objective, NTXent(tau=0.05, reduction="mean"))
    )
    assert pull < 0.1 * reference


def test_labels_of_crcl_have_no_gradient():
    labels = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    CRCL()(cosines(4).requires_grad_(), Targets.paired(4, relevance=labels)).backward()
    assert labels.grad is None or not labels.grad.any()


def test_rince_refuses_exponents_beyond_float32():
    with pytest.raises(SpecError, match=mentions("RINCE.q", "at most 0.8 with tau=0.01")):
        RINCE(tau=0.01, q=0.9)
