"""Scales and margins of "auto": their values for a spread of the negatives, and their refusal."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from visavis import PairLoss, Targets, parse
from visavis.core.errors import SpecError
from visavis.losses.auto_scale import AUTO_FIELDS, negative_spread
from visavis.objectives import (
    CATALOG,
    RSP,
    GradedVLC,
    InfoNCE,
    Sigmoid,
    Triplet,
    Unified,
)

from ..matching import mentions
from .cases import annotations, cosines


def automatic(kind):
    """The objective with every field of "auto" that it allows."""
    allowed = {
        field.name: "auto"
        for field in fields(kind)
        if field.name in AUTO_FIELDS and "Auto" in str(field.type)
    }
    return kind(**allowed) if allowed else None


AUTOMATIC = [objective for kind in CATALOG if (objective := automatic(kind))]
every_automatic = pytest.mark.parametrize("objective", AUTOMATIC, ids=lambda o: type(o).__name__)


def test_named_objectives_allow_auto():
    names = {type(objective).__name__ for objective in AUTOMATIC}
    expected = "Unified VLC RSP GradedVLC Circle InfoNCE NTXent SmoothAP Sigmoid RCL CRCL RINCE"
    assert {*expected.split(), "Triplet", "TripletHN", "TripletTopK", "MaxMargin"} <= names


@every_automatic
def test_auto_is_parsed_and_replaced(objective):
    assert parse(repr(objective)) == objective
    assert objective.auto_fields
    resolved = objective.at_spread(0.1)
    assert type(resolved) is type(objective)
    assert resolved.auto_fields == ()
    assert resolved.at_spread(0.7) is resolved
    targets = Targets.paired(4, **annotations(4, 4))
    assert resolved(cosines(4), targets).isfinite()


@every_automatic
def test_auto_without_training_is_refused_by_one_message(objective):
    targets = Targets.paired(4, **annotations(4, 4))
    calls = (lambda: PairLoss(objective), lambda: objective(cosines(4), targets))
    for call in calls:
        with pytest.raises(SpecError, match=mentions("got 'auto'", "at_spread", "visavis train")):
            call()


@every_automatic
def test_auto_value_is_exact_when_scores_are_rescaled(objective):
    """Scores times 2 have twice the spread: scales are halved, margins doubled."""
    one, two = objective.at_spread(0.1), objective.at_spread(0.2)
    for name in objective.auto_fields:
        ratio = getattr(two, name) / getattr(one, name)
        assert ratio == pytest.approx(2 if name in ("margin", "tau") else 0.5, rel=0.03)


def test_auto_values_are_those_of_the_rule():
    assert Unified(gamma="auto", margin="auto").at_spread(0.1) == Unified(gamma=50, margin=0.15)
    assert InfoNCE(tau="auto").at_spread(0.1) == InfoNCE(tau=0.02)
    assert Sigmoid(scale="auto").at_spread(0.125) == Sigmoid(scale=40)
    assert RSP(gamma="auto").at_spread(0.1).gamma == 50
    # Two digits, so that the last bits of a measurement do not matter.
    assert Unified(gamma="auto").at_spread(0.123456).gamma == 41


@pytest.mark.parametrize("spread", [0.0, -1.0, math.nan, math.inf])
def test_impossible_spread_is_refused(spread):
    with pytest.raises(SpecError, match=mentions("spread of the negatives", "gamma")):
        Unified(gamma="auto").at_spread(spread)


def test_other_fields_refuse_auto():
    with pytest.raises(SpecError, match=mentions("GradedVLC.tau", "a finite number, got 'auto'")):
        GradedVLC(tau="auto")
    with pytest.raises(SpecError, match=mentions("Unified.gamma", "or 'auto'", "got -1")):
        Unified(gamma=-1)
    with pytest.raises(SpecError, match=mentions("RSP.gamma", "or 'auto', or None", "got 'no'")):
        RSP(gamma="no")


@pytest.mark.parametrize("ids", [None, ([1, 1, 2, 3], [1, 2, 2, 3, 4, 1])], ids=["pairs", "ids"])
def test_negative_spread_equals_loops(ids):
    targets = Targets.paired(6) if ids is None else Targets(query_ids=ids[0], candidate_ids=ids[1])
    scores = cosines(*targets.shape)
    spreads = []
    for side, negative in ((scores, targets.negative), (scores.T, targets.negative.T)):
        deviations = []
        for row, mask in zip(side.tolist(), negative.tolist(), strict=True):
            values = [score for score, is_negative in zip(row, mask, strict=True) if is_negative]
            mean = sum(values) / len(values)
            deviations.append(math.sqrt(sum((x - mean) ** 2 for x in values) / len(values)))
        spreads.append(sum(deviations) / len(deviations))
    assert negative_spread(scores, targets) == pytest.approx(sum(spreads) / 2, rel=1e-12)


def test_negative_spread_ignores_positives_and_shifts():
    targets = Targets.paired(5)
    scores = cosines(5)
    changed = scores + 3 * torch.eye(5) + 7
    assert negative_spread(changed, targets) == pytest.approx(negative_spread(scores, targets))
    assert math.isnan(negative_spread(torch.zeros(1, 1), Targets.paired(1)))


def test_margin_of_adaptive_targets_is_not_needed():
    """Margins of the queries replace the margin, but "auto" is refused all the same."""
    targets = Targets.paired(3, query_margin=torch.rand(3), candidate_margin=torch.rand(3))
    with pytest.raises(SpecError, match="'auto'"):
        Triplet(margin="auto")(cosines(3), targets)
