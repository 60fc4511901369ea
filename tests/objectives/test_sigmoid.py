"""Sigmoid: the pairwise loss of SigLIP."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from visavis import Targets
from visavis.objectives import BinomialDeviance, NTXent, Sigmoid

from .cases import assert_close, cosines, gradient

every_temperature = pytest.mark.parametrize(
    ("scale", "bias"), [(10.0, -10.0), (1.0, 0.0), (117.3, -12.9), (1000.0, -500.0)]
)


def published(scores, scale, bias):
    """Algorithm 1 of the paper: the sum over all pairs, divided by the number of images."""
    labels = 2 * torch.eye(len(scores), dtype=scores.dtype) - 1
    return -logsigmoid(labels * (scale * scores + bias)).sum() / len(scores)


@every_temperature
@pytest.mark.parametrize("size", [2, 9])
def test_sigmoid_equals_siglip_loss(scale, bias, size):
    scores = cosines(size).requires_grad_()
    value, right = (
        Sigmoid(scale=scale, bias=bias)(scores, Targets.paired(size)),
        published(scores, scale, bias),
    )
    assert_close(value, right)
    assert_close(*(torch.autograd.grad(each, scores)[0] for each in (value, right)))


@every_temperature
def test_sigmoid_equals_binomial_deviance_of_all_negatives(scale, bias):
    scores, pairs = cosines(7), Targets.paired(7)
    other = BinomialDeviance(
        alpha=scale, beta=scale, lam=-bias / scale, negatives="all", reduction="half_mean"
    )
    assert_close(Sigmoid(scale=scale, bias=bias)(scores, pairs), scale * other(scores, pairs))


def test_sigmoid_gradient_is_independent_per_pair():
    scores, ids = cosines(5), Targets(query_ids=[1, 1, 2, 3, 3], candidate_ids=[1, 2, 2, 3, 1])
    changed = scores.clone()
    changed[2, 3] = 0.9
    before, after = gradient(Sigmoid(), scores, ids), gradient(Sigmoid(), changed, ids)
    assert before[2, 3] != after[2, 3]
    before[2, 3] = after[2, 3]
    assert_close(before, after, atol=0, rtol=1e-14)
    assert (before < 0).equal(ids.positive)


def test_sigmoid_pulls_each_positive_equally():
    scores = torch.full((1, 3), 0.4, dtype=torch.float64)
    actual = gradient(
        Sigmoid(reduction="sum"), scores, Targets(query_ids=[1], candidate_ids=[1, 1, 2])
    )
    pulled = -10 / (1 + math.exp(10 * 0.4 - 10))
    pushed = 10 / (1 + math.exp(10 - 10 * 0.4))
    assert_close(
        actual, torch.tensor([[pulled, pulled, pushed]], dtype=torch.float64)
    )  # the columns have no negative or no positive


def test_sigmoid_bias_balances_first_step():
    """If all scores are 0, positives and negatives have equal gradients, which is the paper's
    reason for this initial bias.
    """
    size = 64
    actual = gradient(
        Sigmoid(bias=-math.log(size - 1)),
        torch.zeros(size, size, dtype=torch.float64),
        Targets.paired(size),
    )
    assert_close(
        actual.diagonal(), torch.full((size,), -10 * (1 - 1 / size) / size, dtype=torch.float64)
    )
    assert_close(actual.sum(1), torch.zeros(size, dtype=torch.float64))


def test_sigmoid_with_scale_rounds_scale_and_keeps_bias():
    assert Sigmoid(bias=-8).with_scale(14.28571428) == Sigmoid(scale=14.285714, bias=-8)
    assert Sigmoid().without_scale() == Sigmoid(scale=1)
    assert Sigmoid(scale=3).without_bias() == Sigmoid(scale=3, bias=0)
    assert NTXent().without_bias() is None
