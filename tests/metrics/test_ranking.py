"""Places, ranks and average precision: an argsort oracle, hand values for ties, and laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visavis import Targets
from visavis.errors import DataError, ShapeError, SpecError
from visavis.metrics import average_precision, average_precision_at, average_precision_at_r, places, r_precision, ranks

TIES = ("pessimistic", "mean", "optimistic")


def problem(seed: int, queries: int, candidates: int, identities: int) -> tuple[Tensor, Targets]:
    """Scores without ties, and ids in which every query has a positive."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randperm(queries * candidates, generator=draw).view(queries, candidates).double()
    candidate_ids = torch.randint(identities, (candidates,), generator=draw)
    query_ids = candidate_ids[torch.randint(candidates, (queries,), generator=draw)]
    return scores, Targets(query_ids=query_ids, candidate_ids=candidate_ids)


problems = st.builds(problem, st.integers(0, 2**16), st.integers(1, 9), st.integers(1, 30), st.integers(1, 12))


@given(problems)
def test_places_without_ties_are_those_of_an_argsort(scores_and_targets: tuple[Tensor, Targets]) -> None:
    scores, targets = scores_and_targets
    for row, positive, found in zip(scores.numpy(), targets.positive.numpy(), places(scores, targets).numpy(), strict=True):
        hits = np.flatnonzero(positive[np.argsort(-row)])
        assert found[: len(hits)].tolist() == [place + 1 for place in hits]
        assert np.isinf(found[len(hits) :]).all()


@given(problems)
def test_a_block_of_rows_stands_as_it_does_in_the_whole(scores_and_targets: tuple[Tensor, Targets]) -> None:
    scores, targets = scores_and_targets
    half = len(scores) // 2
    whole = ranks(scores, targets)
    assert torch.equal(torch.cat([ranks(scores[:half], targets[:half]), ranks(scores[half:], targets[half:])]), whole)


@given(problems)
def test_tie_rules_agree_without_ties_and_are_ordered_with_them(scores_and_targets: tuple[Tensor, Targets]) -> None:
    scores, targets = scores_and_targets
    assert all(torch.equal(places(scores, targets, ties=ties), places(scores, targets)) for ties in TIES)
    pessimistic, mean, optimistic = (places(scores // 7, targets, ties=ties) for ties in TIES)
    assert (optimistic <= mean).all()
    assert (mean <= pessimistic).all()
    held = pessimistic.isfinite()
    assert torch.equal(mean[held], ((optimistic + pessimistic) / 2)[held])


@pytest.mark.parametrize(("ties", "expected"), [("pessimistic", 4.0), ("mean", 3.0), ("optimistic", 2.0)])
def test_hand_values_of_a_positive_tied_with_two_others_behind_one(ties: str, expected: float) -> None:
    scores = torch.tensor([[9.0, 5.0, 5.0, 5.0, 1.0]])
    assert ranks(scores, Targets(query_ids=[0], candidate_ids=[1, 0, 2, 3, 4]), ties=ties).tolist() == [expected]


def test_own_positives_never_stand_in_each_others_way() -> None:
    scores = torch.tensor([[5.0, 5.0, 5.0, 3.0]])
    targets = Targets(query_ids=[0], candidate_ids=[0, 0, 0, 1])
    assert all(places(scores, targets, ties=ties).tolist() == [[1.0, 2.0, 3.0]] for ties in TIES)


def test_a_collapsed_model_scores_nothing() -> None:
    targets = Targets(query_ids=torch.arange(20), candidate_ids=torch.arange(20).repeat_interleave(5))
    assert ranks(torch.ones(20, 100), targets).tolist() == [96] * 20
    assert ranks(torch.ones(100, 20), targets.T).tolist() == [20] * 100


def test_ignored_pairs_neither_count_nor_are_found() -> None:
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0]])
    targets = Targets(query_ids=[0], candidate_ids=[0, 1, 2, 0], ignore=torch.tensor([[True, True, False, False]]))
    assert places(scores, targets).tolist() == [[2.0]]


def test_average_precisions_by_hand() -> None:
    found = torch.tensor([[1.0, 3.0, 8.0], [2.0, torch.inf, torch.inf]], dtype=torch.float64)
    assert average_precision(found).tolist() == pytest.approx([(1 + 2 / 3 + 3 / 8) / 3, 1 / 2])
    assert average_precision_at(found, 5).tolist() == pytest.approx([(1 + 2 / 3) / 3, 1 / 2])
    assert average_precision_at(found, 2).tolist() == pytest.approx([1 / 2, 1 / 2])  # min(R, K) = 2, then 1
    assert average_precision_at(found, 5, normalize="hits").tolist() == pytest.approx([(1 + 2 / 3) / 2, 1 / 2])
    assert average_precision_at(found, 1, normalize="hits").tolist() == [1.0, 0.0]
    assert average_precision_at_r(found).tolist() == pytest.approx([(1 + 2 / 3) / 3, 0.0])
    assert r_precision(found).tolist() == pytest.approx([2 / 3, 0.0])


@given(problems)
def test_average_precision_is_the_textbook_loop(scores_and_targets: tuple[Tensor, Targets]) -> None:
    scores, targets = scores_and_targets
    found = places(scores, targets)
    for row, positive, value in zip(scores.numpy(), targets.positive.numpy(), average_precision(found), strict=True):
        hits, total = 0, 0.0
        for position, hit in enumerate(positive[np.argsort(-row)], 1):
            hits += hit
            total += hits / position if hit else 0
        assert float(value) == pytest.approx(total / hits)
    assert torch.allclose(average_precision_at(found, scores.shape[1]), average_precision(found))


def test_refusals_are_one_sentence() -> None:
    targets = Targets(query_ids=[0, 3], candidate_ids=[0, 1])
    with pytest.raises(ShapeError, match=r"^query 1 has no positive candidate: leave such queries out\.$"):
        ranks(torch.zeros(2, 2), targets)
    with pytest.raises(ShapeError, match=r"^scores have shape \[2, 3\], expected \[2, 2\]"):
        ranks(torch.zeros(2, 3), targets)
    with pytest.raises(DataError, match=r"^the scores of query 1 hold NaN"):
        ranks(torch.tensor([[1.0, 2.0], [torch.nan, 1.0]]), Targets.paired(2))
    with pytest.raises(SpecError, match=r"^ties is 'random', expected pessimistic, mean, optimistic"):
        ranks(torch.eye(2), Targets.paired(2), ties="random")  # type: ignore[arg-type]
