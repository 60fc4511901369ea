"""Graded metrics: 1 for the perfect order, -1 for the reversed one, undefined where relevance is constant; oracles and hand values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score
from torch import Tensor

from visavis.errors import DataError, ShapeError
from visavis.metrics import coherent_scores, ndcg_at


def problem(seed: int, queries: int, candidates: int, levels: int) -> tuple[Tensor, Tensor]:
    """Scores without ties, and relevance in so many levels."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randperm(queries * candidates, generator=draw).view(queries, candidates).double()
    return scores, torch.randint(levels, (queries, candidates), generator=draw).double() / max(1, levels - 1)


problems = st.builds(problem, st.integers(0, 2**16), st.integers(1, 5), st.integers(1, 25), st.integers(1, 6))


def test_perfect_reversed_and_constant_orders() -> None:
    scores = torch.rand(6, 9, dtype=torch.float64)
    assert coherent_scores(scores, scores**3, k=5).tolist() == pytest.approx([1.0] * 6)
    assert coherent_scores(scores, -scores, k=100).tolist() == pytest.approx([-1.0] * 6)
    assert coherent_scores(scores, torch.ones(6, 9), k=4).isnan().all()
    assert ndcg_at(scores, scores**3, k=5).tolist() == pytest.approx([1.0] * 6)
    assert ndcg_at(scores, torch.zeros(6, 9), k=5).isnan().all()


def test_one_swap_among_three_by_hand() -> None:
    scores, relevance = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([[0.9, 0.2, 0.5, 1.0]])
    assert coherent_scores(scores, relevance, k=3).tolist() == pytest.approx([(2 - 1) / 3])
    gain = 0.9 + 0.2 / np.log2(3) + 0.5 / 2
    assert ndcg_at(scores, relevance, k=3).tolist() == pytest.approx([gain / (1 + 0.9 / np.log2(3) + 0.5 / 2)])


def test_ties_by_hand() -> None:
    scores, relevance = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.5, 0.5, 0.7]])
    concordant, discordant, pairs, unequal = 3, 2, 6, 5
    assert coherent_scores(scores, relevance, k=4).tolist() == pytest.approx([(concordant - discordant) / (pairs * unequal) ** 0.5])
    assert coherent_scores(scores, relevance, k=4, tau="a").tolist() == pytest.approx([(concordant - discordant) / pairs])
    assert coherent_scores(scores, torch.ones(1, 4), k=4, tau="a").tolist() == [0]
    assert coherent_scores(scores, relevance, k=1, tau="a").isnan().all()


@given(problems, st.integers(1, 30))
def test_tau_a_is_its_definition(scores_and_relevance: tuple[Tensor, Tensor], k: int) -> None:
    scores, relevance = scores_and_relevance
    scores = scores // 3
    for row, degrees, found in zip(scores, relevance, coherent_scores(scores, relevance, k=k, tau="a"), strict=True):
        top = row.topk(min(k, len(row))).indices
        signs = [(row[i] - row[j]).sign() * (degrees[i] - degrees[j]).sign() for n, i in enumerate(top) for j in top[:n]]
        assert float(found) == pytest.approx(float(sum(signs)) / len(signs) if signs else np.nan, nan_ok=True)


@given(problems, st.integers(1, 30))
def test_graded_metrics_stay_in_their_range_and_know_no_order_of_items(scores_and_relevance: tuple[Tensor, Tensor], k: int) -> None:
    scores, relevance = scores_and_relevance
    shuffled = torch.randperm(scores.shape[1])
    for metric, least in ((coherent_scores, -1), (ndcg_at, 0)):
        found = metric(scores, relevance, k=k)
        assert ((found.nan_to_num() >= least - 1e-12) & (found.nan_to_num() <= 1 + 1e-12)).all()
        assert torch.allclose(metric(scores[:, shuffled], relevance[:, shuffled], k=k), found, equal_nan=True)
        assert torch.allclose(metric(scores.exp() if scores.max() < 50 else scores * 7 - 3, relevance, k=k), found, equal_nan=True)
        rows = torch.cat([metric(scores[i : i + 1], relevance[i : i + 1], k=k) for i in range(len(scores))])
        assert torch.allclose(rows, found, equal_nan=True)


@given(problems, st.integers(1, 30))
def test_ndcg_is_that_of_scikit_learn(scores_and_relevance: tuple[Tensor, Tensor], k: int) -> None:
    scores, relevance = scores_and_relevance
    for row, degrees, found in zip(scores, relevance, ndcg_at(scores, relevance, k=k), strict=True):
        if len(row) > 1 and degrees.any():
            assert float(found) == pytest.approx(ndcg_score(degrees[None].numpy(), row[None].numpy(), k=k))


def test_of_candidates_with_equal_scores_the_least_relevant_counts_first() -> None:
    assert ndcg_at(torch.ones(1, 4), torch.tensor([[0.0, 1.0, 0.0, 0.0]]), k=3).tolist() == [0]


def test_half_precision_scores_are_taken_as_they_are() -> None:
    scores, relevance = torch.rand(4, 50).bfloat16(), torch.rand(4, 50)
    for metric in (coherent_scores, ndcg_at):
        assert torch.equal(metric(scores, relevance, k=50), metric(scores.float(), relevance, k=50))


@pytest.mark.parametrize("metric", [coherent_scores, ndcg_at])
def test_refusals_are_one_sentence(metric) -> None:
    with pytest.raises(ShapeError, match=r"^relevance has shape \[2, 3\], expected that of the scores, \[3, 3\]"):
        metric(torch.eye(3), torch.ones(2, 3), k=1)
    with pytest.raises(DataError, match=r"^the scores of query 1 hold NaN: the model or its features are broken\.$"):
        metric(torch.tensor([[1.0, 2.0], [torch.nan, 1.0]]), torch.ones(2, 2), k=1)
    with pytest.raises(DataError, match=r"^the degrees of query 0 hold NaN"):
        metric(torch.ones(1, 2), torch.tensor([[1.0, torch.nan]]), k=1)
