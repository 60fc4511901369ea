"""Objective specs: text round trip, equality, and errors for invalid fields."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from visavis import parse
from visavis.core.errors import SpecError
from visavis.objectives import CATALOG, Unified

from ..matching import mentions
from ..sampling import for_each

every_objective = for_each(kind=CATALOG)


def values_of(hint: object) -> st.SearchStrategy:
    """Values that a field of this type may have in any objective."""
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    known = {
        float: st.floats(1e-3, 1e6) | st.integers(1, 1000),
        int: st.integers(1, 1000),
        bool: st.booleans(),
    }
    return known.get(hint, st.nothing())


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_objective_repr_round_trips(kind, data):
    hints = typing.get_type_hints(kind)
    fields = [
        field.name
        for field in dataclasses.fields(kind)
        if not values_of(hints[field.name]).is_empty
    ]
    chosen = data.draw(
        st.fixed_dictionaries({}, optional={name: values_of(hints[name]) for name in fields})
    )
    try:
        objective = kind(**chosen)
    except SpecError:  # fields that exclude each other: hypothesis fails if too few values remain
        reject()
    again = parse(repr(objective))
    assert again == objective
    assert hash(again) == hash(objective)
    assert repr(again) == repr(objective)


@every_objective
def test_parse_bare_name_uses_defaults(kind):
    assert parse(kind.__name__) == parse(f" {kind.__name__}() ") == kind()
    assert {kind(), kind(), kind(reduction="mean")} == {kind(), kind(reduction="mean")}


@every_objective
def test_objectives_are_frozen_and_keyword_only(kind):
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().reduction = "mean"
    with pytest.raises(TypeError):
        kind(0.2)


@every_objective
def test_objective_docstrings_have_required_sections(kind):
    for part in ("Formula:", "dL/ds", "Advice:", "Source:"):
        assert part in kind.__doc__


def test_parse_converts_integers_to_floats():
    assert parse("Unified(margin=0, gamma=60)") == Unified(margin=0.0, gamma=60.0)
    assert repr(Unified(gamma=60)) == "Unified(margin=0.2, gamma=60.0, reduction='sum')"


REJECTED = {
    "Unifed()": ("Unifed", "Unified"),
    3: ("3", "Name(field=value, ...)"),
    "Unified(marjin=1)": ("Unified", "marjin", "margin"),
    "Unified(gamma=0)": ("Unified", "gamma", "0"),
    "Unified(gamma=-1)": ("Unified", "gamma", "-1"),
    "Unified(gamma='x')": ("Unified", "gamma", "'x'", "finite number"),
    "Unified(gamma=True)": ("Unified", "gamma", "True", "finite number"),
    "Unified(gamma=1e999)": ("Unified", "gamma", "inf", "finite number"),
    "NTXent(tau=0)": ("NTXent", "tau", "0"),
    "NTXent(denominator='some')": ("NTXent", "denominator", "'some'", "'all'", "'negatives'"),
    "VLC(reduction='max')": ("VLC", "reduction", "'max'", "'sum'", "'mean'", "'half_mean'"),
    "InfoNCE(tau=0)": ("InfoNCE", "tau", "0"),
    "Sigmoid(scale=0)": ("Sigmoid", "scale", "0"),
    "Sigmoid(bias=1e999)": ("Sigmoid", "bias", "inf", "finite number"),
    "RSP(gamma=0)": ("RSP", "gamma", "0", "None"),
    "SSP(positive=0.5)": ("SSP", "positive", "0.5", "list"),
    "AOQ(alpha=0)": ("AOQ", "alpha", "0"),
    "Ladder(margins=[])": ("Ladder", "margins", "()", "at least one"),
    "Ladder(betas=[1])": ("Ladder", "betas", "(1.0,)", "2"),
    "Ladder(thresholds=[0.6, 0.5])": ("Ladder", "thresholds", "(0.6, 0.5)", "1"),
    "Ladder(margins=[1, 1, 1], betas=[1, 1, 1], thresholds=[0.5, 0.5])": (
        "Ladder",
        "thresholds",
        "(0.5, 0.5)",
    ),
    "Ladder(pairs=0)": ("Ladder", "pairs", "0"),
    "Ladder(pairs=2, sampling='sum')": ("Ladder", "pairs", "2", "sampling='sum'"),
    "Ladder(semantics='reference', sampling='sum')": (
        "Ladder",
        "sampling",
        "'sum'",
        "semantics='reference'",
    ),
    "Ladder(semantics='reference', pairs=2)": ("Ladder", "pairs", "2", "semantics='reference'"),
}


@for_each(text=REJECTED)
def test_parse_rejects_invalid_specs(text):
    with pytest.raises(SpecError, match=mentions(*REJECTED[text])):
        parse(text)
