"""Targets: every view is a slice of one small table, and every misuse is one sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis import Targets
from visavis.errors import MissingSupervision, ShapeError
from visavis.targets import PAIR_FACTS, Factors

ids = st.lists(st.integers(-3, 3), max_size=6)


@given(ids, ids)
def test_pairs_with_equal_ids_are_positive_and_all_others_negative(queries, candidates):
    targets = Targets(query_ids=queries, candidate_ids=candidates)
    together = [[q == c for c in candidates] for q in queries]
    assert targets.positive.tolist() == together
    assert torch.equal(targets.negative, ~targets.positive)
    assert targets.shape == (len(queries), len(candidates))


@given(st.data())
def test_a_relation_may_overlap_and_survives_turning_and_slicing(data):
    height, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, height - 1), st.integers(0, width - 1)), max_size=12))
    targets = Targets.from_pairs([i for i, _ in pairs], [j for _, j in pairs], height, width)
    together = torch.tensor([[(i, j) in pairs for j in range(width)] for i in range(height)])
    rows = torch.tensor(data.draw(st.lists(st.integers(0, height - 1), max_size=8)), dtype=torch.long)
    columns = torch.tensor(data.draw(st.lists(st.integers(0, width - 1), max_size=8)), dtype=torch.long)
    assert torch.equal(targets.positive, together)
    assert torch.equal(targets.T.positive, together.T)
    assert torch.equal(targets[rows].positive, together[rows])
    assert torch.equal(targets[rows].T[columns].positive, together[rows][:, columns].T)


def test_paired_is_the_diagonal_and_equals_the_same_relation():
    assert torch.equal(Targets.paired(3).positive, torch.eye(3, dtype=torch.bool))
    assert torch.equal(Targets.from_pairs([0, 1, 2], [0, 1, 2], 3, 3).positive, torch.eye(3, dtype=torch.bool))
    assert Targets.paired(0).positive.shape == (0, 0)


FORMS = {
    "list": [4, 4, -1],
    "tuple": (4, 4, -1),
    "int64": np.array([4, 4, -1]),
    "int8": np.array([4, 4, -1], dtype=np.int8),
    "backwards": np.array([-1, 4, 4])[::-1],
    "strided": np.array([4, 0, 4, 0, -1])[::2],
    "tensor": torch.tensor([4, 4, -1], dtype=torch.int32),
    "tensors": [torch.tensor(4), torch.tensor(4), torch.tensor(-1)],
}


@pytest.mark.parametrize("given_as", FORMS)
def test_ids_may_be_any_whole_numbers_in_one_row(given_as):
    assert Targets(query_ids=FORMS[given_as], candidate_ids=[-1, 4]).positive.tolist() == [[False, True], [False, True], [True, False]]


def test_ids_that_are_read_only_bool_or_huge():
    frozen = np.arange(3)
    frozen.setflags(write=False)
    assert torch.equal(Targets(query_ids=frozen, candidate_ids=frozen).positive, torch.eye(3, dtype=torch.bool))
    assert Targets(query_ids=[True, False], candidate_ids=[1, 0, 1]).positive.tolist() == [[True, False, True], [False, True, False]]
    assert Targets(query_ids=[2**62, -(2**63)], candidate_ids=[-(2**63), 2**62 + 1]).positive.tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize(
    "wrong", [["a", "b"], [1.0, 2.0], [[1], [2]], [[1], [2, 3]], 3, None, {1, 2}, [2**70, 1], torch.ones(2, requires_grad=True)], ids=str
)
def test_anything_else_is_refused_by_name(wrong):
    with pytest.raises(ShapeError, match=r"^candidate_ids .*whole number"):
        Targets(query_ids=[1, 2], candidate_ids=wrong)


def facts_of(height: int, width: int) -> dict[str, torch.Tensor]:
    pairwise = {name: torch.rand(height, width) for name in PAIR_FACTS} | {"ignore": torch.rand(height, width) > 0.5}
    items = {"query_margin": torch.rand(height), "candidate_margin": torch.rand(width)}
    return pairwise | items | {"query_offline_scores": torch.rand(height, 2), "candidate_offline_scores": torch.rand(width, 2)}


def test_turning_twice_and_slicing_give_the_same_facts():
    given_facts = facts_of(3, 4)
    targets = Targets(query_ids=[1, 2, 3], candidate_ids=[1, 2, 3, 1], **given_facts)
    rows = torch.tensor([2, 0])
    for name in PAIR_FACTS:
        assert torch.equal(targets.T.pairwise(name), given_facts[name].T)
        assert torch.equal(targets.T.T[rows].pairwise(name), given_facts[name][rows])
    assert torch.equal(targets.T.query_margin, given_facts["candidate_margin"])
    assert torch.equal(targets.T.candidate_offline_scores, given_facts["query_offline_scores"])
    assert torch.equal(targets[rows].query_margin, given_facts["query_margin"][rows])
    assert torch.equal(targets[rows].candidate_margin, given_facts["candidate_margin"])
    assert torch.equal(targets[1:].query_ids, targets.query_ids[1:])


@pytest.mark.parametrize("name", PAIR_FACTS)
def test_factors_and_functions_are_the_tensor_in_every_view(name):
    left, right = torch.randn(3, 2), torch.randn(4, 2)
    dense = left @ right.T
    views = [
        lambda t: t,
        lambda t: t.T,
        lambda t: t[1:],
        lambda t: t.T[torch.tensor([3, 0, 3])],
        lambda t: t[1:].T[2:],
        lambda t: t.T[1:].T,
    ]
    for fact in (Factors(left, right), lambda rows, columns: dense[rows][:, columns]):
        whole, lazy = (Targets(query_ids=range(3), candidate_ids=range(4), **{name: given_as}) for given_as in (dense, fact))
        for view in views:
            torch.testing.assert_close(view(lazy).pairwise(name), view(whole).pairwise(name))


def test_a_fact_that_nobody_gave_names_its_supplier():
    with pytest.raises(MissingSupervision, match=r"^Ladder needs relevance for every pair: .* or train with GradedSupervision\.$"):
        Targets.paired(2).pairwise("relevance", "Ladder")


WRONG = {
    "query_margin of another length": ({"query_margin": torch.rand(3)}, r"query_margin is of shape \[3\], expected a tensor \[2\]"),
    "query_margin as a column": ({"query_margin": torch.rand(2, 1)}, r"query_margin is of shape \[2, 1\], expected a tensor \[2\]"),
    "candidate_margin as a number": ({"candidate_margin": 0.2}, r"candidate_margin is of type float, expected a tensor \[2\]"),
    "offline scores as a row": (
        {"query_offline_scores": torch.rand(2)},
        r"query_offline_scores is of shape \[2\], expected a tensor \[2, K\]",
    ),
    "weight of another shape": ({"weight": torch.rand(2, 3)}, r"weight has shape \[2, 3\], expected \[2, 2\]: queries x candidates"),
    "ignore as numpy": ({"ignore": np.ones((2, 2))}, r"ignore is of type ndarray, expected a tensor \[2, 2\], Factors, or a function"),
    "factors of other lengths": (
        {"weight": Factors(torch.rand(3, 1), torch.rand(2, 1))},
        r"Factors \[3, 1\] and \[2, 1\], expected \[2, E\]",
    ),
    "factors of two widths": ({"weight": Factors(torch.rand(2, 1), torch.rand(2, 3))}, r"Factors \[2, 1\] and \[2, 3\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_facts_that_do_not_fit_are_refused(case):
    given_facts, sentence = WRONG[case]
    with pytest.raises(ShapeError, match=sentence):
        Targets.paired(2, **given_facts)


@pytest.mark.parametrize("returned", [torch.ones(3, 2), None])
def test_a_function_that_returns_something_else_is_refused(returned):
    with pytest.raises(ShapeError, match=r"the function given for weight returned a value of .*, expected \[2, 2\]: rows x columns"):
        Targets.paired(2, weight=lambda rows, columns: returned).pairwise("weight")


def test_positions_of_a_relation_are_checked():
    with pytest.raises(ShapeError, match="query_index goes from 0 to 5, expected positions from 0 to 1"):
        Targets.from_pairs([0, 5], [0, 1], 2, 2)
    with pytest.raises(ShapeError, match="2 entries and candidate_index 1"):
        Targets.from_pairs([0, 1], [0], 2, 2)
