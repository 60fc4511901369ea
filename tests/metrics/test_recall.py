"""The numbers of a table, by hand and by law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis import Targets
from visavis.metrics import CATALOG, both_ways, map_at_k, map_at_k_hits, mean_rank, median_rank, places, recall_at

some_ranks = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(torch.tensor)


@given(some_ranks, st.integers(1, 60))
def test_recall_grows_with_k_and_reaches_one(ranks: torch.Tensor, k: int) -> None:
    assert recall_at(ranks, k) <= recall_at(ranks, k + 1)
    assert recall_at(ranks, 50) == 1


@pytest.mark.parametrize(("ranks", "published"), [([1, 2], 1), ([1, 4], 2), ([3], 3), ([1, 2, 9], 2), ([1, 2, 5, 9], 3)])
def test_median_rank_is_floored_as_published(ranks: list[int], published: int) -> None:
    assert median_rank(torch.tensor(ranks)) == published


def test_mean_rank() -> None:
    assert mean_rank(torch.tensor([1, 2, 6])) == 3


def test_a_perfect_model_has_rsum_600() -> None:
    targets = Targets(query_ids=torch.arange(30), candidate_ids=torch.arange(30).repeat_interleave(5))
    scores = targets.positive.float()
    metrics = both_ways(places(scores, targets), places(scores.T, targets.T))
    assert metrics["rsum"] == 600
    assert metrics["average_recall"] == 100
    assert metrics["i2t_medr"] == metrics["t2i_meanr"] == metrics["i2t_map_at_5"] == 1


def test_the_two_conventions_of_map_differ_where_positives_are_missed() -> None:
    found = torch.tensor([[1.0, 40.0, 50.0, 60.0, 70.0]], dtype=torch.float64)
    assert map_at_k(found, 5) == pytest.approx(1 / 5)
    assert map_at_k_hits(found, 5) == 1


def test_the_catalog_names_every_metric_once() -> None:
    targets = Targets.paired(3)
    metrics = both_ways(places(torch.eye(3), targets), places(torch.eye(3), targets))
    names = [metric.name for metric in CATALOG]
    assert sorted(metrics) == sorted(name for name in names if not name.endswith("_at_K"))  # those need degrees
    assert len(names) == len(set(names))
    assert all(metric.definition and metric.formula for metric in CATALOG)
