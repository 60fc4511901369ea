"""Recall, mean and median ranks, and the metric catalog."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis import Targets
from visavis.evaluation.bootstrap import BOOTSTRAP_METRICS
from visavis.evaluation.metrics import (
    CATALOG,
    GRADED,
    RANKING,
    best_ranks,
    catalog,
    map_at_k,
    map_at_k_hits,
    mean_rank,
    median_rank,
    positive_ranks,
    ranking_metrics,
    recall_at,
    recall_at_mean_ties,
)
from visavis.evaluation.metrics.ranking import random_rsum

some_ranks = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(torch.tensor)


@given(some_ranks, st.integers(1, 60))
def test_recall_grows_with_k_and_reaches_one(ranks: torch.Tensor, k: int) -> None:
    assert recall_at(ranks, k) <= recall_at(ranks, k + 1)
    assert recall_at(ranks, 50) == 1


def test_recall_at_mean_ties_rounds_half_ranks() -> None:
    """One positive tied with no, one and nine other candidates has the 0-based mean ranks 0, 0.5
    and 4.5.
    """
    scores = torch.zeros(3, 20)
    for query, tied in enumerate((0, 1, 9)):
        scores[query, : tied + 1] = 1
    mean = best_ranks(
        scores, Targets(query_ids=[0, 0, 0], candidate_ids=[0] + 19 * [1]), ties="mean"
    )
    assert mean.tolist() == [1, 1.5, 5.5]
    assert [3 * recall_at_mean_ties(mean, k) for k in (1, 2, 4, 5)] == [1, 2, 2, 3]
    assert [3 * recall_at(mean, k) for k in (1, 2, 4, 5)] == [1, 2, 2, 2]
    assert recall_at_mean_ties(torch.tensor([6.0]), 5) == 0


def test_ranking_metrics_include_mean_ties_recall() -> None:
    scores, targets = (
        (torch.arange(20) < 10).float()[None],
        Targets(query_ids=[0], candidate_ids=[0] + 19 * [1]),
    )
    actual = ranking_metrics(*2 * [positive_ranks(scores, targets, ties="mean")])
    assert [actual[f"i2t_r{k}{name}"] for name in ("", "_mean_ties") for k in (1, 5, 10)] == [
        0,
        0,
        100,
        0,
        100,
        100,
    ]
    without_ties = ranking_metrics(*2 * [positive_ranks(scores, targets)])
    assert [without_ties[f"t2i_r{k}_mean_ties"] for k in (1, 5, 10)] == [
        without_ties[f"t2i_r{k}"] for k in (1, 5, 10)
    ]


@pytest.mark.parametrize(
    ("ranks", "published"), [([1, 2], 1), ([1, 4], 2), ([3], 3), ([1, 2, 9], 2), ([1, 2, 5, 9], 3)]
)
def test_median_rank_is_floored_as_published(ranks: list[int], published: int) -> None:
    assert median_rank(torch.tensor(ranks)) == published


def test_mean_rank_is_mean() -> None:
    assert mean_rank(torch.tensor([1, 2, 6])) == 3


def test_ranking_metrics_of_perfect_model_have_rsum_600() -> None:
    targets = Targets(
        query_ids=torch.arange(30), candidate_ids=torch.arange(30).repeat_interleave(5)
    )
    scores = targets.positive.float()
    metrics = ranking_metrics(positive_ranks(scores, targets), positive_ranks(scores.T, targets.T))
    assert metrics["rsum"] == 600
    assert metrics["average_recall"] == 100
    assert metrics["i2t_medr"] == metrics["t2i_meanr"] == metrics["i2t_map_at_5"] == 1


def test_rsum_sums_six_recalls_of_the_literature() -> None:
    ranks = torch.tensor([[1.0], [2.0], [6.0], [11.0]], dtype=torch.float64)
    metrics = ranking_metrics(ranks, ranks)
    assert metrics["rsum"] == 2 * (25 + 50 + 75)
    assert metrics["average_recall"] == metrics["i2t_average_recall"] == 50
    assert catalog.SIX_RECALLS == ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")
    assert (*catalog.SIX_RECALLS, "rsum") == BOOTSTRAP_METRICS


def test_another_recall_in_results_keeps_rsum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog with R@3 has one more recall, and the same RSUM and average recall."""
    printed = "RECALLS = RECALL_AT_K.at(1, 5, 10)"
    source = inspect.getsource(catalog)
    assert source.count(printed) == 1
    with_r3 = ModuleType("catalog_with_r3")
    monkeypatch.setitem(sys.modules, "catalog_with_r3", with_r3)
    exec(source.replace(printed, "RECALLS = RECALL_AT_K.at(1, 3, 5, 10)"), vars(with_r3))

    ranks = torch.tensor([[1.0], [3.0], [4.0], [11.0]], dtype=torch.float64)
    expected = ranking_metrics(ranks, ranks)
    found = with_r3.ranking_metrics(ranks, ranks)
    assert found["i2t_r3"] == found["t2i_r3"] == 50
    assert {key: value for key, value in found.items() if not key.endswith("_r3")} == expected
    assert with_r3.SIX_RECALLS == catalog.SIX_RECALLS


def test_map_conventions_differ_for_missed_positives() -> None:
    actual = torch.tensor([[1.0, 40.0, 50.0, 60.0, 70.0]], dtype=torch.float64)
    assert map_at_k(actual, 5) == pytest.approx(1 / 5)
    assert map_at_k_hits(actual, 5) == 1


def test_metric_catalog_names_are_unique() -> None:
    targets = Targets.paired(3)
    metrics = ranking_metrics(
        positive_ranks(torch.eye(3), targets), positive_ranks(torch.eye(3), targets)
    )
    names = [metric.name for metric in CATALOG]
    assert list(metrics) == [metric.name for metric in CATALOG if metric.input != "relevance"]
    assert len(names) == len(set(names))
    assert all(metric.definition and metric.formula for metric in CATALOG)


@given(st.integers(2, 9), st.integers(0, 2**16))
def test_rank_metrics_prefer_perfect_order(items: int, seed: int) -> None:
    targets = Targets.paired(items)
    scores = targets.positive + 0.1 * torch.rand(
        items, items, generator=torch.Generator().manual_seed(seed)
    )
    perfect, reversed_ = (positive_ranks(signed, targets) for signed in (scores, -scores))
    for metric in RANKING:
        better, worse = metric.function(perfect), metric.function(reversed_)
        assert (better >= worse) if metric.higher_is_better else (better <= worse), metric.name
        assert metric.unit != "fraction" or 0 <= worse <= better <= 1
        assert metric.unit != "percent" or better == 100


@given(st.integers(2, 9), st.integers(0, 2**16))
def test_graded_metrics_have_value_per_query_and_k(candidates: int, seed: int) -> None:
    scores = torch.rand(3, candidates, generator=torch.Generator().manual_seed(seed)).double()
    ks = (2, candidates) if candidates > 2 else (2,)
    for metric in (metric for metrics in GRADED.values() for metric in metrics):
        values = metric.function(scores, scores**2, ks)
        assert values.shape == (3, len(ks))
        assert values == pytest.approx(1)
        assert (metric.function(scores, 1 - scores, ks) < values).all()


def test_metric_definitions_name_both_sides() -> None:
    definitions = {metric.name: metric.definition for metric in CATALOG}
    assert definitions["i2t_r5"] == "percent of images with a correct text in the top 5 (success@5)"
    assert definitions["t2i_medr"] == "median rank of the best correct image"
    assert not any("{" in definition for definition in definitions.values())


def test_random_rsum_matches_hand_values():
    # One image with one caption is always right. Of two, half of the queries hit at 1.
    assert random_rsum([1]) == (600, 0)
    mean, std = random_rsum([1, 1])
    assert mean == 500
    assert std == pytest.approx(2 * 100 * (2 * 0.25) ** 0.5 / 2)
