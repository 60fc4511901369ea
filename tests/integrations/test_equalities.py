"""Equalities listed in docs/guides/integrations.md, compared with the other library or its formula."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from visavis import PairLoss
from visavis.integrations.open_clip import ClipLoss
from visavis.integrations.pytorch_metric_learning import MetricLoss
from visavis.integrations.sentence_transformers import VisavisLoss
from visavis.objectives import (
    BinomialDeviance,
    Circle,
    InfoNCE,
    MultiSimilarity,
    NTXent,
    Sigmoid,
    Triplet,
)

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "integrations.md"
LABELS = torch.tensor([4, 4, 4, 7, 7, 9, 9])
CIRCLE = Circle(margin=0.4, gamma=80, reduction="half_mean")


def metric_learning():
    for part in ("distances", "miners", "reducers", "losses"):
        pytest.importorskip(f"pytorch_metric_learning.{part}")
    return sys.modules["pytorch_metric_learning"]


def clip(images, texts):
    scores, right = 14.0 * images @ texts.T, torch.arange(len(images))
    return (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2, ClipLoss(NTXent())(
        images, texts, 14.0
    )


def clip_by_info_nce(images, texts):
    return clip(images, texts)[0], ClipLoss(InfoNCE())(images, texts, 14.0)


def ranking(images, texts):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

    class Embedded(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["rows"]}

    columns = [{"rows": side} for side in (images, texts)]
    both_ways = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs = losses.MultipleNegativesRankingLoss(Embedded(), scale=20.0, **both_ways)
    return theirs(columns, None), VisavisLoss(Embedded(), NTXent(), scale=20.0)(columns)


def nt_xent(embeddings, _):
    return metric_learning().losses.NTXentLoss(temperature=0.1)(embeddings, LABELS), MetricLoss(
        NTXent(tau=0.1)
    )(embeddings, LABELS)


def sup_con(embeddings, _):
    return metric_learning().losses.SupConLoss(temperature=0.1)(embeddings, LABELS), MetricLoss(
        InfoNCE(tau=0.1)
    )(embeddings, LABELS)


def sigmoid(images, texts):
    scale, bias, number = 10.0, -4.0, len(images)
    signs = 2 * torch.eye(number, dtype=torch.float64) - 1
    theirs = -logsigmoid(signs * (scale * images @ texts.T + bias)).sum() / number
    objective = BinomialDeviance(
        alpha=scale, beta=scale, lam=-bias / scale, negatives="all", reduction="half_mean"
    )
    return theirs, scale * PairLoss(objective)(images, texts)


def sigmoid_of_clip(images, texts):
    theirs, _ = sigmoid(images, texts)
    return theirs, ClipLoss(Sigmoid())(images, texts, 10.0, -4.0)


def triplet(embeddings, _):
    peer = metric_learning()
    options = {"distance": peer.distances.CosineSimilarity(), "reducer": peer.reducers.SumReducer()}
    return 2 * peer.losses.TripletMarginLoss(margin=0.2, **options)(embeddings, LABELS), MetricLoss(
        Triplet()
    )(embeddings, LABELS)


def circle(embeddings, _):
    return metric_learning().losses.CircleLoss(m=0.4, gamma=80)(embeddings, LABELS), MetricLoss(
        CIRCLE
    )(embeddings, LABELS)


def circle_summed(embeddings, _):
    peer = metric_learning()
    theirs = peer.losses.CircleLoss(m=0.4, gamma=80, reducer=peer.reducers.SumReducer())(
        embeddings, LABELS
    )
    return 2 * theirs, MetricLoss(Circle(margin=0.4, gamma=80))(embeddings, LABELS)


def multi_similarity(embeddings, _):
    peer = metric_learning()
    pairs = peer.miners.MultiSimilarityMiner(epsilon=0.1)(embeddings, LABELS)
    theirs = peer.losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)(embeddings, LABELS, pairs)
    return theirs, MetricLoss(MultiSimilarity(reduction="half_mean"))(embeddings, LABELS)


ROWS = {
    "`ClipLoss(NTXent())`": clip,
    "`ClipLoss(InfoNCE())`": clip_by_info_nce,
    "`ClipLoss(Sigmoid())`": sigmoid_of_clip,
    "`VisavisLoss(model, NTXent(), scale=20)`": ranking,
    "`MetricLoss(NTXent(tau=0.1))`": nt_xent,
    "`MetricLoss(InfoNCE(tau=0.1))`": sup_con,
    '`t * PairLoss(BinomialDeviance(alpha=t, beta=t, lam=-b / t, negatives="all", reduction="half_mean"))`': sigmoid,
    "`MetricLoss(Triplet(margin=0.2))`": triplet,
    "`MetricLoss(Circle(margin=0.4, gamma=80))`": circle_summed,
    '`MetricLoss(Circle(margin=0.4, gamma=80, reduction="half_mean"))`': circle,
    '`MetricLoss(MultiSimilarity(reduction="half_mean"))`': multi_similarity,
}


@pytest.mark.parametrize("row", ROWS)
def test_losses_equal_peer_losses(row):
    embeddings = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    theirs, ours = ROWS[row](*normalize(embeddings, dim=-1))
    assert theirs > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    mine, right = (
        torch.autograd.grad(value, embeddings, retain_graph=True)[0] for value in (ours, theirs)
    )
    torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-11)


def test_integrations_page_lists_tested_equalities():
    (section,) = (text for text in PAGE.read_text().split("\n## ") if "test_equalities.py" in text)
    assert set(re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)) == set(ROWS)


def test_sum_reduction_matches_documented_magnitude():
    labels = torch.arange(32) // 4
    embeddings = normalize(torch.randn(32, 16, dtype=torch.float64), dim=-1)
    summed, mean = (
        MetricLoss(Triplet(reduction=reduction))(embeddings, labels)
        for reduction in ("sum", "half_mean")
    )
    assert math.isclose(
        summed / mean, 2 * 32 * 3
    )  # both directions, and a term for each positive pair
