"""Gradients at the scores and at the normalized vectors are those of one matrix, and the tangent is
orthogonal.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from visavis import Targets
from visavis.core.blocking import ScoreCost
from visavis.core.encoded import Encoded
from visavis.losses.pair_loss import LearnedScale, PairLoss
from visavis.objectives import CATALOG, InfoNCE, NTXent, Sigmoid, TripletHN

from ..sampling import pairwise
from .cases import (
    IDS,
    assert_close,
    every_objective,
    random_embeddings,
    required_annotations,
)


def reference(objective, images, texts, targets):
    """Norms of each query and gradients of the normalized vectors, by autograd of one matrix."""
    units = [normalize(each.detach(), dim=1).requires_grad_() for each in (images, texts)]
    scores = units[0] @ units[1].T
    vectors = torch.autograd.grad(objective(scores, targets), units)
    norms = []
    for block, block_targets in ((scores, targets), (scores.T, targets.T)):
        leaf = block.detach().requires_grad_()
        terms = objective.terms(*objective.prepare(leaf, block_targets))
        norms.append(torch.autograd.grad(terms.sum(), leaf)[0].norm(dim=1))
    return norms, vectors


@pairwise(kind=CATALOG, block_rows=[None, 2])
def test_score_gradients_match_one_matrix(kind, block_rows):
    objective, (images, texts) = kind(), random_embeddings(4, 9)
    image_ids, text_ids = map(list, IDS["captions"])
    targets = Targets(query_ids=image_ids, candidate_ids=text_ids, **required_annotations(4, 9))
    found = PairLoss(objective, block_rows).score_gradients(images, texts, targets)
    norms, vectors = reference(objective, images, texts, targets)
    for ours, right in zip(found.query_norms, norms, strict=True):
        assert_close(ours, right, atol=1e-9)
    for ours, right in zip(found.vectors, vectors, strict=True):
        assert_close(ours.normalized, right, atol=1e-9)


@every_objective
def test_tangent_gradient_is_orthogonal_to_embedding(kind):
    """Divided by the length of an embedding, it is the gradient before normalization."""
    objective, (images, texts) = kind(), random_embeddings(6, 6)
    targets = Targets.paired(6, **required_annotations(6, 6))
    loss = PairLoss(objective)
    found = loss.score_gradients(images, texts, targets)
    before = torch.autograd.grad(loss(images, texts, targets=targets), (images, texts))
    for side, embeddings, gradient in zip(found.vectors, (images, texts), before, strict=True):
        lengths = embeddings.detach().norm(dim=1, keepdim=True)
        assert_close(
            (side.tangent * embeddings.detach()).sum(1) / lengths[:, 0],
            torch.zeros(6, dtype=torch.float64),
            atol=1e-12 * max(1.0, side.normalized.norm().item()),
        )
        assert_close(side.tangent / lengths, gradient, atol=1e-9)


def test_score_gradients_match_hand_values():
    """Two pairs in the plane, TripletHN: each of the four queries pushes and pulls with weight 1."""
    angles = torch.tensor([0.0, 90.0, 30.0, 60.0], dtype=torch.float64).deg2rad()
    images, texts = (3 * torch.stack([angles.cos(), angles.sin()], 1)).split(2)
    found = PairLoss(TripletHN(margin=1.0)).score_gradients(images, texts, Targets.paired(2))
    for norms in found.query_norms:
        assert_close(norms, torch.full((2,), math.sqrt(2), dtype=torch.float64))
    assert found.term_weights == (1.0, 1.0)
    # Both directions: 2 (t_2 - t_1) on image 1, whose length is 2 * 2 sin(15 degrees). It points
    # along 135 degrees, so its tangent at 0 degrees has the share sin(135 degrees).
    length = 4 * math.sin(math.radians(15))
    image = found.vectors[0]
    assert image.normalized[0].norm().item() == pytest.approx(length)
    assert image.tangent[0].norm().item() == pytest.approx(length * math.sin(math.radians(135)))


def test_scale_of_the_loss_is_part_of_the_gradient():
    images, texts = random_embeddings(5, 5)
    targets = Targets.paired(5)
    fixed = PairLoss(NTXent(tau=0.1)).score_gradients(images, texts, targets)
    for scale in (10.0, nn.Parameter(torch.tensor(10.0, dtype=torch.float64)), LearnedScale(10.0)):
        scaled = PairLoss(NTXent(), scale=scale).score_gradients(images, texts, targets)
        for ours, right in zip(scaled.query_norms, fixed.query_norms, strict=True):
            assert_close(ours, right, rtol=1e-6)
        for ours, right in zip(scaled.vectors, fixed.vectors, strict=True):
            assert_close(ours.tangent, right.tangent, rtol=1e-5, atol=1e-7)
    assert fixed.term_weights == pytest.approx((0.1, 0.1))


def test_bias_of_the_loss_changes_the_gradient():
    images, texts = random_embeddings(5, 5)
    targets = Targets.paired(5)
    whole = PairLoss(Sigmoid(scale=10, bias=-5)).score_gradients(images, texts, targets)
    bias = nn.Parameter(torch.tensor(-5.0, dtype=torch.float64))
    learned = PairLoss(Sigmoid(scale=10), bias=bias).score_gradients(images, texts, targets)
    for ours, right in zip(learned.query_norms, whole.query_norms, strict=True):
        assert_close(ours, right, rtol=1e-9)


@pytest.mark.parametrize("block_rows", [None, 2])
def test_score_function_has_no_vector_gradients(block_rows):
    images, texts = random_embeddings(5, 5)
    targets = Targets.paired(5)

    calls = []

    def score(visual, text):
        calls.append(len(visual) * len(text))
        return normalize(visual, dim=1) @ normalize(text, dim=1).T

    loss = PairLoss(InfoNCE(), block_rows, score, score_cost=ScoreCost(8.0, 24.0))
    found = loss.score_gradients(images, texts, targets)
    assert calls == [25] if block_rows is None else sum(calls) == 50  # once for both directions
    expected = PairLoss(InfoNCE()).score_gradients(images, texts, targets)
    assert found.vectors is None
    assert found.term_weights == expected.term_weights
    for ours, right in zip(found.query_norms, expected.query_norms, strict=True):
        assert_close(ours, right, rtol=1e-9)


def test_score_gradients_leave_no_gradient_behind():
    images, texts = random_embeddings(4, 4)
    items = Encoded(images), Encoded(texts)
    PairLoss(TripletHN()).score_gradients(*items, Targets.paired(4))
    assert images.grad is None and texts.grad is None
