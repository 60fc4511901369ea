"""Objectives as values: their text reads back, equal ones are one, and impossible fields are refused."""

from __future__ import annotations

import dataclasses
import re
import typing

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from visavis import parse
from visavis.errors import SpecError
from visavis.objectives import CATALOG, Unified

every_objective = pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)


def values_of(hint: object) -> st.SearchStrategy:
    """Values that a field of this type may have in any objective."""
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    known = {float: st.floats(1e-3, 1e6) | st.integers(1, 1000), int: st.integers(1, 1000), bool: st.booleans()}
    return known.get(hint, st.nothing())


@every_objective
@given(data=st.data())
def test_the_text_of_an_objective_reads_back(kind, data):
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind) if not values_of(hints[field.name]).is_empty]
    chosen = data.draw(st.fixed_dictionaries({}, optional={name: values_of(hints[name]) for name in fields}))
    try:
        objective = kind(**chosen)
    except SpecError:  # fields that exclude each other; hypothesis fails where too few values are left
        reject()
    again = parse(repr(objective))
    assert again == objective
    assert hash(again) == hash(objective)
    assert repr(again) == repr(objective)


@every_objective
def test_a_bare_name_takes_the_defaults(kind):
    assert parse(kind.__name__) == parse(f" {kind.__name__}() ") == kind()
    assert {kind(), kind(), kind(reduction="mean")} == {kind(), kind(reduction="mean")}


@every_objective
def test_objectives_cannot_be_changed_or_given_values_without_names(kind):
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().reduction = "mean"
    with pytest.raises(TypeError):
        kind(0.2)


@every_objective
def test_a_docstring_says_what_why_and_whence(kind):
    for part in ("Formula:", "dL/ds", "Advice:", "Source:"):
        assert part in kind.__doc__


def test_whole_numbers_are_the_same_values():
    assert parse("Unified(margin=0, gamma=60)") == Unified(margin=0.0, gamma=60.0)
    assert repr(Unified(gamma=60)) == "Unified(margin=0.2, gamma=60.0, reduction='sum')"


REFUSED = {
    "Unifed()": "'Unifed' in 'Unifed()' is not in the catalog: did you mean Unified?",
    3: "3 is no text: expected one of the form Name(field=value, ...).",
    "Unified(marjin=1)": "Unified has no field 'marjin': did you mean margin?",
    "Unified(gamma=0)": "Unified: gamma is 0.0, expected a number above 0.",
    "Unified(gamma=-1)": "Unified: gamma is -1.0, expected a number above 0.",
    "Unified(gamma='x')": "Unified: gamma is 'x', expected a finite number.",
    "Unified(gamma=True)": "Unified: gamma is True, expected a finite number.",
    "Unified(gamma=1e999)": "Unified: gamma is inf, expected a finite number.",
    "NTXent(tau=0)": "NTXent: tau is 0.0, expected a number above 0.",
    "NTXent(denominator='some')": "NTXent: denominator is 'some', expected 'all' or 'negatives'.",
    "VLC(reduction='max')": "VLC: reduction is 'max', expected 'sum' or 'mean' or 'half_mean'.",
    "InfoNCE(tau=0)": "InfoNCE: tau is 0.0, expected a number above 0.",
    "Sigmoid(scale=0)": "Sigmoid: scale is 0.0, expected a number above 0.",
    "Sigmoid(bias=1e999)": "Sigmoid: bias is inf, expected a finite number.",
    "RSP(gamma=0)": "RSP: gamma is 0.0, expected a number above 0, or None.",
    "SSP(positive=0.5)": "SSP: positive is 0.5, expected a list of values.",
    "AOQ(alpha=0)": "AOQ: alpha is 0.0, expected a number above 0.",
    "Ladder(margins=[])": "Ladder: margins is (), expected one for each level, at least one.",
    "Ladder(betas=[1])": "Ladder: betas is (1.0,), expected as many as margins, 2.",
    "Ladder(thresholds=[0.6, 0.5])": "Ladder: thresholds is (0.6, 0.5), expected one fewer than margins, 1.",
    "Ladder(margins=[1, 1, 1], betas=[1, 1, 1], thresholds=[0.5, 0.5])": "Ladder: thresholds is (0.5, 0.5), expected each below the one before.",
    "Ladder(pairs=0)": "Ladder: pairs is 0, expected a number above 0.",
    "Ladder(pairs=2, sampling='sum')": "Ladder: pairs is 2, expected 1 with sampling='sum', which takes all.",
    "Ladder(semantics='reference', sampling='sum')": "Ladder: sampling is 'sum', expected 'hard' with semantics='reference'.",
    "Ladder(semantics='reference', pairs=2)": "Ladder: pairs is 2, expected 1 with semantics='reference'.",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_is_said_in_one_sentence(text):
    with pytest.raises(SpecError, match=f"^{re.escape(REFUSED[text])}$"):
        parse(text)
