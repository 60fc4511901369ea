"""Metrics that name a measure of ir_measures have its value, with ties and several positives."""

from __future__ import annotations

import ir_measures
import numpy as np
import pytest
import torch
from torch import Tensor

from visavis.evaluation.metrics import CATALOG, GRADED, RANKING, positive_ranks
from visavis.evaluation.trec import top_candidates
from visavis.losses.targets import Targets

SEEDS = pytest.mark.parametrize("seed", range(8))


def measured(measure: str, scores: Tensor, relevance: Tensor) -> np.ndarray:
    """Values of a measure, by query, on the ranked lists that --trec writes."""
    order, values = top_candidates(scores, relevance, scores.shape[1])
    qrels = {
        f"{query:03}": {str(c): int(gain) for c, gain in enumerate(row) if gain}
        for query, row in enumerate(relevance.tolist())
    }
    run = {
        f"{query:03}": {str(c): value for c, value in zip(candidates, row, strict=True)}
        for query, (candidates, row) in enumerate(
            zip(order.tolist(), values.double().tolist(), strict=True)
        )
    }
    parsed = ir_measures.parse_measure(measure)
    found = {each.query_id: each.value for each in ir_measures.iter_calc([parsed], qrels, run)}
    return np.array([found[query] for query in sorted(qrels)])


def tied_case(seed: int, max_relevance: int) -> tuple[Tensor, Tensor]:
    """Scores with many ties, and the relevance of 30 candidates for 12 queries."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 8, (12, 30), generator=generator).float()
    relevance = torch.randint(0, max_relevance + 1, (12, 30), generator=generator)
    relevance[torch.rand(12, 30, generator=generator) < 0.7] = 0
    relevance[:, 0] = max_relevance  # each query has a positive
    return scores, relevance


@SEEDS
@pytest.mark.parametrize(
    "metric", [each for each in RANKING if each.ir_measures], ids=lambda m: m.name
)
def test_metric_of_ranks_equals_its_ir_measure(metric, seed):
    scores, relevance = tied_case(seed, 1)
    targets = Targets.from_pairs(*relevance.nonzero().T, *relevance.shape)
    value = metric.function(positive_ranks(scores, targets))
    scale = 100 if metric.unit == "percent" else 1
    expected = scale * measured(metric.ir_measures, scores, relevance).mean()
    assert value == pytest.approx(expected, abs=1e-9)


@SEEDS
@pytest.mark.parametrize("k", [1, 5, 10, 30])
def test_ndcg_equals_its_ir_measure(seed, k):
    """Linear gain, log2(rank + 1) as discount, and the less relevant of equal scores first."""
    scores, relevance = tied_case(seed, 3)
    [metric] = [each for each in GRADED["reference"] if each.label == "nDCG@K"]
    values = metric.function(scores, relevance.double(), (k,))[:, 0]
    expected = measured(metric.ir_measures.replace("K", str(k)), scores, relevance)
    assert values.tolist() == pytest.approx(expected.tolist(), abs=1e-9)
    exponential = measured(f"nDCG(dcg='exp-log2')@{k}", scores, relevance)
    assert k == 1 or exponential.tolist() != pytest.approx(expected.tolist(), abs=1e-3)


@SEEDS
def test_map_at_r_is_ap_at_the_r_of_each_query(seed):
    scores, relevance = tied_case(seed, 1)
    targets = Targets.from_pairs(*relevance.nonzero().T, *relevance.shape)
    [metric] = [each for each in RANKING if each.name == "map_at_r"]
    num_positives = relevance.sum(1).tolist()
    expected = [
        measured(f"AP@{r}", scores[i : i + 1], relevance[i : i + 1])[0]
        for i, r in enumerate(num_positives)
    ]
    value = metric.function(positive_ranks(scores, targets))
    assert value == pytest.approx(np.mean(expected), abs=1e-9)


@SEEDS
def test_map_at_k_divides_by_the_smaller_of_r_and_k(seed):
    scores, relevance = tied_case(seed, 1)
    targets = Targets.from_pairs(*relevance.nonzero().T, *relevance.shape)
    [metric] = [each for each in RANKING if each.name == "map_at_5"]
    num_positives = relevance.sum(1).numpy()
    theirs = measured("AP@5", scores, relevance)
    expected = (theirs * num_positives / np.minimum(num_positives, 5)).mean()
    assert metric.function(positive_ranks(scores, targets)) == pytest.approx(expected, abs=1e-9)
    assert not metric.ir_measures


def test_measures_of_the_catalog_can_be_parsed():
    named = {each.ir_measures for each in CATALOG if each.ir_measures}
    assert named == {"Success@1", "Success@5", "Success@10", "RR", "Rprec", "nDCG@K"}
    for measure in named:
        ir_measures.parse_measure(measure.replace("K", "100"))
