"""Values for which a metric would give a number, but not the metric. Each is an error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from visavis import DataError, ShapeError, SpecError, Targets, VisavisError
from visavis.evaluation import metrics

RANKS = torch.tensor([1, 2, 5])
POSITIVES = torch.tensor([[1.0, 3.0], [2.0, torch.inf]], dtype=torch.float64)
SCORES, RELEVANCE = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)
INVALID: dict[str, tuple[Callable[[], object], type[VisavisError], str]] = {
    "every positive would count as a query": (
        lambda: metrics.recall_at(POSITIVES, 2),
        ShapeError,
        "ranks: expected the rank of the best positive of each query",
    ),
    "the mean of no rank would be NaN": (
        lambda: metrics.mean_rank(torch.ones(0)),
        ShapeError,
        "ranks: expected the rank of the best positive of each query",
    ),
    "ranks from 0 would be hits at 0": (
        lambda: metrics.recall_at(torch.tensor([1, 0]), 1),
        DataError,
        "ranks of query 1: expected a rank >= 1, got 0.",
    ),
    "a rank that is NaN would be a miss": (
        lambda: metrics.recall_at(torch.tensor([torch.nan, 1]), 1),
        DataError,
        "ranks of query 0: expected a rank >= 1, got nan.",
    ),
    "an infinite rank would be a miss": (
        lambda: metrics.median_rank(torch.tensor([1, torch.inf])),
        DataError,
        "ranks of query 1: expected a rank >= 1, got inf.",
    ),
    "two positives at rank 1 would give a precision of 2": (
        lambda: metrics.average_precision(torch.tensor([[1.0, 1.0]])),
        DataError,
        "positive_ranks of query 0: expected ascending ranks >= 1, then inf, got 1, 1.",
    ),
    "descending ranks would give another precision": (
        lambda: metrics.r_precision(torch.tensor([[1.0, 2.0], [3.0, 2.0]])),
        DataError,
        "positive_ranks of query 1: expected ascending ranks >= 1, then inf, got 3, 2.",
    ),
    "a query without a positive would divide by 0": (
        lambda: metrics.average_precision_at_r(torch.tensor([[torch.inf]])),
        DataError,
        "positive_ranks of query 0: expected ascending ranks",
    ),
    "no query would give NaN": (
        lambda: metrics.map_at_k(torch.ones(0, 2), 1),
        ShapeError,
        "positive_ranks: expected the ranks of at least one query with a positive",
    ),
    "text ranks are checked, too": (
        lambda: metrics.ranking_metrics(POSITIVES, torch.zeros(1, 1)),
        DataError,
        "text_ranks of query 0: expected ascending ranks",
    ),
    "larger relevance would be gathered": (
        lambda: metrics.coherent_scores(SCORES[:, :3], RELEVANCE, k=2),
        ShapeError,
        "scores, relevance: expected equal shapes [Q, C], got [3, 3] and [3, 4].",
    ),
    "a third axis would be discounted": (
        lambda: metrics.ndcg(torch.ones(2, 2, 2), torch.ones(2, 2, 2)),
        ShapeError,
        "scores, relevance: expected equal shapes [Q, C], got [2, 2, 2] and [2, 2, 2].",
    ),
    "negative gains would lower the maximum": (
        lambda: metrics.ndcg(SCORES[:1], RELEVANCE[:1] - 1),
        DataError,
        "relevance of query 0: expected finite values >= 0 for nDCG",
    ),
    "infinite gains would give NaN": (
        lambda: metrics.ndcg(SCORES, RELEVANCE / 0),
        DataError,
        "relevance of query 0: expected numbers, got NaN.",
    ),
    "any other tau would be tau-a": (
        lambda: metrics.coherent_scores(SCORES, RELEVANCE, k=2, tau="B"),  # type: ignore[arg-type]
        SpecError,
        "tau: expected a or b, got 'B'.",
    ),
    "NaN would never stand before the positive": (
        lambda: metrics.best_ranks(torch.tensor([[1.0, 2.0], [torch.nan, 1.0]]), Targets.paired(2)),
        DataError,
        "scores of query 1: expected numbers, got NaN.",
    ),
}


@pytest.mark.parametrize("wrong_result", INVALID)
def test_metrics_reject_values_that_give_a_wrong_result(wrong_result: str) -> None:
    call, kind, message = INVALID[wrong_result]
    with pytest.raises(kind) as error:
        call()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("k", [0, -1, 2.5])
def test_metrics_reject_invalid_cutoffs(k: float) -> None:
    for call in (
        lambda: metrics.recall_at(RANKS, k),
        lambda: metrics.recall_at_mean_ties(RANKS, k),
        lambda: metrics.map_at_k(POSITIVES, k),
        lambda: metrics.ndcg_at(SCORES, RELEVANCE, k=k),
        lambda: metrics.coherent_scores(SCORES, RELEVANCE, k=k),
    ):
        with pytest.raises(SpecError, match=r"^k: expected an integer >= 1, got .+\.$"):
            call()


def test_metrics_take_numbers_of_numpy_and_scores_with_gradient() -> None:
    assert metrics.recall_at(RANKS, np.int64(2)) == metrics.recall_at(RANKS, 2)
    learned = SCORES.clone().requires_grad_()
    assert torch.equal(
        metrics.best_ranks(learned[:, :3], Targets.paired(3)),
        metrics.best_ranks(SCORES[:, :3], Targets.paired(3)),
    )
    assert torch.equal(metrics.ndcg(learned, learned), metrics.ndcg(SCORES, SCORES))
    assert torch.equal(
        metrics.coherent_scores(learned, learned, k=3), metrics.coherent_scores(SCORES, SCORES, k=3)
    )


def test_coherent_scores_take_negative_relevance() -> None:
    scores, relevance = torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, -0.5]])
    assert metrics.coherent_scores(scores, relevance, k=2).tolist() == [1]
