"""Ranks and average precision compared with argsort, loops and hand values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visavis import Targets
from visavis.core.errors import ShapeError
from visavis.evaluation.metrics import (
    average_precision,
    average_precision_at,
    average_precision_at_r,
    best_ranks,
    positive_ranks,
    r_precision,
)

from ..matching import mentions

TIES = ("pessimistic", "mean", "optimistic")


def random_problem(
    seed: int, queries: int, candidates: int, identities: int
) -> tuple[Tensor, Targets]:
    """Scores without ties, and ids in which every query has a positive."""
    generator = torch.Generator().manual_seed(seed)
    scores = (
        torch.randperm(queries * candidates, generator=generator).view(queries, candidates).double()
    )
    candidate_ids = torch.randint(identities, (candidates,), generator=generator)
    query_ids = candidate_ids[torch.randint(candidates, (queries,), generator=generator)]
    return scores, Targets(query_ids=query_ids, candidate_ids=candidate_ids)


problems = st.builds(
    random_problem, st.integers(0, 2**16), st.integers(1, 9), st.integers(1, 30), st.integers(1, 12)
)


@given(problems)
def test_positive_ranks_match_argsort_without_ties(
    scores_and_targets: tuple[Tensor, Targets],
) -> None:
    scores, targets = scores_and_targets
    for row, positive, actual in zip(
        scores.numpy(),
        targets.positive.numpy(),
        positive_ranks(scores, targets).numpy(),
        strict=True,
    ):
        hits = np.flatnonzero(positive[np.argsort(-row)])
        assert actual[: len(hits)].tolist() == [position + 1 for position in hits]
        assert np.isinf(actual[len(hits) :]).all()


@given(problems)
def test_positive_ranks_tie_rules_are_ordered(scores_and_targets: tuple[Tensor, Targets]) -> None:
    scores, targets = scores_and_targets
    assert all(
        torch.equal(positive_ranks(scores, targets, ties=ties), positive_ranks(scores, targets))
        for ties in TIES
    )
    pessimistic, mean, optimistic = (
        positive_ranks(scores // 7, targets, ties=ties) for ties in TIES
    )
    assert (optimistic <= mean).all()
    assert (mean <= pessimistic).all()
    finite = pessimistic.isfinite()
    assert torch.equal(mean[finite], ((optimistic + pessimistic) / 2)[finite])


@pytest.mark.parametrize(
    ("ties", "expected"), [("pessimistic", 4.0), ("mean", 3.0), ("optimistic", 2.0)]
)
def test_best_ranks_match_hand_values_for_ties(ties: str, expected: float) -> None:
    scores = torch.tensor([[9.0, 5.0, 5.0, 5.0, 1.0]])
    assert best_ranks(
        scores, Targets(query_ids=[0], candidate_ids=[1, 0, 2, 3, 4]), ties=ties
    ).tolist() == [expected]


def test_positive_ranks_do_not_count_other_positives() -> None:
    scores = torch.tensor([[5.0, 5.0, 5.0, 3.0]])
    targets = Targets(query_ids=[0], candidate_ids=[0, 0, 0, 1])
    assert all(
        positive_ranks(scores, targets, ties=ties).tolist() == [[1.0, 2.0, 3.0]] for ties in TIES
    )


@pytest.mark.parametrize(
    ("ties", "expected"), [("pessimistic", 4.0), ("mean", 3.0), ("optimistic", 2.0)]
)
def test_positive_ranks_of_infinite_scores(ties: str, expected: float) -> None:
    """A positive that scores -inf has the score of the padding of its row."""
    scores = torch.tensor([[-torch.inf, -torch.inf, -torch.inf, 0.0], [torch.inf, torch.inf, 1, 0]])
    targets = Targets(query_ids=[0, 1], candidate_ids=[0, 1, 1, 2])
    assert positive_ranks(scores, targets, ties=ties).tolist() == [
        [expected, torch.inf],
        [{"pessimistic": 2.0, "mean": 1.5, "optimistic": 1.0}[ties], 3.0],
    ]


def test_positive_ranks_exclude_ignored_pairs() -> None:
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0]])
    targets = Targets(
        query_ids=[0], candidate_ids=[0, 1, 2, 0], ignore=torch.tensor([[True, True, False, False]])
    )
    assert positive_ranks(scores, targets).tolist() == [[2.0]]


def test_average_precision_matches_hand_values() -> None:
    actual = torch.tensor([[1.0, 3.0, 8.0], [2.0, torch.inf, torch.inf]], dtype=torch.float64)
    assert average_precision(actual).tolist() == pytest.approx([(1 + 2 / 3 + 3 / 8) / 3, 1 / 2])
    assert average_precision_at(actual, 5).tolist() == pytest.approx([(1 + 2 / 3) / 3, 1 / 2])
    assert average_precision_at(actual, 2).tolist() == pytest.approx(
        [1 / 2, 1 / 2]
    )  # min(R, K) = 2, then 1
    assert average_precision_at(actual, 5, normalize="hits").tolist() == pytest.approx(
        [(1 + 2 / 3) / 2, 1 / 2]
    )
    assert average_precision_at(actual, 1, normalize="hits").tolist() == [1.0, 0.0]
    assert average_precision_at_r(actual).tolist() == pytest.approx([(1 + 2 / 3) / 3, 0.0])
    assert r_precision(actual).tolist() == pytest.approx([2 / 3, 0.0])


@given(problems)
def test_average_precision_matches_textbook_loop(
    scores_and_targets: tuple[Tensor, Targets],
) -> None:
    scores, targets = scores_and_targets
    actual = positive_ranks(scores, targets)
    for row, positive, value in zip(
        scores.numpy(), targets.positive.numpy(), average_precision(actual), strict=True
    ):
        hits, total = 0, 0.0
        for position, hit in enumerate(positive[np.argsort(-row)], 1):
            hits += hit
            total += hits / position if hit else 0
        assert float(value) == pytest.approx(total / hits)
    assert torch.allclose(average_precision_at(actual, scores.shape[1]), average_precision(actual))


def test_best_ranks_reject_invalid_inputs() -> None:
    targets = Targets(query_ids=[0, 3], candidate_ids=[0, 1])
    with pytest.raises(ShapeError, match=mentions("query 1", "positive")):
        best_ranks(torch.zeros(2, 2), targets)
    with pytest.raises(ShapeError, match=mentions("scores", "[2, 3]", "[2, 2]")):
        best_ranks(torch.zeros(2, 3), targets)
