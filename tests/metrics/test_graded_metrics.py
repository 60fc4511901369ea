"""Graded metrics compared with reference implementations and hand values."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau
from sklearn.metrics import ndcg_score
from torch import Tensor

from visavis.core.errors import DataError
from visavis.evaluation.metrics import GRADED, coherent_scores, ndcg_at

from ..matching import mentions


def random_problem(seed: int, queries: int, candidates: int, levels: int) -> tuple[Tensor, Tensor]:
    """Scores without ties, and relevance in n levels."""
    generator = torch.Generator().manual_seed(seed)
    scores = (
        torch.randperm(queries * candidates, generator=generator).view(queries, candidates).double()
    )
    return scores, torch.randint(levels, (queries, candidates), generator=generator).double() / max(
        1, levels - 1
    )


problems = st.builds(
    random_problem, st.integers(0, 2**16), st.integers(1, 5), st.integers(1, 25), st.integers(1, 6)
)


def test_graded_metrics_for_perfect_reversed_and_constant_order() -> None:
    scores = torch.rand(6, 9, dtype=torch.float64)
    assert coherent_scores(scores, scores**3, k=5).tolist() == pytest.approx([1.0] * 6)
    assert coherent_scores(scores, -scores, k=100).tolist() == pytest.approx([-1.0] * 6)
    assert coherent_scores(scores, torch.ones(6, 9), k=4).isnan().all()
    assert ndcg_at(scores, scores**3, k=5).tolist() == pytest.approx([1.0] * 6)
    assert ndcg_at(scores, torch.zeros(6, 9), k=5).isnan().all()


def test_graded_metrics_match_hand_values_for_one_swap() -> None:
    scores, relevance = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([[0.9, 0.2, 0.5, 1.0]])
    assert coherent_scores(scores, relevance, k=3).tolist() == pytest.approx([(2 - 1) / 3])
    gain = 0.9 + 0.2 / np.log2(3) + 0.5 / 2
    assert ndcg_at(scores, relevance, k=3).tolist() == pytest.approx(
        [gain / (1 + 0.9 / np.log2(3) + 0.5 / 2)]
    )


def test_coherent_scores_match_hand_values_for_ties() -> None:
    scores, relevance = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.5, 0.5, 0.7]])
    concordant, discordant, pairs, unequal = 3, 2, 6, 5
    assert coherent_scores(scores, relevance, k=4).tolist() == pytest.approx(
        [(concordant - discordant) / (pairs * unequal) ** 0.5]
    )
    assert coherent_scores(scores, relevance, k=4, tau="a").tolist() == pytest.approx(
        [(concordant - discordant) / pairs]
    )
    assert coherent_scores(scores, torch.ones(1, 4), k=4, tau="a").tolist() == [0]
    assert coherent_scores(scores, relevance, k=1, tau="a").isnan().all()


@given(problems, st.integers(1, 30))
def test_coherent_scores_tau_a_matches_definition(
    scores_and_relevance: tuple[Tensor, Tensor], k: int
) -> None:
    scores, relevance = scores_and_relevance
    for row, row_relevance, actual in zip(
        scores, relevance, coherent_scores(scores, relevance, k=k, tau="a"), strict=True
    ):
        assert float(actual) == pytest.approx(
            tau_a(row, row_relevance, row.topk(min(k, len(row))).indices.tolist()), nan_ok=True
        )


def tau_a(row: Tensor, row_relevance: Tensor, top: list[int]) -> float:
    signs = [
        float((row[i] - row[j]).sign() * (row_relevance[i] - row_relevance[j]).sign())
        for i, j in combinations(top, 2)
    ]
    return sum(signs) / len(signs) if signs else np.nan


@given(problems, st.integers(2, 6), st.integers(3, 9))
def test_coherent_scores_average_over_ties_at_cutoff(
    scores_and_relevance: tuple[Tensor, Tensor], k: int, levels: int
) -> None:
    scores, relevance = (side[:1, :9] for side in scores_and_relevance)
    row, row_relevance, k = scores[0] % levels, relevance[0], min(k, scores.shape[1])
    ordered = row.sort(descending=True).values
    above_cutoff, tied_at_cutoff = (
        (row > ordered[k - 1]).nonzero()[:, 0].tolist(),
        (row == ordered[k - 1]).nonzero()[:, 0].tolist(),
    )
    each = [
        tau_a(row, row_relevance, [*above_cutoff, *chosen])
        for chosen in combinations(tied_at_cutoff, k - len(above_cutoff))
    ]
    actual = coherent_scores(row[None], row_relevance[None], k=k, tau="a")
    assert float(actual) == pytest.approx(np.mean(each), nan_ok=True, abs=1e-12)


@given(st.integers(0, 2**16), st.integers(2, 140), st.integers(1, 40))
def test_coherent_scores_equal_scipy_exactly(seed: int, candidates: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, relevance = (
        torch.randint(levels, (3, candidates), generator=generator) / levels for _ in range(2)
    )
    expected = [
        kendalltau(*pair).statistic for pair in zip(scores.numpy(), relevance.numpy(), strict=True)
    ]
    np.testing.assert_array_equal(
        coherent_scores(scores, relevance, k=candidates).numpy(), expected
    )


def test_coherent_scores_match_hand_values_for_tie_at_cutoff() -> None:
    scores, relevance = (
        torch.tensor([[2.0, 1.0, 1.0]]).repeat(3, 1),
        torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.5, 0.5, 1.0]]),
    )
    # Either of the last two may be in the top 2. Rows: both agree, one agrees, one disagrees and
    # the other is a tie.
    assert coherent_scores(scores, relevance, k=2, tau="a").tolist() == [1, 0, -0.5]
    assert coherent_scores(scores, relevance, k=2).tolist() == pytest.approx(
        [1, 0, -0.5 / 0.5**0.5]
    )
    assert coherent_scores(torch.ones(1, 3), relevance[:1], k=2).isnan().all()
    assert coherent_scores(torch.ones(1, 3), relevance[:1], k=2, tau="a").tolist() == [0]


@pytest.mark.parametrize("tau", ["a", "b"])
def test_graded_metrics_ignore_order_of_tied_candidates(tau: str) -> None:
    scores, relevance = (torch.rand(20, 40) * 8).round(), (torch.rand(20, 40) * 5).round()
    actual = coherent_scores(scores, relevance, k=12, tau=tau)
    assert ((actual.nan_to_num() >= -1) & (actual.nan_to_num() <= 1)).all()
    for _ in range(3):
        shuffled = torch.randperm(40)
        assert torch.equal(
            coherent_scores(scores[:, shuffled], relevance[:, shuffled], k=12, tau=tau).nan_to_num(
                2
            ),
            actual.nan_to_num(2),
        )
    for metric in GRADED["paper"]:
        values, moved = (
            metric.function(scores[:, order], relevance[:, order], (3, 12))
            for order in (torch.arange(40), shuffled)
        )
        assert torch.equal(values.nan_to_num(2), moved.nan_to_num(2))


def test_coherent_scores_reference_matches_released_code() -> None:
    scores, relevance = (torch.rand(40, 60) * 8).round(), torch.rand(40, 60)
    taken = [np.argsort(row)[::-1][:12] for row in scores.numpy()]
    expected = [
        kendalltau(row[top], row_relevance[top]).statistic
        for row, row_relevance, top in zip(scores.numpy(), relevance.numpy(), taken, strict=True)
    ]
    actual = coherent_scores(scores, relevance, k=12, semantics="reference")
    np.testing.assert_array_equal(actual.numpy(), expected)
    np.testing.assert_array_equal(
        GRADED["reference"][0].function(scores, relevance, (3, 12))[:, 1], expected
    )
    assert not torch.equal(actual, coherent_scores(scores, relevance, k=12))


@given(problems, st.integers(1, 30))
def test_graded_metrics_are_bounded_and_order_invariant(
    scores_and_relevance: tuple[Tensor, Tensor], k: int
) -> None:
    scores, relevance = scores_and_relevance
    shuffled = torch.randperm(scores.shape[1])
    for metric, lowest in ((coherent_scores, -1), (ndcg_at, 0)):
        actual = metric(scores, relevance, k=k)
        assert ((actual.nan_to_num() >= lowest - 1e-12) & (actual.nan_to_num() <= 1 + 1e-12)).all()
        assert torch.allclose(
            metric(scores[:, shuffled], relevance[:, shuffled], k=k), actual, equal_nan=True
        )
        assert torch.allclose(
            metric(scores.exp() if scores.max() < 50 else scores * 7 - 3, relevance, k=k),
            actual,
            equal_nan=True,
        )
        rows = torch.cat(
            [metric(scores[i : i + 1], relevance[i : i + 1], k=k) for i in range(len(scores))]
        )
        assert torch.allclose(rows, actual, equal_nan=True)


@given(problems, st.integers(1, 30))
def test_ndcg_matches_scikit_learn(scores_and_relevance: tuple[Tensor, Tensor], k: int) -> None:
    scores, relevance = scores_and_relevance
    for row, row_relevance, actual in zip(
        scores, relevance, ndcg_at(scores, relevance, k=k), strict=True
    ):
        if len(row) > 1 and row_relevance.any():
            assert float(actual) == pytest.approx(
                ndcg_score(row_relevance[None].numpy(), row[None].numpy(), k=k)
            )


def test_ndcg_ranks_least_relevant_first_among_ties() -> None:
    assert ndcg_at(torch.ones(1, 4), torch.tensor([[0.0, 1.0, 0.0, 0.0]]), k=3).tolist() == [0]


def test_graded_metrics_accept_half_precision() -> None:
    scores, relevance = torch.rand(4, 50).bfloat16(), torch.rand(4, 50)
    for metric in (coherent_scores, ndcg_at):
        assert torch.equal(metric(scores, relevance, k=50), metric(scores.float(), relevance, k=50))


@pytest.mark.parametrize("metric", [coherent_scores, ndcg_at])
def test_graded_metrics_reject_invalid_inputs(metric) -> None:
    with pytest.raises(DataError, match=mentions("scores", "query 1", "NaN")):
        metric(torch.tensor([[1.0, 2.0], [torch.nan, 1.0]]), torch.ones(2, 2), k=1)
    with pytest.raises(DataError, match=mentions("query 0", "NaN")):
        metric(torch.ones(1, 2), torch.tensor([[1.0, torch.nan]]), k=1)
