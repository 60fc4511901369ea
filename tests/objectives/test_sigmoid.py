"""Sigmoid: the loss of SigLIP, pair by pair."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from visavis import Targets
from visavis.objectives import BinomialDeviance, NTXent, Sigmoid

from .cases import close, cosines, gradient

every_temperature = pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (1.0, 0.0), (117.3, -12.9), (1000.0, -500.0)])


def published(scores, scale, bias):
    """Algorithm 1 of the paper: the sum over all pairs, over the number of images."""
    labels = 2 * torch.eye(len(scores), dtype=scores.dtype) - 1
    return -logsigmoid(labels * (scale * scores + bias)).sum() / len(scores)


@every_temperature
@pytest.mark.parametrize("size", [2, 9])
def test_it_is_the_loss_of_siglip(scale, bias, size):
    scores = cosines(size).requires_grad_()
    value, right = Sigmoid(scale=scale, bias=bias)(scores, Targets.paired(size)), published(scores, scale, bias)
    close(value, right)
    close(*(torch.autograd.grad(each, scores)[0] for each in (value, right)))


@every_temperature
def test_it_is_binomial_deviance_of_all_negatives_at_a_threshold(scale, bias):
    scores, pairs = cosines(7), Targets.paired(7)
    other = BinomialDeviance(alpha=scale, beta=scale, lam=-bias / scale, negatives="all", reduction="half_mean")
    close(Sigmoid(scale=scale, bias=bias)(scores, pairs), scale * other(scores, pairs))


def test_no_pair_changes_the_gradient_of_another():
    scores, ids = cosines(5), Targets(query_ids=[1, 1, 2, 3, 3], candidate_ids=[1, 2, 2, 3, 1])
    changed = scores.clone()
    changed[2, 3] = 0.9
    before, after = gradient(Sigmoid(), scores, ids), gradient(Sigmoid(), changed, ids)
    assert before[2, 3] != after[2, 3]
    before[2, 3] = after[2, 3]
    close(before, after, atol=0, rtol=1e-14)
    assert (before < 0).equal(ids.positive)


def test_several_positives_are_each_pulled_as_one_alone():
    scores = torch.full((1, 3), 0.4, dtype=torch.float64)
    found = gradient(Sigmoid(reduction="sum"), scores, Targets(query_ids=[1], candidate_ids=[1, 1, 2]))
    pulled = -10 / (1 + math.exp(10 * 0.4 - 10))
    pushed = 10 / (1 + math.exp(10 - 10 * 0.4))
    close(found, torch.tensor([[pulled, pulled, pushed]], dtype=torch.float64))  # as columns, they have no negative or no positive


def test_a_bias_of_minus_the_log_of_the_negatives_balances_the_first_step():
    """Where all scores are 0, both kinds of pairs pull as strongly: the reason for the start that the paper gives."""
    size = 64
    found = gradient(Sigmoid(bias=-math.log(size - 1)), torch.zeros(size, size, dtype=torch.float64), Targets.paired(size))
    close(found.diagonal(), torch.full((size,), -10 * (1 - 1 / size) / size, dtype=torch.float64))
    close(found.sum(1), torch.zeros(size, dtype=torch.float64))


def test_another_scale_is_rounded_and_the_bias_stays():
    assert Sigmoid(bias=-8).at_scale(14.28571428) == Sigmoid(scale=14.285714, bias=-8)
    assert Sigmoid().for_scaled_scores() == Sigmoid(scale=1)
    assert Sigmoid(scale=3).for_biased_scores() == Sigmoid(scale=3, bias=0)
    assert NTXent().for_biased_scores() is None
