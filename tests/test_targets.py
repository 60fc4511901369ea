"""Targets: relations, annotations, slicing, transposition and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.matching import mentions

from visavis import Targets
from visavis.core.errors import MissingSupervision, ShapeError, SpecError
from visavis.losses.targets import PAIRWISE_ANNOTATIONS, Factors

ids = st.lists(st.integers(-3, 3), max_size=6)


@given(ids, ids)
def test_targets_with_equal_ids_are_positive(queries, candidates):
    targets = Targets(query_ids=queries, candidate_ids=candidates)
    expected = [[q == c for c in candidates] for q in queries]
    assert targets.positive.tolist() == expected
    assert torch.equal(targets.negative, ~targets.positive)
    assert targets.shape == (len(queries), len(candidates))


@given(ids, ids)
def test_targets_take_texts_as_ids(queries, candidates):
    """As a list or an array, and with the same integers in each call."""
    texts, others = [f"img/{i}.jpg" for i in queries], tuple(f"img/{i}.jpg" for i in candidates)
    expected = Targets(query_ids=queries, candidate_ids=candidates).positive
    for kind in (lambda values: values, np.array, lambda values: np.array(values, object)):
        if texts and others:
            targets = Targets(query_ids=kind(texts), candidate_ids=kind(others))
            assert torch.equal(targets.positive, expected)
            assert bool((targets.query_ids >= 0).all())


@pytest.mark.parametrize(
    "values",
    [[b"a"], [1, "a"], [None], [(1, 2)], [1.5], [[1]], np.array(["2020-01-01"], "datetime64[D]")],
    ids=str,
)
def test_targets_reject_ids_of_other_kinds(values):
    with pytest.raises(ShapeError, match=r"^query_ids: expected one integer or text per item"):
        Targets(query_ids=values, candidate_ids=values)
    with pytest.raises(ShapeError, match=r"query_ids, candidate_ids: expected integers or texts"):
        Targets(query_ids=["a", "b"], candidate_ids=torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match=r"^query_index: expected"):
        Targets.from_pairs(["a"], ["a"], 1, 1)


@given(st.data())
def test_targets_relation_survives_transposition_and_slicing(data):
    num_queries, num_candidates = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    pairs = data.draw(
        st.lists(
            st.tuples(st.integers(0, num_queries - 1), st.integers(0, num_candidates - 1)),
            max_size=12,
        )
    )
    targets = Targets.from_pairs(
        [i for i, _ in pairs], [j for _, j in pairs], num_queries, num_candidates
    )
    expected = torch.tensor(
        [[(i, j) in pairs for j in range(num_candidates)] for i in range(num_queries)]
    )
    rows = torch.tensor(
        data.draw(st.lists(st.integers(0, num_queries - 1), max_size=8)), dtype=torch.long
    )
    columns = torch.tensor(
        data.draw(st.lists(st.integers(0, num_candidates - 1), max_size=8)), dtype=torch.long
    )
    assert torch.equal(targets.positive, expected)
    assert torch.equal(targets.T.positive, expected.T)
    assert torch.equal(targets[rows].positive, expected[rows])
    assert torch.equal(targets[rows].T[columns].positive, expected[rows][:, columns].T)


def test_targets_paired_is_diagonal():
    assert torch.equal(Targets.paired(3).positive, torch.eye(3, dtype=torch.bool))
    assert torch.equal(
        Targets.from_pairs([0, 1, 2], [0, 1, 2], 3, 3).positive, torch.eye(3, dtype=torch.bool)
    )
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


@pytest.mark.parametrize("value", FORMS)
def test_targets_accept_any_integer_ids(value):
    assert Targets(query_ids=FORMS[value], candidate_ids=[-1, 4]).positive.tolist() == [
        [False, True],
        [False, True],
        [True, False],
    ]


def test_targets_accept_read_only_bool_and_huge_ids():
    frozen = np.arange(3)
    frozen.setflags(write=False)
    assert torch.equal(
        Targets(query_ids=frozen, candidate_ids=frozen).positive, torch.eye(3, dtype=torch.bool)
    )
    assert Targets(query_ids=[True, False], candidate_ids=[1, 0, 1]).positive.tolist() == [
        [True, False, True],
        [False, True, False],
    ]
    assert Targets(
        query_ids=[2**62, -(2**63)], candidate_ids=[-(2**63), 2**62 + 1]
    ).positive.tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize(
    "wrong",
    # Ids 1.0 and 1.5 would be one id. A column of ids would be compared with each id of the other side.
    [[1.0, 1.5], [[1], [2]], 3, torch.ones(2)],
    ids=str,
)
def test_targets_reject_invalid_ids(wrong):
    with pytest.raises(ShapeError, match="candidate_ids"):
        Targets(query_ids=[1, 2], candidate_ids=wrong)


def annotations_of(num_queries: int, num_candidates: int) -> dict[str, torch.Tensor]:
    pairwise = {name: torch.rand(num_queries, num_candidates) for name in PAIRWISE_ANNOTATIONS} | {
        "ignore": torch.rand(num_queries, num_candidates) > 0.5
    }
    items = {
        "query_margin": torch.rand(num_queries),
        "candidate_margin": torch.rand(num_candidates),
    }
    return (
        pairwise
        | items
        | {
            "query_offline_scores": torch.rand(num_queries, 2),
            "candidate_offline_scores": torch.rand(num_candidates, 2),
        }
    )


def test_targets_annotations_survive_transposition_and_slicing():
    given_annotations = annotations_of(3, 4)
    targets = Targets(query_ids=[1, 2, 3], candidate_ids=[1, 2, 3, 1], **given_annotations)
    rows = torch.tensor([2, 0])
    for name in PAIRWISE_ANNOTATIONS:
        assert torch.equal(targets.T.pairwise(name), given_annotations[name].T)
        assert torch.equal(targets.T.T[rows].pairwise(name), given_annotations[name][rows])
    assert torch.equal(targets.T.query_margin, given_annotations["candidate_margin"])
    assert torch.equal(
        targets.T.candidate_offline_scores, given_annotations["query_offline_scores"]
    )
    assert torch.equal(targets[rows].query_margin, given_annotations["query_margin"][rows])
    assert torch.equal(targets[rows].candidate_margin, given_annotations["candidate_margin"])
    assert torch.equal(targets[1:].query_ids, targets.query_ids[1:])


@pytest.mark.parametrize("name", PAIRWISE_ANNOTATIONS)
def test_targets_factors_and_functions_match_tensor(name):
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
    for annotation in (Factors(left, right), lambda rows, columns: dense[rows][:, columns]):
        whole, lazy = (
            Targets(query_ids=range(3), candidate_ids=range(4), **{name: value})
            for value in (dense, annotation)
        )
        for view in views:
            torch.testing.assert_close(view(lazy).pairwise(name), view(whole).pairwise(name))


def test_targets_missing_annotation_names_supervision():
    with pytest.raises(
        MissingSupervision, match=mentions("Ladder", "relevance", "GradedSupervision")
    ):
        Targets.paired(2).pairwise("relevance", "Ladder")


INVALID = {
    "query_margin of another length": (
        {"query_margin": torch.rand(3)},
        ("query_margin", "[3]", "[2]"),
    ),
    "query_margin as a column": (
        {"query_margin": torch.rand(2, 1)},
        ("query_margin", "[2, 1]", "[2]"),
    ),
    "candidate_margin as a number": (
        {"candidate_margin": 0.2},
        ("candidate_margin", "float", "[2]"),
    ),
    "offline scores as a row": (
        {"query_offline_scores": torch.rand(2)},
        ("query_offline_scores", "[2]", "[2, K]"),
    ),
    "weight of another shape": ({"weight": torch.rand(2, 3)}, ("weight", "[2, 3]", "[2, 2]")),
    "ignore as numpy": ({"ignore": np.ones((2, 2))}, ("ignore", "ndarray", "[2, 2]")),
    "factors of other lengths": (
        {"weight": Factors(torch.rand(3, 1), torch.rand(2, 1))},
        ("weight", "Factors", "[3, 1] and [2, 1]", "[2, E]"),
    ),
    "factors of two dimensions": (
        {"weight": Factors(torch.rand(2, 1), torch.rand(2, 3))},
        ("weight", "Factors", "[2, 1] and [2, 3]"),
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_targets_reject_mismatched_annotations(case):
    given_annotations, parts = INVALID[case]
    with pytest.raises(ShapeError, match=mentions(*parts)):
        Targets.paired(2, **given_annotations)


@pytest.mark.parametrize("returned", [torch.ones(3, 2), None])
def test_targets_reject_function_of_wrong_shape(returned):
    with pytest.raises(ShapeError, match=mentions("weight", "function", "[2, 2]")):
        Targets.paired(2, weight=lambda rows, columns: returned).pairwise("weight")


def test_targets_ignored_pairs_are_neither_positive_nor_negative():
    ignore = torch.tensor([[True, False, True], [False, False, False]])
    for value in (ignore, lambda rows, columns: ignore[rows][:, columns]):
        targets = Targets(query_ids=[0, 1], candidate_ids=[0, 1, 2], ignore=value)
        assert targets.positive.tolist() == [[False, False, False], [False, True, False]]
        assert targets.negative.tolist() == [[False, True, False], [True, False, True]]


def test_targets_reject_negative_number_of_items():
    for targets in (
        lambda: Targets.paired(-1),
        lambda: Targets.from_pairs([0], [0], num_queries=1, num_candidates=-1),
    ):
        with pytest.raises(SpecError, match=r": expected an integer >= 0, got -1\."):
            targets()
    assert Targets.paired(np.int64(2)).shape == (2, 2)


def test_targets_from_pairs_check_positions():
    with pytest.raises(ShapeError, match=mentions("query_index", "0 to 5", "0 to 1")):
        Targets.from_pairs([0, 5], [0, 1], 2, 2)
    with pytest.raises(ShapeError, match=mentions("candidate_index", 2, 1)):
        Targets.from_pairs([0, 1], [0], 2, 2)
